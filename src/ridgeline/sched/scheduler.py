"""Decide which tokens run next, and on which pages. There are no tensors here, so a simulator can drive it too.

    add, fork, propose, abort            at any time between the two; hold, give: for a token that comes late
    plan = schedule()                    tokens [planned, ..) of some sequences; None: nothing can run now
    updates = commit(plan, results)      record the results; plans are committed in order, at most two are in flight

The states of a request:
                     admit: a row, pages (prefix or swapped)
        waiting  -------------------------------------------> running ----> over (ended, max_tokens, abort)
      (by order) <------------------------------------------- (by order)
                     preempt: pages dropped or swapped out
                     restart: its length changed the rotation of its tokens; pages dropped

Why no request waits forever: `order` never changes, and forks inherit it; no request overtakes the head of the queue;
a sequence that is short of pages may take those of any running one behind it; no request is admitted while a running
one is short; a request that could not finish alone is refused when it is added; and where nothing else can run,
sequences that pause (beams that wait for others) give up their rows and pages.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count
from operator import attrgetter

from ridgeline.sched.cache import StateCache
from ridgeline.sched.checks import check_family, check_fork, check_rows
from ridgeline.sched.page_times import Clock
from ridgeline.sched.policy import Policy, SwapCost, fcfs, last_behind
from ridgeline.sched.sequence import Order, Sequence
from ridgeline.sched.stats import DraftCounts, Stats
from ridgeline.sched.watcher import NO_WATCHER, Watcher
from ridgeline.sched.work import LAST, PageDelta, Result, StepPlan, Update, Work
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.regimes import NO_REGIMES, Regimes

MAX_IN_FLIGHT = 2
HEADROOM = 0.01  # share of pages that stays free when a request joins: a tenth of the preemptions (bench/paging.py)

_BY_ORDER = attrgetter("order")


class Scheduler:
    """Schedules continuous batches over any mix of state groups; see the top of the file.

    num_pages: per group, with page 0, which is never handed out; num_host_pages likewise, for swapping.
    max_batch_tokens, max_seqs: most tokens and sequences of a step. swap_cost: decides how to preempt; None: always
    recompute. clock: measures the lifetimes of pages; None: they are not measured. watcher: is told of commits, forks,
    preemptions and ends. regimes: how rotary frequencies depend on the length of a sequence. lookahead: tokens after
    those of a step, for which it takes free pages as well, so that a draft model can run there.
    """

    _cache_type: type[StateCache] = StateCache

    def __init__(
        self, groups: Seq[StateGroup], num_pages: Seq[int], *, max_batch_tokens: int, max_seqs: int,
        num_host_pages: Seq[int] | None = None, policy: Policy = fcfs, swap_cost: SwapCost | None = None,
        clock: Clock | None = None, watcher: Watcher = NO_WATCHER, regimes: Regimes = NO_REGIMES, lookahead: int = 0,
    ) -> None:  # fmt: skip
        if min(max_batch_tokens, max_seqs, len(groups)) < 1:
            raise ValueError("a scheduler needs a group, and max_batch_tokens and max_seqs of at least 1")
        self._cache = self._cache_type(groups, num_pages, num_host_pages or [0] * len(groups))
        self._watcher = watcher
        self._page_times = None if clock is None else self._cache.watch(clock)
        self._max_batch_tokens, self._policy, self._swap_cost = max_batch_tokens, policy, swap_cost
        self._regimes, self._lookahead = regimes, lookahead
        self._live: dict[int, Sequence] = {}
        self._running: list[Sequence] = []  # by order
        self._waiting: list[tuple[Order, Sequence]] = []  # a heap; some may be over
        self._rows = list(range(max_seqs - 1, -1, -1))
        self._arrivals, self._epochs = count(), count()
        self._step, self._committed = 1, 0  # the next plan's number, and the last committed one's
        self._works: list[Work] = []
        self._short: Order | None = None  # this sequence is short of pages: none behind it may take any in this step
        self._preempted = False  # in this step
        self._blocked: tuple[Sequence, list[int]] | None = None  # the head of the queue, and the free pages it needs
        self._queried_tokens = self._hit_tokens = self._num_recompute = self._num_swap = self._num_restored = 0
        self._recomputed_tokens = 0
        self._drafts = DraftCounts()

    # ---- requests ---------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, children: Seq[Sequence] = ()) -> None:
        """Queue a request. children: further choices for the same prompt, which is computed only once.

        Raises RequestError, and queues nothing, if it can never fit; ValueError for an id in use or another prompt.
        """
        family = check_family(sequence, (sequence, *children), self._live)
        for member in family:
            self._cache.check_fits(member)
        for member in family:
            self._register(member)
        self._queue(sequence, list(children))

    def fork(self, parent_id: int, child: Sequence) -> None:
        """Add a sequence that shares what `parent_id` has computed (beams). No step of the parent may be in flight.

        The child inherits the parent's position in the order. Its tokens begin with those that the parent computed and
        have at least one more. Without a running parent or a free row it is queued. Raises the errors of `add`.
        """
        parent = self._live[parent_id]
        self._cache.check_fits(child)
        if child.id in self._live:
            raise ValueError(f"sequence id {child.id} is in use")
        if parent.row >= 0:
            check_fork(parent, child)
        self._register(child)
        child.order = (*parent.order[:2], child.arrival)
        if parent.row >= 0 and self._rows and child.floor == parent.floor:
            self._branch(parent, child)
        else:
            self._queue(child, [])

    def propose(self, sequence_id: int, drafts: Iterable[int], parents: Iterable[int] = ()) -> None:
        """Set the drafts of a sequence's next step; fewer, or none, run without room or with a token in flight."""
        self._live[sequence_id].propose(drafts, parents)

    def can_verify(self) -> list[Sequence]:
        """Return the sequences that may run drafts in the next step: no token of theirs is in flight."""
        running = [seq for seq in self._running if not seq.pending and not seq.held]
        waiting = [seq for _, seq in self._waiting[: len(self._rows)] if self._live.get(seq.id) is seq]
        return running + [seq for seq in waiting if not seq.pending]

    def hold(self, sequence_id: int) -> None:
        """Do not run a sequence until `give`: the token of its last step, which has just run, comes late."""
        self._live[sequence_id].held = True

    def is_held(self, sequence_id: int) -> bool:
        """Return whether it still waits for `give`; False if it is over, or was preempted and samples again."""
        return sequence_id in self._live and self._live[sequence_id].held

    def give(self, sequence_id: int, result: Result) -> Update:
        """Add the token of a sequence that is held, after the commit of its step. Raises ValueError for any other."""
        seq = self._live[sequence_id]
        if not seq.held or seq.pending or len(result.tokens) != 1:
            raise ValueError(f"sequence {sequence_id} cannot take {len(result.tokens)} tokens now")
        seq.held = False
        seq.tokens.extend(result.tokens)
        self._watcher.commit(seq.id, result.tokens)
        if finished := result.ended or len(seq.tokens) >= seq.max_length:
            self._end(seq)
        elif len(seq.tokens) >= seq.bound:
            self._restart(seq)
        return Update(seq.id, result.tokens, finished)

    def abort(self, sequence_id: int) -> bool:
        """End a request at any moment, even with steps in flight; its pages stay in the prefix index. False if over."""
        if (seq := self._live.get(sequence_id)) is None:
            return False
        self._end(seq)
        return True

    def __len__(self) -> int:
        """Return the number of requests that are not over."""
        return len(self._live)

    # ---- schedule ---------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step: decodes first, then prefill chunks, then new requests, within the tokens and pages.

        None if nothing can run before the next commit or the next request.
        """
        if self._step - self._committed > MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight: commit one first")
        self._plan_all()
        if not self._works and self._step - self._committed == 1 and self._park_idle():
            self._plan_all()
        return self._emit()

    def _plan_all(self) -> None:
        self._short, self._preempted = None, False
        budget = self._plan_running(tuple(self._running), self._max_batch_tokens)
        while budget and self._rows and self._short is None and not self._preempted:
            if (admitted := self._admit()) is None:
                break
            budget -= self._plan(admitted, budget)

    def _plan_running(self, sequences: Iterable[Sequence], budget: int) -> int:
        """Append work for running sequences; the tokens that are left of the budget."""
        prefill = []
        for seq in sequences:
            if budget == 0:
                break
            todo = len(seq.tokens) + seq.pending - seq.planned
            if todo == 1:
                budget -= self._plan(seq, budget)
            elif todo > 1:
                prefill.append(seq)
        for seq in prefill:
            if budget:
                budget -= self._plan(seq, budget)
        return budget

    def _emit(self) -> StepPlan | None:
        cache = self._cache
        if not (self._works or cache.swap_out or cache.swap_in):
            return None
        works, self._works = tuple(self._works), []
        plan = StepPlan(self._step, works, tuple(cache.copies), tuple(cache.swap_out), tuple(cache.swap_in))
        cache.copies, cache.swap_out, cache.swap_in = [], [], []
        self._step += 1
        return plan

    def _plan(self, seq: Sequence, budget: int) -> int:
        """Append work for a running sequence; its number of tokens, 0 if it cannot run now."""
        start, total = seq.planned, len(seq.tokens) + seq.pending
        if seq.row < 0 or seq.held or (seq.waits and seq.pending) or start >= total or total >= seq.bound:
            return 0
        limit, drafts = min(total, start + budget), seq.drafts
        if limit - start > 1 or seq.children or start == seq.snapshot_at:
            limit = self._chunk_end(seq, limit)
            if limit <= start:
                return 0
        drafts = self._usable_drafts(seq, limit, budget - (limit - start)) if drafts else ()
        deltas: tuple[PageDelta, ...] = ()
        ahead = min(self._lookahead, seq.max_length - limit - len(drafts)) if limit == total else 0
        if drafts or limit + ahead > seq.covered:
            limit, end = self._make_room(seq, limit, limit + len(drafts) + ahead)
            if limit <= start:
                return 0
            drafts, end = (drafts[: end - limit], end) if limit == total else ((), limit)
            self._cache.newest_step = self._step
            deltas = self._cache.take(seq, limit, end)
        return self._append(seq, limit, drafts, deltas)

    def _append(self, seq: Sequence, limit: int, drafts: tuple[int, ...], deltas: tuple[PageDelta, ...]) -> int:
        start, known = seq.planned, len(seq.tokens)
        tokens = (*seq.tokens[start:limit], *drafts) if limit <= known else (*seq.tokens[start:], LAST)
        sample, count, tree = limit == known + seq.pending, len(drafts), seq.tree(len(drafts)) if drafts else ()
        own = (seq.id, seq.row, seq.epoch, start, tokens, sample, seq.replay_from, count, deltas, seq.floor, tree)
        self._works.append(Work(*own, adapter=seq.adapter))
        if sample:
            seq.pending += 1
            seq.drafts = seq.parents = ()
        self._cache.newest_step = seq.last_step = self._step
        seq.replay_from = limit
        seq.planned = limit + len(drafts)  # after drafts, it cannot run again before the commit
        return len(tokens)

    def _chunk_end(self, seq: Sequence, limit: int) -> int:
        """Return where a chunk that could go to `limit` ends; `planned` if it has to wait."""
        start, fork_at = seq.planned, seq.fork_at
        if seq.children:  # they begin at the prompt's last token, once the tokens before it are computed
            limit = min(limit, fork_at)
        if start == seq.snapshot_at and seq.computed < start:  # its snapshot is published at the commit, then copied
            return start
        return self._cache.step_end(seq, limit) if limit - start > 1 else limit

    def _usable_drafts(self, seq: Sequence, limit: int, budget: int) -> tuple[int, ...]:
        if seq.pending or limit < len(seq.tokens):
            return ()
        return seq.drafts[: max(0, min(budget, seq.bound - limit - 1))]

    def _make_room(self, seq: Sequence, limit: int, end: int) -> tuple[int, int]:
        """Return how far there are pages; (0, 0) if nowhere. Preempts sequences behind it for its first token only."""
        while self._short is None or seq.order < self._short:
            room = self._cache.room(seq, limit, end)
            if room[0]:
                return room
            victim = None
            if not self._cache.room(seq, limit, end, after_commit=True)[0]:
                victim = last_behind(seq, self._running, self._step)
            if victim is None:
                self._short = seq.order
            else:
                self._preempt(victim)
        return 0, 0

    # ---- rows, preemption -------------------------------------------------------------------------------

    def _admit(self) -> Sequence | None:
        """Give the head of the queue a row and pages to begin with; None if it, and all behind it, must wait."""
        while self._waiting and self._live.get(self._waiting[0][1].id) is not self._waiting[0][1]:
            heapq.heappop(self._waiting)
        if not self._waiting:
            return None
        seq = self._waiting[0][1]
        if seq.replay_from != seq.computed or self._is_blocked(seq) or not self._place(seq):
            return None
        heapq.heappop(self._waiting)
        self._run(seq)
        self._branch_children(seq)
        return seq

    def _is_blocked(self, seq: Sequence) -> bool:
        """Return whether it was refused before for want of pages, and too few became free since. Saves a look-up."""
        if self._blocked is None or self._blocked[0] is not seq or not self._running:
            return False
        return any(pool.num_free < n for pool, n in zip(self._cache.pools, self._blocked[1], strict=True))

    def _place(self, seq: Sequence) -> bool:
        cache = self._cache
        position, pages = (0, [[]] * len(cache.groups)) if seq.host else cache.find_prefix(seq)
        spare = HEADROOM if self._running else 0.0
        lacks = [n + int(spare * pool.num_pages) for n, pool in zip(cache.lacks(seq, pages), cache.pools, strict=True)]
        if max(lacks) > 0:
            self._blocked = seq, [pool.num_free + n for pool, n in zip(cache.pools, lacks, strict=True)]
            return False
        if seq.host:
            cache.newest_step = self._step
            cache.swap_to_device(seq)
            return True
        cache.share(seq, position, pages)
        cache.note_missed(seq, position)
        self._num_restored += cache.has_snapshots and position > 0
        if not (seq.num_preempted or seq.num_restarts):
            seq.num_cached, seq.snapshot_at = position, cache.divergence(seq)
            self._queried_tokens += len(seq.tokens)
            self._hit_tokens += position
            self._recomputed_tokens += max(0, seq.snapshot_at - position)
        return True

    def _run(self, seq: Sequence) -> None:
        seq.row = self._rows.pop()
        insort(self._running, seq, key=_BY_ORDER)

    def _branch_children(self, seq: Sequence) -> None:
        """Let the children go on from the prompt's last token, on the same pages, once all before it is computed."""
        if not seq.children or seq.computed != seq.fork_at:
            return
        children, seq.children = seq.children, []
        for child in children:
            if self._live.get(child.id) is child and self._rows:
                self._branch(seq, child)
            elif self._live.get(child.id) is child:
                self._queue(child, [])

    def _branch(self, parent: Sequence, child: Sequence) -> None:
        position = child.num_cached = parent.computed
        self._cache.share(child, position, self._cache.pages_at(parent, position))
        parent.covered = parent.rows_end = 0  # the page that both would write next is now shared
        self._watcher.fork(parent.id, child.id)
        self._run(child)

    def _preempt(self, seq: Sequence) -> None:
        cache = self._cache
        self._preempted = True
        if seq.is_idle:
            self._park(seq)
            return
        self._leave_row(seq)
        self._watcher.preempt(seq.id)
        seq.num_preempted += 1
        swap = self._swap_cost is not None and cache.can_swap(seq)
        if swap and self._swap_cost and self._swap_cost(seq.replay_from, cache.swap_bytes(seq)) == "swap":
            self._num_swap += 1
            cache.newest_step = self._step
            cache.swap_to_host(seq)
        else:
            self._num_recompute += 1
            cache.release(seq)
            seq.restart(next(self._epochs))
        heapq.heappush(self._waiting, (seq.order, seq))

    def _restart(self, seq: Sequence) -> None:
        """Compute a sequence, whose tokens are all known, again: its new length changes the rotation of its tokens."""
        self._watcher.preempt(seq.id)
        if seq.row >= 0:
            self._leave_row(seq)
            heapq.heappush(self._waiting, (seq.order, seq))
        self._cache.release(seq)
        seq.restart(next(self._epochs))
        seq.enter(self._regimes)
        seq.num_restarts += 1

    def _park(self, seq: Sequence) -> None:
        """Take row and pages from an idle sequence: it runs no more, and its forks begin from the prefix cache."""
        self._num_recompute += 1
        self._leave_row(seq)
        self._watcher.preempt(seq.id)
        self._cache.release(seq)
        seq.restart(next(self._epochs))

    def _park_idle(self) -> bool:
        """Park all idle sequences if others wait for their rows or pages; False if that cannot help."""
        idle = [seq for seq in self._running if seq.is_idle]
        waits = len(idle) < len(self._running) or any(self._live.get(seq.id) is seq for _, seq in self._waiting)
        for seq in idle if waits else ():
            self._park(seq)
        return bool(idle) and waits

    def lose(self, plan: StepPlan, most_tokens: int) -> None:
        """Compute the sequences of a plan that did not run again. Later steps have at most so many tokens."""
        self._max_batch_tokens = most_tokens
        for work in plan.works:
            seq = self._live.get(work.sequence)
            if seq is not None and seq.epoch == work.epoch and seq.row >= 0:
                self._park(seq)
                heapq.heappush(self._waiting, (seq.order, seq))

    def _leave_row(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._rows.append(seq.row)
        seq.row = -1

    def _register(self, seq: Sequence) -> None:
        seq.arrival, seq.epoch = next(self._arrivals), next(self._epochs)
        seq.order = (self._policy(seq), seq.arrival, seq.arrival)
        seq.enter(self._regimes)
        self._live[seq.id] = seq

    def _queue(self, seq: Sequence, children: list[Sequence]) -> None:
        if seq.fork_at:
            seq.children = children
        else:  # nothing to share
            for child in children:
                heapq.heappush(self._waiting, (child.order, child))
        heapq.heappush(self._waiting, (seq.order, seq))

    def _end(self, seq: Sequence) -> None:
        del self._live[seq.id]
        self._watcher.end(seq.id)
        if seq.row >= 0:
            self._leave_row(seq)
        self._cache.release(seq)
        children = [child for child in seq.children if self._live.get(child.id) is child]
        if children:
            self._queue(children[0], children[1:])

    # ---- commit -----------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, results: Seq[Result]) -> list[Update]:
        """Record a step that ran: one result per work. Sequences that were preempted or ended meanwhile are skipped.

        Raises ValueError for a plan out of order, and for a number of tokens that the work cannot give.
        """
        if plan.step != self._committed + 1:
            raise ValueError(f"step {plan.step} was committed after step {self._committed}")
        updates: list[Update] = []
        for work, result in zip(plan.works, results, strict=True):
            seq = self._live.get(work.sequence)
            if seq is None or seq.epoch != work.epoch:
                continue
            seq.computed = limit = work.limit
            if work.sample:
                updates.append(self._accept(seq, work, result))
            if seq.row < 0:  # swapped out meanwhile; its pages are published when it runs again
                seq.planned = seq.replay_from
            else:
                if limit >= seq.next_event:
                    self._cache.advance(seq)
                if seq.children:
                    self._branch_children(seq)
            if work.sample and updates[-1].finished:
                self._end(seq)
            elif work.sample and len(seq.tokens) >= seq.bound:
                self._restart(seq)
        self._committed = plan.step
        self._cache.settle(plan.step)
        return updates

    def _accept(self, seq: Sequence, work: Work, result: Result) -> Update:
        tokens = result.tokens
        seq.pending -= 1
        if len(tokens) != 1:
            paused = not tokens and not seq.pending and (seq.held or not work.num_draft)
            if not paused and not 0 < len(tokens) <= work.depth + 1:
                raise ValueError(f"sequence {seq.id}: {len(tokens)} tokens from a step with {work.num_draft} drafts")
            tokens = tokens[: seq.max_length - len(seq.tokens)]
        if work.num_draft:
            seq.planned = seq.computed + max(len(result.tokens) - 1, 0)
            self._drafts.add(work.num_draft, max(len(result.tokens) - 1, 0), work.depth)
        seq.tokens.extend(tokens)
        if tokens:
            self._watcher.commit(seq.id, tokens)
        return Update(seq.id, tokens, result.ended or len(seq.tokens) >= seq.max_length)

    # ---- reports ----------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the pages that sequences hold on the device; a shared page counts once."""
        return self._cache.used_bytes()

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of `sequence` the prefix index holds now."""
        sequence.enter(self._regimes)
        return self._cache.find_prefix(sequence)[0]

    def stats(self) -> Stats:
        """Return statistics. Takes time proportional to the number of running sequences."""
        return Stats(
            running=len(self._running), waiting=len(self._live) - len(self._running),
            groups=self._cache.group_stats(self._running),
            queried_tokens=self._queried_tokens, hit_tokens=self._hit_tokens,
            preempted_recompute=self._num_recompute, preempted_swap=self._num_swap,
            snapshots=self._cache.num_snapshots(), restored=self._num_restored,
            recomputed_tokens=self._recomputed_tokens, drafts=self._drafts.copy(), page_times=self._page_times,
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent. Looks at every page: for tests and idle moments."""
        self._cache.check(list(self._live.values()))
        check_rows(self._live, self._running, self._rows)
