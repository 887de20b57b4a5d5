"""Compute a state space as a convolution and as a recurrence, beside its closed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.ops import api
from ridgeline.ops.devices import open_table
from ridgeline.spec import S4D

TOKENS = 512


def largest_error(seed: int, threads: int | None) -> float:
    """Return the largest difference of S4D's convolution, its recurrence, and its closed form in float64."""
    rng, size, pairs = np.random.default_rng(seed), 8, 4  # channels, and pairs of complex numbers of each
    u, d = rng.standard_normal((TOKENS, size)), rng.standard_normal(size)
    log_dt, a_log = rng.uniform(-4, -1, size), rng.uniform(-1, 0, (size, pairs))
    a_imag, c = rng.uniform(0, 9, (size, pairs)), rng.standard_normal((size, 2, pairs))
    a, dt = -np.exp(a_log) + 1j * a_imag, np.exp(log_dt)[:, None]
    weights = (c[:, 0] + 1j * c[:, 1]) * (np.exp(dt * a) - 1) / a
    kernel = 2 * np.einsum("cp,cpt->ct", weights, np.exp((dt * a)[..., None] * np.arange(TOKENS))).real
    exact = np.stack([np.convolve(u[:, i], kernel[i])[:TOKENS] for i in range(size)], axis=1) + d * u
    scan = open_table("cpu", threads=threads).primitive(api.STATE_SPACE, S4D(size, 2 * pairs))
    single: Any = [np.ascontiguousarray(x, np.float32) for x in (log_dt, a_log, a_imag, c, d)]
    x: Any = u.astype(np.float32)[None]
    state: Any = np.zeros((1, size, 2, pairs), np.float32)
    whole: Any = scan(x, *single, state, np.array([TOKENS]))[0]
    steps = []
    for i in range(TOKENS):
        y: Any
        y, state = scan(x[:, i : i + 1], *single, state, np.array([1]))
        steps.append(y[0, 0])
    return float(max(np.abs(whole[0] - exact).max(), np.abs(np.stack(steps) - exact).max()))
