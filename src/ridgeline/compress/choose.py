"""Choose the codes of all matrices of one part of a model, as a scheme says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ridgeline.compress.awq import Columns, kept_columns, output_loss, scaled_rounding, search_scales
from ridgeline.compress.clip import clip_by_importance, clip_by_output
from ridgeline.compress.folds import apply_fold, folds, pooled
from ridgeline.compress.gguf import encode_matrix
from ridgeline.compress.gptq import GPTQ, Feedback, feedback_of, gptq
from ridgeline.compress.grid import Floats
from ridgeline.compress.inputs import Inputs, MatrixKey
from ridgeline.compress.layers import Part, keys_of
from ridgeline.compress.outliers import Outliers, small_column_scales
from ridgeline.compress.rtn import round_to_nearest
from ridgeline.compress.scheme import Scheme
from ridgeline.compress.smooth import smooth_scales
from ridgeline.errors import CheckpointError
from ridgeline.load.stored import dequantized
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.dtype import DType
from ridgeline.spec.folds import Fold
from ridgeline.spec.quant import Format


class BlockLoss(Protocol):
    """The error of a part's output on the tokens of the search.

    Attributes:
        batches: number of batches of these tokens.
    """

    batches: int

    def __call__(self, replaced: Mapping[str, Floats], batches: slice) -> float:
        """Return the error on some batches. replaced: weights that replace those of the part, by name."""


@dataclass
class Chosen:
    """The result for one part.

    Attributes:
        codes: every matrix that was rounded.
        kept: columns of them that stay in 16 bits; their codes do not count.
        changed: weights that stay floats and are not as they were: norms, biases, matrices that are never rounded.
        lost: share of the power of each matrix's output that rounding adds as error.
        unseen: matrices that saw fewer tokens than they have columns, with the number of tokens. They are rounded to
            nearest.
        outliers: columns of inputs with outliers, for matrices that have some.
        notes: remarks for the user.
    """

    codes: dict[MatrixKey, QuantizedMatrix] = field(default_factory=dict)
    kept: dict[MatrixKey, Columns] = field(default_factory=dict)
    changed: dict[str, Floats] = field(default_factory=dict)
    lost: dict[MatrixKey, float] = field(default_factory=dict)
    unseen: dict[MatrixKey, int] = field(default_factory=dict)
    outliers: dict[MatrixKey, Outliers] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def numbers(self, key: MatrixKey) -> Floats:
        """Return the matrix that was rounded, float32 [out, in]."""
        out = dequantized(self.codes[key])
        if key in self.kept:
            self.kept[key].replace_in(out)
        return out

    def tell(self, other: Chosen) -> None:
        """Add what another result says about its matrices, without its codes and weights."""
        self.lost |= other.lost
        self.unseen |= other.unseen
        self.outliers |= other.outliers


def matrix_of(weights: Mapping[str, Any], key: MatrixKey) -> Floats:
    """Return a matrix [out, in] of a part as a float32 view or copy."""
    found = weights[key.name] if key.expert is None else weights[key.name][key.expert]
    return np.asarray(found, np.float32)


def scale_part(
    part: Part, weights: dict[str, Any], inputs: Mapping[MatrixKey, Inputs], scheme: Scheme, dtype: DType,
    formats: Mapping[str, Format], block_loss: BlockLoss,
) -> dict[str, Floats]:  # fmt: skip
    """Move scales of channels in a part, for AWQ, SmoothQuant and LLM.int8(). Return all weights that changed, by name.

    weights and inputs are changed accordingly. formats: the format of each matrix that is rounded, by name.
    """
    changed: dict[str, Floats] = {}
    for fold in folds(part) if scheme.moves_scales else ():
        readers = [MatrixKey(*reader) for reader in fold.readers]
        seen = next((inputs[key] for key in readers if key in inputs), None)
        rounded = [key for key in readers if key.name in formats]
        if seen is None or seen.num_tokens < len(seen.max_abs) or not rounded:
            continue
        matrices = [matrix_of(weights, key) for key in rounded]
        if scheme.method == "smooth":
            scales = pooled(fold, smooth_scales(seen.max_abs, matrices, scheme.alpha))
        elif scheme.method == "awq":
            scales = _awq_scales(fold, rounded, weights, seen, formats, block_loss)
        elif fold.norm is None or (scales := small_column_scales(seen.max_abs, matrices)).max() == 1:
            continue
        new = apply_fold(fold, scales, weights, dtype)
        weights |= new
        changed |= new
        for found in {id(inputs[key]): inputs[key] for key in readers if key in inputs}.values():
            found.divide(scales)
    return changed


def _awq_scales(
    fold: Fold, rounded: list[MatrixKey], weights: Mapping[str, Any], seen: Inputs, formats: Mapping[str, Format],
    block_loss: BlockLoss,
) -> Floats:  # fmt: skip
    """Return the scales with the least error of the part's output. Behind the last matrix, that is its own output."""
    mean_abs = pooled(fold, seen.mean_abs)
    if fold.norm is None:
        matrices = [matrix_of(weights, key) for key in rounded]
        return search_scales(mean_abs, output_loss(matrices, seen.hessian, formats[rounded[0].name])).scales

    def loss(scales: Floats, batches: slice) -> float:
        replaced: dict[str, Floats] = {}
        for key in rounded:
            matrix = scaled_rounding(matrix_of(weights, key), scales, formats[key.name])
            if key.expert is None:
                replaced[key.name] = matrix
            else:
                replaced.setdefault(key.name, np.array(weights[key.name], np.float32))[key.expert] = matrix
        return block_loss(replaced, batches)

    first, rest = slice(0, 1), slice(1, block_loss.batches)
    more = (lambda scales: loss(scales, rest)) if block_loss.batches > 1 else None
    return search_scales(mean_abs, lambda scales: loss(scales, first), more).scales


def choose_codes(
    keys: Iterable[MatrixKey], weights: Mapping[str, Any], inputs: Mapping[MatrixKey, Inputs], scheme: Scheme,
    formats: Mapping[str, Format], into: Chosen, threads: int | None = None,
) -> None:  # fmt: skip
    """Choose the codes of some matrices of a part.

    formats: the format of each matrix, by name. into: receives the results. threads: number of threads; None for one.
    Raises CheckpointError for a matrix that cannot be rounded.
    """
    codes_of = _Codes(scheme, threads)
    for key in keys:
        matrix, seen = matrix_of(weights, key), inputs.get(key)
        num_tokens = seen.num_tokens if seen is not None else 0
        if scheme.needs_data and (seen is None or num_tokens < matrix.shape[1]):
            into.unseen[key] = num_tokens
            seen = None
        try:
            into.codes[key] = codes_of(matrix, seen, formats[key.name])
            if scheme.method == "keep" and seen is not None:
                into.kept[key] = kept_columns(matrix, seen.mean_abs, scheme.keep)
        except ValueError as e:
            raise CheckpointError(f"{key}: {e}") from None
        into.lost[key] = lost_power(matrix, into.numbers(key), seen)


class _Codes:
    """Chooses the codes of matrices. Neighbors that read one input share what is computed from its Hessian."""

    def __init__(self, scheme: Scheme, threads: int | None) -> None:
        self._scheme, self._threads = scheme, threads
        self._last: tuple[Inputs, Feedback] | None = None

    def __call__(self, matrix: Floats, seen: Inputs | None, format: Format) -> QuantizedMatrix:
        scheme = self._scheme
        if scheme.method == "type":
            return encode_matrix(matrix, format, None if seen is None else seen.mean_square)
        if seen is None or scheme.method in ("rtn", "smooth", "keep"):
            return round_to_nearest(matrix, format)
        if scheme.method == "gptq":
            options = GPTQ(scheme.act_order, scheme.clip, scheme.static, scheme.damping)
            return gptq(matrix, self._feedback(seen, options), format, options, self._threads)
        if scheme.method == "awq" and scheme.clip:
            return clip_by_output(matrix, seen.hessian, format, self._threads)
        if scheme.method == "clip":
            return clip_by_importance(matrix, seen.mean_square, format)
        return round_to_nearest(matrix, format)

    def _feedback(self, seen: Inputs, options: GPTQ) -> Feedback:
        if self._last is None or self._last[0] is not seen:
            self._last = None  # free its memory first
            self._last = seen, feedback_of(seen.hessian, options)
        return self._last[1]


def lost_power(matrix: Floats, rounded: Floats, seen: Inputs | None) -> float:
    """Return the power of the error of a product over the power of the product, for inputs as seen.

    Without products of inputs, columns count by their mean square, and without inputs equally.
    """
    off = rounded - matrix
    if seen is not None and seen.has_products:
        hessian = seen.hessian
        error, power = (float(((m @ hessian) * m).sum(dtype=np.float64)) for m in (off, matrix))
    else:
        weight = np.float32(1) if seen is None else seen.mean_square
        error, power = (float((np.square(m) * weight).sum(dtype=np.float64)) for m in (off, matrix))
    return max(0.0, error) / power if power > 0 else 0.0


def matrix_keys(part: Part) -> list[MatrixKey]:
    """Return all matrices of a part that may be rounded."""
    return [key for w in part.matrices for key in keys_of(w)]
