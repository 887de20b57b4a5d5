"""Divide a step of a model with a canvas into a pass over known tokens and one over canvases, and lay those out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Memory, PagedLayout
from ridgeline.runtime.layout import Slices, build_layout, ranges
from ridgeline.sched.work import Work
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


def over_canvases(works: Sequence[Work], run: Callable[[Sequence[Work], Floats | None], Stream]) -> Stream:
    """Run the passes of a step, and return the stream of the last one, which is that of the canvases if there are any.

    run: runs works. The signal is that of all tokens, if they are canvases.
    """
    stream: Stream | None = None
    for some in canvas_passes(works):
        signal = None if some[0].signal is None else np.concatenate([work.signal for work in some])
        stream = run(some, signal)
    assert stream is not None, "a step has at least one token"
    return stream


def canvas_passes(works: Sequence[Work]) -> Iterator[list[Work]]:
    """Yield the works of each pass, without their page tables' changes: the known tokens first, then the canvases."""
    known = [w._replace(tokens=w.tokens[: w.known], num_draft=0, signal=None) for w in works if w.known]
    canvases = [
        w._replace(start=w.start + w.known, tokens=w.tokens[w.known :], replay_from=w.start + w.known)
        for w in works
        if w.num_draft
    ]
    yield from (some for some in (known, canvases) if some)


def canvas_rows(works: Sequence[Work]) -> Ints:
    """Return the index of each of a step's tokens among those of its canvases, [T]; -1 for known tokens."""
    lengths, known = np.array([len(w.tokens) for w in works]), np.array([w.known for w in works])
    is_open = ranges(lengths) >= np.repeat(known, lengths)
    rows: Ints = np.where(is_open, np.cumsum(is_open) - 1, -1)
    return rows


def build_canvas_layout(
    slices: Slices, page_table: Ints, group: StateGroup, canvas: int, memory: Memory
) -> PagedLayout:
    """Build the layout of one state group for a pass over canvases, one for each sequence.

    All tokens of a canvas read the same keys. In a group with a window, each of them is laid out as a sequence of one
    query at the last slot of the canvas, for attention with a window that is longer by the canvas
    (spec.Attention.over_canvas).
    """
    own = build_layout(slices, page_table, group.page_tokens, group.lookback, memory)
    if group.lookback == ALL:
        return own
    ends = np.repeat(slices.starts + slices.lengths - 1, slices.lengths)
    single = Slices.plain(np.repeat(slices.rows, slices.lengths), ends, np.ones_like(ends))
    read = build_layout(single, page_table, group.page_tokens, group.lookback + canvas, memory)
    return replace(read, write_pages=own.write_pages, write_slots=own.write_slots)


def on_device(signal: Floats, table: OpsTable) -> Array:
    """Return a signal [T, width] in the type in which the device computes."""
    rows = table.memory.integers(np.arange(len(signal)))
    return table.primitive(api.EMBEDDING)(table.memory.put(signal, "float32", "float32"), rows)
