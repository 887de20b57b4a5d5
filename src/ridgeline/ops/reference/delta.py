"""The gated delta rule in torch: the recurrence for a step of one token, chunks for longer ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.ops.reference.recurrent import _chunks, _in_full, _steps
from ridgeline.spec import GatedDelta, KimiDelta
from ridgeline.spec.workspace import DELTA_CHUNK

UNIT_EPS = 1e-6  # added under the root of a query's or key's length, as in all published code


def delta_rule(case: GatedDelta | KimiDelta):
    per_key, scale = case.num_heads // case.num_key_heads, case.key_dim**-0.5

    @_in_full
    def run(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, h: Tensor,
        lengths: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v, decay, beta = (t.to(h.dtype) for t in (q, k, v, decay, beta))
        q, k = (_unit(t.unflatten(-1, (case.num_key_heads, -1))).repeat_interleave(per_key, -2) for t in (q, k))
        v = v.unflatten(-1, (case.num_heads, -1))
        # One decay for each head, or for each channel of its keys. Padding neither decays nor writes.
        steps = F.softplus(decay + dt_bias).unflatten(-1, (case.num_heads, -1))
        logs = _steps(-a_log.exp()[:, None] * steps, lengths)
        beta = _steps(case.reach * beta.sigmoid(), lengths)
        y, h = (_token if v.shape[1] == 1 else _chunked)(q * scale, k, v, logs, beta, h)
        return y.flatten(2), h

    return run


def norm_gate(case: GatedDelta | KimiDelta):
    act = F.silu if isinstance(case, GatedDelta) else torch.sigmoid

    def normalize(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        x = y.unflatten(-1, (case.num_heads, -1))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.norm.eps)
        return (x * (case.norm.offset + weight)).flatten(-2) * act(z)

    return normalize


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def _token(q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token.

    q and k [n, 1, H, K], v [n, 1, H, P], logs of the decay [n, 1, H, 1 or K], beta [n, 1, H], h [n, H, K, P].
    """
    q, k, v, logs, beta = (t[:, 0] for t in (q, k, v, logs, beta))
    h = logs.exp()[..., None] * h
    error = v - (k[..., None, :] @ h)[..., 0, :]
    h = h + k[..., None] * (beta[..., None] * error)[..., None, :]
    return (q[..., None, :] @ h).transpose(1, 2), h


def _chunked(q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_token` for many tokens (arXiv:2412.06464, 3.3; 2510.26692, 3).

    A token writes k u^T with u = beta (v - k S), where S is the state before the token: the state before the chunk plus
    the writes of earlier tokens of the chunk. So the u of a chunk solve (1 + A) u = beta (v - k h) with A lower
    triangular: u = u_own - w h. Both terms are computed for all chunks before the first h is known.
    """
    m = v.shape[1]
    q, k, v, logs, beta = (_chunks(t, DELTA_CHUNK).transpose(2, 3) for t in (q, k, v, logs, beta[..., None]))
    since = logs.cumsum(-2)  # [n, chunks, H, chunk, 1 or K]: the decay from the chunk's beginning to a token
    inside = _decayed_products(q, k, logs)  # [n, chunks, H, chunk, chunk]
    system = beta * _decayed_products(k, k, logs)  # its diagonal is not read
    right = beta * torch.cat((v, k * since.exp()), -1)
    own, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    q, k, through = q * since.exp(), k * _after(logs).exp(), since[..., -1, :, None].exp()
    outputs = []
    for i in range(v.shape[1]):
        u = own[:, i] - w[:, i] @ h
        outputs.append(q[:, i] @ h + inside[:, i] @ u)
        h = through[:, i] * h + k[:, i].mT @ u
    return torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, :m], h


def _after(logs: Tensor) -> Tensor:
    """Return [..., t, :], the sum over all tokens after t."""
    later = logs[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return torch.cat((later, torch.zeros_like(logs[..., :1, :])), -2)


def _decayed_products(a: Tensor, b: Tensor, logs: Tensor) -> Tensor:
    """Return [..., t, s] = a_t b_s, each channel decayed from token s to token t; 0 where s comes after t.

    a and b [..., tokens, K], logs [..., tokens, 1 or K]. A block of twice the size consists of
    two blocks and, below the diagonal, rows of the later half times rows of the earlier half, each decayed to the
    boundary. So everything is a matrix product, no factor exceeds 1, and no sum of logs is a difference of longer sums.
    """
    out = (a * b).sum(-1)[..., None, None]  # [..., blocks, size, size]
    size = 1
    while size < a.shape[-2]:
        (_, late), (early, _) = _halves(a, size), _halves(b, size)
        logs_early, logs_late = _halves(logs, size)
        below = (late * logs_late.cumsum(-2).exp()) @ (early * _after(logs_early).exp()).mT
        first, second = out.unflatten(-3, (-1, 2)).unbind(-3)
        above = torch.cat((first, torch.zeros_like(below)), -1)
        out = torch.cat((above, torch.cat((below, second), -1)), -2)
        size *= 2
    return out[..., 0, :, :]


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second halves of blocks, [..., blocks, size, K], of [..., blocks * 2 * size, K]."""
    first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return first, second
