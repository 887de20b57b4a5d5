"""Primitives that are matrix products, or norms and rotations of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline._kernels import Experts, Pool, Projection, turn
from ridgeline.ops import api
from ridgeline.ops.api import Rotary
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.matrices import Floats, Ndarray, PackedOnce, build_matrix, build_norm
from ridgeline.spec import ClampedSwiGLU, LayerNorm, MoE, RMSNorm, Rope, Ungated
from ridgeline.spec.activation import Activation


def linear(case: None, pool: Pool) -> Callable[[Floats, Ndarray, Floats | None], Floats]:
    packed = PackedOnce(pool)

    def run(x: Floats, weight: Ndarray, bias: Floats | None) -> Floats:
        rows = rows_of(x)
        out = np.empty((len(rows), len(weight)), np.float32)
        Projection(pool, packed(weight), None, 1.0, 1.0, 0.0)(rows, None, None, None, out)
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], len(weight))

    return run


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
        turn(pool, out, x.shape[-1], case.dim, case.interleaved, np.asarray(rotary.cos), np.asarray(rotary.sin))
        return out

    return run


def experts(case: MoE, pool: Pool) -> Callable[..., Floats]:
    """The experts of one layer: they are packed at the first call."""
    built: list[Experts] = []

    def run(
        x: Floats, ids: Ndarray, scores: Floats, gate: Ndarray, up: Ndarray, down: Ndarray,
        biases: tuple[Floats, Floats, Floats] | None = None,
    ) -> Floats:  # fmt: skip
        if not built:
            built.append(build_experts(case, pool, gate, up, down, biases))
        out = np.empty(x.shape, np.float32)
        built[0](rows_of(x), np.ascontiguousarray(ids), np.ascontiguousarray(scores), out)
        return out

    return run


def build_experts(
    case: MoE, pool: Pool, gate: Ndarray, up: Ndarray, down: Ndarray, biases: tuple[Floats, Floats, Floats] | None
) -> Experts:
    """gate and up [experts, inner, width], down [experts, width, inner]."""
    firsts, seconds = [], []
    for e in range(case.num_experts):
        b_gate, b_up, b_down = (b[e] for b in biases) if biases else (None, None, None)
        firsts.append(build_matrix(pool, [gate[e], up[e]], [b_gate, b_up], interleave=True))
        seconds.append(build_matrix(pool, [down[e]], [b_down]))
    return Experts(pool, firsts, seconds, *activation_of(case.activation))


def _gated_only(case: MoE) -> str | None:
    return None if case.gated else "its experts are gated"


def activation_of(activation: Activation | ClampedSwiGLU | Ungated) -> tuple[str, float, float]:
    """An activation as the kernels name it, with its parameters."""
    if isinstance(activation, Ungated):
        return activation.activation, 1.0, 0.0
    if isinstance(activation, ClampedSwiGLU):
        return "clamped_swiglu", activation.alpha, activation.limit
    return activation, 1.0, 0.0


def rows_of(x: Floats) -> Floats:
    """x [..., n] as rows [T, n], each in one piece."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.strides[-1] == rows.itemsize or rows.shape[-1] == 1 else np.ascontiguousarray(rows)


KERNELS: Kernels = {
    api.LINEAR: Kernel(never, linear),
    api.NORM: Kernel(never, norm),
    api.ROPE: Kernel(never, rope),
    api.EXPERTS: Kernel(_gated_only, experts),
}
