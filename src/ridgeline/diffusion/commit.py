"""Choose how many predictions of a pass are kept: at least one, so that a block of n tokens takes at most n passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from ridgeline.spec.diffusion import Schedule

LAST_TIME = 1e-3  # at which the last pass of Dream's schedule ends


def shares(masked: int, passes: int) -> list[int]:
    """Return how many tokens each pass keeps of a block with `masked` masks: nearly equal, larger ones first (LLaDA).

    passes: number of passes wanted; no pass is without a token, so there may be fewer.
    """
    passes = min(passes, masked)
    base, more = divmod(masked, passes) if passes else (0, 0)
    return [base + (i < more) for i in range(passes)]


def shares_by_time(masked: int, passes: int) -> list[int]:
    """Return how many tokens each pass keeps as time runs evenly from 1 to 0.001 (Dream, arXiv:2508.15487).

    A pass keeps its share of the masks, rounded down, and the last one all that are left. A pass that would keep none
    is left out: it would change nothing.
    """
    step, found, left = (1 - LAST_TIME) / passes, list[int](), masked
    for i in range(passes):
        share = step / (1 - i * step)
        found.append(left if i == passes - 1 else int(left * share))
        left -= found[-1]
    return [count for count in found if count]


def by_time(uniforms: Sequence[float], number: int, passes: int) -> list[int]:
    """Return the indices that a pass keeps, each with the chance that time takes it (Dream's `origin`): maybe none.

    uniforms: noise in [0, 1) of each index. number: the pass's index; the last of `passes` keeps all.
    """
    step = (1 - LAST_TIME) / passes
    chance = 1.0 if number >= passes - 1 else step / (1 - number * step)
    return [i for i, uniform in enumerate(uniforms) if uniform < chance]


# Named by MaskedDiffusion.schedule.
SCHEDULES: Mapping[Schedule, Callable[[int, int], list[int]]] = {"equal": shares, "time": shares_by_time}


def surest(confidences: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` largest confidences, surest first; of equal ones, the lower index first."""
    order = sorted(range(len(confidences)), key=lambda i: (-confidences[i], i))
    return order[:count]


def above(probabilities: Sequence[float], threshold: float) -> list[int]:
    """Return the indices whose probability is at least `threshold`, and always that of the largest one.

    The tokens of n positions with probabilities above 1 - e are the most likely ones together where (n + 1) e <= 1
    (Fast-dLLM, arXiv:2505.22618, theorem 1).
    """
    order = surest(probabilities, len(probabilities))
    return [i for rank, i in enumerate(order) if rank == 0 or probabilities[i] >= threshold]


def within_factor(probabilities: Sequence[float], factor: float) -> list[int]:
    """Return the n surest indices for the largest n with (n + 1) (1 - p_n) < factor, and always at least one.

    p_n is the n-th largest probability (Fast-dLLM, arXiv:2505.22618, section 3.3).
    """
    order = surest(probabilities, len(probabilities))
    most = max((n for n, i in enumerate(order, 1) if (n + 1) * (1 - probabilities[i]) < factor), default=1)
    return order[:most]


def within_entropy(entropies: Sequence[float], bound: float) -> list[int]:
    """Return the n indices of the least entropies, for the largest n whose entropies less their largest are in `bound`.

    The divergence of the tokens' joint distribution from the product of their own distributions is at most this sum,
    so that tokens within a small bound are nearly independent (arXiv:2505.24857; DiffusionGemma). The sum is 0 for one
    token, which is always returned. entropies, bound: in nats.
    """
    order = surest([-entropy for entropy in entropies], len(entropies))
    before = accumulate((entropies[i] for i in order), initial=0.0)
    return [i for i, total in zip(order, before, strict=False) if total <= bound]
