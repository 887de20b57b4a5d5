"""Drafts of a draft model or a head in the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ridgeline.engine.answers import Answer
from ridgeline.engine.depth import DepthRule
from ridgeline.engine.drafts import Drafting, Found
from ridgeline.errors import RequestError
from ridgeline.propose import Drafts
from ridgeline.runtime.drafter import Ask, Drafter
from ridgeline.sample.rejection import Draft
from ridgeline.sched.sequence import Sequence
from ridgeline.spec.trees import head_rows


class ModelDrafting(Drafting):
    """Asks a draft model or a head. length: the longest context for which it drafts.

    After its first error it is not used any more; answers continue without drafts.
    """

    def __init__(self, drafter: Drafter, most: int, length: int, rule: DepthRule | None = None) -> None:
        super().__init__(most, rule)
        self._drafter, self._length = drafter, length
        self._rows = most if drafter.tree == 1 else head_rows(drafter.tree, most)
        self.lookahead = self._rows if drafter.lookahead else 0
        self._refusal: str | None = None

    def reset(self) -> None:
        self._refusal = None

    @property
    def is_on(self) -> bool:
        return self._refusal is None

    @property
    def refusal(self) -> str | None:
        return self._refusal

    def give(self, sequence: int, drafts: Seq[int] | Drafts) -> None:
        raise RequestError("this engine has a draft model or a head; drafts cannot be given as well")

    def _room(self, seq: Sequence) -> int:
        """Return how many drafts a sequence can have: it decodes, and the pages for its drafts are there."""
        known = len(seq.tokens)
        if seq.row < 0 or seq.planned != known - 1:
            return 0
        room = min(seq.bound - known - 1, self._length - known + 1)
        if not self._drafter.lookahead:
            return room
        left, width = seq.rows_end - known + 1, self._drafter.tree
        if width == 1:
            return min(room, left)
        return room if left >= self._rows else min(room, 1 + left // width)  # as many levels as there are rows for

    def _find(
        self, depths: Mapping[int, int], sequences: Mapping[int, Sequence], answers: Mapping[int, Answer]
    ) -> Found:
        asks = [
            Ask(s, sequences[s].row, sequences[s].tokens, depth, answers[s].draft_row()) for s, depth in depths.items()
        ]
        try:
            if self._drafter.lost is not None:
                raise self._drafter.lost
            found = self._drafter.draft(asks, follow=self._rule is None or bool(depths))
        except Exception as e:  # a step of the target must not end with its draft
            self._refusal = f"drafting failed with {type(e).__name__}: {e!s:.500}"
            logging.getLogger(__name__).exception("%s; answers continue without drafts", self._refusal)
            return {}
        rounds = max(map(len, found), default=0) if self._drafter.rounds is None else self._drafter.rounds
        self._rounds = rounds if self._drafter.is_usual else 0
        return {sequence: _drafts(drawn) for sequence, drawn in zip(depths, found, strict=True) if drawn}


def _drafts(drawn: Seq[Draft]) -> Drafts:
    q = tuple(draft.q for draft in drawn if draft.q is not None)
    parents = tuple(draft.parent for draft in drawn if draft.parent is not None)
    return Drafts(tuple(draft.token for draft in drawn), q if len(q) == len(drawn) else None, parents)
