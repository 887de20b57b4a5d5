"""Manage the pages of all sequences in all state groups: take, share, copy, seal and release them.

Invariants (checked by `Scheduler.check` and by the fuzz):
    a page with two holders, or in the prefix index, is never written: a sequence that must write it writes a copy;
    a page enters the index at the commit of the step that filled it, under the hash of exactly what it holds;
    a snapshot enters the index only if a step ended exactly on its position;
    a released page is handed out again only when no step in flight may touch it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain
from math import gcd, lcm

from ridgeline.errors import RequestError
from ridgeline.sched.page_times import Clock, PageLifetimes, PageTimes
from ridgeline.sched.pages import PagePool
from ridgeline.sched.sequence import PageKey, Sequence
from ridgeline.sched.stats import GroupStats
from ridgeline.sched.work import PageCopy, PageDelta
from ridgeline.spec.groups import NULL_PAGE, StateGroup

FINE_TOKENS = 16  # the grid of prefix hashes, and of snapshots where prompts diverge
Has = Callable[[PagePool, PageKey], bool]
MAX_SEEN = 1 << 16  # prefixes that are kept to find where prompts diverge; 16 bytes of key each


class StateCache:
    """Holds one page pool per group and, for swapping, one per group on the host. Positions are in tokens."""

    pools: Seq[PagePool]

    def __init__(self, groups: Seq[StateGroup], num_pages: Seq[int], num_host_pages: Seq[int]) -> None:
        self.groups = tuple(groups)
        self.pools = [PagePool(g.name, n, g.kept_pages) for g, n in zip(groups, num_pages, strict=True)]
        self.host = [PagePool(f"{g.name} on the host", n) for g, n in zip(groups, num_host_pages, strict=True)]
        self.grid = gcd(FINE_TOKENS, *(g.page_tokens for g in groups))
        # A sequence can begin at multiples of this: they are page boundaries in every row group.
        self._align = lcm(self.grid, *(g.page_tokens for g in groups if not g.snapshot))
        self._snapshot_tokens = lcm(*(g.page_tokens for g in groups if g.snapshot))
        self.has_snapshots = any(g.snapshot for g in groups)
        self._seen: OrderedDict[PageKey, None] = OrderedDict()
        self.newest_step = 0  # the newest step that may touch pages which are released now
        self.copies: list[PageCopy] = []  # copies of the step that is being planned, like the swaps
        self.swap_out: list[PageCopy] = []
        self.swap_in: list[PageCopy] = []

    def watch(self, clock: Clock) -> PageTimes:
        """Measure the lifetimes of the device's pages from now on; the histograms that are filled."""
        times = PageTimes()
        for pool in self.pools:
            pool.residency = PageLifetimes(pool.num_pages, clock, times)
        return times

    # ---- before a step: room and pages ---------------------------------------------------------------

    def room(self, seq: Sequence, limit: int, end: int, *, after_commit: bool = False) -> tuple[int, int]:
        """Return how far a step to `limit`, and with drafts to `end`, can go with the free pages; (0, 0) if nowhere.

        after_commit: count the pages that are free once the steps in flight are committed.
        """
        start = seq.planned
        for group, pool, table in zip(self.groups, self.pools, seq.tables, strict=True):
            free = pool.num_free + (pool.num_limbo if after_commit else 0)
            size = group.page_tokens
            if group.snapshot:
                index = group.page_of(limit - 1)
                if not free and not (index < len(table) and pool.writable(table[index])):
                    return 0, 0
                continue
            if start % size and not pool.writable(table[start // size]):
                free -= 1  # for the copy
            if free < 0:
                return 0, 0
            limit = min(limit, (len(table) + free) * size)
            # Drafts leave one page: until the next commit the window reaches further back than the tokens need.
            end = min(end, (len(table) + free - 1) * size) if free else limit
        return (limit, max(limit, end)) if limit > start else (0, 0)

    def take(self, seq: Sequence, limit: int, end: int) -> tuple[PageDelta, ...]:
        """Take the pages for a step that `room` allows; the changes of the page tables."""
        deltas: list[PageDelta] = []
        covered, of_rows = [], []
        for g, (group, pool, table) in enumerate(zip(self.groups, self.pools, seq.tables, strict=True)):
            stop = limit if group.snapshot else end
            first = group.page_of(limit - 1 if group.snapshot else seq.planned)
            if first < len(table) and not pool.writable(table[first]):
                self._copy_on_write(seq, g, first, deltas)
            new = group.new_pages(len(table), stop)
            if group.snapshot:
                table += [pool.take() if group.writes(index, stop) else NULL_PAGE for index in new]
            else:
                table += pool.take_many(len(new))
            if len(table) > seq.sent[g]:
                deltas.append(PageDelta(g, seq.row, seq.sent[g], tuple(table[seq.sent[g] :])))
                seq.sent[g] = len(table)
            covered.append(len(table) * group.page_tokens)
            if not group.snapshot:
                of_rows.append(covered[-1])
        seq.covered, seq.rows_end = min(covered), min(of_rows, default=0)
        return tuple(deltas)

    def _copy_on_write(self, seq: Sequence, g: int, index: int, deltas: list[PageDelta]) -> None:
        pool, table = self.pools[g], seq.tables[g]
        copy = PageCopy(g, table[index], pool.take())
        self.copies.append(copy)
        table[index] = copy.dst
        if index < seq.sent[g]:
            deltas.append(PageDelta(g, seq.row, index, (copy.dst,)))
        pool.drop(copy.src, self.newest_step)

    def num_snapshots(self) -> int:
        """Return the number of recurrent states in the prefix index."""
        return sum(pool.num_keys for group, pool in zip(self.groups, self.pools, strict=True) if group.snapshot)

    def step_end(self, seq: Sequence, end: int) -> int:
        """Return where a chunk that could go to `end` should stop, so that snapshots can be published."""
        if not self.has_snapshots:
            return end
        if seq.planned < seq.snapshot_at < end:
            return seq.snapshot_at
        boundary = end // self._snapshot_tokens * self._snapshot_tokens
        return boundary if boundary > seq.planned else end

    # ---- after a step: the prefix index and the window -----------------------------------------------

    def advance(self, seq: Sequence) -> None:
        """Publish the pages that are complete at `computed`, and release those that no later step reads."""
        position, event = seq.computed, 1 << 62
        for g, (group, pool, table) in enumerate(zip(self.groups, self.pools, seq.tables, strict=True)):
            size = group.page_tokens
            if group.snapshot:
                if position == seq.snapshot_at or position % size == 0:
                    pool.seal(table[group.page_of(position - 1)], seq.prefix_hash(position, self.grid))
                    seq.covered = 0  # later writes go to a copy
            else:
                full = position // size
                if full > seq.sealed[g]:
                    first, seq.sealed[g] = seq.sealed[g], full
                    pool.seal_all(table[first:full], seq.page_keys(first, full, size, self.grid))
            kept = max(seq.dropped[g], group.first_pages)
            for index in range(kept, group.first_live_page(position)):
                pool.drop(table[index], self.newest_step)
                table[index] = NULL_PAGE
                seq.dropped[g] = kept = index + 1
            event = min(event, (position // size + 1) * size, (kept + 1) * size + group.lookback)
        seq.next_event = min(event, seq.snapshot_at) if seq.snapshot_at > position else event

    # ---- where a sequence begins: prefixes, forks, swaps -------------------------------------------------

    def find_prefix(self, seq: Sequence) -> tuple[int, list[list[int]]]:
        """Return the largest position that every group can resume from, and its pages; at most the last token's."""
        position = self._longest(seq, PagePool.has)
        return position, [[pool.find(key) for key in self._keys(g, seq, position)] for g, pool in enumerate(self.pools)]

    def note_missed(self, seq: Sequence, position: int) -> None:
        """Let the pools keep more if a sequence, which begins at `position`, could have begun later with more pages."""
        if any(pool.has_gone for pool in self.pools):
            later = self._longest(seq, PagePool.knows)
            for g, pool in enumerate(self.pools) if later > position else ():
                for key in self._keys(g, seq, later):
                    pool.missed(key)

    def _longest(self, seq: Sequence, has: Has) -> int:
        """Return the largest position that every group can resume from, with the pages for which `has` is true."""
        last = (len(seq.tokens) - 1) // self._align * self._align
        runs: dict[int, list[int]] = {}  # per row group: cached pages in a row that end at each page
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            if group.snapshot:
                continue
            run, runs[g] = 0, []
            for index in range(last // group.page_tokens):
                run = run + 1 if has(pool, seq.prefix_hash((index + 1) * group.page_tokens, self.grid)) else 0
                needed = index < group.first_pages or group.first_live_page(last) == 0
                if not run and needed:  # by every later position, so there is no longer prefix
                    break
                runs[g].append(run)
            last = min(last, len(runs[g]) * group.page_tokens // self._align * self._align)
        for position in range(last, 0, -self._align):
            if all(
                group.resumable(position, self._num_cached(g, seq, position, runs, has))
                for g, group in enumerate(self.groups)
            ):
                return position
        return 0

    def _num_cached(self, g: int, seq: Sequence, position: int, runs: dict[int, list[int]], has: Has) -> int:
        group = self.groups[g]
        if group.snapshot:
            return int(has(self.pools[g], seq.prefix_hash(position, self.grid)))
        pages = position // group.page_tokens
        first = min(group.first_pages, pages)
        return runs[g][pages - 1] if not first or runs[g][first - 1] == first else 0

    def _keys(self, g: int, seq: Sequence, position: int) -> list[PageKey]:
        """Return the keys of the pages of a group that a sequence needs to begin at `position`."""
        group = self.groups[g]
        if group.snapshot:
            return [seq.prefix_hash(position, self.grid)] if position else []
        return [seq.prefix_hash((i + 1) * group.page_tokens, self.grid) for i in group.reads(position)]

    def divergence(self, seq: Sequence) -> int:
        """Return the length of the longest prefix, on the fine grid, that an earlier prompt had too; keep this prompt.

        A prefix that came twice is likely to come again, so a snapshot there is worth a shorter chunk and a page.
        """
        found = 0
        if not self.has_snapshots:
            return found
        for position in range(self._align, len(seq.tokens), self._align):
            key = seq.prefix_hash(position, self.grid)
            if key in self._seen:
                found = position
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return found

    def share(self, seq: Sequence, position: int, pages: Seq[Seq[int]]) -> None:
        """Attach `seq` to shared pages, so that it begins at `position`. pages: for each group, those that it reads."""
        for pool, held in zip(self.pools, pages, strict=True):
            for page in held:
                pool.share(page)
        self._begin(seq, position, pages)

    def pages_at(self, seq: Sequence, position: int) -> list[list[int]]:
        """Return, for each group, the pages of `seq` that a sequence which begins at `position` reads."""
        return [[t[i] for i in group.reads(position)] for group, t in zip(self.groups, seq.tables, strict=True)]

    def _begin(self, seq: Sequence, position: int, pages: Seq[Seq[int]]) -> None:
        seq.tables, seq.dropped, seq.sent = [], [], []
        for group, held in zip(self.groups, pages, strict=True):
            live = group.first_live_page(position)
            first = min(group.first_pages, live)
            seq.tables.append([*held[:first], *[NULL_PAGE] * (live - first), *held[first:]])
            seq.dropped.append(live if live > first else 0)
            seq.sent.append(0 if first else live)
        seq.sealed = [position // group.page_tokens for group in self.groups]
        seq.computed = seq.replay_from = seq.planned = position
        seq.covered = seq.rows_end = seq.next_event = 0

    def release(self, seq: Sequence) -> None:
        """Release all pages of a sequence, on the device and on the host."""
        for pool, table in zip(self.pools, seq.tables, strict=False):
            pool.drop_all(reversed(table), self.newest_step)  # the prefix, which others may share, is evicted last
        for pool, table in zip(self.host, seq.host, strict=False):
            pool.drop_all(table, self.newest_step)
        seq.tables, seq.host = [], []

    def can_swap(self, seq: Sequence) -> bool:
        """Return whether a sequence has computed tokens, and the host has free pages for them.

        False in a step that swaps in: pages are copied out first, so pages that a fork shares with a sequence that
        comes in would not be there yet.
        """
        position = seq.replay_from
        return (
            position > 0
            and not self.swap_in
            and all(len(g.reads(position)) <= pool.num_free for g, pool in zip(self.groups, self.host, strict=True))
        )

    def swap_bytes(self, seq: Sequence) -> int:
        """Return the bytes that a swap moves one way."""
        return sum(len(group.reads(seq.replay_from)) * group.page_bytes for group in self.groups)

    def swap_to_host(self, seq: Sequence) -> None:
        """Plan to copy the pages of `seq` to host memory: in the step planned now, after the steps in flight."""
        for g, pages in enumerate(self.pages_at(seq, seq.replay_from)):
            seq.host.append([self.host[g].take() for _ in pages])
            self.swap_out.extend(PageCopy(g, src, dst) for src, dst in zip(pages, seq.host[g], strict=True))
        host, seq.host = seq.host, []
        self.release(seq)
        seq.host = host

    def swap_to_device(self, seq: Sequence) -> None:
        """Move pages back from the host; the sequence continues from `computed`, where it was swapped."""
        pages = [[pool.take() for _ in held] for pool, held in zip(self.pools, seq.host, strict=True)]
        for g, (held, back) in enumerate(zip(seq.host, pages, strict=True)):
            self.swap_in.extend(PageCopy(g, src, dst) for src, dst in zip(held, back, strict=True))
        self.release(seq)
        self._begin(seq, seq.computed, pages)

    def lacks(self, seq: Sequence, pages: Seq[Seq[int]]) -> list[int]:
        """Return how many free pages each group lacks if `seq` begins with `pages`; 0 or less: it lacks none."""
        return [
            group.most_pages(len(seq.tokens) + 1) - len(held) - pool.num_free + sum(map(pool.is_free, held))
            for group, pool, held in zip(self.groups, self.pools, pages, strict=True)
        ]

    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError for a sequence that does not fit even if it runs alone."""
        if not seq.tokens or len(seq.tokens) >= seq.max_length:
            raise RequestError(f"request {seq.id}: needs a prompt and max_tokens of at least 1")
        for group, pool in zip(self.groups, self.pools, strict=True):
            need = group.most_pages(seq.max_length + seq.after)
            if need > pool.num_pages - 1:
                raise RequestError(
                    f"request {seq.id}: {seq.num_prompt} prompt tokens and {seq.max_tokens} to generate need {need} "
                    f"pages of {group.page_tokens} tokens of state group {group.name!r}; there are {pool.num_pages - 1}"
                )

    # ---- all sequences ----------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the bytes of the pages that sequences hold on the device; a shared page counts once."""
        size = 0
        for group, pool in zip(self.groups, self.pools, strict=True):
            size += group.page_bytes * pool.num_used
        return size

    def group_stats(self, running: Seq[Sequence]) -> tuple[GroupStats, ...]:
        """Return the statistics of each group. running: the sequences that hold pages on the device."""
        found = []
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            held = sum(seq.num_pages(g, group) for seq in running)
            read = sum(min(seq.planned, group.lookback + group.first_tokens) for seq in running)
            slots = 0 if group.snapshot else held * group.page_tokens
            wasted = 0 if group.snapshot else slots - read
            used, host, total = pool.num_used, self.host[g].num_used, max(pool.num_pages - 1, 0)
            shared = held - used
            found.append(GroupStats(group.name, total, used, pool.peak, host, slots, wasted, shared, pool.keep))
        return tuple(found)

    def settle(self, step: int) -> None:
        """Record that a step was committed."""
        for pool in chain(self.pools, self.host):
            pool.settle(step)

    def check(self, sequences: Seq[Sequence]) -> None:
        """Raise AssertionError unless the pools' bookkeeping agrees with the pages that sequences hold."""
        for g, group in enumerate(self.groups):
            on_device: Counter[int] = Counter()
            on_host: Counter[int] = Counter()
            for seq in sequences:
                if seq.host:
                    on_host.update(seq.host[g])
                if seq.row >= 0:
                    on_device.update(seq.tables[g])
                    live = group.reads(seq.computed)
                    assert all(seq.tables[g][i] for i in live), f"sequence {seq.id} lost a page of {group.name}"
            on_device.pop(NULL_PAGE, None)
            self.pools[g].check(on_device)
            self.host[g].check(on_host)
        for seq in sequences:
            assert seq.computed <= seq.replay_from <= seq.planned, f"sequence {seq.id}: progress out of order"
            assert seq.row >= 0 or not seq.tables, f"sequence {seq.id} holds pages without a row"
