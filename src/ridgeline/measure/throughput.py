"""Measure throughput: any number of requests, which all arrive at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ridgeline.llm import LLM
from ridgeline.measure.latency import check
from ridgeline.measure.machine import Roof
from ridgeline.measure.predict import Asked, roofline_times
from ridgeline.measure.spread import Spread
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sched.stats import Stats
from ridgeline.spec.request import OutputChunk, RequestOutput, SamplingParams
from ridgeline.system import total_bytes

SAMPLE_EVERY = 4  # steps between two samples of the engine's statistics


@dataclass(frozen=True, slots=True)
class PageUse:
    """How the engine used its pages, over the steps that were sampled.

    mean_running: mean number of running sequences. mean_used_pages, peak_used_pages, num_pages: pages of all groups in
    use, at most in use, and in all. waste: share of the token slots in pages of running sequences whose token is not
    read any more, or that hold none. hit_rate: share of prompt tokens that were in the prefix cache. swaps: preemptions
    that copied pages to the host.
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
    """Results of a run.

    ttft_s, tpot_s: over all requests, with their time in the queue. tpot_s is None if all answers have one token.
    roofline_s: the elapsed time if each operation ran at the machine's peaks. pages: None without a cache.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    elapsed_s: float
    roofline_s: float
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
        """Return the prompt and output tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.elapsed_s


def measure_throughput(
    llm: LLM, roof: Roof, requests: Sequence[GenerationRequest], *,
    on_done: Callable[[RequestOutput], None] = lambda output: None,
) -> Throughput:  # fmt: skip
    """Run requests, after a few small ones to warm up. Raises RequestError if one does not fit or fails."""
    tokens = [[0] * max(1, min(16, llm.max_model_len - 1))] * 4
    llm.generate([{"prompt_token_ids": ids, "cache_salt": "warm-up"} for ids in tokens], SamplingParams(max_tokens=1))
    before = llm.stats()
    start = time.perf_counter()
    outputs, samples = _run(llm, requests, on_done)
    elapsed = time.perf_counter() - start
    check(outputs)
    asked = [one for out in outputs for one in _asked(out)]
    machine = roof.hardware(memory_bytes=total_bytes(), on_host=llm.loaded.table.memory.on_host)
    roofline = roofline_times(llm.loaded, llm.config, asked, machine)
    ttft = Spread.of(out.timing.ttft_s for out in outputs)
    assert ttft is not None
    return Throughput(
        len(outputs), sum(len(out.prompt_token_ids) for out in outputs), sum(one.new for one in asked), elapsed,
        roofline.elapsed_s, ttft,
        Spread.of(out.timing.tpot_s for out in outputs if out.timing.tpot_s is not None),
        _page_use(before, samples, llm.stats()),
    )  # fmt: skip


def _run(
    llm: LLM, requests: Sequence[GenerationRequest], on_done: Callable[[RequestOutput], None]
) -> tuple[list[RequestOutput], list[Stats]]:
    """Return the results in order of completion, and the engine's statistics every few steps."""
    outputs: list[RequestOutput] = []
    samples: list[Stats] = []

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
                samples.append(stats)
    finally:
        for request_id in ids:
            llm.session.abort(request_id)
    return outputs, samples


def _asked(output: RequestOutput) -> Iterator[Asked]:
    """Yield the size of each answer. Choices share their prompt, so all but the first find it in the cache."""
    prompt = len(output.prompt_token_ids)
    for choice in output.outputs:
        yield Asked(prompt, len(choice.token_ids), prompt if choice.index else output.num_cached_tokens)


def _page_use(before: Stats | None, samples: Sequence[Stats], after: Stats | None) -> PageUse | None:
    if before is None or after is None:
        return None
    queried, hit = after.queried_tokens - before.queried_tokens, after.hit_tokens - before.hit_tokens
    recomputed = after.preempted_recompute - before.preempted_recompute
    swaps = after.preempted_swap - before.preempted_swap
    groups = [group for sample in samples for group in sample.groups]
    slots, wasted = sum(g.slots for g in groups), sum(g.wasted_slots for g in groups)
    return PageUse(
        mean_running=sum(sample.running for sample in samples) / len(samples) if samples else 0.0,
        mean_used_pages=sum(g.used_pages for g in groups) / len(samples) if samples else 0.0,
        peak_used_pages=sum(g.peak_pages for g in after.groups),
        num_pages=sum(g.num_pages for g in after.groups),
        waste=wasted / slots if slots else 0.0,
        hit_rate=hit / queried if queried else 0.0,
        preemptions=recomputed + swaps,
        swaps=swaps,
    )
