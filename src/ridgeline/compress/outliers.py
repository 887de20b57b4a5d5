"""Report input columns with outliers, which LLM.int8() multiplies in float (arXiv:2208.07339)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ridgeline.compress.grid import Floats

K = TypeVar("K")
THRESHOLD = 6.0  # magnitude from which an input is an outlier
FAR = 8.0  # a column is far below the scale of its rows if it uses less than one part in 8 of their range


class Outliers(NamedTuple):
    """The columns of a matrix's input that reach the threshold.

    columns: their indices, the largest magnitude first. peaks: the largest magnitude of each. share: their share of
    all columns.
    """

    columns: tuple[int, ...]
    peaks: tuple[float, ...]
    share: float

    def to_json(self) -> dict[str, object]:
        """Return the fields by name, magnitudes to 4 digits."""
        return {
            "columns": list(self.columns),
            "peaks": [float(f"{p:.4g}") for p in self.peaks],
            "share": float(f"{self.share:.4g}"),
        }


def outlier_columns(max_abs: Floats, threshold: float = THRESHOLD) -> Outliers:
    """Return the columns whose largest magnitude is at least the threshold. max_abs: [in]."""
    found = [int(i) for i in np.argsort(-max_abs, kind="stable") if max_abs[i] >= threshold]
    return Outliers(tuple(found), tuple(float(max_abs[i]) for i in found), len(found) / max_abs.size)


def outlier_report(max_abs: Mapping[K, Floats], threshold: float = THRESHOLD) -> dict[K, Outliers]:
    """Return the outliers of each matrix that has some, by its name."""
    every = {name: outlier_columns(peaks, threshold) for name, peaks in max_abs.items()}
    return {name: found for name, found in every.items() if found.columns}


def small_column_scales(max_abs: Floats, weights: Sequence[Floats]) -> Floats:
    """Return scales [in] for outliers that meet small weights: powers of two, and 1 for all other columns.

    LLM.int8() multiplies outliers exactly, but their columns are codes with the scales of whole rows, which small
    columns use badly. The columns are multiplied with the scales, and their inputs divided by them.

    max_abs: [in], the largest |x| of each input channel. weights: all matrices [out, in] that read this input.
    """
    used = np.zeros(len(max_abs))  # the largest share of a row's range that a column uses
    for weight in weights:
        rows = np.abs(weight).max(1, keepdims=True)
        used = np.maximum(used, (np.abs(weight) / np.where(rows > 0, rows, 1)).max(0))
    usual = float(np.median(used))
    is_small = (max_abs >= THRESHOLD) & (used > 0) & (used * FAR < usual)
    found = np.ones(len(max_abs), np.float32)
    found[is_small] = np.exp2(np.floor(np.log2(usual / used[is_small])))
    return found
