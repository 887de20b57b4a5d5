"""One file per way to store a matrix; each is an ops.api.Linear with a stated error bound."""

from __future__ import annotations

from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array
from ridgeline.quant.int4 import Int4Linear
from ridgeline.quant.int8 import Int8Linear
from ridgeline.quant.linear import StoredLinear
from ridgeline.quant.plain import PlainLinear
from ridgeline.spec.quant import Format

__all__ = ["Int4Linear", "Int8Linear", "PlainLinear", "store"]

_SCHEMES: dict[int, type[StoredLinear]] = {0: PlainLinear, 8: Int8Linear, 4: Int4Linear}  # by bits


def store(weight: Array, bias: Array | None, table: OpsTable, format: Format) -> StoredLinear:
    """A matrix [out, in] in a format, not yet prepared."""
    return _SCHEMES[format.bits](weight, bias, table, format)
