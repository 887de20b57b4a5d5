"""Give the logits of a work a piece at a time, because those of many positions and a large vocabulary take much memory.

A block of 256 tokens of 32 sequences has 8.6 GB of logits over a vocabulary of 262,144. Diffusion models turn each
piece into choices before they read the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ridgeline.sample.logits import Floats

PIECE = 1 << 24  # logits of a piece; a row with more is a piece of its own


def rows_of_piece(vocab_size: int) -> int:
    """Return the rows of a piece."""
    return max(1, PIECE // vocab_size)


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Some rows of logits [vocabulary], float32.

    read: returns rows from a first one up to an end, or fewer, but at least one. They are valid until the next call.
    keep: returns the same rows, which can be read after the step, too.
    """

    count: int
    read: Callable[[int, int], Floats]
    keep: Callable[[], LogitRows]

    @classmethod
    def of(cls, logits: Floats) -> LogitRows:
        """Return rows that are there already, [n, vocabulary]."""
        return cls(len(logits), lambda first, end: logits[first:end], lambda: cls.of(logits.copy()))

    def pieces(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, Floats]]:
        """Yield the rows from `first` to `end`: the index of the first row of each piece, and the piece."""
        stop = self.count if end is None else end
        while first < stop:
            piece = self.read(first, stop)
            yield first, piece
            first += len(piece)


class Pieces:
    """Rows of logits of a step, computed a piece at a time; rows should be read in order.

    compute: returns the logits of rows from a first one up to an end. keep: returns these rows, which can be read after
    the step, too.
    """

    def __init__(
        self, compute: Callable[[int, int], Floats], keep: Callable[[int, int], LogitRows], vocab_size: int
    ) -> None:
        self._compute, self._keep, self._per = compute, keep, rows_of_piece(vocab_size)
        self._number, self._piece = -1, np.zeros((0, vocab_size), np.float32)

    def rows(self, first: int, count: int) -> LogitRows:
        """Return `count` rows from `first` on."""
        return LogitRows(
            count, lambda at, end: self._read(first + at, first + end), lambda: self._keep(first, first + count)
        )

    def _read(self, first: int, end: int) -> Floats:
        number = first // self._per
        base = number * self._per
        if number != self._number:
            self._piece = self._compute(base, base + self._per)
            self._number = number
        return self._piece[first - base : end - base]
