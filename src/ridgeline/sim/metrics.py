"""The columns of a run, simulated or measured: one definition for both.

ttft     from arrival to the first token, the wait in the queue included
tpot     (last token - first token) / (tokens - 1) of one answer; none for a single token
itl      between two tokens of an answer, each gap once
e2e      from arrival to the last token
goodput  requests per second that meet every limit of the SLO
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from ridgeline.plan.limits import Slo
from ridgeline.sched.stats import DraftCounts

QUANTILES = (50, 90, 95, 99)
SECOND = 10**9
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, percentiles and maximum of times in seconds; percentiles between two values are interpolated."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_ns: Ints, weights: Ints | None = None) -> Self | None:
        """Return the percentiles of nanoseconds. weights: how often each value counts. None if there are no values."""
        weights = np.ones(len(values_ns), np.int64) if weights is None else weights
        order = np.argsort(values_ns, kind="stable")
        values, ends = values_ns[order], np.cumsum(weights[order])
        if not len(ends) or not ends[-1]:
            return None
        count = int(ends[-1])
        found = []
        for q in QUANTILES:
            rank = (count - 1) * q / 100
            around = (int(rank), min(int(rank) + 1, count - 1))
            low, high = (int(values[np.searchsorted(ends, at, "right")]) for at in around)
            found.append((low + (high - low) * (rank - int(rank))) / SECOND)
        mean = sum(map(operator.mul, values.tolist(), weights[order].tolist())) / count / SECOND
        p50, p90, p95, p99 = found
        return cls(mean, p50, p90, p95, p99, int(values[weights[order] > 0][-1]) / SECOND)


@dataclass(frozen=True, slots=True)
class DraftsUsed:
    """Draft tokens of a run.

    verifications: runs of a sequence with drafts. tokens_per_verification: accepted drafts and one more, on average.
    acceptance: share of the drafts at each depth that were accepted, of those whose predecessors all were.
    drafting_share: share of the busy time in which drafts were proposed; None if it is not known.
    """

    verifications: int
    num_drafts: int
    num_accepted: int
    tokens_per_verification: float
    acceptance: tuple[float, ...]
    drafting_share: float | None = None

    @classmethod
    def of(cls, counts: Sequence[DraftCounts], drafting_share: float | None = None) -> Self | None:
        """Return the sum of several counts; None if no draft was verified."""
        total = DraftCounts()
        for one in counts:
            total = total.plus(one)
        if not total.verifications:
            return None
        return cls(total.verifications, total.run, total.accepted, total.tokens, total.acceptance, drafting_share)


@dataclass(frozen=True, slots=True)
class Report:
    """The columns of a run. Times are in seconds; the run lasts from the first arrival to the last token.

    requests: requests that were answered. refused: requests that can never fit. mean_batch, mean_waiting,
    mean_used_bytes: sequences of a step, sequences that wait and bytes of pages in use, as means over the time in which
    steps run. utilization: share of the time in which steps run. peak_bytes: most bytes of pages in use. state_bytes:
    bytes of all pages. hit_rate: share of prompt tokens found in the prefix index. goodput: requests per second that
    meet the SLO. attainment: share of requests that meet it. Both are None without an SLO. drafts: None without drafts.
    """

    requests: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    steps: int
    mean_batch: float
    mean_waiting: float
    utilization: float
    mean_used_bytes: float
    peak_bytes: int
    state_bytes: int
    hit_rate: float
    preemptions: int
    replicas: int = 1
    goodput: float | None = None
    attainment: float | None = None
    slo: Slo | None = field(default=None)
    drafts: DraftsUsed | None = None

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def total_tokens_per_s(self) -> float:
        """Return the prompt and output tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.duration_s if self.duration_s else 0.0

    def to_json(self) -> Mapping[str, Any]:
        """Return all columns, with rates."""
        rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
        return asdict(self) | {name: getattr(self, name) for name in rates}


@dataclass(frozen=True, slots=True)
class Answered:
    """Requests that were answered, one entry for each, in order of arrival; times in nanoseconds.

    gaps: times between two tokens of an answer. gap_counts: how often each occurred.
    """

    arrival: Ints
    first: Ints
    last: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    gaps: Ints
    gap_counts: Ints

    @property
    def tpot(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Time per output token in seconds; NaN for an answer of one token."""
        steps = np.where(self.output_tokens > 1, self.output_tokens - 1, 1)
        return np.where(self.output_tokens > 1, (self.last - self.first) / steps / SECOND, np.nan)


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of the machines: sums over steps of their nanoseconds, some multiplied by sequences or by bytes."""

    steps: int = 0
    busy_ns: int = 0
    batch_ns: int = 0
    waiting_ns: int = 0
    byte_ns: int = 0
    peak_bytes: int = 0
    state_bytes: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    refused: int = 0
    replicas: int = 1
    drafts: DraftsUsed | None = None


def met(slo: Slo, answered: Answered) -> np.ndarray[Any, Any]:
    """Return which requests meet every limit. An answer of one token meets the limit of TPOT."""
    found = {
        "ttft": (answered.first - answered.arrival) / SECOND,
        "tpot": answered.tpot,
        "e2e": (answered.last - answered.arrival) / SECOND,
    }
    kept = np.ones(len(answered.arrival), bool)
    for name, limit in slo.limits.items():
        kept &= ~(found[name] > limit)
    return kept


def report(answered: Answered, usage: Usage, slo: Slo | None = None) -> Report:
    """Return the columns of a run."""
    count = len(answered.arrival)
    span = int(answered.last.max() - answered.arrival.min()) if count else 0
    duration, busy = span / SECOND, usage.busy_ns
    ttft, e2e = answered.first - answered.arrival, answered.last - answered.arrival
    tpot = answered.tpot
    good = int(met(slo, answered).sum()) if slo else 0
    return Report(
        requests=count,
        refused=usage.refused,
        prompt_tokens=int(answered.prompt_tokens.sum()),
        output_tokens=int(answered.output_tokens.sum()),
        duration_s=duration,
        ttft_s=Percentiles.of(ttft),
        tpot_s=Percentiles.of(np.rint(tpot[~np.isnan(tpot)] * SECOND).astype(np.int64)),
        itl_s=Percentiles.of(answered.gaps, answered.gap_counts),
        e2e_s=Percentiles.of(e2e),
        steps=usage.steps,
        mean_batch=usage.batch_ns / busy if busy else 0.0,
        mean_waiting=usage.waiting_ns / busy if busy else 0.0,
        utilization=busy / (span * usage.replicas) if span else 0.0,
        mean_used_bytes=usage.byte_ns / busy if busy else 0.0,
        peak_bytes=usage.peak_bytes,
        state_bytes=usage.state_bytes,
        hit_rate=usage.hit_tokens / usage.queried_tokens if usage.queried_tokens else 0.0,
        preemptions=usage.preemptions,
        replicas=usage.replicas,
        goodput=good / duration if slo and duration else None,
        attainment=good / count if slo and count else None,
        slo=slo,
        drafts=usage.drafts,
    )
