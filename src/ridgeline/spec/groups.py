"""Group layers that share one page table: for the scheduler, a group has pages and a lookback.

    kind                    page_tokens   lookback     page_bytes                              snapshot
    MHA / GQA / MQA         16            ALL          2 * kv_heads * head_dim * 16 * dtype    no
    sliding window          16            window - 1   same                                    no
    blocks of B tokens      multiple of B ALL          same                                    no
    MLA latent              16            ALL          (latent + rope) * 16 * dtype            no
    recurrent               snapshots   1            conv + state, whatever page_tokens is   yes

A row group keeps one row per token, `page_tokens` rows to a page. A snapshot group is a sliding window of one whose
page holds one state: page i holds the newest state that a step left behind in tokens (i * T, (i + 1) * T], so that at
the end of each page a snapshot is left, every T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ridgeline.spec.model import AnyLayer
from ridgeline.spec.sight import BEYOND
from ridgeline.spec.state import ALL, State
from ridgeline.spec.storage import ALIGNMENT, EXACT, StateDType, Storage

KEPT_TOKENS = 1024  # free pages of so many tokens stay in the prefix index before untouched memory is used
AHEAD_TOKENS = 512  # pages of so many tokens, or of the last chunk if it was longer, are touched before their use
TOUCH_TOKENS = 128  # touched memory ends at a multiple of the pages of so many tokens
NULL_PAGE = 0  # never handed out: "this position is not kept". Kernels may point padding at it.


@dataclass(frozen=True, slots=True)
class PartSlot:
    """Position of a part of a layer's state in a page: elements of `dtype` from byte `offset` on.

    Their shape is [page_tokens, *shape], or [*shape] for a snapshot.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: StateDType


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """Position of a layer in its group's page: `bytes` bytes from byte `offset`. layer: its index in the model."""

    layer: int
    offset: int
    bytes: int
    parts: tuple[PartSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers with one page table.

    page_tokens: tokens that a page covers. lookback: how many computed tokens the next token reads.
    page_bytes: bytes of one page, all layers. snapshot: a page is one state rather than page_tokens rows.
    slots: the content of a page, layer by layer in the model's order; the scheduler does not use it.
    first_tokens: first tokens of a sequence that every later token reads; their pages are kept as long as the sequence.
    block: tokens whose rows are final together. page_tokens is a multiple of it, unless it is longer than any sequence.
    canvas: tokens of a canvas, which are computed together and read the rows before the first one; 0: there is none.
    """

    name: str
    page_tokens: int
    lookback: int
    page_bytes: int
    snapshot: bool = False
    slots: tuple[LayerSlot, ...] = ()
    first_tokens: int = 0
    block: int = 1
    canvas: int = 0

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.lookback < 0 or self.page_bytes < 0:
            raise ValueError(f"{self.name}: page_tokens must be positive, lookback and page_bytes not negative")
        if self.snapshot and self.lookback != 1:
            raise ValueError(f"{self.name}: the lookback of a snapshot is 1, not {self.lookback}")
        if self.first_tokens < 0 or (self.snapshot and self.first_tokens):
            raise ValueError(f"{self.name}: first_tokens must not be negative, and a snapshot has none")

    @property
    def first_pages(self) -> int:
        """Return how many pages at the beginning of a sequence are kept as long as the sequence."""
        return self.num_pages(self.first_tokens)

    @property
    def kept_pages(self) -> int:
        """Free pages that stay in the prefix index at first before pages are taken that were never used."""
        return max(1, KEPT_TOKENS // self.page_tokens)

    @property
    def ahead_pages(self) -> int:
        """Pages that are touched before they are used: those of AHEAD_TOKENS tokens, and of a sequence that begins."""
        return max(self.num_pages(AHEAD_TOKENS), self.most_pages(AHEAD_TOKENS))

    @property
    def touch_pages(self) -> int:
        """The end of the touched pages is a multiple of so many pages."""
        return self.num_pages(TOUCH_TOKENS)

    def page_of(self, token: int) -> int:
        """Return the index of the page that covers a token."""
        return token // self.page_tokens

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages that cover `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def first_live_page(self, position: int) -> int:
        """Return the index of the oldest page that a step from `position` on reads, the first tokens' pages aside."""
        return max(0, position - self.lookback) // self.page_tokens

    def reads(self, position: int) -> Sequence[int]:
        """Return the indices of the pages that a sequence needs to continue from `position`, ascending."""
        live = range(self.first_live_page(position), self.num_pages(position))
        first = range(min(self.first_pages, live.start))
        return [*first, *live] if first else live

    def new_pages(self, num_held: int, end: int) -> range:
        """Return the page indices to append to a table of `num_held` entries so that it covers tokens [0, end)."""
        return range(num_held, self.num_pages(end))

    def writes(self, index: int, end: int) -> bool:
        """Return whether a step that ends at `end` writes new page `index`: it leaves only one snapshot, at its end."""
        return not self.snapshot or index == self.page_of(end - 1)

    def resumable(self, position: int, num_cached: int) -> bool:
        """Return whether another sequence can begin at `position` if the last `num_cached` pages before it are cached.

        Rows resume only at the end of a full page, a snapshot wherever one was published. `num_cached` is 0 if the
        pages of the first tokens are not cached.
        """
        if not self.snapshot and position % self.page_tokens:
            return False
        return num_cached >= self.num_pages(position) - self.first_live_page(position)

    def most_pages(self, num_tokens: int) -> int:
        """Return how many pages always suffice to finish a sequence of `num_tokens` tokens.

        Its tokens are computed one at a time, and those of a canvas together.
        """
        if self.snapshot:
            return 2  # the state that a step reads and the one that it leaves
        window = (min(self.lookback + self.canvas, num_tokens) + self.page_tokens - 1) // self.page_tokens + 1
        return min(self.num_pages(num_tokens), self.first_pages + window)


class HasLayers(Protocol):
    """A model, or a head for speculative decoding."""

    @property
    def layers(self) -> Sequence[AnyLayer]: ...
    @property
    def canvas(self) -> int: ...


def state_groups(
    spec: HasLayers,
    *,
    page_tokens: int,
    storage: Storage = EXACT,
    snapshots: Storage = EXACT,
    state_snapshot_tokens: int = 256,
) -> tuple[StateGroup, ...]:
    """Return the groups of a model or a head in order of first use: one per (lookback, first tokens, snapshot).

    page_tokens, state_snapshot_tokens: tokens that a page of rows and a snapshot cover. storage, snapshots: how rows
    and recurrent states are stored. Layers of a group may have different shapes. Layers without state are in no group.
    """
    members: dict[tuple[int, int, bool], list[LayerSlot]] = {}
    block = max((layer.mixer.state().block for layer in spec.layers if layer.mixer), default=1)
    if block < BEYOND:  # a page that ends within a block would not be final when it is full
        page_tokens = -(-page_tokens // block) * block
    for i, layer in enumerate(spec.layers):
        state = layer.mixer.state() if layer.mixer else State(())
        if not state.elements:
            continue
        slots = members.setdefault((state.lookback, state.first_tokens, state.snapshot), [])
        offset = slots[-1].offset + slots[-1].bytes if slots else 0
        tokens, kept = (1, snapshots) if state.snapshot else (page_tokens, storage)
        slots.append(_slot(i, offset, state, kept, tokens))
    return tuple(
        StateGroup(
            name=_name(lookback, first_tokens, snapshot),
            page_tokens=state_snapshot_tokens if snapshot else page_tokens,
            lookback=lookback,
            page_bytes=sum(slot.bytes for slot in slots),
            snapshot=snapshot,
            slots=tuple(slots),
            first_tokens=first_tokens,
            block=block,
            canvas=spec.canvas,
        )
        for (lookback, first_tokens, snapshot), slots in members.items()
    )


def with_layers(groups: Sequence[StateGroup], more: Sequence[StateGroup], first_layer: int) -> tuple[StateGroup, ...]:
    """Return groups of two models that run over the same tokens, such as a model and its draft.

    Layers of both that attend equally far have one page table, so a page holds the rows of both models for its tokens.
    The layers of the second model, whose groups are `more`, are numbered from first_layer on.
    """
    found = list(groups)
    for group in more:
        at = next((i for i, own in enumerate(found) if _kind(own) == _kind(group)), None)
        before = 0 if at is None else found[at].page_bytes
        slots = tuple(_moved(slot, first_layer, before) for slot in group.slots)
        if at is None:
            found.append(replace(group, slots=slots))
        else:
            own = found[at]
            found[at] = replace(own, page_bytes=before + group.page_bytes, slots=(*own.slots, *slots))
    return tuple(found)


def _kind(group: StateGroup) -> tuple[int, int, bool, int]:
    """Return what two groups must have in common to share page tables."""
    return group.lookback, group.first_tokens, group.snapshot, group.page_tokens


def _moved(slot: LayerSlot, layers: int, offset: int) -> LayerSlot:
    """Return a slot with later numbers of layers and bytes."""
    parts = tuple(replace(part, offset=part.offset + offset) for part in slot.parts)
    return LayerSlot(slot.layer + layers, slot.offset + offset, slot.bytes, parts)


def _slot(layer: int, offset: int, state: State, storage: Storage, tokens: int) -> LayerSlot:
    """Return the slot of a layer in a page that covers `tokens` tokens."""
    parts, end = [], offset
    for shape in state.parts:
        parts.append(PartSlot(end, storage.stored(shape), storage.dtype))
        end += -(-tokens * storage.part_bytes(shape) // ALIGNMENT) * ALIGNMENT
    return LayerSlot(layer, offset, end - offset, tuple(parts))


def _name(lookback: int, first_tokens: int, snapshot: bool) -> str:
    if snapshot:
        return "snapshot"
    window = "all" if lookback == ALL else f"window {lookback + 1}"
    return f"first {first_tokens} and {window}" if first_tokens else window
