"""Try a layout of plan/ask.py on the virtual clock: find how many replicas keep the limits at p99.

Requests arrive at random (Poisson), their lengths vary, and each goes to the replica with the fewest requests. At most
MOST_SIMULATED replicas are simulated, with their share of the arrivals. The first requests find an empty system, and
the last ones an emptying one; neither count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil

import numpy as np

from ridgeline.cost.footprint import largest
from ridgeline.errors import RequestError
from ridgeline.plan.ask import FULLEST, Layout, Question
from ridgeline.plan.planner import memory_of
from ridgeline.sched.routing import least_loaded
from ridgeline.sim.calibrated_cost import cost_of, draft_cost_of
from ridgeline.sim.drafting import drafts_of
from ridgeline.sim.metrics import SECOND, Answered, met
from ridgeline.sim.settings import Settings, settings
from ridgeline.sim.simulator import simulate
from ridgeline.sim.workload import Request, Workload, arrive, lengths, poisson

MOST_SIMULATED = 8  # replicas
MOST_TRIALS = 7  # of one layout
ROOM = 0.9  # share of its even load at which a layout is tried first
LONGEST = 4  # times the mean length that a sequence may have
MOST_CV = 5  # of lengths
LEAST_LENGTH = 2048  # of the longest sequence
FIRST, LAST = 0.2, 0.95  # part of the requests that counts, in order of arrival
FEWEST, MOST = 500, 1500  # requests of a trial
SOJOURNS = 10  # requests of a trial, in those that are open at a time


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a simulation. Times are in seconds.

    share: share of requests that keep both limits. load: requests divided by those that the replicas could serve if
    they arrived evenly. kept: both limits are kept at p99, and the load is at most FULLEST.
    """

    replicas: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    share: float
    load: float
    mean_batch: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """How requests vary. length_cv: coefficient of variation of both lengths. seed: seed of arrivals and lengths.

    Raises RequestError for values out of range.
    """

    length_cv: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.length_cv <= MOST_CV:
            raise RequestError(f"--length-cv is {self.length_cv}; it must be from 0 to {MOST_CV}")
        if self.seed < 0:
            raise RequestError(f"--seed is {self.seed}; it must be at least 0")


def longest(layout: Layout, question: Question) -> int:
    """Return the most tokens of a sequence: some times the mean, as far as the model and the memory allow."""
    wanted = max(LEAST_LENGTH, LONGEST * question.load.context)
    limit = min(wanted, layout.deployment.spec.max_position_embeddings)
    memory = memory_of(layout.deployment)
    return largest(lambda n: memory.footprint(1, n).fits, limit)


def settings_of(layout: Layout, question: Question) -> Settings:
    """Return the engine's settings on one replica of a layout."""
    return settings(layout.deployment, max_model_len=longest(layout, question), max_num_seqs=layout.batch)


def attempt(layout: Layout, question: Question, replicas: int, spread: Spread) -> Trial:
    """Simulate the users on so many replicas of a layout, at times that are as long as its margin says.

    A prompt's own time has a wider margin than steps have; the rest of it counts once.
    """
    simulated = min(replicas, MOST_SIMULATED)
    rate = question.requests_per_s * simulated / replicas
    chosen, sure = settings_of(layout, question), layout.sure
    found = simulate(
        Workload(arrive(drawn(question, spread, rate, chosen.max_model_len), poisson(rate, spread.seed))),
        chosen, cost_of(layout.deployment, sure), replicas=simulated, route=least_loaded, slo=question.promise,
        seed=spread.seed, drafts=drafts_of(layout.deployment, None, partial(draft_cost_of, sure=sure)),
    )  # fmt: skip
    load = question.requests_per_s / (replicas * layout.requests_per_s)
    more_s = sure.own_s(layout.figures.ttft_s)
    return judged(found.book.answered(), question, replicas, load, found.report.mean_batch, more_s)


def drawn(question: Question, spread: Spread, rate: float, limit: int) -> list[Request]:
    """Return the requests of a trial, at time 0."""
    open_at_a_time = rate * (question.ttft_s + question.output / question.tokens_per_s)
    count = min(max(FEWEST, ceil(SOJOURNS * open_at_a_time)), MOST)
    return list(islice(lengths(question.prompt, question.output, spread.length_cv, spread.seed, limit), count))


def judged(
    answered: Answered, question: Question, replicas: int, load: float, mean_batch: float, more_ttft_s: float = 0.0
) -> Trial:
    """Return the result of a run. more_ttft_s: seconds that come on top of each time to first token."""
    count = len(answered.arrival)
    part = slice(int(FIRST * count), max(int(LAST * count), int(FIRST * count) + 1))
    ttft = (answered.first - answered.arrival)[part] / SECOND + more_ttft_s
    tpot = answered.tpot[part]
    tpot = tpot[~np.isnan(tpot)]
    limits = question.promise
    (t50, t99), (p50, p99) = (_percentiles(values) for values in (ttft, tpot))
    kept = met(limits, answered)[part] & (ttft <= question.ttft_s)
    assert limits.ttft_s is not None and limits.tpot_s is not None
    is_kept = t99 <= limits.ttft_s and p99 <= limits.tpot_s and load <= FULLEST
    return Trial(replicas, t50, t99, p50, p99, float(kept.mean()), load, mean_batch, is_kept)


def _percentiles(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    p50, p99 = np.percentile(values, (50, 99))
    return float(p50), float(p99)


def fewest(most: int, least: int, try_out: Callable[[int], Trial]) -> Trial | None:
    """Return the trial with the fewest replicas that keep the limits; the last one tried if none does, None if not even
    the least are allowed.

    most: replicas that are allowed. least: replicas below which the limits cannot be kept. try_out: makes a trial.
    Trials stop after MOST_TRIALS; then the best one that is known counts.
    """
    if least > most:
        return None
    tried: dict[int, Trial] = {}
    failed, good = least - 1, None
    count = min(most, max(least, ceil(least / ROOM)))
    while len(tried) < MOST_TRIALS:
        found = tried[count] = try_out(count)
        if found.kept:
            good = count
        else:
            failed = count
        if good is not None and good - failed <= max(1, good // 25):
            break
        if good is not None:
            count = (failed + good) // 2
        elif count == most:
            break
        else:
            count = min(most, count + max(1, ceil(count / 6)))
    return tried[good] if good is not None else tried[max(tried)]
