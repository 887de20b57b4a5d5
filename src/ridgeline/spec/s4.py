"""Define state spaces that do not depend on the input: S4 and S4D. A prompt is computed as a convolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Self

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.mixer import Cut, RecurrentBase, require, require_positive
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import S4_BLOCK, in_chunks

UNCUT: Final = "its state spaces read the stream without a projection, and a gate joins all channels after them"


@dataclass(frozen=True, slots=True)
class S4(RecurrentBase):
    """A structured state space (arXiv:2111.00396): for each channel h' = A h + B u, y = C h + D u, A = diag - P P*.

    Bilinear with a step of exp(log_dt): h = (I - dt/2 A)^-1 ((I + dt/2 A) h + dt B u). The diagonal is -exp(A_log) +
    i A_imag. Its entries, P, B, C and h are state_size complex numbers in conjugate pairs, each pair kept once: [real
    or imaginary, state_size / 2]. Then, as in the authors' layer, glu(out(act(y))) with glu(a, b) = a sigmoid(b); a
    layer has no projection before its state spaces, so channels is the model's width.
    """

    channels: int
    state_size: int
    activation: Activation = "gelu"
    bias: bool = True

    initial_state_matrix: ClassVar[Literal["legs", "diagonal"]] = "legs"

    def __post_init__(self) -> None:
        _check(self)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from _weights(self, ("P", "B", "C"), width)

    def state(self) -> State:
        return _state(self)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 10 * self.channels * self.state_size

    def derived_numbers(self) -> int:
        return 7 * self.channels * self.state_size  # seven complex coefficients of each pair (ops/s4.py)

    def cut(self) -> Cut:
        return Cut(0, self.channels)

    def part(self, size: int) -> Self:
        raise ValueError(UNCUT)

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        return _scan_numbers(self, 8 * self.state_size, tokens, padded, seqs)


@dataclass(frozen=True, slots=True)
class S4D(RecurrentBase):
    """S4 with a diagonal A (arXiv:2206.11893): h' = A h + u, y = C h + D u for each channel; its B is part of C.

    By zero-order hold: h = exp(dt A) h + (exp(dt A) - 1) / A u. The rest is as in S4.
    """

    channels: int
    state_size: int
    activation: Activation = "gelu"
    bias: bool = True

    initial_state_matrix: ClassVar[Literal["legs", "diagonal"]] = "diagonal"

    def __post_init__(self) -> None:
        _check(self)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from _weights(self, ("C",), width)

    def state(self) -> State:
        return _state(self)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 4 * self.channels * self.state_size

    def derived_numbers(self) -> int:
        return 3 * self.channels * self.state_size  # three complex coefficients of each pair

    def cut(self) -> Cut:
        return Cut(0, self.channels)

    def part(self, size: int) -> Self:
        raise ValueError(UNCUT)

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        return _scan_numbers(self, 0, tokens, padded, seqs)


def _check(mixer: S4 | S4D) -> None:
    size = mixer.state_size
    require_positive(channels=mixer.channels)
    require(size > 1 and size % 2 == 0, f"state_size must be even and at least 2, for conjugate pairs, not {size}")
    check_activation(mixer.activation)


def _weights(mixer: S4 | S4D, vectors: tuple[str, ...], width: int) -> Iterator[Weight]:
    channels, pairs = mixer.channels, mixer.state_size // 2
    yield Weight("log_dt", (channels,), "out")
    yield Weight("A_log", (channels, pairs), "out")
    yield Weight("A_imag", (channels, pairs), "out")
    for name in vectors:
        yield Weight(name, (channels, 2, pairs), "out")
    yield Weight("D", (channels,), "out")
    yield from linear("out", channels, 2 * width, bias=mixer.bias)


def _state(mixer: S4 | S4D) -> State:
    return State(((mixer.channels, 2, mixer.state_size // 2),), lookback=1, snapshot=True)


def _scan_numbers(mixer: S4 | S4D, matrices: int, tokens: int, padded: int, seqs: int) -> int:
    """Return the numbers besides the states: tokens, a step of one token in float64, and what only weights determine.

    matrices: rows of state_size numbers for each channel: the step as a matrix, and its powers.
    """
    n, (blocked, blocks) = mixer.state_size, in_chunks(tokens, padded, seqs)
    # Inputs, their transforms and the products, twice as long; outputs, and the projection to two numbers of each.
    along = mixer.channels * (13 * blocked + 6 * tokens)
    between = 4 * blocks * mixer.channels * n
    step = 16 * seqs * mixer.channels * n
    return max(along + between, step) + mixer.channels * n * (matrices + 8 * S4_BLOCK)
