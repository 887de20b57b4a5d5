"""Schedule sequences of diffusion models, whose answers grow by blocks (spec/sight.py).

A work runs whole blocks of known tokens, whose rows are final, and then the open block as drafts: the tokens after the
last whole block, and masks. No draft is ever accepted: their rows are computed again, in place, in the next pass. Once
the open block is done, its tokens join those of the sequence, and their rows are computed as final together with the
first pass over the block after it. In a model that sees whole sequences no row is ever final, so that all tokens are
drafts, those of the prompt too; `wanted` says which of them are predicted. In a model with a canvas, blocks have one
token, as known tokens are computed causally, and the drafts are the canvas. With a block cache, the later passes
over a block of a whole sequence compute a part of its rows (`part`), and read the others as the first pass left them.

             start              settled            settled + block
        ------|------------------|------------------|
     in pages   known tokens,      the open block
                rows are final     (drafts)
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.sched.policy import last_behind
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence
from ridgeline.sched.work import PageDelta, Result, Update, Work


class BlockScheduler(Scheduler):
    """Schedules continuous batches of a diffusion model. `propose` sets the open block before each step."""

    def _plan_running(self, sequences: Iterable[Sequence], budget: int) -> int:
        """Append work for running sequences, first for those with the fewest tokens to compute."""
        for seq in sorted(sequences, key=lambda seq: seq.settled - seq.planned > seq.block):
            if budget:
                budget -= self._plan(seq, budget)
        return budget

    def _plan(self, seq: Sequence, budget: int) -> int:
        """Append work for a running sequence; its number of tokens, 0 if it cannot run now."""
        start, settled, block = seq.planned, seq.settled, seq.drafts
        if seq.row < 0 or seq.pending or seq.held or not block:
            return 0
        if seq.part is not None:
            return self._plan_part(seq, *seq.part, budget)
        if seq.children:  # they begin at the last block, once those before it are computed
            settled, block = seq.fork_at, ()
        end = settled + len(block)
        if end - start > budget:
            end, block = min(settled, start + budget // seq.block * seq.block), ()
        if end <= start:
            return 0
        deltas: tuple[PageDelta, ...] = ()
        if end > seq.covered:
            whole = seq.signal is not None and start == seq.settled  # a canvas runs whole, or not at all
            reach = self._reach(seq, end if whole else min(start + seq.block, end), end)
            if reach < end:
                end, block = min(settled, reach // seq.block * seq.block), ()
            if end <= start:
                return 0
            self._cache.newest_step = self._step
            deltas = self._cache.take(seq, end, end)
        tokens = (*seq.tokens[start : end - len(block)], *block)
        return self._append_block(seq, tokens, len(block), deltas)

    def _plan_part(self, seq: Sequence, first: int, reads: int, budget: int) -> int:
        """Append work for a part of a whole sequence, whose pages an earlier pass has filled."""
        if len(seq.drafts) > budget:
            return 0
        work = Work(seq.id, seq.row, seq.epoch, first, seq.drafts, True, first, len(seq.drafts), (), seq.floor)
        self._works.append(work._replace(wanted=seq.wanted, reads=reads))
        seq.pending += 1
        self._cache.newest_step = seq.last_step = self._step
        return len(seq.drafts)

    def _append_block(self, seq: Sequence, tokens: tuple[int, ...], count: int, deltas: tuple[PageDelta, ...]) -> int:
        """Append a work whose last `count` tokens are the open block."""
        start, limit = seq.planned, seq.planned + len(tokens) - count
        is_canvas = seq.signal is not None  # the known tokens before it have no logits
        sample = bool(count) if is_canvas else limit == seq.settled
        work = Work(seq.id, seq.row, seq.epoch, start, tokens, sample, seq.replay_from, count, deltas, seq.floor)
        if is_canvas and count:
            work = work._replace(wanted=(len(tokens) - count, len(tokens)), signal=seq.signal)
        self._works.append(work if seq.wanted is None else work._replace(wanted=seq.wanted))
        seq.pending += sample
        self._cache.newest_step = seq.last_step = self._step
        seq.replay_from = limit
        seq.planned = start + len(tokens)
        return len(tokens)

    def _reach(self, seq: Sequence, least: int, end: int) -> int:
        """Return how far there are pages, up to `end`, and at least to `least`; 0 if nowhere. May preempt others."""
        while self._short is None or seq.order < self._short:
            if (reach := self._cache.room(seq, end, end)[0]) >= least:
                return reach
            victim = None
            if self._cache.room(seq, end, end, after_commit=True)[0] < least:
                victim = last_behind(seq, self._running, self._step)
            if victim is None:
                self._short = seq.order
            else:
                self._preempt(victim)
        return 0

    def _accept(self, seq: Sequence, work: Work, result: Result) -> Update:
        """Record the tokens of a pass: those of the whole open block, or none."""
        seq.pending -= 1
        seq.planned = seq.computed
        tokens = result.tokens[: seq.max_length - len(seq.tokens)]
        seq.tokens.extend(tokens)
        if tokens:
            self._watcher.commit(seq.id, tokens)
        return Update(seq.id, tokens, result.ended or len(seq.tokens) >= seq.max_length)
