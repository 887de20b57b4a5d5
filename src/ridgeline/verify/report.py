"""The results of a run: for each case the equal tokens, what was observed, and every difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ridgeline.verify.baseline import is_near
from ridgeline.verify.matrix import Case

Verdict = Literal["equal", "near tie", "not exercised", "DIFFERENT", "error", "not run"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not the baseline's.

    request: number of the request in the case. position: index in the answer. token: None if the answer ended too
    early. gap: distance of the two tokens in logits, None if it is not known (Baseline.gap).
    """

    request: int
    choice: int
    greedy: bool
    position: int
    token: int | None
    expected: int | None
    gap: float | None

    @property
    def near(self) -> bool:
        """Return whether rounding can explain the difference."""
        return is_near(self.gap)

    def describe(self) -> str:
        """Return a description in one line."""
        kind = "greedy" if self.greedy else "sampled"
        apart = f", {self.gap:.1e} in logits apart" if self.gap is not None else ""
        return (
            f"request {self.request}, choice {self.choice} ({kind}), token {self.position}: {self.token} instead of "
            f"{self.expected}{apart}{', a near tie' if self.near else ''}"
        )


@dataclass(frozen=True, slots=True)
class Score:
    """equal: tokens before each answer's first difference from the baseline. total: expected tokens."""

    equal: int = 0
    total: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.equal + other.equal, self.total + other.total)


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of an engine in a case.

    first_token: steps until the first request's first token. least_first_token: the least steps that the settings
    allow. slack: steps more that it may take, for a state snapshot where prompts diverge, or for a
    block whose last tokens the answer does not need. most_running: most sequences
    at once. hits: requests that found a prefix. cached_tokens: prompt tokens found in the prefix cache. shared_pages:
    most references to pages beyond the first to each. draft_tokens: drafts that were run. accepted_tokens: drafts that
    were accepted.
    """

    requests: int = 0
    steps: int = 0
    first_token: int = 0
    least_first_token: int = 0
    slack: int = 0
    most_running: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preempted_recompute: int = 0
    preempted_swap: int = 0
    shared_pages: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def missing(self, case: Case) -> tuple[str, ...]:
        """Return the settings of a case that had no effect."""
        alone = not case.others and case.n == 1
        seen = {
            "first token too early": self.first_token >= self.least_first_token,
            "first token too late": 0 <= self.first_token - self.least_first_token <= self.slack or not alone,
            "no other sequence ran": not case.others or self.most_running > case.n,
            "no prefix hit": case.prefix == "cold" or self.hits >= (1 if case.preempt else self.requests),
            "a prefix was found": case.prefix == "hit" or not self.hits,
            "nothing was computed again": case.preempt != "recompute" or self.preempted_recompute > 0,
            "nothing was swapped": case.preempt != "swap" or self.preempted_swap > 0,
            # What follows may occur nowhere before, and heads have random weights.
            "no draft was accepted": self.accepted_tokens > 0
            or not case.drafts
            or case.source not in ("known", "model"),
            "no draft was proposed": self.draft_tokens > 0 or not case.drafts or case.source == "ngram",
            "no draft was rejected": not case.wrong or self.accepted_tokens < self.draft_tokens,
            "no page was shared": case.n == 1 or case.apart or self.shared_pages > 0,
        }
        return tuple(reason for reason, was_seen in seen.items() if not was_seen)

    def describe(self, case: Case) -> str:
        """Return the observations that matter for a case, in a few words."""
        parts = [
            f"{self.steps} steps",
            f"first token after {self.first_token}" if case.chunk or case.steps_in_flight > 1 else "",
            f"{self.most_running} at once" if case.others else "",
            f"{self.hits} hits ({self.cached_tokens} tokens)" if case.prefix == "hit" else "",
            f"{self.preempted_swap} swapped" if self.preempted_swap else "",
            f"{self.preempted_recompute} recomputed" if self.preempted_recompute else "",
            f"{self.accepted_tokens} of {self.draft_tokens} drafts accepted" if case.drafts else "",
            f"{self.shared_pages} shared pages" if case.n > 1 else "",
        ]
        return ", ".join(filter(None, parts)) if self.steps else ""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a case. error: the exception in the case, if there was one."""

    case: Case
    greedy: Score = Score()
    sampled: Score = Score()
    differences: tuple[Difference, ...] = ()
    observed: Observed = Observed()
    error: str = ""
    seconds: float = 0.0

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the settings that should have had an effect and had none."""
        return () if self.case.impossible or self.error else self.observed.missing(self.case)

    @property
    def verdict(self) -> Verdict:
        """Return the most severe finding."""
        if self.case.impossible:
            return "not run"
        if self.error:
            return "error"
        if any(not d.near for d in self.differences):
            return "DIFFERENT"
        if self.missing:
            return "not exercised"
        return "near tie" if self.differences else "equal"

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "verdict": self.verdict,
            "missing": list(self.missing),
            "differences": [asdict(d) | {"near": d.near} for d in self.differences],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """A run of the matrix. smallest_lead: smallest lead of a greedy token over the second best one, in logits."""

    seed: int
    quick: bool
    longest: int
    new_tokens: int
    results: tuple[CaseResult, ...]
    smallest_lead: float | None
    seconds: float

    @property
    def equal(self) -> bool:
        """Return whether every token is the baseline's, or differs by rounding only."""
        return not {r.verdict for r in self.results} & {"DIFFERENT", "error"}

    @property
    def complete(self) -> bool:
        """Return whether every setting of every case had an effect."""
        return not any(r.missing for r in self.results)

    def verdicts(self) -> Mapping[Verdict, int]:
        """Return the number of cases with each verdict."""
        return Counter(r.verdict for r in self.results)

    @property
    def greedy(self) -> Score:
        return sum((r.greedy for r in self.results), Score())

    @property
    def sampled(self) -> Score:
        return sum((r.sampled for r in self.results), Score())

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "equal": self.equal,
            "complete": self.complete,
            "seed": self.seed,
            "quick": self.quick,
            "longest": self.longest,
            "new_tokens": self.new_tokens,
            "verdicts": dict(self.verdicts()),
            "greedy": asdict(self.greedy),
            "sampled": asdict(self.sampled),
            "smallest_lead": self.smallest_lead,
            "seconds": self.seconds,
            "cases": [r.to_json() for r in self.results],
        }
