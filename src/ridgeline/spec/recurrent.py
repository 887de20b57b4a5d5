"""Token mixers whose state is one summary of all that went before, as large after a million tokens as after one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.delta import DeltaMixer
from ridgeline.spec.lightning import LightningAttention
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.s4 import S4, S4D
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be positive, not {size}")


@dataclass(frozen=True, slots=True)
class Mamba:
    """A selective state space (arXiv:2312.00752), as its authors' code discretizes it: B by Euler, not by ZOH.

    x, z = in(input); x = act(conv(x)); dt, B, C = x_proj(x); dt = softplus(dt_proj(dt));
    h = exp(dt A) h + dt B x; y = C h + D x; out(y silu(z)). A = -exp(A_log).
    inner_size: channels; each has state_size numbers h. conv_size: tokens that the convolution sees. dt_rank: of dt
    before dt_proj. inner_norm: of dt, B and C before they are used (FalconMamba, Jamba), with weights or without.
    """

    inner_size: int
    state_size: int
    conv_size: int
    dt_rank: int
    activation: Activation = "silu"
    bias: bool = False
    conv_bias: bool = True
    inner_norm: RMSNorm | None = None
    inner_norm_weights: bool = False

    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        _positive(
            inner_size=self.inner_size, state_size=self.state_size, conv_size=self.conv_size, dt_rank=self.dt_rank
        )
        check_activation(self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, 2 * self.inner_size, bias=self.bias)
        yield from _convolution(self.inner_size, self.conv_size, self.conv_bias)
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


@dataclass(frozen=True, slots=True)
class Mamba2:
    """State space duality (arXiv:2405.21060): one decay per head, so that a chunk is a few matrix products.

    z, xBC, dt = in(input); x, B, C = act(conv(xBC)); dt = softplus(dt + dt.bias), clamped to dt_limit;
    h = exp(dt A) h + dt x B; y = C h + D x; out(norm(y silu(z))). A = -exp(A_log), a number per head.
    num_groups: of B and C, each for num_heads / num_groups heads, and of the norm.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_size: int
    norm: RMSNorm
    activation: Activation = "silu"
    bias: bool = False
    conv_bias: bool = True
    dt_least: float = 0.0
    dt_most: float | None = None

    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        _positive(
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
        """x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, self.inner_size + self.conv_channels + self.num_heads, bias=self.bias)
        yield from _convolution(self.conv_channels, self.conv_size, self.conv_bias)
        for name in ("dt_bias", "A_log", "D"):
            yield Weight(name, (self.num_heads,), "out")
        yield from self.norm.weights("gate_norm", self.inner_size)
        yield from linear("out", self.inner_size, width, bias=self.bias, split="in")

    def state(self) -> State:
        shapes = (self.conv_size - 1, self.conv_channels), (self.num_heads, self.head_dim, self.state_size)
        return State(shapes, lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 3 * self.inner_size * self.state_size


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated convolution over a few tokens (LFM2): b, c, x = in(input); out(c conv(b x)).

    channels: of b, c and x. conv_size: tokens that the convolution sees.
    """

    channels: int
    conv_size: int
    bias: bool = False

    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        _positive(channels=self.channels, conv_size=self.conv_size)
        if self.conv_size == 1:
            raise ValueError("a convolution over one token remembers nothing: conv_size must be at least 2")

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, 3 * self.channels, bias=self.bias)
        yield from _convolution(self.channels, self.conv_size, self.bias)
        yield from linear("out", self.channels, width, bias=self.bias, split="in")

    def state(self) -> State:
        return State(((self.conv_size - 1, self.channels),), lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 2 * self.channels


@dataclass(frozen=True, slots=True)
class GatedConvolution:
    """A short convolution beside a gate, as BASED has it (arXiv:2402.18668): x, g = in(input); out(act(conv(x)) g).

    channels: of x and g. conv_size: tokens that the convolution sees.
    """

    channels: int
    conv_size: int
    activation: Activation = "silu"
    bias: bool = True
    conv_bias: bool = False

    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        _positive(channels=self.channels, conv_size=self.conv_size)
        if self.conv_size == 1:
            raise ValueError("a convolution over one token remembers nothing: conv_size must be at least 2")
        check_activation(self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, 2 * self.channels, bias=self.bias)
        yield from _convolution(self.channels, self.conv_size, self.conv_bias)
        yield from linear("out", self.channels, width, bias=self.bias, split="in")

    def state(self) -> State:
        return State(((self.conv_size - 1, self.channels),), lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * self.channels


@dataclass(frozen=True, slots=True)
class TaylorAttention:
    """Linear attention that is softmax attention to the second order of its scores: BASED (arXiv:2402.18668).

    A weight is 1 + s + s^2 / 2 with s = q k / sqrt(feature_dim), a product of features of q and of k: so the keys and
    values seen so far are one matrix. feature_dim: of queries and keys of a head; head_dim: of its values.
    """

    num_heads: int
    head_dim: int
    feature_dim: int

    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        _positive(num_heads=self.num_heads, head_dim=self.head_dim, feature_dim=self.feature_dim)

    @property
    def num_features(self) -> int:
        return 1 + self.feature_dim + self.feature_dim**2

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("q", width, self.num_heads * self.feature_dim)
        yield from linear("k", width, self.num_heads * self.feature_dim)
        yield from linear("v", width, self.num_heads * self.head_dim)
        yield from linear("o", self.num_heads * self.head_dim, width, split="in")

    def state(self) -> State:
        # Sums of values and, in a last row, of weights, over the features.
        return State(((self.num_heads, self.head_dim + 1, self.num_features),), lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 2 * self.num_heads * (self.head_dim + 1) * self.num_features


RecurrentMixer = (
    Mamba | Mamba2 | ShortConvolution | GatedConvolution | TaylorAttention | LightningAttention | S4 | S4D | DeltaMixer
)


def _convolution(channels: int, size: int, bias: bool) -> Iterator[Weight]:
    """A filter per channel, as torch's Conv1d stores them."""
    yield Weight("conv.weight", (channels, 1, size), "out")
    if bias:
        yield Weight("conv.bias", (channels,), "out")
