"""Latency of whole batches: so many prompts of one length at once, so many tokens for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.llm import LLM
from ridgeline.measure.floor import Costs
from ridgeline.measure.machine import Roof
from ridgeline.measure.spread import Spread
from ridgeline.spec.request import RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, over iterations; floors are what the roof allows.

    latency: of the whole batch. ttft: until every sequence has its first token. tpot: (time of the last token - time of
    the first) / (tokens - 1), the mean over the sequences, None where there is one token. output_tokens_per_s: of the
    batch, at the mean latency.
    """

    latency_s: Spread
    ttft_s: Spread
    tpot_s: Spread | None
    output_tokens_per_s: float
    floor_latency_s: float
    floor_ttft_s: float
    floor_tpot_s: float | None


def measure_latency(
    llm: LLM, costs: Costs, roof: Roof, *, batch_size: int, input_len: int, output_len: int, warmup: int, iters: int,
    seed: int = 0, on_iteration: Callable[[], None] = lambda: None,
) -> Latency:  # fmt: skip
    """Run batches of random token ids, greedy, past the end of the sequence; none shares a prefix with another.

    Raises RequestError where a sequence does not fit.
    """
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    runs = []
    for i in range(warmup + iters):
        prompts = random_prompts((seed, i), batch_size, input_len, llm.loaded.spec.vocab_size)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        total = time.perf_counter() - start
        check(outputs)
        each = [out.timing.tpot_s for out in outputs if out.timing.tpot_s is not None]
        runs.append((total, max(out.timing.ttft_s for out in outputs), sum(each) / len(each) if each else 0.0))
        on_iteration()
    latency, first, each_token = ([run[i] for run in runs[warmup:]] for i in range(3))
    floors = [costs.step(batch_size, p).seconds(roof) for p in range(input_len, input_len + output_len - 1)]
    floor_ttft = costs.prefill(batch_size, input_len).seconds(roof)
    mean = Spread.of(latency)
    ttft = Spread.of(first)
    assert mean is not None and ttft is not None
    steps = output_len - 1
    return Latency(
        mean, ttft, Spread.of(each_token) if steps else None,
        batch_size * output_len / mean.mean, floor_ttft + sum(floors), floor_ttft,
        sum(floors) / steps if steps else None,
    )  # fmt: skip


def random_prompts(seed: Sequence[int], count: int, length: int, vocab_size: int) -> list[dict[str, Any]]:
    """Prompts of random token ids, which share prefixes only with prompts of the same seed."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()
    return [{"prompt_token_ids": row, "cache_salt": f"random {seed}"} for row in ids]


def check(outputs: list[RequestOutput]) -> None:
    """Raise RequestError for an answer that failed: what is measured then is not what was meant."""
    for output in outputs:
        for choice in output.outputs:
            if choice.error:
                raise RequestError(f"nothing can be measured: {choice.error}")
