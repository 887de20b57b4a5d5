"""Prompts that begin alike: the share of tokens that the prefix cache finds, beside the optimum."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.errors import RequestError
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.plan.planner import Deployment
from ridgeline.sim import LinearCost, Request, Workload, settings, simulate
from ridgeline.sim.traces import read_trace

PAGE, BLOCK = 16, 64  # tokens of a page, and of the blocks of drawn prompts
SYSTEMS, SHARED, TURNS, GROWS = 4, 8, 5, 6  # system prompts and their blocks; mean turns, and most new blocks of a turn
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # sizes of the cache, as shares of all different blocks
JUDGED, NEAR = 1 / 2, 0.9  # the size that is judged, and the least share of the optimum there: the paper has 0.96
WHOLE = 0.97  # of the optimum with room for everything: a request computes one page or more of a prompt that is known


def workload(setup: Setup) -> list[Request]:
    """Return the requests of the trace of a setup, or drawn conversations that take turns.

    Answers have one token, because only prompts are compared. Raises RequestError for a trace without blocks.
    """
    if setup.trace is not None:
        known = [r for r in read_trace(setup.trace, 500 if setup.quick else 2000) if r.blocks]
        if not known:
            raise RequestError(f"--trace {setup.trace} has no blocks of prompts; give one of Mooncake's")
        return [r._replace(arrival_ns=0, output_tokens=1) for r in known]
    rng, numbers, found = np.random.default_rng(setup.seed), iter(range(1 << 40)), []
    systems = [[next(numbers) for _ in range(SHARED)] for _ in range(SYSTEMS)]
    talks: list[list[list[int]]] = []
    for _ in range(100 if setup.quick else 400):
        blocks, turns = list(systems[min(int(rng.geometric(0.5)), SYSTEMS) - 1]), []
        for _ in range(int(rng.geometric(1 / TURNS))):
            blocks += [next(numbers) for _ in range(int(rng.integers(1, GROWS + 1)))]
            turns.append(list(blocks))
        talks.append(turns)
    open_talks: list[deque[list[int]]] = []
    while talks or open_talks:
        while talks and len(open_talks) < 16:  # people who talk at the same time
            open_talks.append(deque(talks.pop()))
        one = open_talks[int(rng.integers(len(open_talks)))]
        blocks = one.popleft()
        found.append(Request(0, len(blocks) * BLOCK, 1, tuple(blocks), BLOCK))
        open_talks = [talk for talk in open_talks if talk]
    return found


def optimum(requests: Sequence[Request], capacity: int) -> float:
    """Return the most prompt tokens that a cache of `capacity` blocks can find, as a share.

    It drops the block whose next use is the furthest away (Belady 1966), and knows all requests before.
    """
    accesses = [(block, tokens) for r in requests for block, tokens in _blocks(r)]
    later: defaultdict[int, deque[int]] = defaultdict(deque)
    for at, (block, _) in enumerate(accesses):
        later[block].append(at)
    kept: dict[int, int] = {}  # block -> its next use
    order: list[tuple[int, int]] = []
    hits = 0
    for block, tokens in accesses:
        later[block].popleft()
        hits += tokens if block in kept else 0
        kept[block] = later[block][0] if later[block] else len(accesses)
        heapq.heappush(order, (-kept[block], block))
        while len(kept) > capacity:
            use, last = heapq.heappop(order)
            if kept.get(last) == -use:
                del kept[last]
    return hits / sum(tokens for _, tokens in accesses)


def _blocks(request: Request) -> list[tuple[int, int]]:
    """Return the blocks of a prompt with their tokens; the last one may be shorter."""
    left = request.prompt_tokens - request.block_tokens * (len(request.blocks) - 1)
    return [(b, request.block_tokens) for b in request.blocks[:-1]] + [(request.blocks[-1], left)]


def _sizes(requests: Sequence[Request]) -> dict[str, int]:
    """Return the blocks of each cache; each holds the longest request at least."""
    count, longest = len({b for r in requests for b in r.blocks}), max(len(r.blocks) for r in requests)
    return {str(share): max(round(share * count), longest + 1) for share in SHARES}


def predict(setup: Setup) -> Facts:
    """Compute the best hit rate of each size, by a cache that knows the future."""
    requests = workload(setup)
    return {"optimum": {share: optimum(requests, size) for share, size in _sizes(requests).items()}}


def measure(setup: Setup) -> Facts:
    """Serve the requests one after the other with the engine's scheduler on a virtual clock, and count hits."""
    requests, rates = workload(setup), {}
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    deployment = Deployment(find_model("llama-3.1-8b").spec, hardware("h200"), page_tokens=PAGE)
    own = settings(deployment, max_num_seqs=1, max_model_len=longest)
    for share, size in _sizes(requests).items():
        setup.on_part(f"radix: a cache of {size:,} blocks")
        pages = size * requests[0].block_tokens // PAGE + 2  # the null page, and one of the answer
        found = simulate(Workload(requests, clients=1), replace(own, num_pages=(pages,)), LinearCost((1,), (1.0,)))
        rates[share] = found.report.hit_rate
    return {"rates": rates, "requests": len(requests)}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the share of the optimum that is found."""
    parts = {share: measured["rates"][share] / best for share, best in predicted["optimum"].items()}
    judged, least, whole = str(JUDGED), str(SHARES[0]), str(SHARES[-1])
    best = predicted["optimum"]
    return (
        only_if(
            at_least(
                46, parts[judged], NEAR,
                f"with room for half of all different blocks the prefix cache finds {measured['rates'][judged]:.1%} of "
                f"{measured['requests']:,} prompts' tokens, and a cache that knows the future {best[judged]:.1%}; with "
                f"room for all {measured['rates'][whole]:.1%} of {best[whole]:.1%}, and with room for a sixteenth "
                f"{measured['rates'][least]:.1%} of {best[least]:.1%}",
            ),
            parts[whole] >= WHOLE,
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return both rates over the size of the cache."""
    given = ("optimum", predicted["optimum"], False), ("prefix cache", measured["rates"], True)
    curves = tuple(Series(name, [(float(s), r) for s, r in rates.items()], seen) for name, rates, seen in given)
    return (Figure("Prompt tokens that a cache finds", "share of all different blocks", "share", curves, log=False),)


EXPERIMENT = Experiment(
    "radix", "Prompts that begin alike", (46,), predict, measure, judge,
    "Conversations share system prompts, and each turn repeats the turns before it. The cache drops what was not used "
    "for the longest time; the optimum drops what is used latest or never again, which no server can know. With "
    "--trace the requests are those of a Mooncake trace.", figures,
    timed=False,
)  # fmt: skip
