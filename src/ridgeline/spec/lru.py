"""Define the real-gated linear recurrent unit of Griffin and RecurrentGemma."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.convolution import convolution
from ridgeline.spec.mixer import Cut, RecurrentBase, require, require_positive, share
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear


@dataclass(frozen=True, slots=True)
class GatedLRU(RecurrentBase):
    """The real-gated linear recurrent unit, RG-LRU (Griffin, arXiv:2402.19427, 2.4).

    x = conv(in(input)); r = sigmoid(decay_gate(x)); i = sigmoid(input_gate(x)); a = exp(-rate r softplus(decay));
    h = a h + sqrt(1 - a^2) i x, at the first token of a sequence h = i x; out(h act(gate(input))). Both gates multiply
    each block of channels with a matrix of its own, in float32. All matrices have biases.

    Args:
        channels: Number of channels of h.
        num_blocks: Blocks that the channels are divided into for the two gates.
        conv_size: Tokens that the convolution sees.
    """

    inputs: ClassVar[tuple[str, ...]] = ("in", "gate")
    rate: ClassVar[float] = 8.0

    channels: int
    num_blocks: int
    conv_size: int
    activation: Activation = "gelu_tanh"

    def __post_init__(self) -> None:
        require_positive(channels=self.channels, num_blocks=self.num_blocks, conv_size=self.conv_size)
        problem = f"channels {self.channels} is not a multiple of num_blocks {self.num_blocks}"
        require(self.channels % self.num_blocks == 0, problem)
        require(self.conv_size > 1, "a convolution over one token keeps no state: conv_size must be at least 2")
        check_activation(self.activation)

    @property
    def block_size(self) -> int:
        """Return the channels of a block."""
        return self.channels // self.num_blocks

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("in", width, self.channels, bias=True)
        yield from linear("gate", width, self.channels, bias=True)
        yield from convolution(self.channels, self.conv_size, True)
        for name in ("input_gate", "decay_gate"):
            yield Weight(f"{name}.weight", (self.num_blocks, self.block_size, self.block_size), "head")
            yield Weight(f"{name}.bias", (self.num_blocks, self.block_size), "out")
        yield Weight("decay", (self.channels,), "out")
        yield from linear("out", self.channels, width, bias=True, split="in")

    def state(self) -> State:
        """Return the inputs that the convolution sees, whether the sequence has begun (0 or 1) by block, and h."""
        shapes = (self.conv_size - 1, self.channels), (self.num_blocks,), (self.channels,)
        return State(shapes, lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 4 * self.channels

    def cut(self) -> Cut:
        return Cut(self.num_blocks, self.num_blocks)

    def part(self, size: int) -> Self:
        blocks = share("blocks of channels", self.num_blocks, size)
        return replace(self, channels=blocks * self.block_size, num_blocks=blocks)

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        return (4 * tokens + 12 * padded) * self.channels

    def resident_numbers(self, width: int, *, several: bool) -> int:
        return (8 if several else 6) * self.channels
