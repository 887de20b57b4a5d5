"""Token mixers whose state is a matrix that each token corrects: the delta rule with a decay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (arXiv:2412.06464): of each head a matrix S [key_dim, head_dim] from keys to values.

    q, k, v = act(conv(in(x))), each with a filter of its own; q and k are made unit vectors, and q is divided by
    sqrt(key_dim). S = a S; S = S + beta k (v - S^T k)^T; y = S^T q; out(norm(y) silu(gate(x))), the norm over a head.
    a = exp(-exp(A_log) softplus(decay(x) + dt_bias)) and beta = sigmoid(beta(x)) are numbers of a head.
    num_heads, head_dim: of values. num_key_heads: of queries and keys, each for num_heads / num_key_heads heads.
    conv_size: tokens that a convolution sees.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    head_dim: int
    conv_size: int
    norm: RMSNorm
    activation: Activation = "silu"

    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check(
            self.activation, num_heads=self.num_heads, num_key_heads=self.num_key_heads, key_dim=self.key_dim,
            head_dim=self.head_dim, conv_size=self.conv_size,
        )  # fmt: skip
        if self.num_heads % self.num_key_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_key_heads {self.num_key_heads}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of q, k and v, all heads."""
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


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each channel of a key.

    As GatedDelta, but S = diag(a) S, where a = exp(-exp(A_log) softplus(decay_b(decay_a(x)) + dt_bias)) is a number of
    each channel (A_log is a head's), and the output is norm(y) sigmoid(gate_b(gate_a(x))). head_dim: of queries, keys
    and values. rank: what decay_a and gate_a make of x.
    """

    num_heads: int
    head_dim: int
    conv_size: int
    rank: int
    norm: RMSNorm
    activation: Activation = "silu"

    rope: ClassVar[None] = None

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
        """Numbers of q, k and v, all heads."""
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


DeltaMixer = GatedDelta | KimiDelta


def _check(activation: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be positive, not {size}")
    check_activation(activation)


def _projections(width: int, sizes: tuple[int, int, int], conv_size: int) -> Iterator[Weight]:
    """Queries, keys and values, and their filters as torch's Conv1d stores them."""
    for name, size in zip("qkv", sizes, strict=True):
        yield from linear(f"in_{name}", width, size)
    for name, size in zip("qkv", sizes, strict=True):
        yield Weight(f"{name}_conv.weight", (size, 1, conv_size), "out")


def _state(sizes: tuple[int, int, int], conv_size: int, matrix: tuple[int, int, int]) -> State:
    return State((*((conv_size - 1, size) for size in sizes), matrix), lookback=1, snapshot=True)
