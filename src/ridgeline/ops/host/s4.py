"""S4 and S4D in numpy; ops/reference/s4.py explains the terms.

Coefficients that depend on the weights alone are computed in float64. States are complex [..., state_size / 2], or real
[..., state_size] with all real parts first and all imaginary parts after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ridgeline.ops.host.memory import Ndarray
from ridgeline.ops.host.recurrent import Scan, chunk_size, chunks, steps
from ridgeline.spec import S4, S4D
from ridgeline.spec.workspace import S4_BLOCK

Step = Callable[[Ndarray, Ndarray], Ndarray]  # (h [..., channels, N / 2], u [..., channels, 1]) -> h after the token


class Block(NamedTuple):
    """The linear system of each channel over a block of L tokens.

    kernel: [channels, L], the contribution of a token to its own output, to the next token's, and so on.
    into: [channels, L, N], the contribution of each token to the state after the block.
    out: [channels, N, L], the contribution of the state before the block to each output.
    whole(h): states h [channels, n, N] after L tokens of zeros.
    part(h, tokens [n]): the same states after fewer tokens of zeros.
    """

    kernel: Ndarray
    into: Ndarray
    out: Ndarray
    whole: Callable[[Ndarray], Ndarray]
    part: Callable[[Ndarray, Ndarray], Ndarray]


def state_space(case: S4 | S4D) -> Scan:
    build = _dplr if isinstance(case, S4) else _diagonal

    def scan(u: Ndarray, *others: Ndarray) -> tuple[Ndarray, Ndarray]:
        *parameters, d, h, lengths = others
        step, c, block = build(*(x.astype(np.float64) for x in parameters))
        u = steps(u.astype(h.dtype, copy=False), lengths)
        if u.shape[1] == 1:
            state = step(_complex(_flat(h).astype(np.float64)), u[:, 0, :, None].astype(np.float64))
            y = 2 * (c * state).real.sum(-1).astype(h.dtype)[:, None]
            h = np.stack((state.real, state.imag), -2).astype(h.dtype)
        else:
            y, h = _convolve(block(chunk_size(u.shape[1], S4_BLOCK)), u, h, lengths)
        return y + d * u, h

    return scan


def _convolve(block: Block, u: Ndarray, h: Ndarray, lengths: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Compute block after block: a convolution of its tokens, plus the contribution of the state before it."""
    (n, m, channels), size = u.shape, block.kernel.shape[1]
    kernel, into, out = (x.astype(h.dtype) for x in block[:3])
    x = np.ascontiguousarray(chunks(u, size).transpose(3, 0, 1, 2))  # [channels, n, blocks, L]
    # Fourier transforms are fast at powers of two, and twice the block length keeps the convolution from wrapping.
    whole = np.fft.irfft(np.fft.rfft(x, 2 * size) * np.fft.rfft(kernel, 2 * size)[:, None, None], 2 * size)
    y = whole[..., :size].astype(h.dtype)
    added = (x.reshape(channels, -1, size) @ into).reshape(channels, n, -1, into.shape[-1])
    states = [_flat(h).swapaxes(0, 1)]
    for i in range(x.shape[2]):
        states.append(block.whole(states[-1]) + added[:, :, i])
    begins = np.stack(states[:-1], 2)
    y += (begins.reshape(channels, -1, begins.shape[-1]) @ out).reshape(y.shape)
    y = y.reshape(channels, n, -1)[..., :m].transpose(1, 2, 0)
    # For each sequence, take the state before its last, unfinished block and add that block's tokens.
    rest, sequences = lengths % size, np.arange(n)
    kept = np.stack(states)[lengths // size, :, sequences].swapaxes(0, 1)
    ends = lengths[:, None] - size + np.arange(size)
    last = u[sequences[:, None], np.maximum(ends, 0)]
    last[ends < (lengths - rest)[:, None]] = 0.0
    left = block.part(kept, rest) + last.transpose(2, 0, 1) @ into
    return y, left.swapaxes(0, 1).reshape(h.shape)


def _flat(h: Ndarray) -> Ndarray:
    """Return [..., N] of parts [..., 2, N / 2]."""
    return h.reshape(*h.shape[:-2], -1)


def _complex(x: Ndarray) -> Ndarray:
    """Return complex numbers [..., N / 2] of real ones [..., N]."""
    half = x.shape[-1] // 2
    out = np.empty((*x.shape[:-1], half), np.result_type(x.dtype, np.complex64))
    out.real, out.imag = x[..., :half], x[..., half:]
    return out


def _real(x: Ndarray) -> Ndarray:
    """Return real numbers [..., N] of complex ones [..., N / 2]."""
    return np.concatenate((x.real, x.imag), -1)


def _pairs(x: Ndarray) -> Ndarray:
    """Return a weight [channels, 2, N / 2] as complex numbers."""
    return _complex(_flat(x))


# ---- S4D -------------------------------------------------------------------------------------------------------------


def _diagonal(
    log_dt: Ndarray, a_log: Ndarray, a_imag: Ndarray, c: Ndarray
) -> tuple[Step, Ndarray, Callable[[int], Block]]:
    """Return a step of h' = A h + u by zero-order hold, C, and a function that builds a block."""
    a, c = -np.exp(a_log) + 1j * a_imag, _pairs(c)
    exponent = np.exp(log_dt)[:, None] * a
    once = np.exp(exponent)
    b = (once - 1) / a

    def block(size: int) -> Block:
        powers = np.exp(exponent[..., None] * np.arange(size + 1))  # [channels, N / 2, L + 1]
        kernel = 2 * ((c * b)[:, None] @ powers[..., :size]).real[:, 0]
        into = _real((b[..., None] * powers[..., size - 1 :: -1]).swapaxes(1, 2))
        seen = 2 * c[..., None] * powers[..., 1:]
        out = np.concatenate((seen.real, -seen.imag), 1)
        return Block(kernel, into, out, lambda h: _scale(h, powers[:, None, :, -1]), part)

    def part(h: Ndarray, tokens: Ndarray) -> Ndarray:
        return _scale(h, np.exp(exponent[:, None] * tokens[:, None]))

    return lambda h, u: once * h + b * u, c, block


def _scale(h: Ndarray, factors: Ndarray) -> Ndarray:
    """Multiply real states by complex factors."""
    return _real(_complex(h) * factors.astype(np.result_type(h.dtype, np.complex64)))


# ---- S4 --------------------------------------------------------------------------------------------------------------


def _dplr(
    log_dt: Ndarray, a_log: Ndarray, a_imag: Ndarray, p: Ndarray, b: Ndarray, c: Ndarray
) -> tuple[Step, Ndarray, Callable[[int], Block]]:
    """Return a step of h' = (diag(a) - P P*) h + B u by the bilinear rule, C, and a function that builds a block."""
    a, p, b, c = -np.exp(a_log) + 1j * a_imag, _pairs(p), _pairs(b), _pairs(c)
    rate = 2 / np.exp(log_dt)[:, None]
    inverse = 1 / (rate - a)
    solved = inverse * p / (1 + _both(p.conj() * inverse * p))  # by Woodbury: (rate - A)^-1 is diagonal and rank one

    def step(h: Ndarray, u: Ndarray) -> Ndarray:
        v = inverse * ((rate + a) * h - p * _both(p.conj() * h) + 2 * b * u)
        after: Ndarray = v - solved * _both(p.conj() * v)
        return after

    def block(size: int) -> Block:
        channels, n = a.shape[0], 2 * a.shape[1]
        # Rows are states: h becomes h @ powers[i] after 2^i tokens, and c gives the output.
        basis = np.broadcast_to(_complex(np.eye(n))[:, None], (n, channels, n // 2))
        nothing = np.zeros((channels, 1))
        powers = [_real(step(basis, nothing)).swapaxes(0, 1)]
        into = _real(step(np.zeros_like(a), nothing + 1))[:, None]
        out = powers[0] @ np.concatenate((2 * c.real, -2 * c.imag), -1)[..., None]
        for _ in range(int(math.log2(size))):
            into, out = np.concatenate((into @ powers[-1], into), 1), np.concatenate((out, powers[-1] @ out), 2)
            powers.append(powers[-1] @ powers[-1])
        # C (I - A^L): the kernel ends with the block.
        ending = c - (out[:, : n // 2, -1] - 1j * out[:, n // 2 :, -1]) / 2

        def part(h: Ndarray, tokens: Ndarray) -> Ndarray:
            for i, power in enumerate(powers[:-1]):  # one factor for each binary digit of the number of tokens
                h = np.where((tokens >> i)[:, None] % 2 == 1, h @ power.astype(h.dtype), h)
            return h

        kernel = _kernel(rate, a, p, b, ending, size)
        return Block(kernel, into, out, lambda h: h @ powers[-1].astype(h.dtype), part)

    return step, c, block


def _both(x: Ndarray) -> Ndarray:
    """Return the sum over conjugate pairs, of which one is given: [..., N / 2] -> [..., 1], real."""
    return np.asarray(2 * x.real.sum(-1, keepdims=True))


def _kernel(rate: Ndarray, a: Ndarray, p: Ndarray, b: Ndarray, c: Ndarray, size: int) -> Ndarray:
    """Return C A^l B of the discrete system for l < L, by its generating function at the roots of unity (algorithm 1).

    c: C (I - A^L). Multiplied out by 1 + w, where the paper divides by it: so w = -1 is a node like any other.
    """
    w = np.exp(-2j * math.pi * np.arange(size // 2 + 1) / size)
    plus, minus = (1 + w)[:, None], rate[..., None] * (1 - w)[:, None]  # [nodes, 1], [channels, nodes, 1]
    one, other = 1 / (minus - plus * a[:, None]), 1 / (minus - plus * a.conj()[:, None])  # [channels, nodes, N / 2]

    def through(x: Ndarray) -> Ndarray:
        """Return the sum of x / (minus - plus a) over conjugate pairs: [channels, nodes]."""
        return np.asarray((one @ x[..., None] + other @ x.conj()[..., None])[..., 0])

    plus = plus[:, 0]
    low_rank = plus * through(c * p) * through(p.conj() * b) / (1 + plus * through(p.conj() * p))
    return np.asarray(np.fft.irfft(2 * (through(c * b) - low_rank), size))
