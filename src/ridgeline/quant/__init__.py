"""Ways to store a matrix: one file per scheme, each an `ops.api.Linear` with a stated error bound.

How numbers are rounded and multiplied belongs in `ops/`; which format a model's matrices get belongs in `nn/model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array, QuantizedMatrix
from ridgeline.quant.int4 import Int4Linear
from ridgeline.quant.int8 import Int8Linear
from ridgeline.quant.linear import LowRank, StoredLinear
from ridgeline.quant.plain import PlainLinear
from ridgeline.spec.quant import Format, Scheme

__all__ = ["Int4Linear", "Int8Linear", "LowRank", "PlainLinear", "QuantizedMatrix", "store"]

SCHEMES: Mapping[Scheme, type[StoredLinear]] = {"plain": PlainLinear, "int8": Int8Linear, "int4": Int4Linear}


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
    return SCHEMES[own.scheme](matrix, bias, table, own, low_rank)
