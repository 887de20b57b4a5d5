"""Propose drafts with the heads of a Medusa model, which read the target's last hidden state and keep nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.nn.heads import MedusaHead
from ridgeline.nn.model import Model
from ridgeline.ops.api import Array
from ridgeline.runtime.chain import spread
from ridgeline.runtime.drafter import Ask, Place, extend
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.features import Features, Held, is_decode
from ridgeline.runtime.graphs import Passes, Tap
from ridgeline.runtime.layout import Ints
from ridgeline.sample.logits import Floats
from ridgeline.sample.rejection import Draft
from ridgeline.sample.sampler import Best
from ridgeline.sched.work import Result, StepPlan, Work


class Made(NamedTuple):
    """Results of the first heads for n sequences: of each the logits [n, vocabulary of the drafts], the best tokens of
    the target's vocabulary, and their logits.
    """

    logits: Sequence[Array]
    best: Sequence[Array]
    best_logits: Sequence[Array]


class MedusaDrafter:
    """Proposes one token with each head. A sequence whose last state is not kept, such as a fork, has no drafts until
    its next step.
    """

    lookahead = False
    lost: Exception | None = None
    tree = 1
    rounds: int | None = None

    def __init__(self, head: MedusaHead, target: Model, place: Place) -> None:
        self._head, self._memory, self._place = head, place.table.memory, place
        self._features = Features(place.max_seqs, place.num_drafts, 0, head.spec.hidden_size, place.table)
        self.most: int | None = head.spec.num_heads
        self.tap: Tap | None = Tap((), target.hidden, self._features)
        constants = [self._features.array, *head.constants()]
        inputs = DraftInputs(place.max_seqs, 0, place.table)
        self._passes = Passes(constants, place.table, (), place.arena, inputs, place.mirrors)
        self._graphs: dict[tuple[int, int], tuple[Made, Callable[[], None]]] = {}
        if self._passes.refusal is None:
            self._indices = self._passes.recorder.input(self._passes.most)
        self.is_usual = True

    def follow(self, plan: StepPlan) -> None:
        """Do nothing: there is no state in pages."""

    def ran(self, plan: StepPlan, tokens: Ints, features: Array | None) -> None:
        """Keep the hidden states of a step."""
        for work in plan.works:
            stop = work.start + len(work.tokens)
            self._features.rows[work.row] = Held(work.sequence, work.start if is_decode(work) else stop - 1, stop)
        if features is not None:
            self._features.keep(plan.works, tokens, features)

    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Move the hidden states of the accepted drafts of trees to their positions."""
        self._features.settle(works, results)

    def levels(self, drafts: int) -> int:
        """Return how many heads so many drafts of a sequence take."""
        return drafts

    def draft(self, asks: Sequence[Ask], *, follow: bool = True) -> list[list[Draft]]:
        """Return drafts for each sequence; see Drafter."""
        self.is_usual = True
        drafts: list[list[Draft]] = [[] for _ in asks]
        going = [i for i, ask in enumerate(asks) if self._is_kept(ask)]
        if not going:
            return drafts
        asked = [asks[i] for i in going]
        at = [int(self._features.at(ask.row, len(ask.tokens) - 2, len(ask.tokens) - 1)[0]) for ask in asked]
        self._extend(drafts, asks, going, self._run(at, self.levels(max(ask.depth for ask in asked))))
        return drafts

    def _extend(self, drafts: Sequence[list[Draft]], asks: Sequence[Ask], going: Sequence[int], made: Made) -> None:
        """Add what the heads found to the drafts of some sequences. going: their indices in `asks`."""
        found = self._found(made, [asks[i] for i in going])
        extend(drafts, asks, going, found, self._place.vocab_size, self._place.acceptance)

    def _is_kept(self, ask: Ask) -> bool:
        """Return whether the state before the last token of a sequence is kept."""
        held = self._features.of(ask.sequence, ask.row)
        return held is not None and held.first <= len(ask.tokens) - 2 < held.end

    def _found(self, made: Made, asks: Sequence[Ask]) -> Sequence[Best | Floats]:
        """Return what the heads found: logits [n, vocabulary], or best tokens if they are on the host and suffice."""
        if self._passes.refusal is None and all(ask.sampling.wants_best() for ask in asks):
            found = self._passes.fetch([*made.best, *made.best_logits])
            half = len(found) // 2
            return [Best(*pair) for pair in zip(found[:half], found[half:], strict=True)]
        vocabulary, size = self._head.vocabulary, self._place.vocab_size
        return [spread(self._memory.get(logits), vocabulary, size) for logits in made.logits]

    def _run(self, at: Sequence[int], count: int) -> Made:
        """Run the first heads on kept states. at: their indices in `Features.array`."""
        n, passes = len(at), self._passes
        if passes.refusal is not None or n > passes.most:
            return self._heads(self._memory.integers(np.array(at)), count)
        indices = passes.recorder.first(self._indices, n)
        passes.recorder.assign(indices, at)
        if (n, count) in self._graphs:
            made, run = self._graphs[n, count]
            run()
            return made
        self.is_usual = False
        found = passes.record(lambda: [array for arrays in self._heads(indices, count) for array in arrays])
        if found is None:
            return self._heads(indices, count)
        results = found.results
        made = Made(*(results[i * count : (i + 1) * count] for i in range(3)))
        self._graphs[n, count] = made, found.run
        return made

    def _heads(self, indices: Array, count: int) -> Made:
        logits = self._head.logits(self._features.take(indices), count)
        best = [self._passes.best(x) for x in logits]
        return Made(logits, [self._head.to_target(ids) for ids, _ in best], [values for _, values in best])
