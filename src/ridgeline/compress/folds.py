"""Move scales of input channels into what comes before: a norm, or the rows of another matrix.

A function of a layer does not change if the inputs of matrices are divided by scales and their columns multiplied with
them. Inputs are divided by changing the norm or the matrix that computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.compress.inputs import MatrixKey
from ridgeline.compress.layers import Part
from ridgeline.ops.host.memory import dtype_of
from ridgeline.spec import RMSNorm
from ridgeline.spec.dtype import DType
from ridgeline.spec.folds import Fold, mixer_folds, mlp_folds


def folds(part: Part) -> Iterator[Fold]:
    """Yield the scales that can move in a part, those into norms first.

    Other mixers than softmax attention and other layers than pre-norm ones have none.
    """
    layer, prefix = part.spec.layers[part.index], f"layers.{part.index}"
    if part.branch == "mixer":
        yield from mixer_folds(layer, prefix)
    if part.branch == "mlp":
        yield from mlp_folds(layer, prefix, part.weights, part.spec.hidden_size)


def pooled(fold: Fold, per_column: Floats) -> Floats:
    """Return numbers of input columns [in], equal where columns read one row of the source: their mean."""
    if fold.repeat == 1:
        return per_column
    by_head = per_column.reshape(-1, fold.repeat, fold.size)
    found: Floats = np.broadcast_to(by_head.mean(1, keepdims=True), by_head.shape).reshape(-1)
    return found


def apply_fold(fold: Fold, scales: Floats, weights: Mapping[str, Any], dtype: DType) -> dict[str, Floats]:
    """Return the weights that change, in float32, by name: the source's and those of its readers.

    A norm is rounded to the type in which it is stored, and the columns of matrices make up for it.

    scales: [in], by which columns are multiplied; equal where columns read one row of the source.
    """
    changed: dict[str, Floats] = {}
    if fold.norm is not None:
        offset = fold.norm.offset if isinstance(fold.norm, RMSNorm) else 0.0
        old = np.asarray(weights[f"{fold.source}.weight"], np.float32)
        new = ((old + offset) / scales - offset).astype(dtype_of(dtype)).astype(np.float32)
        is_kept = (new + offset) == 0
        scales = np.where(is_kept, 1, (old + offset) / np.where(is_kept, 1, new + offset)).astype(np.float32)
        changed[f"{fold.source}.weight"] = np.where(is_kept, old, new)
        if f"{fold.source}.bias" in weights:
            changed[f"{fold.source}.bias"] = np.asarray(weights[f"{fold.source}.bias"], np.float32) / scales
    else:
        rows = scales if fold.repeat == 1 else scales.reshape(-1, fold.repeat, fold.size)[:, 0].reshape(-1)
        _divide_rows(fold, rows, weights, changed)
    for key in map(MatrixKey._make, fold.readers):
        whole = changed.setdefault(key.name, np.array(weights[key.name], np.float32))
        part = whole if key.expert is None else whole[key.expert]
        part *= scales
    return changed


def _divide_rows(fold: Fold, rows: Floats, weights: Mapping[str, Any], changed: dict[str, Floats]) -> None:
    for kind in ("weight", "bias"):
        name = f"{fold.source}.{kind}"
        if name in weights:
            whole = changed[name] = np.array(weights[name], np.float32)
            part = whole if fold.expert is None else whole[fold.expert]
            part /= rows[:, None] if kind == "weight" else rows
