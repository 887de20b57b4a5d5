"""Round steps up to a few shapes: each shape is recorded once, which takes longer than many steps.

A step is filled up with sequences of token 0 at position 0, whose rows of the page tables name the null page only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

OFTEN = 8  # a shape that occurs so often is recorded as it is
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of sequences that draft together


class Tokens(NamedTuple):
    """The tokens of a step of n sequences; see DecodeGraphs.run. frequency_rows: None if there are none. adapters: the
    slot of each sequence's adapter, -1 for none; () if no sequence has one.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    tokens: Sequence[int]
    frequency_rows: Sequence[int] | None
    adapters: Sequence[int] = ()

    def with_more(self, lengths: Sequence[int], row: int) -> Tokens:
        """Return the tokens of these sequences, and of more with the given lengths. row: their row of page tables."""
        n, total = len(lengths), sum(lengths)
        turned = None if self.frequency_rows is None else [*self.frequency_rows, *[0] * total]
        return Tokens(
            [*self.rows, *[row] * n], [*self.starts, *[0] * n], [*self.lengths, *lengths],
            [*self.tokens, *[0] * total], turned, [*self.adapters, *[-1] * n] if self.adapters else (),
        )  # fmt: skip

    def of_row(self, row: int) -> Tokens:
        """Return as many tokens of sequences that have one row of the page tables, from position 0 on."""
        n = len(self.rows)
        return self._replace(rows=[row] * n, starts=[0] * n, tokens=[0] * len(self.tokens))

    def of_one(self, row: int) -> Tokens:
        """Return the first token of one sequence that has a row of the page tables."""
        frequency_rows = self.frequency_rows and self.frequency_rows[:1]
        return self._replace(rows=[row], starts=[0], lengths=[1], tokens=[0], frequency_rows=frequency_rows,
                             adapters=self.adapters[:1])  # fmt: skip


class Shapes:
    """Chooses shapes of steps.

    sequences: numbers of sequences up to which steps without drafts are filled, ascending. most, most_tokens: sequences
    and tokens of the largest recorded step.
    """

    def __init__(self, sequences: Sequence[int], most: int, most_tokens: int) -> None:
        self._sequences, self._most, self._most_tokens = sequences, most, most_tokens
        self._seen: Counter[tuple[int, int]] = Counter()

    def more(self, n: int, total: int) -> tuple[int, ...]:
        """Return the lengths of sequences that are added to a step that is not recorded yet; none if it is to be."""
        if total == n:
            return (1,) * (min(least for least in self._sequences if least >= n) - n)
        self._seen[n, total] += 1
        missing = -total % n  # the drafts of a shape are a multiple of n
        if not missing or self._seen[n, total] > OFTEN:
            return ()
        return (missing,) if n < self._most and total + missing <= self._most_tokens else ()


def more_drafting(n: int, total: int, most: int, most_tokens: int) -> tuple[int, ...]:
    """Return the lengths of sequences that are added to the first round of n sequences that draft.

    total: their tokens. The number of all sequences becomes one of GRID, and their tokens a multiple of it.
    """
    for wanted in GRID:
        added = wanted - n
        each = -(-(total + added) // wanted)
        left = wanted * each - total
        if added > 0 and wanted <= most and wanted * each <= most_tokens:
            return (*[1] * (added - 1), left - added + 1)
        if added > 0 or (added == 0 and not left):
            break
    return ()
