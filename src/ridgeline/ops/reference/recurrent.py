"""Recurrent primitives in torch: the recurrence for a step of one token, chunks for longer ones.

n sequences have up to m tokens each. Tokens beyond a sequence's length are padding: they leave the state as it is (a
step of 0), and their outputs are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.spec import Attention, LightningAttention, Mamba, Mamba2, TaylorAttention
from ridgeline.spec.taylor import LEAST_FEATURE
from ridgeline.spec.workspace import SCAN_BLOCK, SCAN_CHUNK, SSD_CHUNK


def read_state(dtype: torch.dtype):
    def read_pages(pages: Tensor, read: Tensor, fresh: Tensor, write: Tensor) -> Tensor:
        kept = pages[read].to(dtype)
        # Memory that was never written may hold NaN.
        return kept.masked_fill(fresh.view(-1, *[1] * (kept.dim() - 1)).bool(), 0.0)

    return read_pages


def write_state(pages: Tensor, write: Tensor, states: Tensor) -> None:
    pages[write] = states.to(pages.dtype)


def gather(parts: Sequence[Tensor], axes: int, order: Tensor) -> Tensor:
    return torch.cat([part.flatten(0, axes - 1) for part in parts])[order]


def split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return x.split(list(sizes), -1)


def gate(y: Tensor, z: Tensor) -> Tensor:
    return y * F.silu(z)


def sigmoid_gate(y: Tensor, z: Tensor) -> Tensor:
    return y * torch.sigmoid(z)


def attention_gate(case: Attention) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    act = torch.sigmoid if case.gate_act == "sigmoid" else F.softplus

    def run(y: Tensor, z: Tensor, bias: Tensor | None = None) -> Tensor:
        heads, gates = (x.unflatten(-1, (case.num_heads, -1)) for x in (y, z))
        return (heads * act(gates if bias is None else gates + bias[:, None])).flatten(-2)

    return run


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def gated_norm(case: Mamba2):
    def normalize(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        x = gate(y, z).unflatten(-1, (case.num_groups, -1))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.norm.eps)
        return x.flatten(-2) * (case.norm.offset + weight)

    return normalize


def short_conv(
    x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    kept, m = before.shape[1], x.shape[1]
    seen = torch.cat((before.to(x.dtype), x), 1)  # [n, k - 1 + m, C]
    filters = weight.to(x.dtype)[:, 0]
    y = sum(seen[:, i : i + m] * filters[:, i] for i in range(kept + 1))
    # The last k - 1 tokens of each sequence, without padding.
    last = lengths[:, None] + torch.arange(kept, device=x.device)
    left = seen.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
    return (y if bias is None else y + bias), left


def _steps(dt: Tensor, lengths: Tensor) -> Tensor:
    """Return dt [n, m, ...] with 0 in the padding."""
    valid = torch.arange(dt.shape[1], device=dt.device) < lengths[:, None]
    return dt.masked_fill(~valid.view(*valid.shape, *[1] * (dt.dim() - 2)), 0.0)


# ---- Mamba -----------------------------------------------------------------------------------------------------------


def _in_full(scan):
    """Convert to the type of the state: it is a sum over all tokens, and autocast must not round its terms."""

    def run(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            return scan(x, *others)

    return run


def selective_scan(case: Mamba):
    @_in_full
    def scan(
        x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, h: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, dt, b, c = (t.to(h.dtype) for t in (x, dt, b, c))
        dt, a = _steps(F.softplus(dt), lengths), -a_log.exp()
        size = max(SCAN_CHUNK, SCAN_BLOCK // (x.shape[0] * a.numel()) // SCAN_CHUNK * SCAN_CHUNK)
        outputs = []
        for part in zip(*(t.split(size, 1) for t in (x, dt, b, c)), strict=True):
            y, h = (_scan_token if part[0].shape[1] == 1 else _scan_block)(*part, a, h)
            outputs.append(y)
        return torch.cat(outputs, 1) + d * x, h

    return scan


def _scan_token(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token by the recurrence."""
    x, dt, b, c = (t[:, 0] for t in (x, dt, b, c))
    h = torch.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None]
    return (h @ c[..., None]).transpose(1, 2), h


def _scan_block(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute all chunks from a state of 0 at once, then the state before each chunk and its contribution.

    A chunk maps its state to decay * state + own. These maps are applied in order at the end.
    """
    m = x.shape[1]
    x, dt, b, c = (_chunks(t, SCAN_CHUNK) for t in (x, dt, b, c))  # [n, chunks, chunk, ...]
    decay = torch.exp(dt[..., None] * a)  # [n, chunks, chunk, D, S]
    added = (dt * x)[..., None] * b[..., None, :]
    own, through = [added[:, :, 0]], [decay[:, :, 0]]
    for i in range(1, SCAN_CHUNK):
        own.append(decay[:, :, i] * own[-1] + added[:, :, i])
        through.append(decay[:, :, i] * through[-1])
    begins = []
    for i in range(x.shape[1]):
        begins.append(h)
        h = through[-1][:, i] * h + own[-1][:, i]
    state = torch.stack(own, 2) + torch.stack(through, 2) * torch.stack(begins, 1)[:, :, None]
    y = (state @ c[..., None])[..., 0]
    return y.flatten(1, 2)[:, :m], h


def _chunks(x: Tensor, size: int) -> Tensor:
    """Reshape [n, m, ...] to [n, chunks, size, ...], with zeros at the end."""
    missing = -x.shape[1] % size
    x = torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), 1) if missing else x
    return x.unflatten(1, (-1, size))


# ---- linear attention ------------------------------------------------------------------------------------------------


def taylor_attention(case: TaylorAttention):
    features = features_of(case)

    @_in_full
    def attend(q: Tensor, k: Tensor, v: Tensor, h: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (t.to(h.dtype).unflatten(-1, (case.num_heads, -1)) for t in (q, k, v))
        ones = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # a value of one sums the weights
        logs = torch.zeros_like(v[..., 0])
        linear = _ssd_token if v.shape[1] == 1 else _ssd_chunks
        y, h = linear(_steps(ones, lengths), logs, features(k), features(q), h)
        return (y[..., :-1] / y[..., -1:]).flatten(2), h

    return attend


def features_of(case: TaylorAttention):
    """Return the function of queries or keys [..., feature_dim] that gives their features [..., num_features]."""
    return _hedgehog_features if case.features == "hedgehog" else _taylor_features


def _hedgehog_features(x: Tensor) -> Tensor:
    """Return softmax(x) and softmax(-x), each number at least LEAST_FEATURE."""
    return torch.cat((x.softmax(-1), (-x).softmax(-1)), -1).clamp(min=LEAST_FEATURE)


def _taylor_features(x: Tensor) -> Tensor:
    """Return features whose product is 1 + s + s^2 / 2, where s = q k / sqrt(D)."""
    x = x * x.shape[-1] ** -0.25
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2) * 0.5**0.5
    return torch.cat((torch.ones_like(x[..., :1]), x, squares), -1)


def lightning_attention(case: LightningAttention):
    @_in_full
    def attend(q: Tensor, k: Tensor, v: Tensor, h: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (t.to(h.dtype) for t in (q, k, v))
        slopes = torch.tensor(case.slopes, dtype=h.dtype, device=h.device)
        logs = _steps(-slopes.expand(v.shape[:3]), lengths)
        y, h = (_ssd_token if v.shape[1] == 1 else _ssd_chunks)(_steps(v, lengths), logs, k, q, h)
        return y.flatten(2), h

    return attend


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------


def ssd(case: Mamba2):
    heads = (case.num_heads, case.head_dim)
    per_group = case.num_heads // case.num_groups

    @_in_full
    def scan(
        x: Tensor, dt: Tensor, dt_bias: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, h: Tensor,
        lengths: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, dt, b, c = (t.to(h.dtype) for t in (x, dt, b, c))
        dt = _steps(F.softplus(dt + dt_bias).clamp(case.dt_least, case.dt_most), lengths)
        x = x.unflatten(-1, heads)
        b, c = (t.unflatten(-1, (case.num_groups, -1)).repeat_interleave(per_group, -2) for t in (b, c))
        logs, inputs = dt * -a_log.exp(), dt[..., None] * x
        y, h = (_ssd_token if x.shape[1] == 1 else _ssd_chunks)(inputs, logs, b, c, h)
        return (y + d[:, None] * x).flatten(2), h

    return scan


def _ssd_token(x: Tensor, logs: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token. x [n, 1, H, P], logs of the decay [n, 1, H], b and c [n, 1, H, S], h [n, H, P, S]."""
    x, logs, b, c = (t[:, 0] for t in (x, logs, b, c))
    h = logs.exp()[..., None, None] * h + x[..., None] * b[..., None, :]
    return (h @ c[..., None])[:, None, ..., 0], h


def _ssd_chunks(x: Tensor, logs: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute many tokens: matrices within a chunk, states between chunks (arXiv:2405.21060, section 6)."""
    m = x.shape[1]
    size = min(SSD_CHUNK, 1 << (m - 1).bit_length())
    x, b, c = (_chunks(t, size).transpose(2, 3) for t in (x, b, c))  # [n, chunks, H, chunk, ...]
    logs = _chunks(logs, size).transpose(2, 3)  # [n, chunks, H, chunk]
    inside = _decays(logs)  # [n, chunks, H, chunk, chunk]
    y = ((c @ b.transpose(-1, -2)) * inside) @ x
    left = (x * inside[..., -1, :, None]).transpose(-1, -2) @ b  # [n, chunks, H, P, S]
    until = logs.cumsum(-1)
    through = until[..., -1].exp()
    begins = []
    for i in range(x.shape[1]):
        begins.append(h)
        h = through[:, i, :, None, None] * h + left[:, i]
    y = y + until.exp()[..., None] * (c @ torch.stack(begins, 1).transpose(-1, -2))
    return y.transpose(2, 3).flatten(1, 2)[:, :m], h


def _decays(logs: Tensor) -> Tensor:
    """Return [..., t, s], the decay from token s to token t; 0 where s comes after t.

    Each pair has a sum of its own: a difference of two running sums would lose precision.
    """
    size = logs.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=logs.device).tril()
    sums = logs[..., None].expand(*logs.shape, size).masked_fill(~lower.tril(-1), 0.0).cumsum(-2)
    return sums.masked_fill(~lower, -torch.inf).exp()
