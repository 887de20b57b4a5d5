"""Recurrent token mixers written from their papers, in float64; they share no code with the mixers under test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.spec import S4, S4D, GatedConvolution, LightningAttention, ShortConvolution, TaylorAttention

Weights = dict[str, Tensor]
KINDS = (S4, S4D, GatedConvolution, LightningAttention, ShortConvolution, TaylorAttention)
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": torch.relu}


def mix(mixer: Any, x: Tensor, w: Weights, at: str) -> Tensor:
    """Map x [T, hidden size] to [T, hidden size], for one sequence from its beginning."""
    match mixer:
        case S4() | S4D():
            y = ACTIVATIONS[mixer.activation](_state_space(mixer, x, w, at))
            a, b = _project(y, w, f"{at}.out").chunk(2, -1)
            return a * torch.sigmoid(b)
        case LightningAttention():
            y = _lightning(mixer, x, w, at) * torch.sigmoid(_project(x, w, f"{at}.gate"))
        case TaylorAttention():
            y = _taylor(mixer, x, w, at)
            return _project(y, w, f"{at}.o")
        case GatedConvolution():
            inner, gate = _project(x, w, f"{at}.in").chunk(2, -1)
            y = ACTIVATIONS[mixer.activation](_filter(inner, w, at)) * gate
        case ShortConvolution():
            b, c, inner = _project(x, w, f"{at}.in").chunk(3, -1)
            y = c * _filter(b * inner, w, at)
    return _project(y, w, f"{at}.out")


def _project(x: Tensor, w: Weights, name: str) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def _filter(x: Tensor, w: Weights, at: str) -> Tensor:
    """Filter each channel with its own weights for a token and earlier ones; the last weight is for the token
    itself.
    """
    taps = w[f"{at}.conv.weight"][:, 0]
    rows = []
    for t in range(len(x)):
        seen = [(taps[:, -1 - back], x[t - back]) for back in range(min(t + 1, taps.shape[1]))]
        rows.append(sum((a * b for a, b in seen), w.get(f"{at}.conv.bias", torch.zeros_like(x[0]))))
    return torch.stack(rows)


def _state_space(mixer: S4 | S4D, u: Tensor, w: Weights, at: str) -> Tensor:
    """Compute h' = A h + B u with matrices of all conjugate numbers, discretized by a solve (S4) or an exponential
    (S4D).
    """

    def whole(x: Tensor) -> Tensor:  # [channels, 2, pairs] -> [channels, N]
        half = torch.complex(x[:, 0], x[:, 1])
        return torch.cat((half, half.conj()), -1)

    own = {name.removeprefix(f"{at}."): x for name, x in w.items() if name.startswith(f"{at}.")}
    dt, one = own["log_dt"].exp()[:, None, None], torch.eye(mixer.state_size, dtype=torch.complex128)
    a = torch.diag_embed(whole(torch.stack((-own["A_log"].exp(), own["A_imag"]), 1)))
    if isinstance(mixer, S4):
        p = whole(own["P"])
        a = a - p[:, :, None] * p.conj()[:, None, :]
        back = one - dt / 2 * a
        step = torch.linalg.solve(back, one + dt / 2 * a)
        drive = torch.linalg.solve(back, dt * whole(own["B"])[..., None])
    else:
        step = torch.linalg.matrix_exp(dt * a)
        drive = torch.linalg.solve(a, (step - one).sum(-1, keepdim=True))
    c, h, rows = whole(own["C"]), torch.zeros_like(drive), []
    for token in u:
        h = step @ h + drive * token[:, None, None]
        rows.append((c[:, None] @ h)[:, 0, 0].real + own["D"] * token)
    return torch.stack(rows)


def _lightning(mixer: LightningAttention, x: Tensor, w: Weights, at: str) -> Tensor:
    """Compute linear attention: the weight of an earlier token is q k, decayed by the slope's factor per
    token between.
    """
    qkv = ACTIVATIONS[mixer.activation](_project(x, w, f"{at}.qkv")).view(len(x), mixer.num_heads, 3, -1)
    q, k, v = (qkv[:, :, i].transpose(0, 1) for i in range(3))
    between = (torch.arange(len(x))[:, None] - torch.arange(len(x))).double()
    heads = []
    for i in range(mixer.num_heads):
        slope = mixer.slope_scale * 2.0 ** (-8.0 * (i + 1) / mixer.num_heads)
        heads.append(((q[i] @ k[i].T) * torch.exp(-slope * between)).tril() @ v[i])
    y = torch.stack(heads, 1).flatten(1)
    return y / ((y**2).mean(-1, keepdim=True) + mixer.norm.eps).sqrt() * w[f"{at}.out_norm.weight"]


def _shares(x: Tensor, sign: float) -> Tensor:
    return (torch.exp(sign * x) / torch.exp(sign * x).sum(-1, keepdim=True)).clamp(min=1e-30)


def _taylor(mixer: TaylorAttention, x: Tensor, w: Weights, at: str) -> Tensor:
    q, k, v = (_project(x, w, f"{at}.{n}").view(len(x), mixer.num_heads, -1).transpose(0, 1) for n in "qkv")
    if mixer.features == "hedgehog":
        weights = sum(_shares(q, s) @ _shares(k, s).transpose(1, 2) for s in (1.0, -1.0)).tril()
    else:
        scores = q @ k.transpose(1, 2) / mixer.feature_dim**0.5
        weights = (1 + scores + scores**2 / 2).tril()
    return ((weights / weights.sum(-1, keepdim=True)) @ v).transpose(0, 1).flatten(1)


def opposites(m: int) -> tuple[np.ndarray, ...]:
    """Return q, k, v and a state of tokens whose features of q times those of k are 0 in float32, and the mean of the
    values up to each token: all weights are equal.
    """
    q = np.tile(np.float32([60, 60, -60, -60]), (1, m, 2))
    v = np.random.default_rng(0).standard_normal((1, m, 6), dtype=np.float32)
    return q, -q, v, np.zeros((1, 2, 4, 8), np.float32), v.cumsum(1) / np.arange(1, m + 1, dtype=np.float32)[:, None]
