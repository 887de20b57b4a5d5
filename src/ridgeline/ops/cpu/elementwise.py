"""Functions of the elements of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.linear import activation_of, rows_of
from ridgeline.ops.cpu.matrices import Floats, once
from ridgeline.spec import Mamba2


def add(case: None, pool: Pool) -> Callable[[Floats, Floats, float], Floats]:
    def run(a: Floats, b: Floats, scale: float) -> Floats:
        out = empty(pool, *a.shape)
        _kernels.add(pool, rows_of(a), rows_of(b), scale, rows_of(out))
        return out

    return run


def scale(case: None, pool: Pool) -> Callable[[Floats, float], Floats]:
    return _with_number(_kernels.scale, pool)


def join(case: None, pool: Pool) -> Callable[[Floats, Floats], Floats]:
    def run(a: Floats, b: Floats) -> Floats:
        out = empty(pool, *a.shape[:-1], a.shape[-1] + b.shape[-1])
        _kernels.scale(pool, rows_of(a), 1.0, rows_of(out[..., : a.shape[-1]]))
        _kernels.scale(pool, rows_of(b), 1.0, rows_of(out[..., a.shape[-1] :]))
        return out

    return run


def softcap(case: None, pool: Pool) -> Callable[[Floats, float], Floats]:
    return _with_number(_kernels.softcap, pool)


def _with_number(kernel: Callable[..., None], pool: Pool) -> Callable[[Floats, float], Floats]:
    def run(x: Floats, number: float) -> Floats:
        out = empty(pool, *x.shape)
        kernel(pool, rows_of(x), number, rows_of(out))
        return out

    return run


def multiply(case: None, pool: Pool) -> Callable[[Floats, Floats], Floats]:
    of_two, with_number = _of_two(_kernels.multiply, pool), scale(None, pool)
    return lambda a, b: with_number(a, float(b[0])) if b.shape == (1,) else of_two(a, b)


def gate(case: None, pool: Pool) -> Callable[[Floats, Floats], Floats]:
    return _of_two(_kernels.gate, pool)


def sigmoid_gate(case: None, pool: Pool) -> Callable[[Floats, Floats], Floats]:
    gated = _of_two(_kernels.sigmoid_gate, pool)
    return lambda y, z: gated(y, np.broadcast_to(z, y.shape))


def _of_two(kernel: Callable[..., None], pool: Pool) -> Callable[[Floats, Floats], Floats]:
    def run(a: Floats, b: Floats) -> Floats:
        out = empty(pool, *a.shape)
        kernel(pool, rows_of(a), rows_of(b), rows_of(out))
        return out

    return run


def activation(case: Any, pool: Pool) -> Callable[..., Floats]:
    name = activation_of(case.activation)

    def run(x: Floats, up: Floats | None = None) -> Floats:
        out = empty(pool, *x.shape)
        _kernels.activate(pool, *name, rows_of(x), None if up is None else rows_of(up), rows_of(out))
        return out

    return run


def gated_norm(case: Mamba2, pool: Pool) -> Callable[[Floats, Floats, Floats], Floats]:
    assert case.norm is not None  # without a norm, the op is GATE
    offset, eps = np.float32(case.norm.offset), case.norm.eps
    moved = once(lambda weight: offset + weight)

    def run(y: Floats, z: Floats, weight: Floats) -> Floats:
        out = empty(pool, *y.shape)
        _kernels.gated_norm(pool, case.num_groups, eps, rows_of(y), rows_of(z), moved(weight), rows_of(out))
        return out

    return run


KERNELS: Kernels = {
    api.ADD: Kernel(never, add),
    api.SCALE: Kernel(never, scale),
    api.JOIN: Kernel(never, join),
    api.SOFTCAP: Kernel(never, softcap),
    api.MULTIPLY: Kernel(never, multiply),
    api.GATE: Kernel(never, gate),
    api.SIGMOID_GATE: Kernel(never, sigmoid_gate),
    api.ACTIVATION: Kernel(never, activation),
    api.GATED_NORM: Kernel(never, gated_norm),
}
