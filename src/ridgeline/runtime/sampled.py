"""The tokens that a device sampled last, where it runs ahead of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array
from ridgeline.ops.draws import Draw
from ridgeline.ops.driver import Fetched
from ridgeline.runtime.layout import Ints
from ridgeline.runtime.sampling import best_results
from ridgeline.sample.acceptance import draw_ahead, draw_verified
from ridgeline.sample.rejection import Distribution
from ridgeline.sample.sampler import Best, SampleRow
from ridgeline.sched.work import Result, Work
from ridgeline.spec.acceptance import Acceptance


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

    fetched: the tokens and the largest logits of rows of logits. indices: the rows of these works among them. works:
    by their index in the plan, with the row of each.
    """

    def __init__(self, fetched: Fetched, indices: Ints, works: Mapping[int, tuple[Work, SampleRow]]) -> None:
        self._fetched, self._indices, self._works = fetched, indices, works

    def results(self) -> dict[int, Result]:
        """Wait for the tokens; return the result of each work, by its index in the plan."""
        ids, logits = self._fetched()
        works, rows = zip(*self._works.values(), strict=True)
        found = best_results(Best(ids[self._indices], logits[self._indices]), rows, works)
        return dict(zip(self._works, found, strict=True))


def sampled_ahead(
    works: Sequence[Work],
    rows: Sequence[SampleRow | None],
    acceptance: Acceptance,
    q: Mapping[int, Sequence[Distribution]],
) -> dict[int, list[Draw]]:
    """Return how the device samples works, by their index, and no works that only the host samples.

    There is a draw for each row of logits of a work: of its last known token, and of each draft. A draft is accepted if
    its token is what was drawn at its position. acceptance: how drafts are accepted. q: the distributions that drafts
    were drawn from, by the index of the work: rejection sampling with them needs the host, which has them.
    """
    pairs = enumerate(zip(works, rows, strict=True))
    return {
        i: draws for i, (work, row) in pairs
        if work.sample and row is not None and (draws := _draws(work, row, acceptance, i in q)) is not None
    }  # fmt: skip


def is_drawn(row: SampleRow) -> bool:
    """Return whether the op DRAW samples a row, so that the host need not wait for its logits."""
    return row.edits is None and row.params.logprobs is None and draw_ahead(row, "same", 0) is not None


def _draws(work: Work, row: SampleRow, acceptance: Acceptance, has_q: bool) -> list[Draw] | None:
    """Return a draw for each row of a work; None if the host must sample it. row: at the first of them.

    has_q: its drafts have distributions.
    """
    if not is_drawn(row) or (has_q and acceptance == "rejection" and row.params.temperature > 0):
        return None
    return draw_verified(row, work.tokens[len(work.tokens) - work.num_draft :], work.parents, acceptance)
