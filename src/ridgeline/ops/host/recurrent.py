"""Recurrent primitives in numpy: the recurrence for a step of one token, chunks for longer ones.

The forms are those of ops/reference/recurrent.py. Results are overwritten where possible, as there are no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ridgeline.ops.host.memory import Ndarray, widen
from ridgeline.ops.host.primitives import sigmoid, silu
from ridgeline.spec import Attention, LightningAttention, Mamba, Mamba2, TaylorAttention
from ridgeline.spec.taylor import LEAST_FEATURE
from ridgeline.spec.workspace import SCAN_BLOCK, SCAN_CHUNK, SSD_CHUNK

Scan = Callable[..., tuple[Ndarray, Ndarray]]


def read_state(pages: Ndarray, read: Ndarray, fresh: Ndarray, write: Ndarray) -> Ndarray:
    kept: Ndarray = pages[read]
    kept[fresh != 0] = 0.0  # memory that was never written may hold NaN
    return kept


def write_state(pages: Ndarray, write: Ndarray, states: Ndarray) -> None:
    pages[write] = states


def gather(parts: Sequence[Ndarray], axes: int, order: Ndarray) -> Ndarray:
    flat = [part.reshape(-1, *part.shape[axes:]) for part in parts]
    return (flat[0] if len(flat) == 1 else np.concatenate(flat))[order]


def split(x: Ndarray, sizes: Sequence[int]) -> tuple[Ndarray, ...]:
    ends = list(accumulate(sizes))
    return tuple(x[..., end - size : end] for end, size in zip(ends, sizes, strict=True))


def gate(y: Ndarray, z: Ndarray) -> Ndarray:
    return y * silu(z)


def sigmoid_gate(y: Ndarray, z: Ndarray) -> Ndarray:
    return y * sigmoid(z)


def attention_gate(case: Attention) -> Callable[[Ndarray, Ndarray, Ndarray | None], Ndarray]:
    act = sigmoid if case.gate_act == "sigmoid" else softplus

    def run(y: Ndarray, z: Ndarray, bias: Ndarray | None = None) -> Ndarray:
        heads, gates = (x.reshape(*x.shape[:-1], case.num_heads, -1) for x in (y, z))
        return (heads * act(gates if bias is None else gates + bias[:, None])).reshape(y.shape)

    return run


def gated_norm(case: Mamba2) -> Callable[[Ndarray, Ndarray, Ndarray], Ndarray]:
    own = case.norm
    assert own is not None  # without a norm, the op is GATE

    def normalize(y: Ndarray, z: Ndarray, weight: Ndarray) -> Ndarray:
        x = gate(y, z).reshape(*y.shape[:-1], case.num_groups, -1)
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + own.eps)
        return x.reshape(y.shape) * (own.offset + weight)

    return normalize


def short_conv(
    x: Ndarray, before: Ndarray, weight: Ndarray, bias: Ndarray | None, lengths: Ndarray
) -> tuple[Ndarray, Ndarray]:
    kept, m = before.shape[1], x.shape[1]
    seen = np.concatenate((before.astype(x.dtype, copy=False), x), 1)  # [n, k - 1 + m, C]
    filters = widen(weight[:, 0]).astype(x.dtype, copy=False)
    y = seen[:, :m] * filters[:, 0]
    for i in range(1, kept + 1):
        y += seen[:, i : i + m] * filters[:, i]
    if bias is not None:
        y += bias
    # The last k - 1 tokens of each sequence, without padding.
    last = lengths[:, None] + np.arange(kept)
    return y, seen[np.arange(len(x))[:, None], last]


def steps(dt: Ndarray, lengths: Ndarray) -> Ndarray:
    """Return dt [n, m, ...] with 0 in the padding."""
    valid = np.arange(dt.shape[1]) < lengths[:, None]
    return np.where(valid.reshape(*valid.shape, *[1] * (dt.ndim - 2)), dt, dt.dtype.type(0))


def softplus(x: Ndarray) -> Ndarray:
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def like(h: Ndarray, *arrays: Ndarray) -> tuple[Ndarray, ...]:
    """Convert to the type of the state, which is a sum over all tokens."""
    return tuple(x.astype(h.dtype, copy=False) for x in arrays)


# ---- Mamba -----------------------------------------------------------------------------------------------------------


def selective_scan(case: Mamba) -> Scan:
    def scan(
        x: Ndarray, dt: Ndarray, a_log: Ndarray, b: Ndarray, c: Ndarray, d: Ndarray, h: Ndarray, lengths: Ndarray
    ) -> tuple[Ndarray, Ndarray]:
        x, dt, b, c = like(h, x, dt, b, c)
        dt, a = steps(softplus(dt), lengths), -np.exp(a_log)
        if x.shape[1] == 1:
            y, h = _scan_token(x, dt, b, c, a, h)
            return y + d * x, h
        size = max(SCAN_CHUNK, SCAN_BLOCK // (len(x) * a.size) // SCAN_CHUNK * SCAN_CHUNK)
        y = d * x
        for at in range(0, x.shape[1], size):
            some = slice(at, at + size)
            part, h = _scan_block(x[:, some], dt[:, some], b[:, some], c[:, some], a, h)
            y[:, some] += part
        return y, h

    return scan


def _scan_token(x: Ndarray, dt: Ndarray, b: Ndarray, c: Ndarray, a: Ndarray, h: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Compute one token by the recurrence."""
    x, dt, b, c = (t[:, 0] for t in (x, dt, b, c))
    h = np.exp(dt[..., None] * a) * h
    h += (dt * x)[..., None] * b[:, None]
    return (h @ c[..., None]).transpose(0, 2, 1), h


def _scan_block(x: Ndarray, dt: Ndarray, b: Ndarray, c: Ndarray, a: Ndarray, h: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Compute all chunks from a state of 0 at once, then the state before each chunk and its contribution.

    A chunk maps its state to decay * state + own. These maps are applied in order at the end.
    """
    n, m = x.shape[:2]
    x, dt, b, c = (chunks(t, SCAN_CHUNK) for t in (x, dt, b, c))  # [n, chunks, chunk, ...]
    through = np.exp(
        dt[..., None] * a
    )  # [n, chunks, chunk, D, S]: the decay of a token; later, since the start of its chunk
    state = (dt * x)[..., None] * b[..., None, :]  # contribution of a token; later, the state after it
    for i in range(1, SCAN_CHUNK):
        state[:, :, i] += through[:, :, i] * state[:, :, i - 1]
        through[:, :, i] *= through[:, :, i - 1]
    begins = np.empty_like(state[:, :, 0])
    for i in range(x.shape[1]):
        begins[:, i] = h
        h = through[:, i, -1] * h + state[:, i, -1]
    through *= begins[:, :, None]
    state += through
    y = (state @ c[..., None])[..., 0]
    return y.reshape(n, -1, y.shape[-1])[:, :m], h


def chunk_size(tokens: int, most: int) -> int:
    """Return the least power of two that is not below `tokens`, or `most`, so that short prompts get little padding."""
    return min(most, 1 << (tokens - 1).bit_length())


def chunks(x: Ndarray, size: int) -> Ndarray:
    """Reshape [n, m, ...] to [n, chunks, size, ...], with zeros at the end."""
    missing = -x.shape[1] % size
    if missing:
        x = np.concatenate((x, np.zeros((len(x), missing, *x.shape[2:]), x.dtype)), 1)
    return x.reshape(len(x), -1, size, *x.shape[2:])


# ---- linear attention ------------------------------------------------------------------------------------------------


def taylor_attention(case: TaylorAttention) -> Scan:
    features = _hedgehog_features if case.features == "hedgehog" else _taylor_features

    def attend(q: Ndarray, k: Ndarray, v: Ndarray, h: Ndarray, lengths: Ndarray) -> tuple[Ndarray, Ndarray]:
        q, k, v = (x.reshape(*x.shape[:-1], case.num_heads, -1) for x in like(h, q, k, v))
        ones = np.concatenate((v, np.ones_like(v[..., :1])), -1)  # a value of one sums the weights
        logs = np.zeros_like(v[..., 0])
        linear = _ssd_token if v.shape[1] == 1 else _ssd_chunks
        y, h = linear(steps(ones, lengths), logs, features(k), features(q), h)
        out: Ndarray = y[..., :-1] / y[..., -1:]
        return out.reshape(*out.shape[:2], -1), h

    return attend


def _hedgehog_features(x: Ndarray) -> Ndarray:
    """Return softmax(x) and softmax(-x), each number at least LEAST_FEATURE."""
    both = np.stack((x, -x), -2)
    both = np.exp(both - both.max(-1, keepdims=True))
    found: Ndarray = np.maximum(both / both.sum(-1, keepdims=True), LEAST_FEATURE)
    return found.reshape(*x.shape[:-1], -1)


def _taylor_features(x: Ndarray) -> Ndarray:
    """Return features whose product is 1 + s + s^2 / 2, where s = q k / sqrt(D)."""
    x = x * x.shape[-1] ** -0.25
    squares = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1) * 0.5**0.5
    return np.concatenate((np.ones_like(x[..., :1]), x, squares), -1)


def lightning_attention(case: LightningAttention) -> Scan:
    def attend(q: Ndarray, k: Ndarray, v: Ndarray, h: Ndarray, lengths: Ndarray) -> tuple[Ndarray, Ndarray]:
        q, k, v = like(h, q, k, v)
        logs = steps(np.broadcast_to(-np.array(case.slopes, h.dtype), v.shape[:3]), lengths)
        y, h = (_ssd_token if v.shape[1] == 1 else _ssd_chunks)(steps(v, lengths), logs, k, q, h)
        return y.reshape(*y.shape[:2], -1), h

    return attend


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------


def ssd(case: Mamba2) -> Scan:
    heads = (case.num_heads, case.head_dim)
    per_group = case.num_heads // case.num_groups

    def scan(
        x: Ndarray, dt: Ndarray, dt_bias: Ndarray, a_log: Ndarray, b: Ndarray, c: Ndarray, d: Ndarray, h: Ndarray,
        lengths: Ndarray,
    ) -> tuple[Ndarray, Ndarray]:  # fmt: skip
        x, dt, b, c = like(h, x, dt, b, c)
        dt = steps(np.clip(softplus(dt + dt_bias), case.dt_least, case.dt_most), lengths)
        x = x.reshape(*x.shape[:2], *heads)
        b, c = (np.repeat(t.reshape(*t.shape[:2], case.num_groups, -1), per_group, -2) for t in (b, c))
        logs, inputs = dt * -np.exp(a_log), dt[..., None] * x
        y, h = (_ssd_token if x.shape[1] == 1 else _ssd_chunks)(inputs, logs, b, c, h)
        y += d[:, None] * x
        return y.reshape(*y.shape[:2], -1), h

    return scan


def _ssd_token(x: Ndarray, logs: Ndarray, b: Ndarray, c: Ndarray, h: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Compute one token. x [n, 1, H, P], logs of the decay [n, 1, H], b and c [n, 1, H, S], h [n, H, P, S]."""
    x, logs, b, c = (t[:, 0] for t in (x, logs, b, c))
    h = np.exp(logs)[..., None, None] * h
    h += x[..., None] * b[..., None, :]
    return (h @ c[..., None])[:, None, ..., 0], h


def _ssd_chunks(x: Ndarray, logs: Ndarray, b: Ndarray, c: Ndarray, h: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Compute many tokens: matrices within a chunk, states between chunks (arXiv:2405.21060, section 6)."""
    n, m = x.shape[:2]
    size = chunk_size(m, SSD_CHUNK)
    x, b, c = (chunks(t, size).swapaxes(2, 3) for t in (x, b, c))  # [n, chunks, H, chunk, ...]
    logs = chunks(logs, size).swapaxes(2, 3)  # [n, chunks, H, chunk]
    inside = _decays(logs)  # [n, chunks, H, chunk, chunk]
    left = (x * inside[..., -1, :, None]).swapaxes(-1, -2) @ b  # [n, chunks, H, P, S]
    inside *= c @ b.swapaxes(-1, -2)
    y = inside @ x
    until = logs.cumsum(-1)
    through, begins = np.exp(until[..., -1]), np.empty_like(left)
    for i in range(x.shape[1]):
        begins[:, i] = h
        h = through[:, i, :, None, None] * h + left[:, i]
    y += np.exp(until)[..., None] * (c @ begins.swapaxes(-1, -2))
    return y.swapaxes(2, 3).reshape(n, -1, *h.shape[1:3])[:, :m], h


def _decays(logs: Ndarray) -> Ndarray:
    """Return [..., t, s], the decay from token s to token t; 0 where s comes after t.

    Each pair has a sum of its own: a difference of two running sums would lose precision.
    """
    size = logs.shape[-1]
    lower = np.tri(size, dtype=bool)
    sums: Ndarray = np.where(np.tri(size, k=-1, dtype=bool), logs[..., None], logs.dtype.type(0)).cumsum(-2)
    np.exp(sums, out=sums)
    sums *= lower
    return sums
