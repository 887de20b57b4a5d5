"""Deliberate bugs test the fuzz: each of them patches one method of the scheduler, and the fuzz must find it.

share without a reference          seal before a page is full         hash without its root
window page dropped a token early  pages reused with a step in flight no copy on write
copy on write not sent             epoch not raised by preemption     lookback off by one
swap-in to the wrong page          end of sequence ignored            snapshot published off its position
drafts not rolled back             accepted drafts not replayed       snapshot overwritten in flight
parent writes on after a fork      swapped before the step in flight  two sequences on one row
first tokens freed with the window
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_sched_fuzz import MIXES, fuzz

from ridgeline.sched import PageDelta, Result, Sequence, Update, Work
from ridgeline.sched.cache import StateCache
from ridgeline.sched.pages import PagePool
from ridgeline.sched.scheduler import Scheduler
from ridgeline.spec.groups import StateGroup

SEEDS = tuple(dict.fromkeys((13, 7, *range(30))))  # the first two find the bugs that few seeds find
Patch = pytest.MonkeyPatch
_share, _drop = PagePool.share, PagePool.drop
_advance, _take, _swap_in, _swap_out = (
    StateCache.advance,
    StateCache.take,
    StateCache.swap_to_device,
    StateCache.swap_to_host,
)
_register, _accept, _branch = Scheduler._register, Scheduler._accept, Scheduler._branch
_chunk_end, _leave_row, _restart = Scheduler._chunk_end, Scheduler._leave_row, Sequence.restart


def share_without_reference(patch: Patch) -> None:
    def share(pool: PagePool, page: int) -> None:
        _share(pool, page)
        if pool._refs[page] > 1:
            pool._refs[page] -= 1

    patch.setattr(PagePool, "share", share)


def seal_too_early(patch: Patch) -> None:
    def advance(cache: StateCache, seq: Sequence) -> None:
        _advance(cache, seq)
        for group, pool, table in zip(cache.groups, cache.pools, seq.tables, strict=True):
            index = seq.computed // group.page_tokens
            end = (index + 1) * group.page_tokens
            if not group.snapshot and index < len(table) and end <= len(seq.tokens):
                pool.seal(table[index], seq.prefix_hash(end, cache.grid))

    patch.setattr(StateCache, "advance", advance)


def root_ignored(patch: Patch) -> None:
    def register(self: Scheduler, seq: Sequence) -> None:
        _register(self, seq)
        seq.root = b""

    patch.setattr(Scheduler, "_register", register)


def window_dropped_early(patch: Patch) -> None:
    def advance(cache: StateCache, seq: Sequence) -> None:
        _advance(cache, seq)
        for g, group in enumerate(cache.groups):
            for index in range(seq.dropped[g], group.first_live_page(seq.computed + 1)):
                cache.pools[g].drop(seq.tables[g][index], cache.newest_step)
                seq.tables[g][index] = 0
                seq.dropped[g] = index + 1

    patch.setattr(StateCache, "advance", advance)


def reused_in_flight(patch: Patch) -> None:
    patch.setattr(PagePool, "drop", lambda pool, page, until: _drop(pool, page, 0))


def no_copy_on_write(patch: Patch) -> None:
    patch.setattr(StateCache, "_copy_on_write", lambda *args: None)


def copy_not_sent(patch: Patch) -> None:
    def take(cache: StateCache, seq: Sequence, limit: int, end: int) -> tuple[PageDelta, ...]:
        sent = list(seq.sent)
        return tuple(d for d in _take(cache, seq, limit, end) if d.first >= sent[d.group])

    patch.setattr(StateCache, "take", take)


def epoch_not_raised(patch: Patch) -> None:
    patch.setattr(Sequence, "restart", lambda seq, epoch: _restart(seq, seq.epoch))


def lookback_off_by_one(patch: Patch) -> None:
    def first_live_page(group: StateGroup, position: int) -> int:
        return max(0, position - group.lookback + 1) // group.page_tokens

    patch.setattr(StateGroup, "first_live_page", first_live_page)


def first_tokens_let_go(patch: Patch) -> None:
    patch.setattr(StateGroup, "first_pages", 0)


def swapped_to_wrong_page(patch: Patch) -> None:
    def swap_in(cache: StateCache, seq: Sequence) -> None:
        begin = len(cache.swap_in)
        _swap_in(cache, seq)
        moves = [m for m in cache.swap_in[begin:] if m.group == 0]
        if len(moves) > 1:
            cache.swap_in[begin : begin + 2] = [
                moves[0]._replace(dst=moves[1].dst),
                moves[1]._replace(dst=moves[0].dst),
            ]

    patch.setattr(StateCache, "swap_to_device", swap_in)


def end_ignored(patch: Patch) -> None:
    def accept(self: Scheduler, seq: Sequence, work: Work, result: Result) -> Update:
        return _accept(self, seq, work, result._replace(ended=False))

    patch.setattr(Scheduler, "_accept", accept)


def snapshot_off_position(patch: Patch) -> None:
    def advance(cache: StateCache, seq: Sequence) -> None:
        _advance(cache, seq)
        position = seq.computed // cache.grid * cache.grid
        for group, pool, table in zip(cache.groups, cache.pools, seq.tables, strict=True):
            if group.snapshot and position:
                pool.seal(table[group.page_of(seq.computed - 1)], seq.prefix_hash(position, cache.grid))
                seq.covered = 0

    patch.setattr(StateCache, "advance", advance)


def drafts_not_rolled_back(patch: Patch) -> None:
    def accept(self: Scheduler, seq: Sequence, work: Work, result: Result) -> Update:
        update = _accept(self, seq, work, result)
        if work.num_draft:
            seq.planned = work.start + len(work.tokens)
        return update

    patch.setattr(Scheduler, "_accept", accept)


def drafts_not_replayed(patch: Patch) -> None:
    def accept(self: Scheduler, seq: Sequence, work: Work, result: Result) -> Update:
        update = _accept(self, seq, work, result)
        seq.replay_from = seq.planned
        return update

    patch.setattr(Scheduler, "_accept", accept)


def snapshot_overwritten(patch: Patch) -> None:
    def chunk_end(self: Scheduler, seq: Sequence, limit: int) -> int:
        if seq.planned == seq.snapshot_at and not seq.children:
            return limit
        return _chunk_end(self, seq, limit)

    patch.setattr(Scheduler, "_chunk_end", chunk_end)


def parent_writes_on(patch: Patch) -> None:
    def branch(self: Scheduler, parent: Sequence, child: Sequence) -> None:
        covered = parent.covered
        _branch(self, parent, child)
        parent.covered = covered

    patch.setattr(Scheduler, "_branch", branch)


def swapped_too_early(patch: Patch) -> None:
    """Swap the state of the last commit, although the step in flight will have changed it."""

    def swap_out(cache: StateCache, seq: Sequence) -> None:
        seq.replay_from = seq.computed
        _swap_out(cache, seq)

    patch.setattr(StateCache, "swap_to_host", swap_out)


def row_twice(patch: Patch) -> None:
    def leave(self: Scheduler, seq: Sequence) -> None:
        _leave_row(self, seq)
        if self._running:
            self._rows[-1] = self._running[0].row

    patch.setattr(Scheduler, "_leave_row", leave)


BUGS: list[Callable[[Patch], None]] = [
    share_without_reference,
    seal_too_early,
    root_ignored,
    window_dropped_early,
    reused_in_flight,
    no_copy_on_write,
    copy_not_sent,
    epoch_not_raised,
    lookback_off_by_one,
    first_tokens_let_go,
    swapped_to_wrong_page,
    end_ignored,
    snapshot_off_position,
    drafts_not_rolled_back,
    drafts_not_replayed,
    snapshot_overwritten,
    parent_writes_on,
    swapped_too_early,
    row_twice,
]


def seeds_until_caught(mixes: list[Any]) -> int:
    for number, seed in enumerate(SEEDS, 1):
        for mix in mixes:
            try:
                fuzz(mix, seed)
            except AssertionError:
                return number
    return 0


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    names = ["kv, latent, window, snapshot", "kv, snapshot", "kv, first tokens, window, snapshot", "first tokens"]
    assert seeds_until_caught([MIXES[name] for name in names]), "the fuzz did not find the bug"
