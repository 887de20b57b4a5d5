"""Move scales of input channels into what comes before: a norm, or the rows of another matrix.

A function of a layer does not change if the inputs of matrices are divided by scales and their columns multiplied with
them. Inputs are divided by changing the norm or the matrix that computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.compress.inputs import MatrixKey
from ridgeline.compress.layers import Part, keys_of
from ridgeline.ops.host.memory import dtype_of
from ridgeline.spec import MLP, Attention, GatedMLP, MoE, Norm, RMSNorm, SharedAttention
from ridgeline.spec.dtype import DType


class Fold(NamedTuple):
    """Scales that can move: from the inputs of `readers` into `source`.

    source: the prefix of a norm's weights, or a matrix whose rows compute the inputs. norm: the norm, if it is one.
    readers: all matrices that read the inputs, those that are never rounded included. repeat: number of neighboring
    heads of `size` columns that read one head of the source; 1 if columns are rows of the source.
    """

    source: str
    norm: Norm | None
    readers: tuple[MatrixKey, ...]
    repeat: int = 1
    size: int = 1
    expert: int | None = None


def folds(part: Part) -> Iterator[Fold]:
    """Yield the scales that can move in a part, those into norms first.

    Other mixers than softmax attention and other layers than pre-norm ones have none.
    """
    layer = part.spec.layers[part.index]
    prefix = f"layers.{part.index}"
    if part.branch == "mixer" and layer.pre_norm:
        yield from _attention_folds(layer.mixer, layer.pre_norm, prefix)
    if part.branch == "mlp" and layer.pre_norm:
        yield from _mlp_folds(part, layer.mlp, layer.pre_norm, prefix)


def _attention_folds(mixer: object, norm: Norm, prefix: str) -> Iterator[Fold]:
    if not isinstance(mixer, Attention | SharedAttention):
        return
    attention = mixer.attention if isinstance(mixer, SharedAttention) else mixer
    names = ["q", "out_gate"] if attention.out_gate else ["q"]
    if isinstance(mixer, Attention):
        names += ["k", "v"]
    readers = tuple(MatrixKey(f"{prefix}.mixer.{name}.weight") for name in names)
    yield Fold(f"{prefix}.mixer_norm", norm, readers)
    if isinstance(mixer, Attention):
        out = (MatrixKey(f"{prefix}.mixer.o.weight"),)
        yield Fold(f"{prefix}.mixer.v", None, out, attention.query_group, attention.head_dim)


def _mlp_folds(part: Part, mlp: object, norm: Norm, prefix: str) -> Iterator[Fold]:
    if not isinstance(mlp, MLP | GatedMLP | MoE):
        return
    hidden = part.spec.hidden_size
    behind = ("mlp.latent_out.weight", "mlp.experts.") if isinstance(mlp, MoE) and mlp.latent_size else ()
    readers = [
        key
        for w in part.weights
        if w.is_matrix and w.shape[-1] == hidden and not w.name.endswith("down.weight")
        if not w.name.removeprefix(f"{prefix}.").startswith(behind or "-")
        for key in keys_of(w)
    ]
    yield Fold(f"{prefix}.mlp_norm", norm, tuple(readers))
    if isinstance(mlp, GatedMLP):
        yield Fold(f"{prefix}.mlp.up", None, (MatrixKey(f"{prefix}.mlp.down.weight"),))
    if isinstance(mlp, MoE) and isinstance(mlp.shared, GatedMLP):
        yield Fold(f"{prefix}.mlp.shared.up", None, (MatrixKey(f"{prefix}.mlp.shared.down.weight"),))
    if isinstance(mlp, MoE) and isinstance(mlp.activation, str):
        for e in range(mlp.num_experts):
            down = MatrixKey(f"{prefix}.mlp.experts.down.weight", e)
            yield Fold(f"{prefix}.mlp.experts.up", None, (down,), expert=e)


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
    for key in fold.readers:
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
