"""Matrices of a model in any format: their products, low-rank terms and stated error bounds.

How numbers are rounded and multiplied belongs in `ops/`; which format a model's matrices get belongs in `nn/model.py`.
"""

from __future__ import annotations

from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array, QuantizedMatrix
from ridgeline.quant.bounds import bound
from ridgeline.quant.linear import LowRank, StoredLinear
from ridgeline.spec.quant import Format

__all__ = ["LowRank", "QuantizedMatrix", "StoredLinear", "bound", "store"]


def store(
    matrix: Array | QuantizedMatrix, bias: Array | None, table: OpsTable, format: Format,
    low_rank: LowRank | None = None,
) -> StoredLinear:  # fmt: skip
    """Return a matrix [out, in] stored in a format; call `prepare` before `apply`.

    Args:
        matrix: floats, which are rounded as the format says; or codes and scales, which keep their own format.
        bias: [out], float32, or None.
        low_rank: a term that is added to each product, or None.
    """
    own = matrix.format if isinstance(matrix, QuantizedMatrix) else format
    return StoredLinear(matrix, bias, table, own, low_rank)
