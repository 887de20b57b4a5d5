"""State of attention layers as kernels get it: of whole sequences, and in pages.

Keys, values and latents are in their stored type: float32, bfloat16, float16, int8 or fp8. A row of int8 ends with the
four bytes of its scale; fp8 is bytes of e4m3 (uint8), which `scales` multiply. Kernels convert them to float32. See
spec.storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ridgeline.ops.arrays import Array
from ridgeline.spec.storage import UNSCALED, KVScales


class DenseKeyValues(NamedTuple):
    """Keys and values of whole sequences, one after the other: [T, K, D], with each sequence's length."""

    keys: Array
    values: Array
    lengths: tuple[int, ...]
    scales: KVScales = UNSCALED


class DenseRows(NamedTuple):
    """A layer's state of whole sequences, one after the other: each part [T, *shape], with each sequence's length."""

    parts: tuple[Array, ...]
    lengths: tuple[int, ...]
    scales: KVScales = UNSCALED


class BucketTree(NamedTuple):
    """The drafts of a Bucket's sequences, if some of them form trees; see PagedLayout.paths."""

    limits: Array  # [n, 1], slot of the first draft
    ends: Array  # [n, 1], slot after the last draft
    positions: Array  # [n, 64], position of each draft; undefined after the last one
    paths: Array  # [n, m], of the queries


class Bucket(NamedTuple):
    """Sequences of a step with similar numbers of queries and of keys, padded to one shape: n sequences, m queries and
    P pages of keys each. Padding repeats a sequence's last query; padding pages are page 0.
    """

    rows: Array  # [n, m], indices into the step's T tokens
    positions: Array  # [n, m], positions of the queries
    pages: Array  # [n, P], page numbers in the arena
    first: Array  # [n, P], the slot of the first key of each page, which is its position unless drafts form a tree
    tree: BucketTree | None = None


class Buckets(NamedTuple):
    """A step's sequences in buckets."""

    buckets: tuple[Bucket, ...]
    order: Array  # [T], index of each token's result in the concatenated [n * m] results of the buckets


@dataclass(frozen=True)
class PagedLayout:
    """The pages of one state group that a step reads and writes, shared by the group's layers.

    Kernels read page tables. Backends that compute on rectangles use buckets, which are made at the first access.

    Drafts come last among the tokens of a sequence, in neighboring slots. If they form a tree, a draft reads the known
    tokens and the drafts on its path, and its position is the one after these. Bit i of its path is draft i of its
    sequence: its own bit, and those of its ancestors, which come before it. The path of a known token is 0, and so is
    that of a chain of drafts, which reads all tokens before it.
    """

    write_pages: Array  # [T]
    write_slots: Array  # [T], the token's slot in its page
    starts: Array  # [N], the slot of each sequence's first query, which is its position unless drafts form a tree
    lengths: Array  # [N], number of queries of each sequence
    tables: Array  # [N, P], page numbers; 0 for pages that do not exist or are not read
    fill_buckets: Callable[[], Buckets]
    paths: Array | None = None  # [T]; None: each token reads all tokens of its sequence before it

    @cached_property
    def _buckets(self) -> Buckets:
        return self.fill_buckets()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets.buckets

    @property
    def order(self) -> Array:
        return self._buckets.order


class PagedKeyValues(NamedTuple):
    """Keys and values of one layer in the arena: [pages, page_tokens, K, D] views. Page 0 is padding.

    The layout inside a page belongs to the device; all backends of a device use the same one.
    """

    keys: Array
    values: Array
    layout: PagedLayout
    scales: KVScales = UNSCALED


class PagedRows(NamedTuple):
    """A layer's state in the arena, as views of each part: [pages, page_tokens, *shape]. Page 0 is padding."""

    parts: tuple[Array, ...]
    layout: PagedLayout
    scales: KVScales = UNSCALED


class Selection(NamedTuple):
    """Keys that an indexer has chosen for each of a step's T queries.

    ids: [T, k], slots of the keys in their sequence, ascending; those behind the count are undefined. counts: [T].
    """

    ids: Array
    counts: Array


class PageTarget(NamedTuple):
    """Where the keys and values of a step's T tokens are written; see WRITE_PAGES."""

    parts: tuple[Array, ...]
    pages: Array
    slots: Array
    scales: KVScales = UNSCALED
