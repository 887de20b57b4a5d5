"""S4 and S4D by kernels: the recurrence of every channel, for one token as for many.

The coefficients of a token's step depend on the weights alone and are computed once, in float64; see ops/s4.py for the
systems. States are [n, state_size / 2, 2, channels].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.linear import rows_of
from ridgeline.ops.cpu.matrices import Floats, Ndarray, PackedOnce
from ridgeline.ops.cpu.state import State, locate
from ridgeline.ops.s4 import token_terms
from ridgeline.spec import S4, S4D

BLOCK = 16  # channels of one block of the kernel


def state_space(case: S4 | S4D, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    def make(*system: Ndarray) -> Floats:
        return _terms(case, *(x.astype(np.float64) for x in system))

    terms = PackedOnce(make)

    def run(u: Floats, *others: Any) -> tuple[Floats, State]:
        *system, d, h, lengths = others
        y, (left, at) = empty(pool, *u.shape), locate(h)
        inputs = rows_of(u), terms(*system), d
        pool.keep(inputs[1])
        _kernels.state_space_scan(pool, *inputs, at.before, lengths, rows_of(y), at.after, at.read, at.write)
        return y, left

    return run


def _terms(case: S4 | S4D, *system: Ndarray) -> Floats:
    """Return the coefficients in the kernel's layout: [blocks, modes, 6 or 14, 16]."""
    parts = token_terms(case, np.exp, *system)
    terms = np.stack([x for part in parts for x in (part.real, part.imag)])  # [terms, channels, modes]
    missing = -terms.shape[1] % BLOCK
    terms = np.pad(terms, ((0, 0), (0, missing), (0, 0))).reshape(len(terms), -1, BLOCK, terms.shape[2])
    return np.ascontiguousarray(terms.transpose(1, 3, 0, 2), np.float32)


KERNELS: Kernels = {api.STATE_SPACE: Kernel(never, state_space)}
