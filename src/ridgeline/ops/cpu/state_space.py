"""S4 and S4D by kernels: the recurrence of every channel, for one token as for many.

The coefficients of a token's step depend on the weights alone and are computed once, in float64; see ops/host/s4.py for
the systems. States are [n, state_size / 2, 2, channels].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.linear import rows_of
from ridgeline.ops.cpu.matrices import Floats, Ndarray
from ridgeline.ops.cpu.state import State, locate
from ridgeline.spec import S4, S4D

BLOCK = 16  # channels of one block of the kernel


def state_space(case: S4 | S4D, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    found: dict[int, Floats] = {}

    def terms(system: tuple[Ndarray, ...]) -> Floats:
        key = id(system[0])
        if key not in found:
            found[key] = _terms(case, *(x.astype(np.float64) for x in system))
            weakref.finalize(system[0], found.pop, key, None)
        return found[key]

    def run(u: Floats, *others: Any) -> tuple[Floats, State]:
        *system, d, h, lengths = others
        y, (left, at) = empty(pool, *u.shape), locate(h)
        inputs = rows_of(u), terms(tuple(system)), d
        _kernels.state_space_scan(pool, *inputs, at.before, lengths, rows_of(y), at.after, at.read, at.write)
        return y, left

    return run


def _terms(case: S4 | S4D, log_dt: Ndarray, a_log: Ndarray, a_imag: Ndarray, *others: Ndarray) -> Floats:
    """Return the coefficients in the kernel's layout: [blocks, modes, 6 or 14, 16]."""
    a, dt = -np.exp(a_log) + 1j * a_imag, np.exp(log_dt)[:, None]
    parts = _dplr(a, dt, *map(_pairs, others)) if isinstance(case, S4) else _diagonal(a, dt, *map(_pairs, others))
    terms = np.stack([x for part in parts for x in (part.real, part.imag)])  # [terms, channels, modes]
    missing = -terms.shape[1] % BLOCK
    terms = np.pad(terms, ((0, 0), (0, missing), (0, 0))).reshape(len(terms), -1, BLOCK, terms.shape[2])
    return np.ascontiguousarray(terms.transpose(1, 3, 0, 2), np.float32)


def _pairs(x: Ndarray) -> Ndarray:
    """Return a weight [channels, 2, modes] as complex numbers."""
    return np.asarray(x[:, 0] + 1j * x[:, 1])


def _diagonal(a: Ndarray, dt: Ndarray, c: Ndarray) -> list[Ndarray]:
    """Discretize by zero-order hold: h = exp(dt a) h + (exp(dt a) - 1) / a u."""
    once = np.exp(dt * a)
    return [once, (once - 1) / a, _seen(c)]


def _dplr(a: Ndarray, dt: Ndarray, p: Ndarray, b: Ndarray, c: Ndarray) -> list[Ndarray]:
    """Discretize by the bilinear rule, with s(h) = sum of 2 Re(conj(p) h), r = 2 / dt and i = 1 / (r - a):

    v = i ((r + a) h - p s(h) + 2 b u), then h = v - solved s(v), where solved is the rank-one part of (r - A)^-1 beside
    i. s(v) is linear in h and u, so that both sums use the h before the token.
    """
    rate = 2 / dt
    inverse = 1 / (rate - a)
    solved = inverse * p / (1 + _both(p.conj() * inverse * p))
    kept, lost, given = inverse * (rate + a), inverse * p, 2 * inverse * b
    again, added = _both(p.conj() * lost), _both(p.conj() * given)
    return [
        kept,
        given - solved * added,
        _seen(c),
        solved * again - lost,
        -solved,
        _seen(p.conj()),
        _seen(p.conj() * kept),
    ]


def _both(x: Ndarray) -> Ndarray:
    """Return the sum over conjugate pairs, of which one is given: [channels, modes] -> [channels, 1], real."""
    return np.asarray(2 * x.real.sum(-1, keepdims=True))


def _seen(x: Ndarray) -> Ndarray:
    """Return factors with which 2 Re(x h), the sum of a conjugate pair, is a sum of products of real parts."""
    return np.asarray(2 * x.conj())


KERNELS: Kernels = {api.STATE_SPACE: Kernel(never, state_space)}
