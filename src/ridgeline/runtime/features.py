"""Keep what a head for speculative decoding reads of its target: a feature for each of the last tokens of a sequence.

A step of the target leaves one feature [hidden_size] for each of its tokens. Whether the next token of a row is known,
and whether a draft was accepted, is known only after the step. So features are kept until the head has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array
from ridgeline.runtime.layout import Ints
from ridgeline.sched.work import Result, Work
from ridgeline.spec.workspace import KEPT_FEATURES, feature_rows


@dataclass(slots=True)
class Held:
    """Positions [first, end) of a sequence whose features are kept. Later positions hold drafts, if any.

    drafts: whether the sequence had drafts since rows were last run or forgotten.
    """

    sequence: int
    first: int
    end: int
    drafts: bool = False


class Features:
    """Holds features of each row of the page tables, and those of all tokens of one step.

    max_seqs: rows of the page tables that sequences have; the row after them fills up recorded steps. drafts: most
    drafts of a sequence in a step. tokens: most tokens of a step. array: all of them, [rows * size + 1 + tokens,
    hidden_size]. Position p of row r is at r * size + p % size. After these comes a feature of zeros, and then those of
    the step.
    """

    def __init__(self, max_seqs: int, drafts: int, tokens: int, hidden_size: int, table: OpsTable) -> None:
        self.size = KEPT_FEATURES + 2 * (drafts + 1)
        self._zero = (max_seqs + 1) * self.size
        self.array: Array = table.memory.zeros((feature_rows(max_seqs + 1, drafts, tokens), hidden_size))
        self._memory, self._write = table.memory, table.primitive(api.WRITE_STATE)
        self._take = table.primitive(api.EMBEDDING)
        self._tokens = np.zeros((max_seqs + 1) * self.size, np.int64)
        self.rows: dict[int, Held] = {}  # by row of the page tables

    def of(self, sequence: int, row: int) -> Held | None:
        """Return which features of a sequence are kept; None if there are none."""
        held = self.rows.get(row)
        return held if held is not None and held.sequence == sequence else None

    def at(self, row: int, start: int, end: int) -> Ints:
        """Return the indices in `array` of positions [start, end) of a row."""
        return row * self.size + np.arange(start, end) % self.size

    def zeros(self, count: int) -> Ints:
        """Return indices in `array` of features of zeros."""
        return np.full(count, self._zero)

    def of_step(self, start: int, end: int) -> Ints:
        """Return the indices in `array` of tokens [start, end) of the step that `keep_step` was called for."""
        return self._zero + 1 + np.arange(start, end)

    def tokens(self, row: int, start: int, end: int) -> list[int]:
        """Return the tokens at positions [start, end) of a row whose features are kept."""
        found: list[int] = self._tokens[self.at(row, start, end)].tolist()
        return found

    def take(self, indices: Array) -> Array:
        """Return features [n, hidden_size] by their indices in `array`."""
        return self._take(self.array, indices)

    def keep_step(self, features: Array) -> None:
        """Keep the features [T, hidden_size] of all tokens of a step until the next step."""
        self.put(self.of_step(0, features.shape[0]), features)

    def places(self, works: Sequence[Work], tokens: Ints) -> list[int]:
        """Return the indices in `array` of all tokens of a step that only decodes.

        tokens: their ids [T], which are kept too.
        """
        size = self.size
        found = [w.row * size + p % size for w in works for p in range(w.start, w.start + len(w.tokens))]
        self._tokens[found] = tokens
        return found

    def write(self, indices: Array, features: Array) -> None:
        """Write features [n, hidden_size] to indices [n] of `array`, both on the device."""
        self._write(self.array, indices, features)

    def keep(self, works: Sequence[Work], tokens: Ints, features: Array) -> None:
        """Keep the features of a step's works [T, hidden_size]; of a chunk of a prompt, only the last one.

        tokens: ids of the step's tokens [T].
        """
        indices, chosen, size, end = list[int](), list[int](), self.size, 0
        for work in works:
            first, end, stop = end, end + len(work.tokens), work.start + len(work.tokens)
            begin = work.start if is_decode(work) else stop - 1
            indices += [work.row * size + position % size for position in range(begin, stop)]
            chosen += range(max(first, end - (stop - begin)), end)
        kept = np.array(indices)
        if len(chosen) < features.shape[0]:
            features = self._take(features, self._memory.integers(np.array(chosen)))
        self.put(kept, features)
        self._tokens[kept] = tokens[chosen]

    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Move the features of accepted drafts of trees, which were kept in the order of the drafts, to the positions
        that these have in the answer.
        """
        sources, targets = list[int](), list[int]()
        for work, result in zip(works, results, strict=True):
            if not result.path or not is_decode(work):
                continue
            for depth, node in enumerate(result.path):
                if node != depth:
                    sources.append(work.row * self.size + (work.start + 1 + node) % self.size)
                    targets.append(work.row * self.size + (work.start + 1 + depth) % self.size)
        if sources:
            self.put(np.array(targets), self.take(self._memory.integers(np.array(sources))))
            tokens = self._tokens.reshape(-1)
            tokens[targets] = tokens[sources]

    def put(self, indices: Ints, features: Array) -> None:
        """Write features [n, hidden_size] to indices of `array`."""
        self._write(self.array, self._memory.integers(indices), features)


def is_decode(work: Work) -> bool:
    """Return whether a work is one token and its drafts."""
    return len(work.tokens) == 1 + work.num_draft
