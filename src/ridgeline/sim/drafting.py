"""Drafts in a simulation: who has how many, how long proposing them takes, and how many are accepted.

The scheduler is the engine's: it is told which sequences have drafts (`Scheduler.propose`), runs them if there is room,
and records how many were accepted. The depth is chosen by the engine's rule (engine/depth.py), which sees the times of
the virtual clock. How many drafts are accepted is drawn for each sequence with a generator of its own, so that it does
not depend on what else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from ridgeline.plan.planner import Deployment
from ridgeline.plan.speculation import Speculation
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence as Sched
from ridgeline.sched.stats import DraftSpeed
from ridgeline.sched.watcher import NullWatcher
from ridgeline.sched.work import Result, StepPlan
from ridgeline.sim.cost import StepCost
from ridgeline.sim.costs import CostTable
from ridgeline.spec import ModelSpec
from ridgeline.spec.heads import MedusaSpec

SEED_BITS = 40  # bits of a sequence's number in the seed of its generator


class Rule(Protocol):
    """Chooses depths; see engine/depth.py:DepthRule."""

    speed: DraftSpeed

    @property
    def is_resting(self) -> bool: ...
    def rest(self) -> None: ...
    def depths(self, sequences: Sequence[int], batch: int) -> dict[int, int]: ...
    def step(self, batch: int, drafts: int, rounds: int, seconds: float, drafting: float, tokens: int) -> None: ...
    def verified(self, sequence: int, run: int, path: Sequence[int]) -> None: ...
    def end(self, sequence: int) -> None: ...


MakeRule = Callable[[int, bool], Rule]  # from the largest depth, and whether a draft model or a head runs


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of a simulated engine.

    cost: cost of steps of the draft model or head; None without one. make_rule: chooses the depth of each step;
    None: always the largest one.
    """

    speculation: Speculation
    cost: StepCost | None
    make_rule: MakeRule | None = None


class Drafting(NullWatcher):
    """The drafts of one replica. plain: cost of a step of the model.

    A draft model computes the tokens that it has not seen before it proposes. Chunks of prompts are computed beside the
    model's. Medusa has no state. speed: times with drafts and without; None if the depth is fixed.
    """

    def __init__(self, drafts: Drafts, plain: CostTable, seed: int) -> None:
        self._drafts, self._plain, self._seed = drafts, plain, seed
        spec = drafts.speculation
        self._spec, self._draft = spec, None if spec.draft is None else spec.draft.spec
        self._table = None if drafts.cost is None else CostTable(drafts.cost)
        self._rule = drafts.make_rule(spec.depth, self._table is not None) if drafts.make_rule else None
        self._rests, self._rounds, self._drafting_s = False, 0, 0.0
        self._filled: dict[int, int] = {}  # sequence -> its tokens that the draft has computed
        self._chunks: dict[int, tuple[int, int]] = {}  # sequence -> chunks of its prompt that only the model computed
        self._chance: dict[int, Random] = {}

    @property
    def lookahead(self) -> int:
        """Return how many tokens after a step the scheduler takes pages for, because the draft runs there."""
        return 0 if self._table is None or isinstance(self._draft, MedusaSpec) else self._spec.depth

    @property
    def speed(self) -> DraftSpeed | None:
        return None if self._rule is None else self._rule.speed

    # ---- what the scheduler tells -----------------------------------------------------------------------

    def preempt(self, sequence: int) -> None:
        """Forget what the draft has computed: its pages are gone."""
        self._filled[sequence] = 0
        self._chunks.pop(sequence, None)

    def end(self, sequence: int) -> None:
        """Forget a sequence."""
        for table in (self._filled, self._chunks, self._chance):
            table.pop(sequence, None)
        if self._rule is not None:
            self._rule.end(sequence)

    # ---- one step ---------------------------------------------------------------------------------------

    def propose(self, scheduler: Scheduler) -> float:
        """Give the scheduler the drafts of the next step; return the seconds that proposing them took."""
        rule, most = self._rule, self._spec.depth
        self._rounds, self._drafting_s = 0, 0.0
        self._rests = rule is not None and rule.is_resting
        if rule is not None and self._rests:
            rule.rest()
            return 0.0
        able = {seq.id: seq for seq in scheduler.can_verify()}
        room = {number: n for number, seq in able.items() if (n := min(most, self._room(seq))) > 0}
        if rule is None:
            depths = room
        else:
            chosen = rule.depths(list(room), len(able))
            depths = {number: min(depth, room[number]) for number, depth in chosen.items()}
        for number, depth in depths.items():
            scheduler.propose(number, (0,) * depth)
        self._drafting_s = self._seconds(depths, able, follow=rule is None or bool(depths))
        return self._drafting_s

    def results(self, plan: StepPlan) -> list[Result]:
        """Draw the tokens of each work of a step."""
        return [
            Result((0,) * (1 + self._accepted(work.sequence, work.num_draft))) if work.sample else Result()
            for work in plan.works
        ]

    def collected(self, plan: StepPlan, results: Sequence[Result], seconds: float) -> None:
        """Take note of a step that took `seconds`."""
        works, rule = plan.works, self._rule
        decodes = all(work.sample and len(work.tokens) == work.num_draft + 1 for work in works)
        if not decodes:
            for work in works:
                if (limit := work.start + len(work.tokens) - work.num_draft) > work.start + 1:
                    first, _ = self._chunks.get(work.sequence, (work.start, 0))
                    self._chunks[work.sequence] = first, limit
        if rule is None or self._rests or not works:
            return
        if decodes:
            drafts, tokens = sum(work.num_draft for work in works), sum(len(result.tokens) for result in results)
            rule.step(len(works), drafts, self._rounds, seconds, self._drafting_s, tokens)
        for work, result in zip(works, results, strict=True):
            if decodes or work.num_draft:
                rule.verified(work.sequence, work.num_draft, range(len(result.tokens) - 1))

    # ---- depth, acceptance ------------------------------------------------------------------------------

    def _room(self, seq: Sched) -> int:
        """Return how many drafts a sequence can have, as in engine/drafts.py and engine/model_drafts.py."""
        known = len(seq.tokens)
        if self._table is None:
            return seq.bound - known - 1
        if seq.row < 0 or seq.planned != known - 1:
            return 0
        pages = seq.rows_end - known + 1 if self.lookahead else known  # Medusa's heads keep nothing in pages
        return min(seq.bound - known - 1, pages)

    def _accepted(self, sequence: int, drafts: int) -> int:
        chance = self._chance.get(sequence)
        if chance is None:
            chance = self._chance[sequence] = Random((self._seed << SEED_BITS) + sequence)
        own, found = self._spec.by_depth, 0
        while found < drafts and chance.random() < own[min(found, len(own) - 1)]:
            found += 1
        return found

    # ---- the time of proposing --------------------------------------------------------------------------

    def _seconds(self, depths: Mapping[int, int], able: Mapping[int, Sched], *, follow: bool) -> float:
        """Return the seconds of the draft's steps. follow: it also computes chunks of prompts."""
        table = self._table
        if table is None:
            if self._spec.draft is not None or not depths:  # looking n-grams up takes no time here
                return 0.0
            each = _step_s(self._plain, [(1, len(able[number].tokens)) for number in depths], len(depths))
            return self._spec.draft_cost * each * max(depths.values())
        seconds = self._follow(table, depths) if follow and not isinstance(self._draft, MedusaSpec) else 0.0
        self._rounds = max(depths.values(), default=0)
        if not depths:
            return seconds
        if isinstance(self._draft, MedusaSpec):
            return seconds + _step_s(table, [(1, len(able[number].tokens)) for number in depths], len(depths))
        seconds += _step_s(table, [self._first(able[number], depth) for number, depth in depths.items()], len(depths))
        for ahead in range(1, self._rounds):
            going = [(1, len(able[number].tokens) + ahead) for number, depth in depths.items() if depth > ahead]
            seconds += _step_s(table, going, len(going))
        return seconds

    def _first(self, seq: Sched, depth: int) -> tuple[int, int]:
        """Return the tokens and the context of a sequence in the draft's first step.

        A draft model keeps the rows of accepted drafts; a head computes them again from the model's hidden states.
        """
        known = len(seq.tokens)
        filled = min(self._filled.get(seq.id, seq.num_cached), known - 1)
        is_model = isinstance(self._draft, ModelSpec)
        start = max(0, min(filled, known - 2)) if is_model else filled
        self._filled[seq.id] = known + depth - 1 if is_model else known
        return known - start, known

    def _follow(self, table: CostTable, depths: Mapping[int, int]) -> float:
        """Return the seconds of the chunks of prompts that the model computed and the draft did not."""
        chunks, self._chunks = self._chunks, {}
        missing = []
        for number, (first, end) in chunks.items():
            start = self._filled.get(number, first)
            if number not in depths and end > start:
                missing.append((end - start, end))
                self._filled[number] = end
        return _step_s(table, missing, 0) if missing else 0.0


def _step_s(table: CostTable, spans: Sequence[tuple[int, int]], rows: int) -> float:
    """Return the seconds of a step. spans: the tokens of each sequence, and its context. rows: rows of logits."""
    sums = [sum(numbers) for numbers in zip(*(table.of(*span) for span in spans), strict=True)]
    return float(table.cost.seconds(sum(tokens for tokens, _ in spans), rows, sums))


def drafts_of(
    deployment: Deployment, make_rule: MakeRule | None, cost: Callable[[Deployment], StepCost]
) -> Drafts | None:
    """Return the drafts of a deployment; None without. cost: computes the cost of its draft's steps."""
    spec = deployment.speculation
    if spec is None:
        return None
    has_steps = spec.draft is not None and spec.draft.spec is not None
    return Drafts(spec, cost(deployment) if has_steps else None, make_rule)
