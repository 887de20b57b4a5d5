"""The real-gated linear recurrent unit in numpy; the forms are those of ops/reference/lru.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline.ops.host.memory import Ndarray, widen
from ridgeline.ops.host.primitives import sigmoid
from ridgeline.ops.host.recurrent import like, softplus, steps
from ridgeline.spec import GatedLRU


def block_linear(x: Ndarray, weight: Ndarray, bias: Ndarray) -> Ndarray:
    groups = len(weight)
    parts = x.reshape(-1, groups, x.shape[-1] // groups).swapaxes(0, 1)  # [G, T, in]
    out: Ndarray = parts @ widen(weight).astype(x.dtype, copy=False).swapaxes(1, 2) + bias[:, None]
    return out.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


def gated_lru(case: GatedLRU) -> Callable[..., tuple[Ndarray, Ndarray, Ndarray]]:
    def scan(
        x: Ndarray, into: Ndarray, gate: Ndarray, decay: Ndarray, begun: Ndarray, h: Ndarray, lengths: Ndarray
    ) -> tuple[Ndarray, Ndarray, Ndarray]:
        x, into, gate = like(h, x, into, gate)
        logs = -case.rate * sigmoid(gate) * softplus(decay)
        size = np.sqrt(-np.expm1(2 * logs))
        size[:, 0][begun[:, 0] == 0] = 1.0
        y = steps(size * sigmoid(into) * x, lengths)
        decays = np.exp(steps(logs, lengths))
        for t in range(x.shape[1]):
            y[:, t] += decays[:, t] * h
            h = y[:, t]
        return y, np.ones_like(begun), h.copy()

    return scan
