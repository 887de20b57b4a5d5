"""Define selective state spaces: Mamba and Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.convolution import convolution
from ridgeline.spec.mixer import Cut, RecurrentBase, require, require_positive, share
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import SCAN_BLOCK, SCAN_CHUNK, SSD_CHUNK, in_chunks


@dataclass(frozen=True, slots=True)
class Mamba(RecurrentBase):
    """A selective state space (arXiv:2312.00752), with B discretized by Euler's method as in the authors' code.

    x, z = in(input); x = act(conv(x)); dt, B, C = x_proj(x); dt = softplus(dt_proj(dt));
    h = exp(dt A) h + dt B x; y = C h + D x; out(y silu(z)). A = -exp(A_log).

    Args:
        inner_size: Number of channels.
        state_size: Numbers of h for each channel.
        conv_size: Tokens that the convolution sees.
        dt_rank: Size of dt before dt_proj.
        inner_norm: Norm of dt, B and C before they are used (FalconMamba, Jamba).
        inner_norm_weights: Whether that norm has weights.
    """

    inputs: ClassVar[tuple[str, ...]] = ("in",)
    summed_within: ClassVar[tuple[str, ...]] = ("x",)

    inner_size: int
    state_size: int
    conv_size: int
    dt_rank: int
    activation: Activation = "silu"
    bias: bool = False
    conv_bias: bool = True
    inner_norm: RMSNorm | None = None
    inner_norm_weights: bool = False

    def __post_init__(self) -> None:
        require_positive(
            inner_size=self.inner_size, state_size=self.state_size, conv_size=self.conv_size, dt_rank=self.dt_rank
        )
        check_activation(self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, 2 * self.inner_size, bias=self.bias, fused=(self.inner_size,) * 2)
        yield from convolution(self.inner_size, self.conv_size, self.conv_bias)
        yield from linear("x", self.inner_size, self.dt_rank + 2 * self.state_size, split="in")
        if self.inner_norm and self.inner_norm_weights:
            for name, size in (("dt_norm", self.dt_rank), ("b_norm", self.state_size), ("c_norm", self.state_size)):
                yield from self.inner_norm.weights(name, size)
        yield from linear("dt", self.dt_rank, self.inner_size, bias=True)
        yield Weight("A_log", (self.inner_size, self.state_size), "out")
        yield Weight("D", (self.inner_size,), "out")
        yield from linear("out", self.inner_size, width, bias=self.bias, split="in")

    def state(self) -> State:
        shapes = (self.conv_size - 1, self.inner_size), (self.inner_size, self.state_size)
        return State(shapes, lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 3 * self.inner_size * self.state_size

    def cut(self) -> Cut:
        return Cut(0, self.inner_size)

    def part(self, size: int) -> Self:
        """Return a part of the channels; x is summed over ranks, since dt, B and C follow from all channels."""
        return replace(self, inner_size=share("channels", self.inner_size, size))

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        inputs, along = 3 * tokens * self.inner_size, 8 * padded * (self.inner_size + self.state_size)
        one = self.inner_size * self.state_size
        block = min(padded + SCAN_CHUNK * seqs, max(SCAN_BLOCK // one, SCAN_CHUNK * seqs)) * one
        return inputs + along + 8 * block


@dataclass(frozen=True, slots=True)
class Mamba2(RecurrentBase):
    """State space duality (arXiv:2405.21060): one decay per head, so that a chunk is a few matrix products.

    z, xBC, dt = in(input); x, B, C = act(conv(xBC)); dt = softplus(dt + dt.bias), clamped to dt_least..dt_most;
    h = exp(dt A) h + dt x B; y = C h + D x; out(norm(y silu(z))). A = -exp(A_log), a number per head.

    Args:
        num_groups: Groups of heads. The heads of one group share B and C, and the norm is over one group.
        conv_size: Tokens that the convolution sees.
        norm: None: y silu(z) has no norm.
        out_bias: Whether `out` has a bias; None: as `bias` says.
        input_scales: Factors on z, x, B, C and dt as `in` gives them (Falcon-H1).
    """

    inputs: ClassVar[tuple[str, ...]] = ("in",)

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_size: int
    norm: RMSNorm | None
    activation: Activation = "silu"
    bias: bool = False
    conv_bias: bool = True
    dt_least: float = 0.0
    dt_most: float | None = None
    out_bias: bool | None = None
    input_scales: tuple[float, float, float, float, float] | None = None

    def __post_init__(self) -> None:
        require_positive(
            num_heads=self.num_heads, head_dim=self.head_dim, state_size=self.state_size, num_groups=self.num_groups,
            conv_size=self.conv_size,
        )  # fmt: skip
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}")
        if self.dt_most is not None and not 0 <= self.dt_least <= self.dt_most:
            raise ValueError(f"dt must be between 0 <= dt_least <= dt_most, not {self.dt_least} and {self.dt_most}")
        check_activation(self.activation)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Return the number of channels of the convolution: those of x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def weights(self, width: int) -> Iterator[Weight]:
        xbc = self.inner_size, self.num_groups * self.state_size, self.num_groups * self.state_size
        fused = self.inner_size, *xbc, self.num_heads
        yield from linear("in", width, sum(fused), bias=self.bias, fused=fused)
        yield from convolution(self.conv_channels, self.conv_size, self.conv_bias, xbc)
        for name in ("dt_bias", "A_log", "D"):
            yield Weight(name, (self.num_heads,), "out")
        if self.norm:
            yield from (replace(w, split="out") for w in self.norm.weights("gate_norm", self.inner_size))
        bias = self.bias if self.out_bias is None else self.out_bias
        yield from linear("out", self.inner_size, width, bias=bias, split="in")

    def state(self) -> State:
        shapes = (self.conv_size - 1, self.conv_channels), (self.num_heads, self.head_dim, self.state_size)
        return State(shapes, lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 3 * self.inner_size * self.state_size

    def cut(self) -> Cut:
        return Cut(self.num_heads, self.num_heads)

    def part(self, size: int) -> Self:
        """Return a part of the groups, each with its heads, its B and C, and its norm."""
        problem = f"the norm over each of its {self.num_groups} groups of heads would need the numbers of several ranks"
        require(self.num_groups % size == 0, problem)
        return replace(self, num_heads=self.num_heads // size, num_groups=self.num_groups // size)

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        chunked, chunks = in_chunks(tokens, padded, seqs)
        inputs = (4 if self.input_scales else 2) * tokens * (self.inner_size + self.conv_channels + self.num_heads)
        along = 4 * padded * self.conv_channels + chunked * self.num_heads * (4 * self.state_size + 5 * self.head_dim)
        matrices = 5 * chunked * SSD_CHUNK * self.num_heads
        chunk_states = 4 * chunks * self.inner_size * self.state_size
        return inputs + along + matrices + chunk_states
