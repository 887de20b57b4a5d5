"""Counters of the engine process: plain numbers that it sends to the HTTP process for /metrics."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from ridgeline.sched.counts import Histogram
from ridgeline.spec.request import RequestOutput

# Upper bounds of the histograms' buckets. They are vLLM's, so that vLLM's dashboards work.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LATENCY = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)
STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
DELIVERY = (
    0.0001, 0.0002, 0.0005, 0.00075, 0.001, 0.00125, 0.0015, 0.00175, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01,
    0.015, 0.02, 0.05, 0.1, 0.5,
)  # fmt: skip
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
STEP_TOKENS = tuple(float(2**e) for e in range(14))

RECENT_SECONDS = 60
RECENT_VALUES = 1024  # a busy server keeps only its last values of a minute


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Percentiles in the unit of the values, interpolated between two values."""

    p50: float
    p90: float
    p99: float


class RecentHistogram(Histogram):
    """A histogram that also keeps its last values, since its buckets are too coarse for percentiles of a minute."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._values: deque[tuple[float, float]] = deque(maxlen=RECENT_VALUES)

    def observe(self, value: float) -> None:
        """Count one value, and keep it."""
        super().observe(value)
        self._values.append((time.perf_counter(), value))

    def move(self, seconds: float) -> None:
        """Add seconds to the times of the last values, whose clock was another one."""
        self._values = deque(((when + seconds, value) for when, value in self._values), maxlen=RECENT_VALUES)

    def recent(self, now: float) -> Quantiles | None:
        """Return the percentiles of the last minute before `now` (time.perf_counter), or None without values."""
        values = [value for when, value in self._values if when > now - RECENT_SECONDS]
        return Quantiles(*np.percentile(values, (50, 90, 99)).tolist()) if values else None

    def plus(self, other: Self) -> Self:
        """Return the counts and the last values of both."""
        both = super().plus(other)
        both._values = deque(sorted((*self._values, *other._values)), maxlen=RECENT_VALUES)
        return both


@dataclass(slots=True)
class EngineMeters:
    """Counts since the engine process started. Names that end in _s are seconds.

    steps: steps of the engine. busy_s: time in steps. alive_s: age of the process. last_step_s: time of the last step
    that ran a forward pass. forwards: number of forward passes. sequences: sequences in all forward passes. step_bytes,
    step_flops: bytes moved and operations of all forward passes by the cost model. predicted_s, roof_s: their predicted
    time, and their least time by the roofline. drift: measured time of the last seconds of steps, divided by their
    predicted time; 0 if it is not known. resident_bytes: memory that the process has in RAM. finished: finished
    sequences by reason. block_passes: passes over blocks of finished answers, in a diffusion model. page_checks: checks
    of the page tables by result, "agreed" or "wrong". embedded_texts, embedded_tokens: texts from which vectors or
    scores were computed, and their tokens.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    alive_s: float = 0.0
    failed_steps: int = 0
    last_step_s: float = 0.0
    forwards: int = 0
    sequences: int = 0
    step_bytes: float = 0.0
    step_flops: float = 0.0
    predicted_s: float = 0.0
    roof_s: float = 0.0
    drift: float = 0.0
    resident_bytes: int = 0
    block_passes: int = 0
    embedded_texts: int = 0
    embedded_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    page_checks: Counter[str] = field(default_factory=Counter)
    ttft: RecentHistogram = field(default_factory=lambda: RecentHistogram(TTFT))
    inter_token: Histogram = field(default_factory=lambda: Histogram(PER_TOKEN))
    per_token: RecentHistogram = field(default_factory=lambda: RecentHistogram(PER_TOKEN))
    e2e: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    queue: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    inference: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    prefill: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    decode: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTIONS))

    def move(self, seconds: float) -> None:
        """Add seconds to all times of a clock, as for the clock of another machine."""
        for histogram in (self.ttft, self.per_token):
            histogram.move(seconds)

    def finish(self, output: RequestOutput) -> None:
        """Count a complete request."""
        timing, tokens = output.timing, sum(len(o.token_ids) for o in output.outputs)
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        self.block_passes += output.num_passes
        self.finished.update(str(o.finish_reason) for o in output.outputs)
        self.e2e.observe(timing.total_s)
        self.queue.observe(timing.queued_s)
        self.inference.observe(timing.total_s - timing.queued_s)
        self.prefill.observe(timing.ttft_s - timing.queued_s)
        self.decode.observe(timing.total_s - timing.ttft_s)
        if timing.tpot_s is not None:
            self.per_token.observe(timing.tpot_s)
        self.request_prompt_tokens.observe(len(output.prompt_token_ids))
        self.request_generation_tokens.observe(tokens)
        self.request_preemptions.observe(output.num_preempted)
