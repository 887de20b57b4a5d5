"""The tokens that a device sampled last, where it runs ahead of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array
from ridgeline.ops.draws import Draw
from ridgeline.ops.driver import Fetched
from ridgeline.runtime.layout import Ints
from ridgeline.sample.acceptance import draw_ahead
from ridgeline.sample.sampler import Best, SampleRow, take_best
from ridgeline.sched.work import Result, Work


class SampledTokens:
    """Holds the token that each row of the page tables sampled last, on the device.

    The host does not know these tokens when it submits the next step, which refers to them as LAST.
    """

    def __init__(self, rows: int, table: OpsTable) -> None:
        self._array: Array = table.memory.integers(np.zeros(rows, np.int64))
        self._known, self._keep = table.primitive(api.KNOWN_TOKENS), table.primitive(api.KEEP_TOKENS)

    def known(self, tokens: Array, rows: Array) -> Array:
        """Return ids [T] for tokens [T], of which some may be LAST. rows: each token's row of the page tables."""
        return self._known(tokens, self._array, rows)

    def keep(self, rows: Array, ids: Array) -> None:
        """Keep the ids [n] that rows [n] of the page tables sampled."""
        self._keep(self._array, rows, ids)


class Ahead:
    """Tokens of some works that the device sampled, and that are on their way to the host.

    fetched: the tokens and the largest logits of their rows, an entry for each of `indices`. works: their indices in
    the plan.
    """

    def __init__(
        self, fetched: Fetched, indices: Sequence[int], works: Sequence[int], rows: Sequence[SampleRow]
    ) -> None:
        self._fetched, self._indices, self._works, self._rows = fetched, indices, works, rows

    def results(self) -> list[tuple[int, Result]]:
        """Wait for the tokens; return the index in the plan and the result of each work."""
        ids, logits = self._fetched()
        best = Best(ids[self._indices], logits[self._indices])
        found = []
        for work, row, one in zip(self._works, self._rows, take_best(best), strict=True):
            if isinstance(one, Exception):
                found.append((work, Result(error=one)))
            else:
                found.append((work, Result((one.token,), row.is_end(one.token))))
        return found


def sampled_ahead(works: Sequence[Work], rows: Sequence[SampleRow | None]) -> dict[int, Draw]:
    """Return how the device samples the next tokens of works, by their index, and no works that only the host samples.

    Drafts must be verified before the next step, so that works of a step with drafts wait for the host.
    """
    if any(work.num_draft for work in works):
        return {}
    pairs = enumerate(zip(works, rows, strict=True))
    return {
        i: draw for i, (work, row) in pairs if work.sample and row is not None and (draw := _drawn(row)) is not None
    }


def is_drawn(row: SampleRow) -> bool:
    """Return whether the op DRAW samples a row, so that the host need not wait for its logits."""
    return _drawn(row) is not None


def _drawn(row: SampleRow) -> Draw | None:
    """Return how the op DRAW samples a row; None if it cannot, or if the row wants log probabilities."""
    return draw_ahead(row, "same", 0) if row.edits is None and row.params.logprobs is None else None


def last_tokens(works: Sequence[Work]) -> Ints:
    """Return the index of the last token of each work among the step's tokens."""
    return np.cumsum([len(work.tokens) for work in works]) - 1
