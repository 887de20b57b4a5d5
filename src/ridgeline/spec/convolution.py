"""Define token mixers that are short convolutions: their state is the last few inputs of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.mixer import Cut, RecurrentBase, require, require_positive, share
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear


@dataclass(frozen=True, slots=True)
class ShortConvolution(RecurrentBase):
    """A gated convolution over a few tokens (LFM2): b, c, x = in(input); out(c conv(b x)).

    channels: number of channels of b, of c and of x. conv_size: tokens that the convolution sees.
    """

    inputs: ClassVar[tuple[str, ...]] = ("in",)

    channels: int
    conv_size: int
    bias: bool = False

    def __post_init__(self) -> None:
        require_positive(channels=self.channels, conv_size=self.conv_size)
        require(self.conv_size > 1, "a convolution over one token keeps no state: conv_size must be at least 2")

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, 3 * self.channels, bias=self.bias, fused=(self.channels,) * 3)
        yield from convolution(self.channels, self.conv_size, self.bias)
        yield from linear("out", self.channels, width, bias=self.bias, split="in")

    def state(self) -> State:
        return State(((self.conv_size - 1, self.channels),), lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 2 * self.channels

    def cut(self) -> Cut:
        return Cut(0, self.channels)

    def part(self, size: int) -> Self:
        return replace(self, channels=share("channels", self.channels, size))

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        return 6 * (tokens + padded) * self.channels


@dataclass(frozen=True, slots=True)
class GatedConvolution(RecurrentBase):
    """A short convolution beside a gate (BASED, arXiv:2402.18668): x, g = in(input); out(act(conv(x)) g).

    channels: number of channels of x and of g. conv_size: tokens that the convolution sees.
    """

    inputs: ClassVar[tuple[str, ...]] = ("in",)

    channels: int
    conv_size: int
    activation: Activation = "silu"
    bias: bool = True
    conv_bias: bool = False

    def __post_init__(self) -> None:
        require_positive(channels=self.channels, conv_size=self.conv_size)
        require(self.conv_size > 1, "a convolution over one token keeps no state: conv_size must be at least 2")
        check_activation(self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, 2 * self.channels, bias=self.bias, fused=(self.channels,) * 2)
        yield from convolution(self.channels, self.conv_size, self.conv_bias)
        yield from linear("out", self.channels, width, bias=self.bias, split="in")

    def state(self) -> State:
        return State(((self.conv_size - 1, self.channels),), lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * self.channels

    def cut(self) -> Cut:
        return Cut(0, self.channels)

    def part(self, size: int) -> Self:
        return replace(self, channels=share("channels", self.channels, size))

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        return 6 * (tokens + padded) * self.channels


def convolution(channels: int, size: int, bias: bool, fused: tuple[int, ...] = ()) -> Iterator[Weight]:
    """Yield the weights of a filter for each channel, in the layout of torch's Conv1d. fused: see `Weight`."""
    yield Weight("conv.weight", (channels, 1, size), "out", fused)
    if bias:
        yield Weight("conv.bias", (channels,), "out", fused)
