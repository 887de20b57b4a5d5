"""Recurrent mixers by kernels: one recurrence over the tokens, whether a step has one of them or many.

A state's numbers lie as the kernels want them, channels side by side: [n, S, D] of Mamba, [n, H, S, P] of Mamba-2,
[n, H, features, P + 1] of BASED, in arrays of the shape that the spec says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, never
from ridgeline.ops.cpu.linear import rows_of
from ridgeline.ops.cpu.matrices import Floats, Ndarray
from ridgeline.spec import Mamba, Mamba2, TaylorAttention


class Once:
    """A function of arrays that live long, each worked out when it is first asked for."""

    def __init__(self, function: Callable[[Ndarray], Floats]) -> None:
        self._function = function
        self._found: dict[int, Floats] = {}

    def __call__(self, array: Ndarray) -> Floats:
        found = self._found.get(id(array))
        if found is None:
            found = self._found[id(array)] = np.ascontiguousarray(self._function(array), np.float32)
            weakref.finalize(array, self._found.pop, id(array), None)
        return found


def short_conv(case: None, pool: Pool) -> Callable[..., tuple[Floats, Floats]]:
    by_token = Once(lambda weight: weight[:, 0].T)  # [k, C]

    def run(x: Floats, before: Floats, weight: Ndarray, bias: Floats | None, lengths: Ndarray) -> tuple[Floats, Floats]:
        y, left = np.empty(x.shape, np.float32), np.empty(before.shape, np.float32)
        _kernels.short_conv(pool, rows_of(x), before, by_token(weight), bias, lengths, rows_of(y), left)
        return y, left

    return run


def selective_scan(case: Mamba, pool: Pool) -> Callable[..., tuple[Floats, Floats]]:
    negative = Once(lambda a_log: -np.exp(a_log.T.astype(np.float32)))  # [S, D]

    def run(
        x: Floats, dt: Floats, a_log: Ndarray, b: Floats, c: Floats, d: Floats, h: Floats, lengths: Ndarray
    ) -> tuple[Floats, Floats]:
        y, after = np.empty(x.shape, np.float32), np.empty(h.shape, np.float32)
        inputs = rows_of(x), rows_of(dt), negative(a_log), rows_of(b), rows_of(c)
        _kernels.selective_scan(pool, *inputs, d, h, lengths, rows_of(y), after)
        return y, after

    return run


def ssd(case: Mamba2, pool: Pool) -> Callable[..., tuple[Floats, Floats]]:
    negative = Once(lambda a_log: -np.exp(a_log.astype(np.float32)))
    limits = case.dt_least, float("inf") if case.dt_most is None else case.dt_most

    def run(
        x: Floats, dt: Floats, dt_bias: Floats, a_log: Ndarray, b: Floats, c: Floats, d: Floats, h: Floats,
        lengths: Ndarray,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        y, after = np.empty(x.shape, np.float32), np.empty(h.shape, np.float32)
        inputs = rows_of(x), rows_of(dt), dt_bias, negative(a_log), rows_of(b), rows_of(c), d
        _kernels.linear_scan(pool, case.num_groups, *inputs, *limits, h, lengths, rows_of(y), after)
        return y, after

    return run


def taylor_attention(case: TaylorAttention, pool: Pool) -> Callable[..., tuple[Floats, Floats]]:
    def run(q: Floats, k: Floats, v: Floats, h: Floats, lengths: Ndarray) -> tuple[Floats, Floats]:
        y, after = np.empty(v.shape, np.float32), np.empty(h.shape, np.float32)
        inputs = rows_of(q), rows_of(k), rows_of(v)
        _kernels.taylor_scan(pool, case.num_heads, *inputs, h, lengths, rows_of(y), after)
        return y, after

    return run


KERNELS: Kernels = {
    api.SHORT_CONV: Kernel(never, short_conv),
    api.SELECTIVE_SCAN: Kernel(never, selective_scan),
    api.SSD: Kernel(never, ssd),
    api.TAYLOR_ATTENTION: Kernel(never, taylor_attention),
}
