"""Measure for two seconds how fast a model decodes one sequence, for reports that compare a few models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from ridgeline.errors import DeviceError
from ridgeline.llm import LLM
from ridgeline.measure.latency import check, random_prompts
from ridgeline.measure.quiet import OthersLoad
from ridgeline.settings import EngineOptions
from ridgeline.spec.request import SamplingParams

LIMIT_S, MOST = 2.0, 5  # most seconds of a measurement, and most answers, of which the median counts
WARM_UP = 32  # tokens of the prompts whose times say how long a measurement takes
BUSY = 0.1  # share of all cores that other programs use, above which the notes say so


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second that one sequence was measured to decode.

    context: tokens of the sequence at its end. others: share of all cores that other programs used meanwhile.
    """

    tokens_per_s: float
    context: int
    others: float


def measure_rate(model: str, prompt: int, answer: int, threads: int | None) -> Rate | None:
    """Load a model on the CPU and decode one sequence; None if the model does not fit into memory.

    prompt, answer: tokens of the sequence, or fewer if they would take longer than LIMIT_S.
    """
    options = EngineOptions(max_num_seqs=1, speculative="off")
    try:
        llm = LLM(
            model, device="cpu", threads=threads, engine=options, skip_tokenizer_init=True,
            max_model_len=prompt + answer,
        )  # fmt: skip
    except DeviceError:
        return None
    others, few = OthersLoad(), min(WARM_UP, prompt)
    first_s, token_s = map(min, zip(*(_timed(llm, i, few, min(2, answer)) for i in range(2)), strict=True))
    prompt = min(prompt, max(few, int(LIMIT_S / 2 / first_s * few)))
    answer = min(answer, max(2, int(LIMIT_S / 4 / token_s)))
    began, seconds = time.perf_counter(), list[float]()
    while not seconds or (len(seconds) < MOST and time.perf_counter() - began < LIMIT_S / 4):
        seconds.append(_timed(llm, 2 + len(seconds), prompt, answer)[1])
    return Rate(1 / median(seconds), prompt + answer, others.share())


def _timed(llm: LLM, seed: int, prompt: int, answer: int) -> tuple[float, float]:
    """Return the seconds until the first token of an answer, and the mean seconds of each further one."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    outputs = llm.generate(random_prompts((seed,), 1, prompt, llm.loaded.spec.vocab_size), params)
    check(outputs)
    timing = outputs[0].timing
    return timing.ttft_s, timing.tpot_s or timing.total_s


def rate_notes(rates: Mapping[str, Rate | None], context: int) -> tuple[str, ...]:
    """Return remarks about measured rates by the names of models. context: tokens of the sequence that was wanted."""
    notes = [
        f"{name} was not measured, because it does not fit into memory" for name, rate in rates.items() if not rate
    ]
    known = [rate for rate in rates.values() if rate is not None]
    if (shortest := min((rate.context for rate in known), default=context)) < context:
        notes.append(
            f"tok/s was measured for {LIMIT_S:g} seconds at most, in a context of {shortest:,} tokens instead of "
            f"{context:,}"
        )
    if (most := max((rate.others for rate in known), default=0.0)) > BUSY:
        notes.append(f"other programs used {most:.0%} of the machine while tok/s was measured, so it may be too low")
    return tuple(notes)
