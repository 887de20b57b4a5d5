"""The product with one matrix, norms, and rotations, by kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline._kernels import Pool, Projection, rotate
from ridgeline.ops import api
from ridgeline.ops.api import Rotary, Weights
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.matrices import Floats, build_matrix, build_norm
from ridgeline.spec import ClampedSwiGLU, LayerNorm, RMSNorm, Rope, Ungated
from ridgeline.spec.activation import Activation
from ridgeline.spec.quant import Format


class Product:
    """The product with one matrix."""

    def __init__(self, case: Format, weights: Weights, pool: Pool) -> None:
        self._matrix = build_matrix(pool, [weights.linears["matrix"]])
        self._kernel, self._pool = Projection(pool, self._matrix, None, 1.0, 1.0, 0.0), pool

    def __call__(self, x: Floats) -> Floats:
        rows = rows_of(x)
        out = empty(self._pool, len(rows), self._matrix.rows)
        self._kernel(rows, None, None, None, out)
        return out.reshape(*x.shape[:-1], self._matrix.rows)

    def dequantize(self) -> Floats:
        matrix = self._matrix
        out = np.empty((matrix.rows, matrix.columns), np.float32)
        matrix.take(self._pool, np.arange(matrix.rows), out)
        return out


def norm(case: RMSNorm | LayerNorm, pool: Pool) -> Callable[[Floats, Floats, Floats | None], Floats]:
    def run(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
        rows = rows_of(x)
        out = empty(pool, *rows.shape)
        build_norm(case, weight, bias)(pool, rows, out)
        return out.reshape(x.shape)

    return run


def rope(case: Rope, pool: Pool) -> Callable[[Floats, Rotary], Floats]:
    def run(x: Floats, rotary: Rotary) -> Floats:
        out = x.copy(order="C")
        rotate(pool, out, x.shape[-1], 0, case.dim, case.interleaved, np.asarray(rotary.cos), np.asarray(rotary.sin))
        return out

    return run


def activation_of(activation: Activation | ClampedSwiGLU | Ungated) -> tuple[str, float, float]:
    """Return the kernels' name of an activation, with its parameters."""
    if isinstance(activation, Ungated):
        return activation.activation, 1.0, 0.0
    if isinstance(activation, ClampedSwiGLU):
        return "clamped_swiglu", activation.alpha, activation.limit
    return activation, 1.0, 0.0


def rows_of(x: Floats) -> Floats:
    """Reshape x [..., n] to dense rows [T, n]."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.strides[-1] == rows.itemsize or rows.shape[-1] == 1 else np.ascontiguousarray(rows)


KERNELS: Kernels = {
    api.NORM: Kernel(never, norm),
    api.ROPE: Kernel(never, rope),
}
