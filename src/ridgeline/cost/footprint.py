"""Count what is in a device's memory: weights, pages of state as the engine allocates them, workspace, a reserve.

There are two counts of state. The formula multiplies numbers by bytes. The pages are allocated whole: the last page of
a sequence is partly empty, a window needs one page more, and a recurrent state exists twice (one is read, one written).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from math import ceil

from ridgeline.cost.head_memory import HeadWorkspace
from ridgeline.cost.memory import BOOKKEEPING_BYTES, Workspace
from ridgeline.cost.precision import Precision, packed_bytes
from ridgeline.cost.shard import Scheme, device_weight_bytes
from ridgeline.spec import ModelSpec, Weight
from ridgeline.spec.groups import StateGroup, state_groups, with_layers
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.heads import HeadSpec

# Share of the memory besides weights that the engine uses; the allocator and other programs get the rest.
FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Footprint:
    """Holds the bytes that a model takes, on the device that holds most of it.

    formula_bytes, pages_bytes: state by the formula, and as allocated. logits_bytes: the part of the workspace for
    logits, sampling and log probabilities. activation_bytes: the rest of the workspace, and bookkeeping of pages.
    spare_bytes: memory that is left; negative if the model does not fit.
    """

    memory_bytes: int
    weight_bytes: float
    formula_bytes: float
    pages_bytes: float
    activation_bytes: float
    logits_bytes: float

    @property
    def workspace_bytes(self) -> float:
        return self.activation_bytes + self.logits_bytes

    @property
    def reserve_bytes(self) -> float:
        """Return the memory that the engine leaves to the allocator and to other programs."""
        return max(self.memory_bytes - self.weight_bytes, 0.0) * (1 - FRACTION)

    @property
    def used_bytes(self) -> float:
        return self.weight_bytes + self.pages_bytes + self.workspace_bytes

    @property
    def spare_bytes(self) -> float:
        return self.memory_bytes - self.reserve_bytes - self.used_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0


class Memory:
    """Counts the memory of one model on one machine.

    Args:
        page_tokens: Tokens of a page of keys and values.
        chunk: Tokens of prompts in one step.
        drafts: Draft tokens of a sequence in one step.
        draft: Model or head that proposes them on the same device, over the same pages; None without one.
        kept_weights, kept_state: Shares of the weights and of the state that are on the device; the others are in the
            host's memory.
    """

    def __init__(
        self, spec: ModelSpec, precision: Precision, hardware: HardwareSpec, scheme: Scheme, *, page_tokens: int,
        chunk: int, drafts: int = 0, draft: ModelSpec | HeadSpec | None = None, kept_weights: float = 1.0,
        kept_state: float = 1.0,
    ) -> None:  # fmt: skip
        self._kept_state = kept_state
        self._spec, self._precision, self._hardware, self._scheme = spec, precision, hardware, scheme
        self._chunk, self._drafts, self._draft = chunk, drafts, draft
        self.weight_bytes = _weight_bytes(spec, precision, hardware, scheme)
        self.groups = page_groups(spec, precision, page_tokens, tp=scheme.tp)
        self.bookkeeping_bytes = BOOKKEEPING_BYTES if hardware.kind == "cpu" else 0
        # The workspace is the engine's own count, with the pages that the engine has today: float32.
        own = state_groups(spec, page_tokens=page_tokens)
        self._workspace = Workspace(spec, own, on_cpu=hardware.kind == "cpu", drafts=drafts)
        self.draft_weight_bytes = 0.0
        self._more: Workspace | HeadWorkspace | None = None
        if draft is not None:
            self.draft_weight_bytes = _weight_bytes(draft, precision, hardware, scheme)
            self.weight_bytes += self.draft_weight_bytes
            more = page_groups(draft, precision, page_tokens, tp=scheme.tp)
            self.groups = with_layers(self.groups, more, len(spec.layers))
            own, on_cpu = state_groups(draft, page_tokens=page_tokens), hardware.kind == "cpu"
            self._more = (
                Workspace(draft, own, on_cpu=on_cpu, drafts=drafts)
                if isinstance(draft, ModelSpec)
                else HeadWorkspace(draft, own, on_cpu=on_cpu, drafts=drafts)
            )
        self.weight_bytes *= kept_weights

    def with_chunk(self, chunk: int) -> Memory:
        """Return a copy with another number of tokens of prompts in one step."""
        other = copy(self)
        other._chunk = chunk
        return other

    def footprint(self, batch: int, context: int) -> Footprint:
        """Return the memory that `batch` sequences of `context` tokens take on each replica."""
        scheme = self._scheme
        own = -(-batch // scheme.ep)
        pages = [own * group.most_pages(context) + 1 for group in self.groups]
        size = sum(n * group.page_bytes for n, group in zip(pages, self.groups, strict=True)) / scheme.pp
        size *= self._kept_state
        tokens = max(self._chunk, own * (1 + self._drafts))
        workspace = self._step_bytes(tokens, own, context)
        logits = self._workspace.logits(tokens, own)
        bookkeeping = self.bookkeeping_bytes * sum(pages)
        return Footprint(
            self._hardware.memory_bytes, self.weight_bytes, own * self.sequence_bytes(context), size,
            workspace - logits + bookkeeping, logits,
        )  # fmt: skip

    def room_bytes(self, seqs: int, length: int) -> int:
        """Return the bytes that are left for pages and their bookkeeping.

        Steps have `seqs` sequences of up to `length` tokens.
        """
        tokens = max(self._chunk, seqs * (1 + self._drafts))
        step = self._workspace.bytes(tokens, seqs, length) + self._draft_step_bytes(tokens, seqs, length)
        return int((self._hardware.memory_bytes - self.weight_bytes) * FRACTION) - step

    def _step_bytes(self, tokens: int, seqs: int, length: int) -> int:
        """Return the bytes of a step and of the model's RoPE frequencies for sequences of this length."""
        own = self._workspace.bytes(tokens, seqs, length) + self._spec.frequency_bytes(length)
        return own + self._draft_step_bytes(tokens, seqs, length)

    def _draft_step_bytes(self, tokens: int, seqs: int, length: int) -> int:
        return self._more.bytes(tokens, seqs, length) if self._more else 0

    def sequence_bytes(self, context: int) -> float:
        """Return the bytes of state of one sequence on one device, by the formula."""
        own = formula_bytes(self._spec, self._precision, context, tp=self._scheme.tp) / self._scheme.pp
        return (own + self.draft_sequence_bytes(context)) * self._kept_state

    def draft_sequence_bytes(self, context: int) -> float:
        """Return the part of `sequence_bytes` that is the draft's."""
        draft, tp = self._draft, self._scheme.tp
        return formula_bytes(draft, self._precision, context, tp=tp) / self._scheme.pp if draft is not None else 0.0

    def largest_batch(self, context: int, most: int = 1 << 20) -> int:
        """Return how many sequences of `context` tokens fit on each replica; 0 if none does."""
        return largest(lambda n: self.footprint(n, context).fits, most)

    def longest_context(self, batch: int) -> int:
        """Return the longest context, in tokens, with which `batch` sequences fit; 0 if none does."""
        return largest(lambda n: self.footprint(batch, n).fits, self._spec.max_position_embeddings)


def _weight_bytes(spec: ModelSpec | HeadSpec, precision: Precision, hardware: HardwareSpec, scheme: Scheme) -> float:
    """Return the bytes of the weights on one device. One CPU has them as our kernels allocate them, in whole panels."""
    if hardware.kind == "cpu" and scheme.devices == scheme.replicas:
        return packed_bytes(spec, precision)
    held = held_weights(spec, precision)
    return sum(device_weight_bytes(w, precision.weight_bytes(w), scheme) for w in held) / scheme.pp


def held_weights(spec: ModelSpec | HeadSpec, precision: Precision) -> Iterator[Weight]:
    """Yield all weights. A tied head is a separate weight if it is rounded and the embedding is not."""
    yield from spec.weights()
    head = Weight("head.weight", (spec.vocab_size, spec.hidden_size), "out")
    if isinstance(spec, ModelSpec) and spec.encoder:
        return
    if spec.tie_word_embeddings and precision.stored_type(head) != precision.stored_type(next(spec.weights())):
        yield head


def formula_bytes(spec: ModelSpec | HeadSpec, precision: Precision, context: int, *, tp: int = 1) -> float:
    """Return the bytes of state of a sequence: the numbers that its layers keep times their bytes, scales included."""
    total = 0.0
    for layer in spec.layers:
        if layer.mixer and (state := layer.mixer.state()).elements:
            row = state.parts[-1][-1]
            size = precision.state_bytes(state.elements_at(context), row, snapshot=state.snapshot)
            total += size / min(tp, layer.mixer.cut().state)
    return total


def page_groups(
    spec: ModelSpec | HeadSpec, precision: Precision, page_tokens: int, *, tp: int = 1
) -> tuple[StateGroup, ...]:
    """Return the engine's state groups, with the page size of a precision and of one device's share of the heads."""
    found = []
    for group in state_groups(spec, page_tokens=page_tokens):
        slots, offset = [], 0
        for slot in group.slots:
            mixer = spec.layers[slot.layer].mixer
            assert mixer is not None  # a layer without one keeps nothing
            state = mixer.state()
            elements = state.elements * (1 if group.snapshot else group.page_tokens)  # whole blocks of a model
            size = precision.state_bytes(elements, state.parts[-1][-1], snapshot=group.snapshot)
            slots.append(replace(slot, offset=offset, bytes=ceil(size / min(tp, mixer.cut().state))))
            offset += slots[-1].bytes
        found.append(replace(group, slots=tuple(slots), page_bytes=offset))
    return tuple(found)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest n in 1..most that fits, 0 if none does. If n fits, every smaller number must fit too."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
