"""The scheduler for a simulator: sequences that only decode are left alone until something happens to them.

A sequence that has its first token *cruises*: every step gives it one token, and nothing of it changes but counts, so
it is looked at only when it needs a page, has filled one that others or its window care for, or ends. All decisions are
those of Scheduler, from its own code; where pages or the budget run short, all wake up and the step is an ordinary one.

    schedule() ... commit()     one step: works of those that compute a prompt, and all that cruise beside them
    calm_steps(n), skip(k)      many steps at once, in which only pages are taken

What is left out: a plan's works of those that cruise (a device would need them), and more than one step in flight. A
page that generated tokens fill gets its key when the next one is taken, so nobody else may begin with generated tokens.
Equal to the ordinary scheduler in every decision (tests/pure/test_sim_jump.py).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import gcd
from typing import Any

from ridgeline.sched.scheduler import _BY_ORDER, Scheduler
from ridgeline.sched.sequence import Sequence
from ridgeline.sched.stats import Stats
from ridgeline.sched.work import LAST, Result, StepPlan, Update
from ridgeline.sim.runs import RunCache
from ridgeline.spec.state import ALL


class FastForwardScheduler(Scheduler):
    """See the top of the file; arguments as for Scheduler.

    Sequences may neither fork nor have drafts, and what they are given as results is not looked at but for its number.
    """

    _cache_type = RunCache
    _cache: RunCache

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # Only pages that reach back to the beginning: to fill one concerns nobody else.
        self._only_all = all(g.lookback == ALL and not g.snapshot for g in self._cache.groups)
        self._page_tokens = min(g.page_tokens for g in self._cache.groups)
        self._least_gap = gcd(*(g.page_tokens for g in self._cache.groups))  # tokens between two needs of pages
        self._since: dict[int, int] = {}  # of each that cruises: the step from which on its counts are not up to date
        self._to_refill: dict[int, list[Sequence]] = {}  # step -> who needs a page before it
        self._to_commit: dict[int, list[Sequence]] = {}  # step -> to whom something happens at its end
        self._commit_steps: list[int] = []  # a heap of the keys above
        # For each of the first `num_fast_forwarded`: the tokens of its context less the number of the step.
        self.offsets = array("q", bytes(8 * len(self._rows)))
        self._places: dict[int, int] = {}  # in `offsets`
        self._members: list[int] = []  # whose each is

    @property
    def num_fast_forwarded(self) -> int:
        """Sequences that are left alone."""
        return len(self._since)

    @property
    def next_step(self) -> int:
        """The number of the next plan."""
        return self._step

    # ---- one step ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, results: Seq[Result]) -> list[Update]:
        """As of Scheduler; of those that cruise, only the ends are told, without their tokens."""
        updates = self._commit_fast_forwarded(plan.step)
        updates += super().commit(plan, results)
        for work in plan.works:
            seq = self._live.get(work.sequence)
            if seq is not None and work.sample and seq.row >= 0:
                self._fast_forward(seq, plan.step)
        return updates

    def check(self) -> None:
        """As of Scheduler, between two steps."""
        self._wake_all()
        super().check()

    def stats(self) -> Stats:
        """As of Scheduler, between two steps."""
        self._wake_all()
        return super().stats()

    def _plan_running(self, sequences: Iterable[Sequence], budget: int) -> int:
        if not self._since:
            return super()._plan_running(sequences, budget)
        due = self._to_refill.get(self._step, ())
        awake = [seq for seq in self._running if seq.id not in self._since] if self._has_awake() else []
        if len(self._since) > budget or not self._is_plenty(len(due), len(awake), budget):
            self._wake_all()
            return super()._plan_running(sequences, budget)
        self._refill(self._step)
        if not awake:
            return budget - len(self._since)
        return super()._plan_running(awake, budget - len(self._since))

    def _emit(self) -> StepPlan | None:
        plan = super()._emit()
        if plan is None and self._since:
            plan = StepPlan(self._step, ())
            self._cache.newest_step = self._step
            self._step += 1
        return plan

    def _park_idle(self) -> bool:
        return not self._since and super()._park_idle()

    def _place(self, seq: Sequence) -> bool:
        found = super()._place(seq)
        if found:
            self._cache.begin_alone(seq)
        return found

    def _preempt(self, seq: Sequence) -> None:
        self._cache.end_alone(seq)
        super()._preempt(seq)

    def _restart(self, seq: Sequence) -> None:
        if seq.id in self._since:
            self._leave_fast_forward(seq)
        for due in self._to_refill.values():  # it will cruise again, and need its pages at other steps
            if seq in due:
                due.remove(seq)
        super()._restart(seq)

    def _has_awake(self) -> bool:
        return len(self._since) < len(self._running)

    def _is_plenty(self, refills: int, awake: int, budget: int) -> bool:
        """Is there a page for everybody in this step, whoever comes first? A few more than needed are asked for."""
        need = 2 * (refills + awake) + (budget // self._page_tokens if awake else 0)
        return all(pool.num_free >= need for pool in self._cache.pools)

    # ---- many steps -------------------------------------------------------------------------------------

    def calm_steps(self, most: int) -> int:
        """In how many steps from now, up to `most`, all running sequences cruise, none ends, nobody can join them, and
        pages suffice. 0: the next step is to be planned."""
        if not self._since or self._has_awake() or len(self._since) > self._max_batch_tokens or self._may_admit():
            return 0
        while self._commit_steps and self._commit_steps[0] not in self._to_commit:
            heapq.heappop(self._commit_steps)
        steps = min(most, self._commit_steps[0] - self._step) if self._commit_steps else most
        free = min(pool.num_free for pool in self._cache.pools)
        refills: list[int] = []  # at most, in each step: who has got a page may need another one `_least_gap` later
        for ahead in range(steps):
            again = refills[ahead - self._least_gap] if ahead >= self._least_gap else 0
            refills.append(again + len(self._to_refill.get(self._step + ahead, ())))
            free -= 2 * refills[-1]
            if free < 0:
                return ahead
        return steps

    def skip(self, steps: int) -> list[tuple[int, int]]:
        """Run so many calm steps: for those that took pages, how many steps from now and `used_bytes` in it."""
        found = [(ahead, self.used_bytes) for ahead in range(steps) if self._refill(self._step + ahead)]
        self._step += steps
        self._committed += steps
        self._cache.newest_step = self._committed
        self._cache.settle(self._committed)
        return found

    def _may_admit(self) -> bool:
        """Is the head of the queue worth another look?"""
        waiting = self._waiting
        while waiting and self._live.get(waiting[0][1].id) is not waiting[0][1]:
            heapq.heappop(waiting)
        if not waiting or not self._rows or len(self._since) == self._max_batch_tokens:
            return False
        return not self._is_blocked(waiting[0][1])

    # ---- those that cruise ------------------------------------------------------------------------------

    def _fast_forward(self, seq: Sequence, step: int) -> None:
        """Leave it alone after a step."""
        self._since[seq.id] = step + 1
        place = self._places[seq.id] = len(self._members)
        self.offsets[place] = seq.computed - step
        self._members.append(seq.id)
        self._await_page(seq)
        self._await_commit(seq, step)

    def _await_page(self, seq: Sequence) -> None:
        step = self._since[seq.id] + max(0, seq.covered - seq.planned)
        self._to_refill.setdefault(step, []).append(seq)

    def _await_commit(self, seq: Sequence, step: int) -> None:
        """After `step`: until its last token or, where that matters, until it fills a page or leaves one behind."""
        after = seq.bound - len(seq.tokens)
        if not self._only_all:
            after = min(after, max(1, seq.next_event - seq.computed))
        found = self._to_commit.get(step + after)
        if found is None:
            self._to_commit[step + after] = [seq]
            heapq.heappush(self._commit_steps, step + after)
        else:
            found.append(seq)

    def _refill(self, step: int) -> bool:
        """Take the pages that those who cruise need before a step. False: none."""
        due = self._to_refill.pop(step, None)
        if due is None:
            return False
        self._cache.newest_step = step
        due.sort(key=_BY_ORDER)
        simple, since, size = self._cache.is_simple, self._since, self._page_tokens
        for seq in due:
            if seq.id not in since:
                continue
            if simple and seq.next_event == seq.covered:
                self._count(seq, step)
                self._cache.turn_page(seq)
                self._to_refill.setdefault(step + size, []).append(seq)
            else:
                self._catch_up(seq, step)
                if seq.planned >= seq.covered:  # else it has got its page since it was put down here
                    self._cache.take(seq, seq.planned + 1, seq.planned + 1)
                    self._await_page(seq)
        return True

    def _catch_up(self, seq: Sequence, step: int) -> None:
        """Bring it up to the beginning of a step."""
        self._count(seq, step)
        if seq.computed >= seq.next_event:
            self._cache.advance(seq)

    def _count(self, seq: Sequence, step: int) -> None:
        gained = step - self._since[seq.id]
        seq.tokens.extend((LAST,) * gained)
        seq.planned += gained
        seq.computed = seq.replay_from = seq.planned
        self._since[seq.id] = step

    def _commit_fast_forwarded(self, step: int) -> list[Update]:
        """What happens at the end of a step to those that cruise."""
        updates = []
        for seq in sorted(self._to_commit.pop(step, ()), key=_BY_ORDER):
            if seq.id not in self._since:
                continue
            self._catch_up(seq, step + 1)
            if len(seq.tokens) >= seq.max_length:
                updates.append(Update(seq.id, (), True))
                self._end(seq)
                continue
            if len(seq.tokens) >= seq.bound:
                self._restart(seq)
                continue
            if seq.planned >= seq.covered:
                self._await_page(seq)
            self._await_commit(seq, step)
        return updates

    def _leave_fast_forward(self, seq: Sequence) -> None:
        del self._since[seq.id]
        place, member = self._places.pop(seq.id), self._members.pop()
        if member != seq.id:  # the last one takes its place
            self.offsets[place] = self.offsets[len(self._members)]
            self._members[place], self._places[member] = member, place

    def _end(self, seq: Sequence) -> None:
        if seq.id in self._since:
            self._catch_up(seq, max(self._since[seq.id], self._committed + 1))
            self._leave_fast_forward(seq)
        super()._end(seq)

    def _wake_all(self) -> None:
        """Bring all up to date: the next step is an ordinary one."""
        for seq in self._running:
            if seq.id in self._since:
                self._catch_up(seq, self._step)
        self._since.clear()
        self._to_refill.clear()
        self._to_commit.clear()
        self._commit_steps.clear()
        self._places.clear()
        self._members.clear()
