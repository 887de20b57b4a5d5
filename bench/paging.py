"""Compare how reservation and pages use the memory for state: python bench/paging.py --trace CSV [--plot FILE]

CSV is the Azure conversation trace (TIMESTAMP,ContextTokens,GeneratedTokens). Its first requests wait in order of
arrival from the start: with the trace's own times, the load would decide how full the memory is, and the question is
how many requests a full memory holds. Memory is a number of tokens; a prompt is computed in one step, each running
request gives a token per step, and requests are admitted in their order. Ways to allocate memory:

    reserve          a block of the longest length that the server allows, for each request
    oracle, buddy    a block whose size is the power of two that holds prompt and answer; an oracle knows the length
    oracle, exact    a block of exactly the prompt and the answer
    doubling         a block whose size is the power of two that holds the current tokens; it doubles when it is full
    pages            pages of the real scheduler, which need not be contiguous

A block is contiguous and has the first address that fits; for powers of two, the address is a multiple of the size, as
in buddy allocation. A block that grows may overlap its old range. If no range is free, the latest request loses its
block and is computed again when it is admitted again. `preempted` counts these; `computed_again` is the number of
tokens that are computed again, over those that must be computed once.

use_of_reserved: tokens whose state is stored over tokens reserved, both summed over all steps while the step runs (its
tokens count, the one that it samples does not). vLLM (arXiv 2309.06180, figure 2) defines use in the same way: memory
that is reserved for later tokens is waste. `expected` follows from the lengths alone, for requests that never wait
while they have a block. use_of_memory: tokens over all of the memory, so fragmentation counts too; this and `running`
are means over the steps in which requests wait. There are two workloads: all requests, with the longest length of the
whole trace; and requests of up to 2048 tokens, the length for which vLLM's baselines reserve.

Then each prompt gets n answers of equal length, on shared pages and as separate requests. `saved` is 1 - pages held /
page table entries of all holders, summed over steps, as in vLLM's figure 15; `saved_expected` follows from the lengths
if the answers to a prompt always run together and share its full pages.

The gates: every request completes with its length, the scheduler's page tables agree, use_of_reserved is within 1 % of
`expected`; pages of 16 > oracle, buddy > reserve, in use and in requests that run at once; sharing saves pages and
steps.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common import emit

from ridgeline.sched import Result, Scheduler, Sequence
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

MEMORY = 1 << 17  # tokens
SHORT = 2048
PAGES = (1, 16, 32, 64, 128)
CHECK_EVERY = 500  # steps
NO_LIMIT = 1 << 24


class Request(NamedTuple):
    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer


# Maps a request and the tokens that it must hold now to the size of its block.
Block = Callable[[Request, int], int]


@dataclass
class Tally:
    """Sums over steps. The fields full_... sum over the steps in which requests wait."""

    steps: int = 0
    tokens: int = 0
    reserved: int = 0
    full_steps: int = 0
    full_tokens: int = 0
    full_running: int = 0
    computed: int = 0  # tokens, including those that are computed again
    preempted: int = 0
    held: int = 0  # pages, each counted once
    entries: int = 0  # entries of page tables

    def add(self, running: int, tokens: int, reserved: int, *, waiting: bool) -> None:
        self.steps += 1
        self.tokens += tokens
        self.reserved += reserved
        if waiting:
            self.full_steps += 1
            self.full_tokens += tokens
            self.full_running += running

    @property
    def use_of_reserved(self) -> float:
        return self.tokens / self.reserved

    @property
    def use_of_memory(self) -> float:
        return self.full_tokens / self.full_steps / MEMORY

    @property
    def running(self) -> float:
        return self.full_running / self.full_steps

    def again(self, requests: list[Request], n: int = 1) -> float:
        """Return the tokens that are computed more than once, over the tokens that n answers to each prompt need."""
        return self.computed / sum(r.prompt - 1 + n * r.answer for r in requests) - 1


class Region:
    """Holds contiguous blocks in [0, MEMORY), each at the first address that fits."""

    def __init__(self, *, aligned: bool) -> None:
        self._aligned = aligned
        self._blocks: list[tuple[int, int]] = []  # start, end; sorted

    def take(self, size: int) -> tuple[int, int] | None:
        start = 0
        for first, last in (*self._blocks, (MEMORY, MEMORY)):
            if start + size <= first:
                insort(self._blocks, (start, start + size))
                return start, start + size
            start = -(-last // size) * size if self._aligned else last
        return None

    def free(self, block: tuple[int, int]) -> None:
        self._blocks.remove(block)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def whole_pages(page: int) -> Block:
    return lambda request, n: -(-n // page) * page


class Contiguous:
    """Runs continuous batching with a contiguous block for each request; counts steps until all have ended."""

    def __init__(self, requests: list[Request], block: Block, *, aligned: bool) -> None:
        self._requests, self._block = requests, block
        self._region = Region(aligned=aligned)
        self._known = [r.prompt for r in requests]  # tokens: the prompt's and those generated
        self._waiting = list(range(len(requests)))  # by arrival
        self._running: list[int] = []  # by arrival
        self._blocks: dict[int, tuple[int, int]] = {}

    def run(self) -> Tally:
        tally = Tally()
        while self._waiting or self._running:
            lost = self._grow()
            tally.preempted += lost
            tally.computed += len(self._running)
            while self._waiting and not lost and self._allocate(self._waiting[0]):
                tally.computed += self._known[self._waiting[0]]
                insort(self._running, self._waiting.pop(0))
            reserved = sum(end - start for start, end in self._blocks.values())
            tokens = sum(self._known[i] for i in self._running)
            tally.add(len(self._running), tokens, reserved, waiting=bool(self._waiting))
            self._advance()
        assert all(n == r.total for n, r in zip(self._known, self._requests, strict=True))
        return tally

    def _advance(self) -> None:
        """Give each running request a token, and remove complete requests."""
        for i in tuple(self._running):
            self._known[i] += 1
            if self._known[i] == self._requests[i].total:
                self._leave(i)

    def _leave(self, i: int) -> None:
        self._running.remove(i)
        self._region.free(self._blocks.pop(i))

    def _allocate(self, i: int) -> bool:
        block = self._region.take(self._block(self._requests[i], self._known[i]))
        if block is not None:
            self._blocks[i] = block
        return block is not None

    def _grow(self) -> int:
        """Give larger blocks to requests that need one, the earliest first; return how many lost their block."""
        lost = 0
        for i in tuple(self._running):
            if i not in self._blocks:
                continue
            start, end = self._blocks[i]
            if self._block(self._requests[i], self._known[i]) == end - start:
                continue
            self._region.free(self._blocks.pop(i))
            while not self._allocate(i):
                victim = self._running[-1]
                self._running.pop()
                insort(self._waiting, victim)
                lost += 1
                if victim == i:
                    break
                self._region.free(self._blocks.pop(victim))
        return lost


def paged(requests: list[Request], page: int, n: int = 1) -> Tally:
    """Run the real scheduler with `n` answers to each prompt; the device is one that gives every token."""
    scheduler = Scheduler(
        [StateGroup("kv", page, ALL, 1)], [MEMORY // page + 1], max_batch_tokens=NO_LIMIT, max_seqs=1 << 12
    )
    for i, request in enumerate(requests):
        prompt = [i, *range(request.prompt - 1)]  # no two prompts begin with the same tokens
        first, *others = (Sequence(n * i + k, prompt, request.answer) for k in range(n))
        scheduler.add(first, others)
    tally, given = Tally(), Counter[int]()
    while len(scheduler):
        plan = scheduler.schedule()
        assert plan is not None
        stats = scheduler.stats()
        (group,) = stats.groups
        tally.computed += sum(len(w.tokens) for w in plan.works)
        tally.held += group.used_pages
        tally.entries += group.slots // page
        tally.add(stats.running, group.slots - group.wasted_slots, group.slots, waiting=stats.waiting > 0)
        if tally.steps % CHECK_EVERY == 0:
            scheduler.check()
        updates = scheduler.commit(plan, [Result((7,)) if w.sample else Result() for w in plan.works])
        given.update(u.sequence for u in updates)
    scheduler.check()
    tally.preempted = scheduler.stats().preempted_recompute
    assert all(given[n * i + k] == r.answer for i, r in enumerate(requests) for k in range(n))
    return tally


def expected(requests: list[Request], block: Block) -> float:
    """Return tokens over tokens reserved, summed over the steps of all requests."""
    lengths = [(r, length) for r in requests for length in range(r.prompt, r.total)]
    return sum(length for _, length in lengths) / sum(block(r, length) for r, length in lengths)


def compare(name: str, requests: list[Request], longest: int) -> dict[str, Tally]:
    """Print one line for each way to give out memory."""
    blocks: dict[str, tuple[Block, bool]] = {
        f"reserve {longest}": (lambda r, n: longest, False),
        "oracle, buddy": (lambda r, n: power_of_two(r.total), True),
        "oracle, exact": (lambda r, n: r.total, False),
        "doubling": (lambda r, n: power_of_two(n), True),
    }
    tallies = {way: Contiguous(requests, block, aligned=a).run() for way, (block, a) in blocks.items()}
    tallies |= {f"pages of {p}": paged(requests, p) for p in PAGES}
    exact = {way: expected(requests, block) for way, (block, _) in blocks.items()}
    exact |= {f"pages of {p}": expected(requests, whole_pages(p)) for p in PAGES}
    for way, tally in tallies.items():
        close = abs(tally.use_of_reserved / exact[way] - 1) < 0.01
        emit(
            f"paging: {name}, {way}", close,
            use_of_reserved=round(tally.use_of_reserved, 4), expected=round(exact[way], 4),
            use_of_memory=round(tally.use_of_memory, 4), running=round(tally.running, 1), steps=tally.steps,
            preempted=tally.preempted, computed_again=round(tally.again(requests), 4), requests=len(requests),
        )  # fmt: skip
    ours, buddy, reserve = (tallies[way] for way in ("pages of 16", "oracle, buddy", f"reserve {longest}"))
    emit(
        f"paging: {name}, order",
        ours.use_of_reserved > buddy.use_of_reserved > reserve.use_of_reserved
        and ours.running > buddy.running > reserve.running,
        use_over_buddy=round(ours.use_of_reserved / buddy.use_of_reserved, 2),
        use_over_reserve=round(ours.use_of_reserved / reserve.use_of_reserved, 2),
        running_over_buddy=round(ours.running / buddy.running, 2),
        running_over_reserve=round(ours.running / reserve.running, 2),
    )
    return tallies


def parallel(requests: list[Request], n: int) -> None:
    """Print one line that compares n answers to each prompt on shared pages with separate requests."""
    alone = paged([r for r in requests for _ in range(n)], 16)
    shared = paged(requests, 16, n)
    saved = 1 - shared.held / shared.entries
    lengths = [(r, length) for r in requests for length in range(r.prompt, r.total)]
    limit = (n - 1) / n * sum((r.prompt - 1) // 16 for r, _ in lengths) / sum(-(-length // 16) for _, length in lengths)
    emit(
        f"paging: {n} answers to each prompt, pages of 16", 0 < saved < 1.01 * limit and shared.steps < alone.steps,
        saved=round(saved, 4), saved_expected=round(limit, 4),
        running=round(shared.running, 1), running_alone=round(alone.running, 1),
        steps=shared.steps, steps_alone=alone.steps, preempted=shared.preempted, preempted_alone=alone.preempted,
        computed_again=round(shared.again(requests, n), 4), requests=len(requests),
    )  # fmt: skip


def read(path: Path) -> list[Request]:
    with path.open(newline="") as file:
        return [Request(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def plot(path: Path, panels: dict[str, dict[str, Tally]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(12.5, 4.8), layout="constrained")
    for ax, (title, tallies) in zip(axes, panels.items(), strict=True):
        rows = list(range(len(tallies)))
        colors = ["tab:blue" if way.startswith("pages") else "tab:gray" for way in tallies]
        use, memory = (
            [100 * getattr(t, name) for t in tallies.values()] for name in ("use_of_reserved", "use_of_memory")
        )
        top = ax.barh([p - 0.19 for p in rows], use, 0.36, color=colors, label="share of reserved memory")
        low = ax.barh([p + 0.19 for p in rows], memory, 0.36, color=colors, alpha=0.4, label="share of all memory")
        ax.bar_label(top, fmt="%.1f %%", fontsize=8, padding=3)
        ax.bar_label(
            low, [f"{m:.1f} %, {t.running:.0f} run at once" for m, t in zip(memory, tallies.values(), strict=True)],
            fontsize=8, padding=3,
        )  # fmt: skip
        ax.set_yticks(rows, list(tallies))
        ax.invert_yaxis()
        ax.set(xlim=(0, 148), xlabel="% that holds the state of a token")
        ax.set_xticks(range(0, 101, 20))
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="upper right", fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="path of AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--requests", type=int, default=1500, help="number of requests from the start of the trace")
    parser.add_argument("--plot", type=Path, help="also draw the shares into this PNG")
    options = parser.parse_args()
    trace = read(options.trace)
    requests = list(itertools.islice(trace, options.requests))
    short = [r for r in requests if r.total <= SHORT]
    longest = max(r.total for r in trace)
    panels = {
        f"{len(requests)} requests of the Azure conversation trace": compare("all", requests, longest),
        f"the {len(short)} of them of up to {SHORT} tokens": compare(f"up to {SHORT}", short, SHORT),
    }
    for n in (2, 4):
        parallel(requests[: len(requests) // n], n)
    if options.plot:
        plot(options.plot, panels)


if __name__ == "__main__":
    main()
