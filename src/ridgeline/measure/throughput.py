"""Throughput: any number of requests, all there from the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ridgeline.llm import LLM
from ridgeline.measure.floor import Costs
from ridgeline.measure.latency import check
from ridgeline.measure.machine import Roof
from ridgeline.measure.spread import Spread
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sched.stats import Stats
from ridgeline.spec.request import OutputChunk, RequestOutput, SamplingParams

SAMPLE_EVERY = 4  # steps between two looks at the engine's statistics


@dataclass(frozen=True, slots=True)
class PageUse:
    """How the engine used its pages, over the steps that were looked at.

    running: sequences, mean. used, peak, total: pages of all groups, mean, most, and there are. waste: share of the
    token places in pages of running sequences that hold no token which is still read. hit_rate: share of prompt tokens
    found in the prefix cache. preemptions: of which swaps to the host.
    """

    mean_running: float
    mean_used_pages: float
    peak_used_pages: int
    num_pages: int
    waste: float
    hit_rate: float
    preemptions: int
    swaps: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a run gave. ttft and tpot: of each request, its time in the queue included. floor_s: what the roof allows.

    tpot_s: None if no answer has more than one token. pages: None where nothing is kept between tokens.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    elapsed_s: float
    floor_s: float
    ttft_s: Spread
    tpot_s: Spread | None
    pages: PageUse | None

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.elapsed_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.elapsed_s


def measure_throughput(
    llm: LLM, costs: Costs, roof: Roof, requests: Sequence[GenerationRequest], *,
    on_done: Callable[[RequestOutput], None] = lambda output: None,
) -> Throughput:  # fmt: skip
    """Run requests, after a few small ones to warm up. Raises RequestError where one does not fit or fails."""
    tokens = [[0] * max(1, min(16, llm.max_model_len - 1))] * 4
    llm.generate([{"prompt_token_ids": ids, "cache_salt": "warm-up"} for ids in tokens], SamplingParams(max_tokens=1))
    before = llm.stats()
    start = time.perf_counter()
    outputs, looks = _run(llm, requests, on_done)
    elapsed = time.perf_counter() - start
    check(outputs)
    sizes = [size for out in outputs for size in _sizes(out)]
    max_seqs = llm.config.max_num_seqs if llm.config else len(sizes)
    ttft = Spread.of(out.timing.ttft_s for out in outputs)
    assert ttft is not None
    return Throughput(
        len(outputs), sum(len(out.prompt_token_ids) for out in outputs), sum(new for *_, new in sizes), elapsed,
        costs.all(sizes, max_seqs=max_seqs).seconds(roof), ttft,
        Spread.of(out.timing.tpot_s for out in outputs if out.timing.tpot_s is not None),
        _page_use(before, looks, llm.stats()),
    )  # fmt: skip


def _run(
    llm: LLM, requests: Sequence[GenerationRequest], on_done: Callable[[RequestOutput], None]
) -> tuple[list[RequestOutput], list[Stats]]:
    """The results, in order of completion, and the engine's statistics every few steps."""
    outputs: list[RequestOutput] = []
    looks: list[Stats] = []

    def sink(chunk: OutputChunk) -> None:
        if chunk.output is not None:
            outputs.append(chunk.output)
            on_done(chunk.output)

    ids = []
    try:
        for request in requests:
            ids.append(llm.session.add(request, sink))  # noqa: PERF401
        for step in count():
            if not len(llm.session):
                break
            llm.session.step()
            if step % SAMPLE_EVERY == 0 and (stats := llm.stats()) is not None:
                looks.append(stats)
    finally:
        for request_id in ids:
            llm.session.abort(request_id)
    return outputs, looks


def _sizes(output: RequestOutput) -> Iterator[tuple[int, int, int]]:
    """Of each answer: prompt tokens that were there already, prompt tokens, new tokens. Choices share their prompt."""
    prompt = len(output.prompt_token_ids)
    for choice in output.outputs:
        yield prompt if choice.index else output.num_cached_tokens, prompt, len(choice.token_ids)


def _page_use(before: Stats | None, looks: Sequence[Stats], after: Stats | None) -> PageUse | None:
    if before is None or after is None:
        return None
    queried, hit = after.queried_tokens - before.queried_tokens, after.hit_tokens - before.hit_tokens
    recomputed = after.preempted_recompute - before.preempted_recompute
    swaps = after.preempted_swap - before.preempted_swap
    groups = [group for look in looks for group in look.groups]
    slots, wasted = sum(g.slots for g in groups), sum(g.wasted_slots for g in groups)
    return PageUse(
        mean_running=sum(look.running for look in looks) / len(looks) if looks else 0.0,
        mean_used_pages=sum(g.used_pages for g in groups) / len(looks) if looks else 0.0,
        peak_used_pages=sum(g.peak_pages for g in after.groups),
        num_pages=sum(g.num_pages for g in after.groups),
        waste=wasted / slots if slots else 0.0,
        hit_rate=hit / queried if queried else 0.0,
        preemptions=recomputed + swaps,
        swaps=swaps,
    )
