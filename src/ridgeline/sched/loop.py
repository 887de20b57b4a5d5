"""The loop of an engine, and the Runner that it drives: a device (runtime/runner.py) or a clock (sim/runner.py).

    plan = loop.schedule()                  the tokens that run next; None if nothing can run now
    loop.submit(plan, sampling)             the runner begins to compute them
    loop.sample(rows)                       the runner samples the rows of the oldest step that need the host
    plan, results = loop.collect()          the results of the oldest step in flight; waits for them
    updates = loop.commit(plan, results)    the scheduler records them

With two steps in flight, step n + 1 is scheduled and submitted before step n is sampled and collected. Its tokens refer
to those of step n as LAST (sched/work.py), so the host need not know them. Sequences whose tokens the host must sample
(`Sequence.waits`) are not in step n + 1. The host's work between `submit` and `collect` overlaps
with the runner's. On a CPU, kernels run in the runner's thread and release Python's lock, but the
host's work still needs a core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Generic, Protocol, TypeVar

from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.work import Result, StepPlan, Update

Sampling = TypeVar("Sampling", contravariant=True)
Row = TypeVar("Row", contravariant=True)
Sampled = TypeVar("Sampled", covariant=True)
Handle = TypeVar("Handle")
S = TypeVar("S", bound=Scheduler)


class Runner(Protocol[Sampling, Row, Sampled, Handle]):
    """Computes StepPlans, in the order in which they are submitted."""

    def submit(self, plan: StepPlan, sampling: Sampling) -> Handle:
        """Begin a step. The runner samples the works for which `sampling` says how; the others are left to `sample`."""
        ...

    def samples_ahead(self, row: Row) -> bool:
        """Return whether the next step can refer to the token of a row before its step is collected."""
        ...

    def sample(self, handle: Handle, rows: Mapping[int, Row]) -> Mapping[int, Sampled]:
        """Sample the works, by their index in the plan, whose rows need the state of the host: masks, edits, beams.

        To be called before `collect`; one later step may have been submitted. Waits for the step. Does nothing for no
        rows.
        """
        ...

    def collect(self, handle: Handle) -> Seq[Result]:
        """Wait for a step and return a result for each work of its plan. Raises what the step raised."""
        ...

    def reset(self) -> None:
        """Wait for the steps that were submitted and forget them."""
        ...

    @property
    def unrecorded(self) -> str | None:
        """Return why decode steps are not run from a recording; None where they are."""
        ...

    @property
    def resident_pages(self) -> tuple[int, ...]:
        """Number of pages of each group that have memory; () if the runner has none."""
        ...


LOST = object()  # in place of the handle of a step that was not begun
AnyRunner = Runner[Any, Any, Any, Any]
R = TypeVar("R", bound=AnyRunner)


class StepLoop(Generic[S, R]):
    """The steps between a scheduler and a runner; see the top of the file."""

    def __init__(self, scheduler: S, runner: R) -> None:
        self.scheduler, self.runner = scheduler, runner
        self._flights: deque[tuple[StepPlan, Any]] = deque()

    def __len__(self) -> int:
        """Return the number of steps that were submitted and not collected yet."""
        return len(self._flights)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if nothing can run before the next commit or the next request."""
        return self.scheduler.schedule()

    @property
    def oldest(self) -> StepPlan:
        """Return the plan of the oldest step in flight."""
        return self._flights[0][0]

    def submit(self, plan: StepPlan, sampling: Any) -> Any:
        """Let the runner begin a step; its handle."""
        handle = self.runner.submit(plan, sampling)
        self._flights.append((plan, handle))
        return handle

    def lose(self, plan: StepPlan, most_tokens: int) -> None:
        """Give up a step that the runner could not begin: its sequences run again, in steps of so many tokens."""
        self.scheduler.lose(plan, most_tokens)
        self._flights.append((plan, LOST))

    def sample(self, rows: Mapping[int, Any]) -> Mapping[int, Any]:
        """Let the runner sample rows of the oldest step that need the host, before `collect`."""
        handle = self._flights[0][1]
        return {} if handle is LOST or not rows else self.runner.sample(handle, rows)

    def collect(self) -> tuple[StepPlan, Seq[Result]]:
        """Wait for the oldest step; its plan, and a result for each of its works."""
        plan, handle = self._flights.popleft()
        return plan, [Result()] * len(plan.works) if handle is LOST else self.runner.collect(handle)

    def commit(self, plan: StepPlan, results: Seq[Result]) -> list[Update]:
        """Let the scheduler record the results of a step; the new tokens, and which sequences are over."""
        return self.scheduler.commit(plan, results)
