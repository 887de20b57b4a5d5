"""The scheduler of the simulator: it fast-forwards sequences that only decode.

A sequence that has its first token gets one token in every step, and only its counts change. So it is *fast-forwarded*:
it is updated only when it needs a page, has filled a page that another sequence or its window depends on, or ends.
All decisions are made by the code of Scheduler. Where pages or the budget run short, all sequences are brought up to
date and the step is an ordinary one.

    schedule() ... commit()     one step: works for prompts, and the fast-forwarded sequences beside them
    calm_steps(n), skip(k)      many steps at once, in which only pages are taken

Missing here: works of fast-forwarded sequences (a device would need them), and more than one step in flight. A page
that generated tokens fill gets its key when the next page is taken, so no prompt may begin with generated tokens.
Every decision is the ordinary scheduler's (tests/pure/test_sim_jump.py).
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
    """A Scheduler that fast-forwards sequences; see the top of the file. Arguments are those of Scheduler.

    Sequences may neither fork nor have drafts. Only the number of tokens in a result matters.
    """

    _cache_type = RunCache
    _cache: RunCache

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # True: all layers attend to all tokens, so a page that is filled changes nothing for others.
        self._only_all = all(g.lookback == ALL and not g.snapshot for g in self._cache.groups)
        self._page_tokens = min(g.page_tokens for g in self._cache.groups)
        self._least_gap = gcd(
            *(g.page_tokens for g in self._cache.groups)
        )  # least tokens between two pages that a sequence takes
        self._since: dict[int, int] = {}  # fast-forwarded sequence -> the first step that its counts lack
        self._to_refill: dict[int, list[Sequence]] = {}  # step -> sequences that need a page before it
        self._to_commit: dict[int, list[Sequence]] = {}  # step -> sequences to update at its end
        self._commit_steps: list[int] = []  # a heap of the keys above
        # For each fast-forwarded sequence: the tokens of its context minus the number of the step.
        self.offsets = array("q", bytes(8 * len(self._rows)))
        self._indices: dict[int, int] = {}  # sequence -> index in `offsets`
        self._members: list[int] = []  # index in `offsets` -> sequence

    @property
    def num_fast_forwarded(self) -> int:
        """Return the number of sequences that are fast-forwarded."""
        return len(self._since)

    @property
    def next_step(self) -> int:
        """Return the number of the next plan."""
        return self._step

    # ---- one step ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, results: Seq[Result]) -> list[Update]:
        """Record a step as Scheduler does. Fast-forwarded sequences have updates only when they end, without tokens."""
        updates = self._commit_fast_forwarded(plan.step)
        updates += super().commit(plan, results)
        for work in plan.works:
            seq = self._live.get(work.sequence)
            if seq is not None and work.sample and seq.row >= 0:
                self._fast_forward(seq, plan.step)
        return updates

    def check(self) -> None:
        """Check the bookkeeping, between two steps."""
        self._wake_all()
        super().check()

    def stats(self) -> Stats:
        """Return statistics, between two steps."""
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
        for due in self._to_refill.values():  # it is fast-forwarded again later, and needs its pages at other steps
            if seq in due:
                due.remove(seq)
        super()._restart(seq)

    def _has_awake(self) -> bool:
        return len(self._since) < len(self._running)

    def _is_plenty(self, refills: int, awake: int, budget: int) -> bool:
        """Return whether there are enough pages for all sequences in this step, in any order, with some to spare."""
        need = 2 * (refills + awake) + (budget // self._page_tokens if awake else 0)
        return all(pool.num_free >= need for pool in self._cache.pools)

    # ---- many steps -------------------------------------------------------------------------------------

    def calm_steps(self, most: int) -> int:
        """Return how many steps from now, at most `most`, can be skipped; 0 if the next step must be planned.

        In these steps all running sequences are fast-forwarded, none ends, none can join, and there are enough pages.
        """
        if not self._since or self._has_awake() or len(self._since) > self._max_batch_tokens or self._may_admit():
            return 0
        while self._commit_steps and self._commit_steps[0] not in self._to_commit:
            heapq.heappop(self._commit_steps)
        steps = min(most, self._commit_steps[0] - self._step) if self._commit_steps else most
        free = min(pool.num_free for pool in self._cache.pools)
        refills: list[int] = []  # upper bound per step: a sequence may need the next page `_least_gap` steps later
        for ahead in range(steps):
            again = refills[ahead - self._least_gap] if ahead >= self._least_gap else 0
            refills.append(again + len(self._to_refill.get(self._step + ahead, ())))
            free -= 2 * refills[-1]
            if free < 0:
                return ahead
        return steps

    def skip(self, steps: int) -> list[tuple[int, int]]:
        """Skip steps; for each of them that took pages, its number from now and `used_bytes` in it."""
        found = [(ahead, self.used_bytes) for ahead in range(steps) if self._refill(self._step + ahead)]
        self._step += steps
        self._committed += steps
        self._cache.newest_step = self._committed
        self._cache.settle(self._committed)
        return found

    def _may_admit(self) -> bool:
        """Return whether the head of the queue might be admitted now."""
        waiting = self._waiting
        while waiting and self._live.get(waiting[0][1].id) is not waiting[0][1]:
            heapq.heappop(waiting)
        if not waiting or not self._rows or len(self._since) == self._max_batch_tokens:
            return False
        return not self._is_blocked(waiting[0][1])

    # ---- fast-forwarded sequences--------------------------------------------------------------------------

    def _fast_forward(self, seq: Sequence, step: int) -> None:
        """Fast-forward a sequence after a step."""
        self._since[seq.id] = step + 1
        index = self._indices[seq.id] = len(self._members)
        self.offsets[index] = seq.computed - step
        self._members.append(seq.id)
        self._await_page(seq)
        self._await_commit(seq, step)

    def _await_page(self, seq: Sequence) -> None:
        step = self._since[seq.id] + max(0, seq.covered - seq.planned)
        self._to_refill.setdefault(step, []).append(seq)

    def _await_commit(self, seq: Sequence, step: int) -> None:
        """Note when to update a sequence after `step`: at its last token or, where it matters, when it fills a page."""
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
        """Take the pages that fast-forwarded sequences need before a step; False if they need none."""
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
                if seq.planned >= seq.covered:  # else it got its page since it was noted here
                    self._cache.take(seq, seq.planned + 1, seq.planned + 1)
                    self._await_page(seq)
        return True

    def _catch_up(self, seq: Sequence, step: int) -> None:
        """Bring a sequence up to date for the beginning of a step."""
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
        """Update fast-forwarded sequences at the end of a step; those that end."""
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
        index, member = self._indices.pop(seq.id), self._members.pop()
        if member != seq.id:  # the last one moves to its index
            self.offsets[index] = self.offsets[len(self._members)]
            self._members[index], self._indices[member] = member, index

    def _end(self, seq: Sequence) -> None:
        if seq.id in self._since:
            self._catch_up(seq, max(self._since[seq.id], self._committed + 1))
            self._leave_fast_forward(seq)
        super()._end(seq)

    def _wake_all(self) -> None:
        """Bring all sequences up to date and stop fast-forwarding: the next step is an ordinary one."""
        for seq in self._running:
            if seq.id in self._since:
                self._catch_up(seq, self._step)
        self._since.clear()
        self._to_refill.clear()
        self._to_commit.clear()
        self._commit_steps.clear()
        self._indices.clear()
        self._members.clear()
