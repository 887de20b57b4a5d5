"""Define token mixers with the gated delta rule: the state is a matrix, which decays and which each token corrects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.mixer import Cut, RecurrentBase, require, require_positive, share
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import DELTA_CHUNK


@dataclass(frozen=True, slots=True)
class GatedDelta(RecurrentBase):
    """Gated DeltaNet (arXiv:2412.06464): each head keeps a matrix S [key_dim, head_dim] from keys to values.

    q, k, v = act(conv(in(x))), each with its own filter; q and k become unit vectors, and q is divided by
    sqrt(key_dim). S = a S; S = S + beta k (v - S^T k)^T; y = S^T q; out(norm(y) silu(gate(x))), the norm over a head.
    a = exp(-exp(A_log) softplus(decay(x) + dt_bias)) and beta = reach sigmoid(beta(x)) are one number for each head.

    Args:
        num_heads, head_dim: Heads of values, and their size.
        num_key_heads, key_dim: Heads of queries and keys, and their size. Each serves num_heads / num_key_heads heads.
        conv_size: Tokens that a convolution sees.
        reach: The largest beta. With 2, a token can turn what its key finds around (arXiv:2411.12537).
    """

    inputs: ClassVar[tuple[str, ...]] = ("in_q", "in_k", "in_v", "decay", "beta", "gate")

    num_heads: int
    num_key_heads: int
    key_dim: int
    head_dim: int
    conv_size: int
    norm: RMSNorm
    activation: Activation = "silu"
    reach: float = 1.0

    def __post_init__(self) -> None:
        _check(
            self.activation, num_heads=self.num_heads, num_key_heads=self.num_key_heads, key_dim=self.key_dim,
            head_dim=self.head_dim, conv_size=self.conv_size,
        )  # fmt: skip
        require(0 < self.reach <= 2, f"reach must be above 0 and at most 2, not {self.reach}")
        heads, key_heads = self.num_heads, self.num_key_heads
        require(heads % key_heads == 0, f"num_heads {heads} is not a multiple of num_key_heads {key_heads}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes of q, k and v, all heads together."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_heads * self.head_dim

    def weights(self, width: int) -> Iterator[Weight]:
        inner = self.num_heads * self.head_dim
        yield from _projections(width, self.sizes, self.conv_size)
        yield from linear("decay", width, self.num_heads)
        yield from linear("beta", width, self.num_heads)
        yield Weight("A_log", (self.num_heads,), "out")
        yield Weight("dt_bias", (self.num_heads,), "out")
        yield from linear("gate", width, inner)
        yield from self.norm.weights("gate_norm", self.head_dim)
        yield from linear("out", inner, width, split="in")

    def state(self) -> State:
        return _state(self.sizes, self.conv_size, (self.num_heads, self.key_dim, self.head_dim))

    def work(self, tokens: int, context: int) -> int:
        return tokens * 4 * self.num_heads * self.key_dim * self.head_dim

    def cut(self) -> Cut:
        return Cut(self.num_heads, self.num_heads)

    def part(self, size: int) -> Self:
        keys = share("heads of keys", self.num_key_heads, size)
        return replace(self, num_heads=share("heads", self.num_heads, size), num_key_heads=keys)

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        decays = 1  # a number of each head
        return _scan_numbers(self.sizes, (self.num_heads, self.key_dim, self.head_dim), decays, tokens, padded, seqs)


@dataclass(frozen=True, slots=True)
class KimiDelta(RecurrentBase):
    """Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each channel of a key.

    It differs from GatedDelta in two points: S = diag(a) S, where a = exp(-exp(A_log) softplus(decay_b(decay_a(x)) +
    dt_bias)) has a number for each channel (A_log has one for each head); and the output is norm(y) times
    sigmoid(gate_b(gate_a(x))).

    head_dim: size of queries, keys and values. rank: size of the results of decay_a and gate_a.
    """

    inputs: ClassVar[tuple[str, ...]] = ("in_q", "in_k", "in_v", "decay_a", "beta", "gate_a")

    num_heads: int
    head_dim: int
    conv_size: int
    rank: int
    norm: RMSNorm
    activation: Activation = "silu"

    reach: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check(
            self.activation, num_heads=self.num_heads, head_dim=self.head_dim, conv_size=self.conv_size, rank=self.rank
        )

    @property
    def num_key_heads(self) -> int:
        return self.num_heads

    @property
    def key_dim(self) -> int:
        return self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes of q, k and v, all heads together."""
        return (self.num_heads * self.head_dim,) * 3

    def weights(self, width: int) -> Iterator[Weight]:
        inner = self.num_heads * self.head_dim
        yield from _projections(width, self.sizes, self.conv_size)
        yield from linear("decay_a", width, self.rank, split=None)
        yield from linear("decay_b", self.rank, inner)
        yield from linear("beta", width, self.num_heads)
        yield Weight("A_log", (self.num_heads,), "out")
        yield Weight("dt_bias", (inner,), "out")
        yield from linear("gate_a", width, self.rank, split=None)
        yield from linear("gate_b", self.rank, inner)
        yield from self.norm.weights("gate_norm", self.head_dim)
        yield from linear("out", inner, width, split="in")

    def state(self) -> State:
        return _state(self.sizes, self.conv_size, (self.num_heads, self.head_dim, self.head_dim))

    def work(self, tokens: int, context: int) -> int:
        return tokens * 4 * self.num_heads * self.head_dim**2

    def cut(self) -> Cut:
        return Cut(self.num_heads, self.num_heads)

    def part(self, size: int) -> Self:
        return replace(self, num_heads=share("heads", self.num_heads, size))

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        decays = self.key_dim  # a number of each channel of a key
        return _scan_numbers(self.sizes, (self.num_heads, self.key_dim, self.head_dim), decays, tokens, padded, seqs)


DeltaMixer = GatedDelta | KimiDelta


def _check(activation: str, **sizes: int) -> None:
    require_positive(**sizes)
    check_activation(activation)


def _projections(width: int, sizes: tuple[int, int, int], conv_size: int) -> Iterator[Weight]:
    """Yield the projections of queries, keys and values, and their filters in the layout of torch's Conv1d."""
    for name, size in zip("qkv", sizes, strict=True):
        yield from linear(f"in_{name}", width, size)
    for name, size in zip("qkv", sizes, strict=True):
        yield Weight(f"{name}_conv.weight", (size, 1, conv_size), "out")


def _state(sizes: tuple[int, int, int], conv_size: int, matrix: tuple[int, int, int]) -> State:
    return State((*((conv_size - 1, size) for size in sizes), matrix), lookback=1, snapshot=True)


def _scan_numbers(
    sizes: tuple[int, int, int], matrix: tuple[int, int, int], decays: int, tokens: int, padded: int, seqs: int
) -> int:
    """Return the numbers besides the states: of the whole step, along the sequences, and in chunks of them.

    sizes: numbers of q, k and v. matrix: heads, size of a key, size of a value. decays: decays of a head and a token.
    """
    heads, keys, values = matrix
    # A sequence that is longer than a chunk becomes at most twice as long in whole chunks.
    chunked = min(padded + DELTA_CHUNK * seqs, max(2 * padded, DELTA_CHUNK * seqs))
    inputs = 2 * tokens * (sum(sizes) + heads * (values + decays + 1))
    # Inputs and their convolution; unit queries and keys for each head of values; decays.
    along = padded * (2 * sum(sizes) + heads * (2 * keys + 3 * decays + 2))
    # These in chunks; right sides and solutions; results. Three matrices: products, the system and its copy.
    chunks = chunked * heads * (4 * keys + 6 * values + 2 * decays + 3 * DELTA_CHUNK)
    return inputs + along + chunks + 2 * seqs * heads * keys * values
