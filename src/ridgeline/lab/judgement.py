"""Judge a claim by a number that was measured, and an interval that is fixed before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Verdict(StrEnum):
    """The lab's answer to a claim on this machine."""

    holds = "holds"
    differs = "differs"
    untried = "cannot be tried here"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one claim.

    text: a sentence with what was seen; for `differs`, by how much and why; for `untried`, what would be needed.
    effect: the number that decides. low, high: the interval of that number over repetitions or seeds, or None for an
    exact number. threshold: the limit, which the experiment fixes.
    """

    claim: int
    verdict: Verdict
    text: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: str = ""


def equal(claim: int, found: float, expected: float, text: str) -> Judgement:
    """Judge a number that has to be exact."""
    verdict = Verdict.holds if found == expected else Verdict.differs
    return Judgement(claim, verdict, text, found, threshold=f"= {expected:,.15g}")


def within(
    claim: int, found: float, low: float, high: float, text: str, spread: tuple[float, float] | None = None
) -> Judgement:
    """Judge a number that has to be from `low` to `high`. spread: its interval over repetitions."""
    verdict = Verdict.holds if low <= found <= high else Verdict.differs
    least, most = spread or (None, None)
    return Judgement(claim, verdict, text, found, least, most, f"{low:.4g} to {high:.4g}")


def at_least(claim: int, found: float, limit: float, text: str, spread: tuple[float, float] | None = None) -> Judgement:
    """Judge a number that must not be below a limit; with a spread, its low end must not be below the limit."""
    verdict = Verdict.holds if (spread[0] if spread else found) >= limit else Verdict.differs
    least, most = spread or (None, None)
    return Judgement(claim, verdict, text, found, least, most, f"at least {limit:.4g}")


def at_most(claim: int, found: float, limit: float, text: str, spread: tuple[float, float] | None = None) -> Judgement:
    """Judge a number that must not be above a limit; with a spread, its high end must not be above the limit."""
    verdict = Verdict.holds if (spread[1] if spread else found) <= limit else Verdict.differs
    least, most = spread or (None, None)
    return Judgement(claim, verdict, text, found, least, most, f"at most {limit:.4g}")


def untried(claim: int, needed: str) -> Judgement:
    """Return the verdict on a claim that this machine or these models cannot try. needed: a sentence that says so."""
    return Judgement(claim, Verdict.untried, needed)


def only_if(found: Judgement, condition: bool) -> Judgement:
    """Return a judgement that also needs a second condition: without it, the claim differs."""
    return found if condition else replace(found, verdict=Verdict.differs)
