"""The scheduler, rule by rule. The fuzz tests all rules together (test_sched_fuzz.py)."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from sched_device import FakeDevice, Script

from ridgeline.errors import RequestError
from ridgeline.sched import LAST, Priority, Result, Scheduler, Sequence, StepPlan, Update, hash_root
from ridgeline.sched.pages import PagePool
from ridgeline.spec import ALL, Attention, GatedMLP, Layer, ModelSpec, RMSNorm
from ridgeline.spec.groups import StateGroup, state_groups
from ridgeline.spec.storage import STORAGES

KV = StateGroup("kv", 4, ALL, 64)
WINDOW = StateGroup("window", 4, 7, 64)
STATE = StateGroup("state", 16, 1, 256, snapshot=True)


def make(*groups: StateGroup, pages: int = 100, tokens: int = 64, seqs: int = 8, **more: object) -> Scheduler:
    return Scheduler(groups, [pages] * len(groups), max_batch_tokens=tokens, max_seqs=seqs, **more)  # type: ignore[arg-type]


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check()
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, token: int = 9) -> list[Update]:
    updates = scheduler.commit(plan, [Result((token,)) if w.sample else Result() for w in plan.works])
    scheduler.check()
    return updates


def run(scheduler: Scheduler) -> list[StepPlan]:
    """Run all remaining steps, one at a time, and return their plans."""
    plans = []
    while plan := scheduler.schedule():
        plans.append(plan)
        commit(scheduler, plan)
    assert len(scheduler) == 0
    return plans


# ---- state groups ------------------------------------------------------------------------------------------


def test_layers_group_by_their_state_and_not_by_shape() -> None:
    wide = Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    narrow, window = replace(wide, num_kv_heads=1), replace(wide, window=10)
    norm, mlp = RMSNorm(1e-6), GatedMLP(8)
    layers = tuple(Layer(mixer, mlp, norm) for mixer in (wide, window, narrow, window))
    spec = ModelSpec("x", 32, 32, 64, layers, norm)
    everything, windowed = state_groups(spec, page_tokens=16, storage=STORAGES["bfloat16"])
    assert (everything.lookback, windowed.lookback) == (ALL, 9)
    size = 2 * 2 * 8 * 16 * 2
    assert [(s.layer, s.offset, s.bytes) for s in everything.slots] == [(0, 0, size), (2, size, size // 2)]
    assert [(s.layer, s.offset, s.bytes) for s in windowed.slots] == [(1, 0, size), (3, size, size)]
    assert everything.page_bytes == size * 3 // 2
    assert not everything.snapshot


def test_pages_that_a_group_reads_and_needs() -> None:
    assert list(WINDOW.reads(13)) == [1, 2, 3]
    assert list(KV.reads(13)) == [0, 1, 2, 3]
    assert list(STATE.reads(16)) == [0]
    assert list(STATE.reads(17)) == [1]
    assert KV.most_pages(13) == 4
    assert WINDOW.most_pages(1000) == 3  # 8 tokens at any offset
    assert StateGroup("self", 4, 0, 1).most_pages(1000) == 1
    assert [STATE.writes(i, 33) for i in range(3)] == [False, False, True]
    assert not KV.resumable(13, 4)
    assert KV.resumable(12, 3)
    assert not KV.resumable(12, 2)
    assert WINDOW.resumable(12, 2)
    first = StateGroup("first", 4, 8, 1, first_tokens=6)  # pages 0 and 1 are never freed
    assert list(first.reads(13)) == [0, 1, 2, 3]
    assert list(first.reads(41)) == [0, 1, 8, 9, 10]
    assert list(first.reads(4)) == [0]
    assert first.most_pages(1000) == 5
    assert first.most_pages(13) == 4
    assert first.resumable(40, 2)
    assert not first.resumable(40, 1)
    with pytest.raises(ValueError, match="a snapshot has none"):
        StateGroup("x", 4, 1, 1, snapshot=True, first_tokens=1)
    with pytest.raises(ValueError, match="lookback of a snapshot"):
        StateGroup("x", 4, 2, 1, snapshot=True)


def test_a_prefix_without_its_first_tokens_is_no_prefix() -> None:
    """All pages of the window are cached, but the page of the first tokens is not, so the hit begins before it."""
    group = StateGroup("first", 4, 8, 64, first_tokens=6)
    prompt = [i % 50 for i in range(41)]
    for lost, hit in ((None, 40), (0, 0), (1, 4), (5, 40), (8, 32)):
        scheduler = make(group)
        scheduler.add(Sequence(0, prompt, 1))
        run(scheduler)
        pool, asking = scheduler._cache.pools[0], Sequence(1, prompt, 1)
        if lost is not None:
            pool._keys[pool._by_key.pop(asking.prefix_hash(4 * lost + 4, scheduler._cache.grid))] = None
        position, pages = scheduler._cache.find_prefix(asking)
        assert position == hit
        assert all(pages[0]) and len(pages[0]) == len(group.reads(hit))


# ---- pages -------------------------------------------------------------------------------------------------


def test_a_page_waits_for_the_step_that_may_touch_it() -> None:
    pool = PagePool("kv", 3)
    a, b = pool.take(), pool.take()
    pool.seal(a, b"a")
    pool.drop(a, until=2)
    pool.drop(b, until=1)
    assert (pool.num_free, pool.num_limbo, pool.num_used) == (0, 2, 0)
    pool.settle(2)
    assert pool.num_free == 2
    assert pool.take() == b  # a page without a hash is taken first
    assert pool.find(b"a") == a
    pool.share(a)
    assert not pool.writable(a)
    pool.drop(a, until=2)
    assert pool.take() == a
    assert pool.find(b"a") == 0
    with pytest.raises(KeyError):
        pool.take()
    with pytest.raises(AssertionError, match="holders"):
        pool.check({a: 1})
    pool.check({a: 1, b: 1})


# ---- steps -------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_prefill_fills_the_budget() -> None:
    scheduler = make(KV, tokens=8)
    scheduler.add(Sequence(0, [1, 2, 3], 9))
    commit(scheduler, plan_of(scheduler))
    scheduler.add(Sequence(1, list(range(20)), 9))
    first, second = plan_of(scheduler).works
    assert (first.sequence, first.tokens, first.sample) == (0, (9,), True)
    assert (second.sequence, second.tokens, second.sample) == (1, tuple(range(7)), False)


def test_work_is_plain_data_and_tables_travel_as_deltas() -> None:
    scheduler = make(KV)
    scheduler.add(Sequence(0, [1, 2, 3], 9))
    plans = run(scheduler)
    assert pickle.loads(pickle.dumps(plans)) == plans
    assert [len(p.works[0].deltas) for p in plans] == [1, 0, 1, 0, 0, 0, 1, 0, 0]
    assert len({p.works[0].row for p in plans}) == 1


def test_two_steps_in_flight() -> None:
    scheduler = make(KV)
    scheduler.add(Sequence(0, [1, 2, 3], 3))
    one, two = plan_of(scheduler), plan_of(scheduler)
    assert two.works[0].tokens == (LAST,)
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="step 2 was committed after step 0"):
        commit(scheduler, two)
    assert commit(scheduler, one, 5) == [Update(0, (5,), False)]
    three = plan_of(scheduler)
    assert commit(scheduler, two, 6) == [Update(0, (6,), False)]
    assert scheduler.schedule() is None  # all max_tokens are already in flight
    assert commit(scheduler, three, 7) == [Update(0, (7,), True)]
    with pytest.raises(ValueError, match="after step 3"):
        commit(scheduler, three)


@pytest.mark.parametrize("late", [False, True])
def test_an_end_with_the_next_step_in_flight(late: bool) -> None:
    """The tokens of the next step are neither sealed, counted nor returned, and its pages are freed after that step."""
    scheduler = make(KV, pages=8)
    scheduler.add(Sequence(0, [1, 2, 3], 20))
    one, two = plan_of(scheduler), plan_of(scheduler)
    assert scheduler.commit(one, [Result((5,), ended=not late)]) == [Update(0, (5,), not late)]
    assert scheduler.abort(0) == late
    assert (scheduler.stats().groups[0].used_pages, len(scheduler)) == (0, 0)
    scheduler.add(Sequence(1, [1, 2, 3, 5, 8], 20))
    third = plan_of(scheduler)
    taken = {page for delta in third.works[0].deltas for page in delta.pages}
    assert not taken & {page for delta in one.works[0].deltas for page in delta.pages}
    assert third.works[0].start == 0  # the page that step two filled has no hash
    assert commit(scheduler, two) == []
    assert commit(scheduler, third) == [Update(1, (9,), False)]


def test_results_that_cannot_be() -> None:
    scheduler = make(KV)
    scheduler.add(Sequence(0, [1, 2, 3], 9))
    plan = plan_of(scheduler)
    with pytest.raises(ValueError, match="2 tokens from a step with 0 drafts"):
        scheduler.commit(plan, [Result((1, 2))])


# ---- state -------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_under_the_same_root_only() -> None:
    scheduler = make(KV)
    prompt = list(range(30))
    for number, (root, start) in enumerate([(b"", 0), (b"", 28), (hash_root(cache_salt="x"), 0)]):
        scheduler.add(Sequence(number, prompt, 2, root=root))
        assert run(scheduler)[0].works[0].start == start
    stats = scheduler.stats()
    assert (stats.queried_tokens, stats.hit_tokens) == (90, 28)
    assert hash_root(cache_salt="ab") != hash_root(cache_salt="a", adapter="b")


def test_windows_free_old_pages() -> None:
    scheduler = make(KV, WINDOW, tokens=10)
    scheduler.add(Sequence(0, list(range(60)), 2))
    for _ in range(6):
        commit(scheduler, plan_of(scheduler))
    everything, window = scheduler.stats().groups
    assert (everything.used_pages, window.used_pages) == (15, 2)
    assert (everything.slots, everything.wasted_slots) == (60, 0)
    assert (window.slots, window.wasted_slots) == (8, 1)


def test_chunks_end_where_a_snapshot_can_be_published() -> None:
    scheduler = make(KV, STATE, tokens=50)
    scheduler.add(Sequence(0, list(range(41)), 1))
    assert [len(p.works[0].tokens) for p in run(scheduler)] == [32, 9]


def test_prompts_that_differ_get_a_snapshot_at_the_second_request() -> None:
    scheduler = make(KV, STATE, tokens=200)
    starts = []
    for number in range(3):
        scheduler.add(Sequence(number, [*range(46), *range(100 + number, 130 + number)], 1))
        starts.append([p.works[0].start for p in run(scheduler)])
    assert starts[0] == [0, 64]  # a snapshot at 64, where no other prompt passes
    assert starts[1] == [0, 44, 64]  # 44 is the end of the last page that both prompts share
    assert starts[2] == [44, 64]
    stats = scheduler.stats()
    assert (stats.restored, stats.recomputed_tokens) == (1, 44)  # the second request found no snapshot
    assert stats.snapshots == 4  # one at 44, and one at 64 for each request


def test_a_fork_copies_only_the_page_that_two_would_write() -> None:
    scheduler = make(KV, STATE)
    prompt = list(range(15))
    scheduler.add(Sequence(0, prompt, 4), [Sequence(n, list(prompt), 4) for n in (1, 2)])
    first = plan_of(scheduler)
    assert [len(w.tokens) for w in first.works] == [14]
    commit(scheduler, first)
    second = plan_of(scheduler)
    assert [(w.sequence, w.start, w.tokens, w.sample) for w in second.works] == [(n, 14, (14,), True) for n in range(3)]
    assert sorted(c.group for c in second.copies) == [0, 0, 1, 1]  # the last sequence that writes needs no copy
    assert scheduler.stats().groups[0].used_pages == 3 + 3
    commit(scheduler, second)
    run(scheduler)


def test_beams_fork_in_mid_generation() -> None:
    scheduler = make(KV, pages=20)
    scheduler.add(Sequence(0, list(range(9)), 5))
    plan = plan_of(scheduler)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.fork(0, Sequence(1, [*range(9), 7], 5, num_prompt=9))
    assert scheduler.commit(plan, [Result()]) == [Update(0, (), False)]
    assert scheduler.schedule() is None  # the sequence is paused
    with pytest.raises(ValueError, match="does not begin"):
        scheduler.fork(0, Sequence(1, [5, 5, 5], 5))
    for child, token in ((1, 40), (2, 41)):
        scheduler.fork(0, Sequence(child, [*range(9), token], 5, num_prompt=9))
    assert scheduler.abort(0)
    plan = plan_of(scheduler)
    assert [(w.sequence, w.start, w.tokens) for w in plan.works] == [(1, 9, (40,)), (2, 9, (41,))]
    assert len(plan.copies) == 1
    commit(scheduler, plan)
    run(scheduler)


def pause(scheduler: Scheduler, *numbers: int) -> None:
    """Run a step in which `numbers` sample, and commit no token for them."""
    plan = plan_of(scheduler)
    assert [w.sequence for w in plan.works if w.sample] == list(numbers)
    scheduler.commit(plan, [Result() for _ in plan.works])


def test_paused_sequences_are_preempted_if_nothing_else_can_run() -> None:
    """With two beams and one row, the first beam is paused, so it is preempted for the second; it is not recomputed in
    vain.
    """
    scheduler = make(KV, seqs=1)
    scheduler.add(Sequence(0, list(range(9)), 5))
    pause(scheduler, 0)
    for child, token in ((1, 7), (2, 8)):
        scheduler.fork(0, Sequence(child, [*range(9), token], 5, num_prompt=9))
    scheduler.abort(0)
    pause(scheduler, 1)
    pause(scheduler, 2)
    assert scheduler.stats().preempted_recompute == 1
    assert scheduler.schedule() is None  # both are paused and no request waits, so none is preempted
    assert scheduler.stats().running == 1
    for parent in (1, 2):
        scheduler.fork(parent, Sequence(parent + 2, [*range(9), parent + 6, 5], 5, num_prompt=9))
        scheduler.abort(parent)
    assert {w.sequence for plan in run(scheduler) for w in plan.works} == {3, 4}


def test_one_that_pauses_and_is_preempted_is_not_computed_again() -> None:
    scheduler = make(KV, pages=6, policy=Priority())
    scheduler.add(Sequence(0, list(range(4)), 10, priority=1))
    pause(scheduler, 0)
    scheduler.add(Sequence(1, list(range(10, 22)), 8))  # it needs five pages at its end, which are all pages
    ran = set()
    while plan := scheduler.schedule():
        ran |= {w.sequence for w in plan.works}
        commit(scheduler, plan)
    assert ran == {1}
    assert scheduler.stats().preempted_recompute == 1
    assert scheduler.abort(0)
    assert len(scheduler) == 0


def test_a_fork_keeps_the_rank_of_its_parent() -> None:
    """A fork runs before a request that arrived later than its parent."""
    scheduler = make(KV, seqs=1)
    scheduler.add(Sequence(0, list(range(5)), 5))
    scheduler.add(Sequence(1, list(range(5)), 1))
    pause(scheduler, 0)
    for child in (2, 3):
        scheduler.fork(0, Sequence(child, [*range(5), child], 2, num_prompt=5))
    scheduler.abort(0)
    order = [w.sequence for plan in run(scheduler) for w in plan.works]
    assert order == [2, 3, 1]


def test_drafts_keep_the_state_before_them_and_replay() -> None:
    scheduler = make(KV, STATE)
    scheduler.add(Sequence(0, list(range(10)), 20))
    commit(scheduler, plan_of(scheduler))
    scheduler.propose(0, [1, 2, 3])
    plan = plan_of(scheduler)
    work = plan.works[0]
    assert (work.tokens, work.num_draft) == ((9, 1, 2, 3), 3)
    assert scheduler.schedule() is None  # the next position depends on the accepted drafts
    assert scheduler.commit(plan, [Result((1, 2, 8))]) == [Update(0, (1, 2, 8), False)]
    work = plan_of(scheduler).works[0]
    assert (work.replay_from, work.start, work.tokens) == (11, 13, (8,))
    assert (scheduler.stats().draft_tokens, scheduler.stats().accepted_tokens) == (3, 2)
    assert scheduler.stats().groups[1].peak_pages == 1  # one page, whatever is drafted


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_preemption(how: str) -> None:
    scheduler = make(KV, pages=11, num_host_pages=[11], swap_cost=lambda tokens, num_bytes: how)
    for number in range(2):
        scheduler.add(Sequence(number, [number] * 15, 20))
    plans = run(scheduler)
    stats = scheduler.stats()
    assert (stats.preempted_recompute, stats.preempted_swap) == ((1, 0) if how == "recompute" else (0, 1))
    starts = [w.start for p in plans for w in p.works if w.sequence == 1]
    assert all(a < b for a, b in pairwise(starts)) == (how == "swap")
    assert sum(len(p.swap_out) for p in plans) == sum(len(p.swap_in) for p in plans) == 5 * (how == "swap")


# ---- priorities ---------------------------------------------------------------------------------------------


def test_priorities_overtake_but_do_not_starve() -> None:
    scheduler = make(KV, seqs=1, policy=Priority(patience=3))
    scheduler.add(Sequence(0, [1, 2], 1, priority=0))
    order = []
    for number in range(1, 8):
        scheduler.add(Sequence(number, [1, 2], 1, priority=-1))
        plan = plan_of(scheduler)
        order.append(plan.works[0].sequence)
        commit(scheduler, plan)
    assert order == [1, 2, 0, 3, 4, 5, 6]  # the third request arrives as many seconds later as its priority is worth


def test_a_request_that_can_never_fit_fails_alone() -> None:
    scheduler = make(KV, pages=6)
    refused = 0
    for number in range(1000):
        try:
            scheduler.add(Sequence(number, [1] * 10, 11 if number == 500 else 10))
        except RequestError as e:
            refused += 1
            assert (
                "10 prompt tokens and 11 to generate need 6 pages of 4 tokens of state group 'kv'; there are 5"
                in str(e)
            )
    assert refused == 1
    assert sum(w.start == 0 or w.sample for p in run(scheduler) for w in p.works) >= 999


def test_bad_requests() -> None:
    scheduler = make(KV)
    with pytest.raises(RequestError, match="needs a prompt"):
        scheduler.add(Sequence(0, [], 5))
    with pytest.raises(RequestError, match="max_tokens"):
        scheduler.add(Sequence(0, [1], 0))
    with pytest.raises(ValueError, match="another prompt"):
        scheduler.add(Sequence(0, [1, 2], 5), [Sequence(1, [1, 3], 5)])
    scheduler.add(Sequence(0, [1], 5))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(Sequence(0, [1], 5))
    assert len(scheduler) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_every_step(depth: int) -> None:
    """The tokens of the others do not change, whenever a sequence is aborted."""
    groups = (KV, WINDOW, STATE)
    for moment in range(60):
        scheduler = make(*groups, tokens=7, seqs=3)
        device = FakeDevice(groups)
        for number in range(3):
            prompt = tuple(range(2, 25 + number))
            device.scripts[number] = Script(prompt, number)
            scheduler.add(Sequence(number, list(prompt), 6))
        flight, got = [], {0: 0, 1: 0, 2: 0}
        for step in range(80):
            if plan := scheduler.schedule():
                flight.append((plan, device.run(plan)))
            if step == moment:
                scheduler.abort(1)
            if flight and (len(flight) == depth or not plan):
                done, results = flight.pop(0)
                for update in scheduler.commit(done, [r._replace(ended=False) for r in results]):
                    first = len(device.scripts[update.sequence].given) + got[update.sequence]
                    assert update.tokens == (device.scripts[update.sequence].token(first),)
                    got[update.sequence] += 1
                device.committed = done.step
            scheduler.check()
        assert got[0] == got[2] == 6
        assert len(scheduler) == 0
