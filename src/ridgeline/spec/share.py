"""Say which numbers of a model's weights a rank holds: derived from the weights of the model and of its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from ridgeline.spec.model import ModelSpec
from ridgeline.spec.weight import Weight


@dataclass(frozen=True, slots=True)
class Share:
    """The numbers of a weight that a rank holds.

    Attributes:
        axis: the axis that is cut, counted from the last one, which is -1; None: the weight is whole.
        runs: the first and the end of the indices along it, run after run.
        padding: further indices, whose numbers nobody reads.
        is_zero: the rank holds zeros, because rank 0 adds the bias once.
    """

    axis: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    padding: int = 0
    is_zero: bool = False

    def indices(self) -> list[int]:
        """Return the indices along the axis, with the last one again for padding."""
        found = [i for first, end in self.runs for i in range(first, end)]
        return found + [found[-1]] * self.padding


WHOLE = Share()


def shares(whole: ModelSpec, part: ModelSpec) -> Mapping[str, Share]:
    """Return the share of each weight that the rank `part.rank` of a model holds."""
    weights = {w.name: w for w in whole.weights()}
    return {w.name: _share(weights[w.name], w, weights, part.rank, part.ranks) for w in part.weights()}


def _share(whole: Weight, part: Weight, weights: Mapping[str, Weight], rank: int, ranks: int) -> Share:
    if whole.shape == part.shape:
        module, _, kind = whole.name.rpartition(".")
        matrix = weights.get(f"{module}.weight")
        is_once = kind == "bias" and matrix is not None and matrix.split == "in"
        return Share(is_zero=True) if is_once and rank else WHOLE
    axes = [i for i, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    assert len(axes) == 1, f"{whole.name} is cut along several axes"
    axis = axes[0]
    sizes = whole.fused if axis == 0 and whole.fused else (whole.shape[axis],)
    owns = part.fused if axis == 0 and part.fused else (part.shape[axis],)
    runs, padding = [], 0
    for start, size, own in zip(accumulate((0, *sizes)), sizes, owns, strict=False):
        # Ranks that hold copies of the same units follow each other. Where rows do not divide, the last are padding.
        first = min(rank // (ranks * own // size) * own, size - 1)
        end = min(first + own, size)
        runs.append((start + first, start + end))
        padding += own - (end - first)
    return Share(axis - len(whole.shape), tuple(runs), padding)
