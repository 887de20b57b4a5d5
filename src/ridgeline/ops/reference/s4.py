"""S4 and S4D in torch: the recurrence for a step of one token, convolutions of blocks of tokens for longer ones.

Coefficients that depend on the weights alone (steps, powers, kernels) are computed in float64, because they are raised
to high powers. Both forms use one discretization. States are complex [..., state_size / 2], or real [..., state_size]
with all real parts first and all imaginary parts after them. "channels" is an axis, N the state_size, and L the tokens
of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.reference.recurrent import _in_full, _steps
from ridgeline.spec import S4, S4D
from ridgeline.spec.workspace import S4_BLOCK

Step = Callable[[Tensor, Tensor], Tensor]  # (h [..., channels, N / 2], u [..., channels, 1]) -> h after the token


class Block(NamedTuple):
    """The linear system of each channel over a block of L tokens.

    kernel: [channels, L], the contribution of a token to its own output, to the next token's, and so on.
    into: [channels, L, N], the contribution of each token to the state after the block.
    out: [channels, N, L], the contribution of the state before the block to each output.
    whole(h): states h [channels, n, N] after L tokens of zeros.
    part(h, tokens [n]): the same states after fewer tokens of zeros.
    """

    kernel: Tensor
    into: Tensor
    out: Tensor
    whole: Callable[[Tensor], Tensor]
    part: Callable[[Tensor, Tensor], Tensor]


def state_space(case: S4 | S4D):
    build = _dplr if isinstance(case, S4) else _diagonal

    @_in_full
    def scan(u: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        *parameters, d, h, lengths = others
        step, c, block = build(*(p.double() for p in parameters))
        u = _steps(u.to(h.dtype), lengths)
        if u.shape[1] == 1:
            state = step(_complex(h.double().flatten(-2)), u[:, 0, :, None].double())
            y, h = 2 * (c * state).real.sum(-1).to(h.dtype)[:, None], torch.stack((state.real, state.imag), -2).to(h)
        else:
            y, h = _convolve(block(min(S4_BLOCK, 1 << (u.shape[1] - 1).bit_length())), u, h, lengths)
        return y + d * u, h

    return scan


def _convolve(block: Block, u: Tensor, h: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Compute block after block: a convolution of its tokens, plus the contribution of the state before it."""
    (n, m, channels), size = u.shape, block.kernel.shape[1]
    kernel, into, out = (x.to(h.dtype) for x in (block.kernel, block.into, block.out))
    x = torch.cat((u, u.new_zeros(n, -m % size, channels)), 1).permute(2, 0, 1).unflatten(2, (-1, size))
    # Fourier transforms are fast at powers of two, and twice the block length keeps the convolution from wrapping.
    y = torch.fft.irfft(torch.fft.rfft(x, 2 * size) * torch.fft.rfft(kernel, 2 * size)[:, None, None], 2 * size)
    added = (x.flatten(1, 2) @ into).unflatten(1, (n, -1))  # [channels, n, blocks, N]
    states = [h.flatten(-2).transpose(0, 1)]
    for i in range(x.shape[2]):
        states.append(block.whole(states[-1]) + added[:, :, i])
    begins = torch.stack(states[:-1], 2)
    y = y[..., :size] + (begins.flatten(1, 2) @ out).unflatten(1, (n, -1))
    y = y.flatten(2)[..., :m].permute(1, 2, 0)
    # For each sequence, take the state before its last, unfinished block and add that block's tokens.
    rest = lengths % size
    kept = torch.stack(states, 0)[lengths // size, :, torch.arange(n, device=u.device)].transpose(0, 1)
    ends = lengths[:, None] - size + torch.arange(size, device=u.device)
    last = u.gather(1, ends.clamp(min=0)[..., None].expand(-1, -1, channels))
    last = last.masked_fill((ends < (lengths - rest)[:, None])[..., None], 0.0).permute(2, 0, 1)
    left = block.part(kept, rest) + last @ into
    return y, left.transpose(0, 1).unflatten(-1, (2, -1))


def _complex(x: Tensor) -> Tensor:
    """Return complex numbers [..., N / 2] of real ones [..., N]."""
    return torch.complex(*x.chunk(2, -1))


def _real(x: Tensor) -> Tensor:
    """Return real numbers [..., N] of complex ones [..., N / 2]."""
    return torch.cat((x.real, x.imag), -1)


def _pairs(x: Tensor) -> Tensor:
    """Return a weight [channels, 2, N / 2] as complex numbers."""
    return torch.complex(x[:, 0], x[:, 1])


# ---- S4D -------------------------------------------------------------------------------------------------------------


def _diagonal(log_dt: Tensor, a_log: Tensor, a_imag: Tensor, c: Tensor) -> tuple[Step, Tensor, Callable[[int], Block]]:
    """Return a step of h' = A h + u by zero-order hold, C, and a function that builds a block."""
    a, c = torch.complex(-a_log.exp(), a_imag), _pairs(c)
    exponent = log_dt.exp()[:, None] * a
    once = exponent.exp()
    b = (once - 1) / a

    def block(size: int) -> Block:
        powers = (exponent[..., None] * torch.arange(size + 1, device=c.device)).exp()  # [channels, N / 2, L + 1]
        kernel = 2 * ((c * b)[:, None] @ powers[..., :size]).real[:, 0]
        into = _real((b[..., None] * powers[..., :size].flip(-1)).transpose(1, 2))
        seen = 2 * c[..., None] * powers[..., 1:]
        out = torch.cat((seen.real, -seen.imag), 1)
        return Block(kernel, into, out, lambda h: _scale(h, powers[:, None, :, -1]), part)

    def part(h: Tensor, tokens: Tensor) -> Tensor:
        return _scale(h, (exponent[:, None] * tokens[:, None]).exp())

    return lambda h, u: once * h + b * u, c, block


def _scale(h: Tensor, factors: Tensor) -> Tensor:
    """Multiply real states by complex factors."""
    return _real(_complex(h) * factors.to(torch.promote_types(h.dtype, torch.complex64)))


# ---- S4 --------------------------------------------------------------------------------------------------------------


def _dplr(
    log_dt: Tensor, a_log: Tensor, a_imag: Tensor, p: Tensor, b: Tensor, c: Tensor
) -> tuple[Step, Tensor, Callable[[int], Block]]:
    """Return a step of h' = (diag(a) - P P*) h + B u by the bilinear rule, C, and a function that builds a block."""
    a, p, b, c = torch.complex(-a_log.exp(), a_imag), _pairs(p), _pairs(b), _pairs(c)
    rate = 2 / log_dt.exp()[:, None]
    inverse = 1 / (rate - a)
    solved = inverse * p / (1 + _both(p.conj() * inverse * p))  # by Woodbury: (rate - A)^-1 is diagonal and rank one

    def step(h: Tensor, u: Tensor) -> Tensor:
        v = inverse * ((rate + a) * h - p * _both(p.conj() * h) + 2 * b * u)
        return v - solved * _both(p.conj() * v)

    def block(size: int) -> Block:
        channels, n = a.shape[0], 2 * a.shape[1]
        # Rows are states: h becomes h @ powers[i] after 2^i tokens, and c gives the output.
        basis = _complex(torch.eye(n, dtype=rate.dtype, device=rate.device))[:, None].expand(-1, channels, -1)
        nothing = rate.new_zeros(channels, 1)
        powers = [_real(step(basis, nothing)).transpose(0, 1)]
        into = _real(step(torch.zeros_like(a), nothing + 1))[:, None]
        out = powers[0] @ torch.cat((2 * c.real, -2 * c.imag), -1)[..., None]
        for _ in range(int(math.log2(size))):
            into, out = torch.cat((into @ powers[-1], into), 1), torch.cat((out, powers[-1] @ out), 2)
            powers.append(powers[-1] @ powers[-1])
        # C (I - A^L): the kernel ends with the block.
        ending = c - torch.complex(out[:, : n // 2, -1], -out[:, n // 2 :, -1]) / 2

        def part(h: Tensor, tokens: Tensor) -> Tensor:
            for i, power in enumerate(powers[:-1]):  # one factor for each binary digit of the number of tokens
                h = torch.where((tokens >> i)[:, None] % 2 == 1, h @ power.to(h), h)
            return h

        return Block(_kernel(rate, a, p, b, ending, size), into, out, lambda h: h @ powers[-1].to(h), part)

    return step, c, block


def _both(x: Tensor) -> Tensor:
    """Return the sum over conjugate pairs, of which one is given: [..., N / 2] -> [..., 1], real."""
    return 2 * x.real.sum(-1, keepdim=True)


def _kernel(rate: Tensor, a: Tensor, p: Tensor, b: Tensor, c: Tensor, size: int) -> Tensor:
    """Return C A^l B of the discrete system for l < L, by its generating function at the roots of unity (algorithm 1).

    c: C (I - A^L). Multiplied out by 1 + w, where the paper divides by it: so w = -1 is a node like any other.
    """
    w = torch.exp(-2j * math.pi * torch.arange(size // 2 + 1, device=a.device, dtype=rate.dtype) / size)
    plus, minus = (1 + w)[:, None], rate[..., None] * (1 - w)[:, None]  # [nodes, 1], [channels, nodes, 1]
    one, other = 1 / (minus - plus * a[:, None]), 1 / (minus - plus * a.conj()[:, None])  # [channels, nodes, N / 2]

    def through(x: Tensor) -> Tensor:
        """Return the sum of x / (minus - plus a) over conjugate pairs: [channels, nodes]."""
        return (one @ x[..., None] + other @ x.conj()[..., None])[..., 0]

    plus = plus[:, 0]
    low_rank = plus * through(c * p) * through(p.conj() * b) / (1 + plus * through(p.conj() * p))
    return torch.fft.irfft(2 * (through(c * b) - low_rank), size)
