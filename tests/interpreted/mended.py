"""Make Triton's interpreter compute bfloat16 and dot products as a GPU does, within float32.

The interpreter (3.6 to 3.9) multiplies and truncates the bits of bfloat16 as if they were whole numbers, without a
warning. Dots and casts are mended here; kernels widen what they load before other arithmetic. A dot of floats is
computed in float64 and rounded once, so that no choice of a BLAS library changes a bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as it

from interpreted.hastened import hasten

CASTS = (
    "create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui", "create_fp_ext", "create_fp_trunc",
)  # fmt: skip


def widen(x: Any) -> Any:
    """Return a handle of bfloat16 as one of float32."""
    bits = x.data.astype(np.uint32) << 16
    return it.TensorHandle(bits.view(np.float32), tl.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, ties to even; NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    out = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), out)


def mend() -> None:
    """Replace the interpreter's dots and casts."""
    builder = it.InterpreterBuilder
    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (widen(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        with np.errstate(all="ignore"):
            product = a.data.astype(np.float64) @ b.data.astype(np.float64)
        if a.dtype.scalar.is_int():
            product = product.astype(np.int64)  # exact: sums of products of bytes are far below 2^53
        with np.errstate(all="ignore"):
            return it.TensorHandle((d.data + product).astype(d.data.dtype), d.dtype.scalar)

    def cast_any(self: Any, src: Any, dst_type: Any) -> Any:
        came, goes = src.dtype.scalar, dst_type.scalar
        if came == tl.bfloat16 and goes != tl.bfloat16:
            src = widen(src)
            return src if goes == tl.float32 else cast(self, src, dst_type)
        if goes == tl.bfloat16 and came != tl.bfloat16:
            return it.TensorHandle(narrow(src.data.astype(np.float32)), tl.bfloat16)
        return cast(self, src, dst_type)

    def convert_any(self: Any, src: Any, dst: Any, mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst.scalar):
            return cast_any(self, src, dst)
        return convert(self, src, dst, mode)

    hasten()
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = dot, cast_any, convert_any
    for name in CASTS:
        setattr(builder, name, cast_any)
