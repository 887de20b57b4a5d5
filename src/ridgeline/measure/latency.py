"""Measure the latency of whole batches: prompts of one length that start together, and answers of one length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.llm import LLM
from ridgeline.measure.machine import Roof
from ridgeline.measure.predict import Asked, roofline_times
from ridgeline.measure.spread import Spread
from ridgeline.spec.request import RequestOutput, SamplingParams
from ridgeline.system import total_bytes


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of a batch in seconds, over all iterations.

    latency_s: until the whole batch is finished. ttft_s: until every sequence has its first token. tpot_s: (time of the
    last token - time of the first) / (tokens - 1), the mean over the sequences; None for answers of one token.
    output_tokens_per_s: tokens of the batch over its mean latency. roofline_...: the same times if each operation ran
    at the machine's peaks.
    """

    latency_s: Spread
    ttft_s: Spread
    tpot_s: Spread | None
    output_tokens_per_s: float
    roofline_latency_s: float
    roofline_ttft_s: float
    roofline_tpot_s: float | None


def measure_latency(
    llm: LLM, roof: Roof, *, batch_size: int, input_len: int, output_len: int, warmup: int, iters: int,
    seed: int = 0, on_iteration: Callable[[], None] = lambda: None,
) -> Latency:  # fmt: skip
    """Run batches of random token ids with greedy sampling; end tokens do not stop a sequence.

    No two prompts share a prefix.

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
    machine = roof.hardware(memory_bytes=total_bytes(), on_host=llm.loaded.table.memory.on_host)
    roofline = roofline_times(llm.loaded, llm.config, [Asked(input_len, output_len)] * batch_size, machine)
    gaps = [gap for gap in roofline.tpot_s if gap is not None]
    mean = Spread.of(latency)
    ttft = Spread.of(first)
    assert mean is not None and ttft is not None
    return Latency(
        mean, ttft, Spread.of(each_token) if gaps else None,
        batch_size * output_len / mean.mean, roofline.elapsed_s, max(roofline.ttft_s),
        sum(gaps) / len(gaps) if gaps else None,
    )  # fmt: skip


def random_prompts(seed: Sequence[int], count: int, length: int, vocab_size: int) -> list[dict[str, Any]]:
    """Return prompts of random token ids. They share prefixes only with prompts of the same seed."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()
    return [{"prompt_token_ids": row, "cache_salt": f"random {seed}"} for row in ids]


def check(outputs: list[RequestOutput]) -> None:
    """Raise RequestError if an answer failed, because the times then measure something else."""
    for output in outputs:
        for choice in output.outputs:
            if choice.error:
                raise RequestError(f"nothing can be measured: {choice.error}")
