"""Define the questions that every token mixer answers, so that no other package needs to tell mixers apart.

    weights(width)            names, shapes and split axes        -> loader, modules, inspect
    state(), reads()          what it keeps and what it reads     -> page pools, inspect, planner
    work(tokens, context)     multiply-accumulates                -> planner
    traffic(tokens, context)  numbers that it moves               -> planner
    workspace(step, ...)      memory of its ops at their peak     -> engine settings, planner
    cut()                     how devices divide it               -> planner
    part(size)                the mixer of one of `size` ranks    -> engine

`width` is the model's hidden size. To add a mixer, write a frozen dataclass that inherits from `Mixer` or
`RecurrentBase` and add it to the union in mixers.py or recurrent.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple, Self, TypeVar

from ridgeline.spec.sight import Sight
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight
from ridgeline.spec.workspace import FLOAT, KeysRead, Phases, StepSize

AnyMixer = TypeVar("AnyMixer", bound="Mixer")


class Traffic(NamedTuple):
    """Numbers that one sequence moves through a layer's mixer in one step, besides weights.

    state: numbers of state that are read; a recurrent state is also written back. Rows of keys and values that are
    written are results of k and v, and are counted there. activations: inputs and results.
    """

    state: int
    activations: int


class Cut(NamedTuple):
    """How tensor parallelism divides a mixer.

    heads: the number of devices must divide it; 0 means that any number of devices may share the mixer. state: devices
    that the state is divided over at most; with more devices, several hold the same part.
    """

    heads: int
    state: int


class Mixer(ABC):
    """Base class of token mixers: the questions that a mixer answers about itself."""

    __slots__ = ()

    is_recurrent: ClassVar[bool] = False
    keeps_latents: ClassVar[bool] = False  # whether it keeps latents (MLA) instead of keys and values
    # Whether it is linear attention whose weights of tokens training can make those of softmax (train/mixing.py).
    imitates_softmax: ClassVar[bool] = False
    # Names of the matrices that multiply the block's input, as far as it has them. A kernel may pack them as one.
    inputs: ClassVar[tuple[str, ...]] = ()
    # Names of the matrices that ranks divide along their inputs, besides the last one, whose sum is the branch's delta.
    summed_within: ClassVar[tuple[str, ...]] = ()
    # How training initializes the matrix A of a state space (train/state_space.py); None for all other mixers.
    initial_state_matrix: ClassVar[Literal["legs", "diagonal"] | None] = None

    @property
    def kind(self) -> str:
        """Return the name of the kind in tables and messages."""
        return type(self).__name__

    @property
    def query_group(self) -> int:
        """Return the number of query heads that share the same keys; 0 for a mixer that does not attend to keys."""
        return 0

    @property
    def value_size(self) -> int:
        """Return the numbers of a value that heads add up; 0 for a mixer that does not attend to keys."""
        return 0

    @abstractmethod
    def weights(self, width: int) -> Iterator[Weight]:
        """Yield its parameters."""

    @abstractmethod
    def state(self) -> State:
        """Return what it keeps of a sequence."""

    def reads(self) -> State:
        """Return the state that it reads: its own, unless it shares the keys and values of another layer."""
        return self.state()

    def state_layer(self, index: int) -> int:
        """Return the index of the layer whose state layer `index`, which has this mixer, reads."""
        return index

    @abstractmethod
    def work(self, tokens: int, context: int) -> int:
        """Return the multiply-accumulates, besides those of weights, of the last `tokens` of `context` tokens."""

    @abstractmethod
    def traffic(self, tokens: int, context: int) -> Traffic:
        """Return the numbers that one sequence moves for the last `tokens` of `context` tokens."""

    @abstractmethod
    def cut(self) -> Cut:
        """Return how tensor parallelism divides it."""

    @abstractmethod
    def part(self, size: int) -> Self:
        """Return the mixer of one of `size` ranks: all ranks have equal ones. Raises ValueError with the reason if it
        cannot be cut.
        """

    @abstractmethod
    def workspace(self, step: StepSize, width: int, keys: KeysRead) -> Phases:
        """Return an upper bound in bytes on the memory that its reference ops hold in one step, in float32."""

    @abstractmethod
    def resident_numbers(self, width: int, *, several: bool) -> int:
        """Return the numbers per token that the mixer holds when it ends, with the kernels of device cpu.

        several: whether the step has several sequences, whose tokens a recurrent mixer copies side by side and back.
        """

    def draft_numbers(self, width: int) -> int:
        """Return the numbers that are kept of each draft token, to compute the state again if drafts are rejected."""
        return 0

    def derived_numbers(self) -> int:
        """Return the numbers in float32 that kernels keep beside the weights, because only these determine them."""
        return 0

    def cost_key(self) -> Self:
        """Return an equal mixer for all layers that cost the same, without fields that do not change the cost."""
        return self

    def seeing(self, sight: Sight) -> Self:
        """Return the mixer with tokens that see so far ahead. Raises ValueError if they cannot."""
        raise ValueError(f"layers of kind {self.kind} cannot see ahead")

    def replaced_by(self, other: AnyMixer) -> AnyMixer | Self:
        """Return the mixer of a layer whose attention becomes `other`. Raises ValueError where that is impossible."""
        return other


class RecurrentBase(Mixer):
    """Base class of mixers whose state is one array per sequence, whatever its length."""

    __slots__ = ()

    rope: ClassVar[None] = None
    is_recurrent: ClassVar[bool] = True

    @abstractmethod
    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        """Return the numbers that its ops hold at their peak, besides the states.

        tokens: tokens of the step. padded: tokens along the sequences, padding included.
        """

    def workspace(self, step: StepSize, width: int, keys: KeysRead) -> Phases:
        """Return the peak; draft tokens run separately, after tokens that are computed again before the step's own."""
        if not step.drafts:
            return Phases(self._scan_bytes(step.tokens, step.queries, step.seqs))
        tokens = step.tokens + step.replays
        inputs = FLOAT * tokens * self.draft_numbers(width)
        return Phases(2 * inputs + self._scan_bytes(tokens, 4 * tokens, 2 * step.seqs))

    def _scan_bytes(self, tokens: int, padded: int, seqs: int) -> int:
        states = 4 * seqs * self.state().elements  # read, computed, and put in order
        return FLOAT * (states + self.scan_numbers(tokens, padded, seqs))

    def traffic(self, tokens: int, context: int) -> Traffic:
        results = sum(w.shape[-1] for w in self.weights(1) if w.name in ("o.weight", "out.weight"))
        return Traffic(2 * self.state().elements, 2 * tokens * results)

    def draft_numbers(self, width: int) -> int:
        return width + sum(weight.shape[0] for weight in self.weights(width) if len(weight.shape) == 2)

    def resident_numbers(self, width: int, *, several: bool) -> int:
        matrices = [w.shape for w in self.weights(width) if len(w.shape) == 2]
        results = sum(rows for rows, _ in matrices if rows != width)
        inner = max(columns for rows, columns in matrices if rows == width)
        filtered = sum(w.shape[0] for w in self.weights(width) if w.name.endswith("conv.weight"))
        return results + filtered + (4 if several else 2) * inner


def share(what: str, count: int, size: int, *, copies: bool = False) -> int:
    """Return how many of `count` units each of `size` ranks has. copies: ranks may have copies of the same unit.

    Raises ValueError if the units cannot be divided equally.
    """
    if copies and count < size:
        require(size % count == 0, f"{size} ranks are not a multiple of its {count} {what}")
        return 1
    require(count % size == 0, f"its {count} {what} are not a multiple of {size} ranks")
    return count // size


def require(ok: bool, message: str) -> None:
    """Raise ValueError with `message` unless `ok`."""
    if not ok:
        raise ValueError(message)


def require_positive(**sizes: int) -> None:
    """Raise ValueError for a size that is below 1."""
    for name, size in sizes.items():
        require(size > 0, f"{name} must be positive, not {size}")
