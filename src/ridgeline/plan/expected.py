"""Compute the expected times beside the roof: medians and percentiles of a plan's figures.

On a GPU that nobody calibrated, medians come from the roofline with efficiencies, and bands from how far published
results are from it (cost/efficiency.py). On a calibrated CPU, the plan's own times are the medians, and bands come from
the measured error of such predictions (bench/plan_error.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from statistics import NormalDist

from ridgeline.cost.efficiency import CALIBRATED, PERCENTILES, Efficiency, Kind, efficiency_of
from ridgeline.plan.planner import Figures, Load, Planner
from ridgeline.spec.hardware import HardwareSpec

Band = Mapping[str, float]  # p10, p50 and p90

# Figure -> the kind of error that it has, and whether it is a rate.
FIGURES: Mapping[str, tuple[Kind, bool]] = {
    "step_s": ("tpot", False), "ttft_s": ("ttft", False), "tpot_s": ("tpot", False),
    "served_ttft_s": ("ttft", False), "served_tpot_s": ("tpot", False), "tokens_per_s": ("tpot", True),
    "served_tokens_per_s": ("throughput", True),
}  # fmt: skip
LEVELS: Mapping[str, float] = {"p10": 0.1, "p50": 0.5, "p90": 0.9}  # probability that a time is at most as long
WHY = {
    "machine": "fitted to published results, some of them of this machine",
    "family": "fitted to published results of other machines of its generation",
    "none": "fitted to published results of other generations, since there are none of this one",
    "calibrated": "the measured error of predictions on calibrated machines",
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Percentiles of the figures of a load, by name. known: their origin, a key of WHY."""

    bands: Mapping[str, Band]
    known: str


def expected(planner: Planner, load: Load, roof: Figures) -> Expected | None:
    """Return what to expect of a load; None on a machine of which too little is known.

    roof: the figures of the planner. Nothing beats the roof, so a percentile that would lie beyond it is the roof's.
    """
    d = planner.deployment
    if d.hardware.rates is not None:
        return Expected({name: _band(name, roof, roof, CALIBRATED, bounded=False) for name in FIGURES}, "calibrated")
    found = efficiency_of(d.hardware)
    if found is None:
        return None
    medians = Planner(d, found).figures(load)
    return Expected({name: _band(name, medians, roof, found, bounded=True) for name in FIGURES}, found.known)


@dataclass(frozen=True, slots=True)
class Sureness:
    """How sure times on a machine are.

    efficiency: numbers that give the medians; None for the planner's own times. ttft, tpot: factor over the median
    that a time stays below with the confidence that was asked for.
    """

    efficiency: Efficiency | None
    ttft: float
    tpot: float

    @property
    def is_roof(self) -> bool:
        """Return whether times are the planner's own, without a margin."""
        return self == ROOF

    def own_s(self, prompt_s: float) -> float:
        """Return the seconds by which a prompt's own time may exceed what the margin of steps gives it."""
        return max(self.ttft - self.tpot, 0.0) * prompt_s


ROOF = Sureness(None, 1.0, 1.0)  # times of the planner, without a margin


def sureness(hardware: HardwareSpec, confidence: float) -> Sureness:
    """Return how sure times on a machine are; times at the roof, without a margin, where too little is known."""
    found = CALIBRATED if hardware.rates is not None else efficiency_of(hardware)
    if found is None:
        return ROOF
    normal = NormalDist().inv_cdf(confidence)
    factors = (exp(normal * found.spread[kind]) for kind in ("ttft", "tpot"))
    return Sureness(None if found is CALIBRATED else found, *factors)


def origin(hardware: HardwareSpec) -> str:
    """Return where the expected times of a machine come from; "" where too little is known of it."""
    if hardware.rates is not None:
        return WHY["calibrated"]
    found = efficiency_of(hardware)
    return WHY[found.known] if found else ""


def _band(name: str, medians: Figures, roof: Figures, found: Efficiency, *, bounded: bool) -> Band:
    kind, is_rate = FIGURES[name]
    median, least = getattr(medians, name), getattr(roof, name)
    if is_rate:
        median, least = 1 / median, 1 / least
    times = {p: found.at(median, kind, normal) for p, normal in PERCENTILES.items()}
    if bounded:
        times = {p: max(value, least) for p, value in times.items()}
    if not is_rate:
        return times
    return {"p10": 1 / times["p90"], "p50": 1 / times["p50"], "p90": 1 / times["p10"]}
