"""Drafts of a draft model in the engine: which sequences get how many of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ridgeline.engine.answers import Answer
from ridgeline.errors import RequestError
from ridgeline.runtime.drafter import Ask, Drafter
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.watcher import NO_WATCHER, Watcher


class ModelDrafting:
    """Asks a draft model once a step. most: draft tokens of a sequence in a step. length: the draft's longest context.

    After its first error the draft model is not used any more; answers continue without drafts.
    """

    def __init__(self, drafter: Drafter, most: int, length: int) -> None:
        self._drafter, self._most, self._length = drafter, most, length
        self._refusal: str | None = None

    def reset(self) -> None:
        """Use the draft model again after an error: the engine begins anew."""
        self._refusal = None

    @property
    def is_on(self) -> bool:
        """Return whether drafts may be proposed in the next step."""
        return self._refusal is None

    @property
    def refusal(self) -> str | None:
        """Return why the draft model is not used any more; None while it is."""
        return self._refusal

    @property
    def watcher(self) -> Watcher:
        """Return what is told of commits: the draft's state is in the pages of its target, so it needs no telling."""
        return NO_WATCHER

    @property
    def lookahead(self) -> int:
        """Return for how many tokens after those of a step pages are taken."""
        return self._most

    def give(self, sequence: int, drafts: Seq[int]) -> None:
        """Raise RequestError: the draft model has this task."""
        raise RequestError("this engine has a draft model; drafts cannot be given as well")

    def propose(self, scheduler: Scheduler, answers: Mapping[int, Answer]) -> None:
        """Let the draft model propose for the next step. answers: by sequence; beams have none, and get no drafts."""
        if self._refusal is not None:
            return
        asks: list[Ask] = []
        asking: list[int] = []
        for seq in scheduler.can_verify():
            known = len(seq.tokens)
            count = min(self._most, seq.bound - known - 1, seq.covered - known + 1, self._length - known + 1)
            answer = answers.get(seq.id)
            if answer is None or count < 1 or seq.row < 0 or seq.planned != known - 1:
                continue
            asks.append(Ask(seq.row, seq.tokens, count, answer.draft_row()))
            asking.append(seq.id)
        try:
            found = self._drafter.draft(asks)
        except Exception as e:  # a step of the target must not end with its draft
            self._refusal = f"the draft model failed with {type(e).__name__}: {e!s:.500}"
            logging.getLogger(__name__).exception("%s; answers continue without drafts", self._refusal)
            return
        for sequence, drafts in zip(asking, found, strict=True):
            if drafts:
                scheduler.propose(sequence, drafts)
