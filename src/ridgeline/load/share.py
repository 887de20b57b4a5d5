"""Cut weights to the share of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.ops.api import BY_ROW, QuantizedMatrix
from ridgeline.spec.share import Share

ROUNDING = "int8", "fp8", "outliers"  # activations whose rounding follows from the largest number of a token


def numbers_of(array: Any, share: Share) -> Any:
    """Return a rank's share of a weight: a view where its rows are neighbors."""
    if share.is_zero:
        return np.zeros_like(array)
    if share.axis is None:
        return array
    after = (slice(None),) * (-share.axis - 1)
    if len(share.runs) == 1 and not share.padding:
        return array[(..., slice(*share.runs[0]), *after)]
    return array[(..., share.indices(), *after)]


def rows_of(rows: np.ndarray[Any, Any], share: Share) -> np.ndarray[Any, Any]:
    """Return a rank's share of the rows of a matrix. The others are not cut."""
    return rows[share.indices()] if share.axis == -2 else rows


def columns_of(name: str, matrix: QuantizedMatrix, share: Share) -> QuantizedMatrix:
    """Return a rank's share of the columns of a matrix of codes, whose scales are those of the whole matrix.

    Raises CheckpointError for a cut through a group of columns, for columns in another order, and for activations that
    are rounded by the largest number of a token, of which each rank knows only a part.
    """
    format, ((first, end),) = matrix.format, share.runs
    unit = format.block or format.group or 1
    if first % unit or (end % unit and end != matrix.shape[1]):
        raise CheckpointError(
            f"{name} shares scales between {unit} columns, and a rank would begin or end at column "
            f"{first if first % unit else end}; take fewer ranks (--tensor-parallel-size)"
        )
    if matrix.permutation is not None:
        raise CheckpointError(f"{name} has columns in another order (act-order), and cannot be cut; take one rank")
    if format.activations in ROUNDING and matrix.input_scale is None:
        raise CheckpointError(
            f"{name} rounds activations by the largest number of a token ({format.activations}), of which a rank has "
            "only a part; add --activations bf16"
        )
    found: dict[str, Any] = {}
    for part in BY_ROW:
        if (array := getattr(matrix, part)) is None:
            continue
        size = 1 if part == "codes" else format.block if part in ("scales", "minimums") else format.group
        size = size or format.group
        found[part] = array[:, first // size : -(-end // size)] if size else array
    return replace(matrix, **found)
