"""The gated delta rule in numpy: the recurrence for a step of one token, chunks for longer ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline.ops.host.memory import Ndarray
from ridgeline.ops.host.primitives import sigmoid, silu
from ridgeline.ops.host.recurrent import Scan, chunk_size, chunks, like, softplus, steps
from ridgeline.spec import GatedDelta, KimiDelta
from ridgeline.spec.workspace import DELTA_CHUNK

UNIT_EPS = 1e-6  # added under the root of a query's or key's length, as in all published code


def delta_rule(case: GatedDelta | KimiDelta) -> Scan:
    per_key, scale = case.num_heads // case.num_key_heads, case.key_dim**-0.5

    def run(
        q: Ndarray, k: Ndarray, v: Ndarray, decay: Ndarray, beta: Ndarray, a_log: Ndarray, dt_bias: Ndarray, h: Ndarray,
        lengths: Ndarray,
    ) -> tuple[Ndarray, Ndarray]:  # fmt: skip
        q, k, v, decay, beta = like(h, q, k, v, decay, beta)
        q, k = (np.repeat(_unit(_heads(x, case.num_key_heads)), per_key, -2) for x in (q, k))
        q *= scale
        # One decay for each head, or for each channel of its keys. Padding neither decays nor writes.
        rates = _heads(softplus(decay + dt_bias), case.num_heads)
        logs = steps(-np.exp(a_log)[:, None] * rates, lengths)
        beta = steps(case.reach * sigmoid(beta), lengths)
        y, h = (_token if v.shape[1] == 1 else _chunked)(q, k, _heads(v, case.num_heads), logs, beta, h)
        return y.reshape(*y.shape[:2], -1), h

    return run


def norm_gate(case: GatedDelta | KimiDelta) -> Callable[[Ndarray, Ndarray, Ndarray], Ndarray]:
    act = silu if isinstance(case, GatedDelta) else sigmoid

    def normalize(y: Ndarray, z: Ndarray, weight: Ndarray) -> Ndarray:
        x = _heads(y, case.num_heads)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + case.norm.eps)
        x *= case.norm.offset + weight
        out: Ndarray = x.reshape(y.shape)
        out *= act(z)
        return out

    return normalize


def _heads(x: Ndarray, count: int) -> Ndarray:
    return x.reshape(*x.shape[:-1], count, -1)


def _unit(x: Ndarray) -> Ndarray:
    unit: Ndarray = x / np.sqrt(np.square(x).sum(-1, keepdims=True) + UNIT_EPS)
    return unit


def _token(q: Ndarray, k: Ndarray, v: Ndarray, logs: Ndarray, beta: Ndarray, h: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Compute one token.

    q and k [n, 1, H, K], v [n, 1, H, P], logs of the decay [n, 1, H, 1 or K], beta [n, 1, H], h [n, H, K, P].
    """
    q, k, v, logs, beta = (x[:, 0] for x in (q, k, v, logs, beta))
    h = np.exp(logs)[..., None] * h
    error = v - (k[..., None, :] @ h)[..., 0, :]
    h += k[..., None] * (beta[..., None] * error)[..., None, :]
    return (q[..., None, :] @ h).swapaxes(1, 2), h


def _chunked(q: Ndarray, k: Ndarray, v: Ndarray, logs: Ndarray, beta: Ndarray, h: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Compute `_token` for many tokens; see ops/reference/delta.py.

    The tokens of a chunk write u = own - w h, where h is the state before the chunk. One triangular system gives own
    and w of all chunks before the first h is known.
    """
    n, m, heads = v.shape[:3]
    size = chunk_size(m, DELTA_CHUNK)
    q, k, v, logs, beta = (chunks(x, size).swapaxes(2, 3) for x in (q, k, v, logs, beta[..., None]))
    since = np.exp(logs.cumsum(-2))  # [n, chunks, H, chunk, 1 or K]: the decay from the chunk's beginning to a token
    inside = _decayed_products(q, k, logs)  # [n, chunks, H, chunk, chunk]
    system = beta * _decayed_products(k, k, logs)
    np.einsum("...ii->...i", system)[...] = 1.0
    right = beta * np.concatenate((v, k * since), -1)
    # The matrix is triangular with ones on its diagonal and nothing larger, so that pivoting keeps the order.
    own, w = np.split(np.linalg.solve(system, right), (v.shape[-1],), -1)
    q, k, through = q * since, k * np.exp(_after(logs)), since[..., -1, :, None]
    y = np.empty(v.shape, h.dtype)
    for i in range(v.shape[1]):
        u = own[:, i] - w[:, i] @ h
        y[:, i] = q[:, i] @ h + inside[:, i] @ u
        h = through[:, i] * h + k[:, i].swapaxes(-1, -2) @ u
    return y.swapaxes(2, 3).reshape(n, -1, heads, y.shape[-1])[:, :m], h


def _after(logs: Ndarray) -> Ndarray:
    """Return [..., t, :], the sum over all tokens after t."""
    out = np.zeros_like(logs)
    np.cumsum(logs[..., :0:-1, :], -2, out=out[..., -2::-1, :])
    return out


def _decayed_products(a: Ndarray, b: Ndarray, logs: Ndarray) -> Ndarray:
    """Return [..., t, s] = a_t b_s, each channel decayed from token s to token t; 0 where s comes after t.

    a and b [..., tokens, K], logs [..., tokens, 1 or K]. Computed by halves as in ops/reference/delta.py: no
    factor exceeds 1, and no sum of logs is a difference of longer sums.
    """
    out = (a * b).sum(-1)[..., None, None]  # [..., blocks, size, size]
    size = 1
    while size < a.shape[-2]:
        (_, late), (early, _) = _halves(a, size), _halves(b, size)
        logs_early, logs_late = _halves(logs, size)
        smaller = out
        out = np.zeros((*late.shape[:-2], 2 * size, 2 * size), a.dtype)
        out[..., :size, :size], out[..., size:, size:] = smaller[..., 0::2, :, :], smaller[..., 1::2, :, :]
        left, right = late * np.exp(logs_late.cumsum(-2)), early * np.exp(_after(logs_early))
        np.matmul(left, right.swapaxes(-1, -2), out=out[..., size:, :size])
        size *= 2
    whole: Ndarray = out[..., 0, :, :]
    return whole


def _halves(x: Ndarray, size: int) -> tuple[Ndarray, Ndarray]:
    """Return the first and the second halves of blocks, [..., blocks, size, K], of [..., blocks * 2 * size, K]."""
    halves = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return halves[..., 0, :, :], halves[..., 1, :, :]
