"""Give each part of a model its own bits, so that the model takes a given number of bits on average.

The bits go where they lower the divergence most, as measured: each part is rounded alone, in each number of bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to store a part: its bits, its bytes, and the divergence that it causes alone."""

    bits: int
    num_bytes: float
    cost: float


def spend(choices: Mapping[str, list[Choice]], budget: float) -> dict[str, Choice]:
    """Return a choice for each part with at most `budget` bytes in total and a small sum of costs.

    Starts with the fewest bytes and takes the step with the greatest gain for each byte, until no step fits. Steps lie
    on the lower convex hull of each part's choices: until the first step that does not fit, no other choice has both
    fewer bytes and a smaller cost.

    Raises ValueError if even the fewest bytes are too many.
    """
    hulls = {name: _hull(some) for name, some in choices.items()}
    at = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].num_bytes for hull in hulls.values())
    if left < 0:
        raise ValueError(f"the budget of {budget:,.0f} bytes is {-left:,.0f} too small")
    while True:
        steps = [
            (_slope(hull[at[name]], hull[at[name] + 1]), name)
            for name, hull in hulls.items()
            if at[name] + 1 < len(hull) and hull[at[name] + 1].num_bytes - hull[at[name]].num_bytes <= left
        ]
        if not steps:
            return {name: hull[at[name]] for name, hull in hulls.items()}
        _, name = max(steps)
        before, after = hulls[name][at[name]], hulls[name][at[name] + 1]
        left -= after.num_bytes - before.num_bytes
        at[name] += 1


def _slope(before: Choice, after: Choice) -> float:
    return (before.cost - after.cost) / (after.num_bytes - before.num_bytes)


def _hull(choices: list[Choice]) -> list[Choice]:
    """Return the choices that no mixture of others beats, with rising bytes and falling costs."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.num_bytes, c.cost)):
        if hull and choice.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull
