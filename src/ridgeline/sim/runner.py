"""A Runner without a device: a step takes the time that its cost says, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ridgeline.sched.work import Result, StepPlan
from ridgeline.sim.costs import CostTable
from ridgeline.sim.workload import SECOND

TOKEN, NOTHING = Result((0,)), Result()


class Beside(NamedTuple):
    """Sequences that decode in a step without a Work of their own: their number, and the sums of their costs."""

    num_seqs: int = 0
    sums: Sequence[int] = ()


NOBODY = Beside()


def nobody(step: int) -> Beside:
    """Return that every sequence of a step has a Work."""
    return NOBODY


class TimedStep(NamedTuple):
    """A step on the virtual clock. end_ns: when it is over. beside: sequences without a Work."""

    plan: StepPlan
    end_ns: int
    beside: Beside


class ClockRunner:
    """A sched.loop.Runner on a virtual clock. Each work that samples gives one token and its accepted
    drafts; their id is 0.

    now_ns: the time of the next `submit`; `collect` moves it to the end of the step. beside: called with a step's
    number. results: gives the tokens of a step with drafts; None: there are none.
    """

    unrecorded = "the simulator records no steps"
    resident_pages = ()

    def __init__(
        self, costs: CostTable, beside: Callable[[int], Beside] = nobody,
        results: Callable[[StepPlan], Sequence[Result]] | None = None,
    ) -> None:  # fmt: skip
        self._costs, self._beside, self._results = costs, beside, results
        self.now_ns = 0
        self._free_ns = 0  # when the last step that was submitted is over

    def submit(self, plan: StepPlan, sampling: object) -> TimedStep:
        """Begin a step now, or when the one before is over. How tokens are sampled takes no time."""
        beside, costs = self._beside(plan.step), self._costs
        tokens = rows = beside.num_seqs
        sums = beside.sums
        for work in plan.works:
            new = len(work.tokens)
            tokens += new
            rows += work.sample * (1 + work.num_draft)
            numbers = costs.of(new, work.start + new)
            sums = [a + b for a, b in zip(sums, numbers, strict=True)] if sums else numbers
        start = self.now_ns if self.now_ns > self._free_ns else self._free_ns
        self._free_ns = start + (round(costs.cost.seconds(tokens, rows, sums) * SECOND) or 1)
        return TimedStep(plan, self._free_ns, beside)

    def samples_ahead(self, row: object) -> bool:
        """Return True: tokens are known when a step begins."""
        return True

    def sample(self, handle: TimedStep, rows: Mapping[int, object]) -> Mapping[int, Result]:
        """Return a token for each row."""
        return dict.fromkeys(rows, TOKEN)

    def collect(self, handle: TimedStep) -> Sequence[Result]:
        """Let the step end; a token for each work that samples."""
        if handle.end_ns > self.now_ns:
            self.now_ns = handle.end_ns
        if self._results is not None:
            return self._results(handle.plan)
        return [TOKEN if work.sample else NOTHING for work in handle.plan.works]

    def reset(self) -> None:
        """Let the steps that were submitted end."""
        self.now_ns = max(self.now_ns, self._free_ns)
