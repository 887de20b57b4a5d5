"""Recorded steps of recurrent layers with drafts run the tokens that unrecorded steps run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.ops.devices import open_table
from ridgeline.ops.parts import follow_segments
from ridgeline.runtime.again import numbers, segments, sizes
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.layout import Slices, build_segments, build_snapshot_layout
from ridgeline.runtime.padding import Tokens

MOST, ROWS, PAGE = 4, 12, 8


def along(inputs: Any, states: Any, lengths: Any) -> Any:
    """Return a recurrence whose results depend on the order of all tokens before."""
    (x,), (h,) = inputs, states
    h, y = h.copy(), np.full(x.shape, np.nan)
    for t in range(x.shape[1]):
        inside = t < lengths
        h[inside] = 3 * h[inside] + x[inside, t]
        y[inside, t] = h[inside]
    return y, [h]


def gather(parts: Any, axes: int, order: Any) -> Any:
    return np.concatenate([x.reshape(-1, *x.shape[axes:]) for x in parts])[order]


@pytest.mark.parametrize("seed", range(20))
def test_fixed_shapes_give_the_tokens_and_states_of_any(seed: int) -> None:
    rng, table = np.random.default_rng(seed), open_table("cpu")
    memory, n = table.memory, int(rng.integers(1, 7))
    drafts, replays = (rng.integers(0, MOST + 1, n) if rng.random() < 0.8 else np.zeros(n, np.int64) for _ in range(2))
    rows, starts = rng.permutation(ROWS)[:n], replays + rng.integers(0, 40, n)
    slices = replace(Slices.plain(rows, starts, drafts + 1), drafts=drafts, replays=replays)
    total = int(slices.lengths.sum())
    given = Tokens(rows.tolist(), starts.tolist(), slices.lengths.tolist(), [0] * total, None)
    found = numbers(given, replays.tolist(), MOST)
    assert [x.size for x in found] == list(sizes(n, total, MOST))

    follow = follow_segments(along, lambda x, at: x[at], gather)
    own, states = [rng.integers(-9, 9, (total, 1)).astype(float)], [rng.integers(-9, 9, (n, 1)).astype(float)]
    kept, inputs = rng.integers(-9, 9, (ROWS * MOST, 1)).astype(float), DraftInputs(ROWS, MOST, table)
    read, wanted = inputs.indices(rows, replays), build_segments(slices, memory)
    y, left = follow(own, states, () if read is None else [kept[np.asarray(read)]], wanted)
    fixed = segments(found, np.arange(n), MOST, lambda x, columns: x.reshape(-1, columns), has_drafts=total > n)
    again, after = follow(own, states, [kept[found.read]], fixed)
    assert np.array_equal(again, y) and np.array_equal(after[0], left[0])

    layout = build_snapshot_layout(slices, np.arange(1, 1 + ROWS * 20).reshape(ROWS, 20), PAGE, memory)
    assert np.array_equal(1 + found.rows * 20 + found.known // PAGE, layout.write)
    if total > n:
        assert np.array_equal(fixed.keep, np.asarray(wanted.keep))
        assert np.array_equal(found.write, np.asarray(inputs.indices(rows, drafts)))
