"""Primitives over single tokens, and matrix products, in numpy. ops/reference defines the results."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ridgeline.ops.api import Rotary, SlotTerms
from ridgeline.ops.host.memory import Ndarray, widen
from ridgeline.spec import MLP, XIELU, ClampedSwiGLU, GatedMLP, LayerNorm, MoE, QueryGrowth, RMSNorm, Rope, Ungated

WIDEN_BLOCK = 2**18  # elements of a matrix that are converted to float32 at once: they stay in the cache


def embedding(table: Ndarray, ids: Ndarray) -> Ndarray:
    return widen(table[ids])


def linear(x: Ndarray, weight: Ndarray, bias: Ndarray | None) -> Ndarray:
    """Return the product of x [..., in] with a matrix, [..., out]."""
    rows = x.reshape(-1, x.shape[-1])  # one matrix product for all sequences
    if weight.dtype == x.dtype:
        out = rows @ weight.T
    else:
        out = np.empty((len(rows), len(weight)), x.dtype)
        step = max(1, WIDEN_BLOCK // weight.shape[1])
        for start in range(0, len(weight), step):
            np.matmul(rows, widen(weight[start : start + step]).T, out=out[:, start : start + step])
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], len(weight))


def norm(case: RMSNorm | LayerNorm) -> Callable[[Ndarray, Ndarray, Ndarray | None], Ndarray]:
    return _layer_norm(case) if isinstance(case, LayerNorm) else _rms_norm(case)


def _layer_norm(case: LayerNorm) -> Callable[[Ndarray, Ndarray, Ndarray | None], Ndarray]:
    def normalize(x: Ndarray, weight: Ndarray, bias: Ndarray | None) -> Ndarray:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + case.eps)
        x *= case.offset + weight if case.offset else weight
        return x if bias is None else x + bias

    return normalize


def _rms_norm(case: RMSNorm) -> Callable[[Ndarray, Ndarray, Ndarray | None], Ndarray]:
    def normalize(x: Ndarray, weight: Ndarray, bias: Ndarray | None) -> Ndarray:
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + case.eps)
        x *= case.offset + weight if case.offset else weight
        return x

    return normalize


def rotary(positions: Ndarray, inverse_frequencies: Ndarray, attention_factor: float) -> Rotary:
    angles = positions[:, None].astype(np.float32) * inverse_frequencies
    return Rotary(np.cos(angles) * attention_factor, np.sin(angles) * attention_factor)


def grow_queries(case: QueryGrowth) -> Callable[[Ndarray, Ndarray], Ndarray]:
    def grow(q: Ndarray, positions: Ndarray) -> Ndarray:
        if case.by == "power":
            factors: Ndarray = np.exp(case.beta * np.log1p((positions + case.ahead) / case.every))
        else:
            steps = ((positions + case.ahead) // case.every).astype(q.dtype)
            factors = 1.0 + case.beta * np.log1p(steps)
        grown: Ndarray = q * factors[:, None, None].astype(q.dtype)
        return grown

    return grow


def rope(case: Rope) -> Callable[[Ndarray, Rotary], Ndarray]:
    half = case.dim // 2
    first = slice(0, case.dim, 2) if case.interleaved else slice(0, half)
    second = slice(1, case.dim, 2) if case.interleaved else slice(half, case.dim)

    def rotate(x: Ndarray, table: Rotary) -> Ndarray:
        cos, sin = (np.asarray(part)[:, None] for part in table)  # [T, 1, dim / 2]
        a, b, out = x[..., first], x[..., second], x.copy()
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out

    return rotate


def decode_layout(
    page_table: Ndarray, rows: Ndarray, positions: Ndarray, last: Ndarray, page_tokens: int
) -> tuple[Ndarray, ...]:
    index = positions // page_tokens
    return page_table[rows, index], positions - index * page_tokens, page_table[rows[last]]


def known_tokens(tokens: Ndarray, sampled: Ndarray, rows: Ndarray) -> Ndarray:
    return np.where(tokens < 0, sampled[rows], tokens)


def keep_tokens(sampled: Ndarray, rows: Ndarray, ids: Ndarray) -> None:
    sampled[rows] = ids


def best(logits: Ndarray) -> tuple[Ndarray, Ndarray]:
    ids = logits.argmax(axis=1)
    return ids, logits[np.arange(len(logits)), ids]


def split_heads(x: Ndarray, num_heads: int) -> Ndarray:
    return x.reshape(*x.shape[:-1], num_heads, -1)


# ---- activations -----------------------------------------------------------------------------------------------------


def sigmoid(x: Ndarray) -> Ndarray:
    out = np.exp(-x)
    out += 1.0
    return np.divide(1.0, out, out=out)


def silu(x: Ndarray) -> Ndarray:
    out = np.exp(-x)
    out += 1.0
    return np.divide(x, out, out=out)


def gelu(x: Ndarray) -> Ndarray:
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Ndarray) -> Ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def relu(x: Ndarray) -> Ndarray:
    return np.maximum(x, 0.0)


def relu2(x: Ndarray) -> Ndarray:
    return np.square(relu(x))


ACTIVATIONS: dict[str, Callable[[Ndarray], Ndarray]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "relu2": relu2,
}  # fmt: skip

# erf(x) = 1 - exp(-x^2) (c1 t + c2 t^2 + ...), t = 1 / (1 + _ERF_SCALE x), x >= 0: the form of Abramowitz and Stegun
# 7.1.26 with more terms, fitted to math.erfc; the error is 1.1e-9.
_ERF_SCALE = 0.45
_ERF_TERMS = (0.2589897432, 0.2010089592, 0.4601719854, -0.3758050858, 0.8571699354, -0.4941053979, 0.09256986159)


def erf(x: Ndarray) -> Ndarray:
    """Compute the error function, which numpy lacks. The error is 4e-7 in float32."""
    size = np.abs(x)
    t = 1.0 / (1.0 + _ERF_SCALE * size)
    sum_ = np.zeros_like(t)
    for term in reversed(_ERF_TERMS):
        sum_ += term
        sum_ *= t
    signed: Ndarray = np.copysign(1.0 - sum_ * np.exp(-size * size), x)
    return signed


def activation(case: MLP | GatedMLP | MoE) -> Callable[..., Ndarray]:
    if isinstance(case.activation, ClampedSwiGLU):
        return clamped_swiglu(case.activation)
    if isinstance(case.activation, Ungated):
        return ACTIVATIONS[case.activation.activation]
    assert isinstance(case.activation, str)  # XIELU is an op of its own
    act = ACTIVATIONS[case.activation]
    if not isinstance(case, GatedMLP | MoE):
        return act

    def gated(gate: Ndarray, up: Ndarray) -> Ndarray:
        out = act(gate)
        out *= up
        return out

    return gated


def clamped_swiglu(case: ClampedSwiGLU) -> Callable[[Ndarray, Ndarray], Ndarray]:
    def act(gate: Ndarray, up: Ndarray) -> Ndarray:
        gate, up = np.minimum(gate, case.limit), np.clip(up, -case.limit, case.limit)
        return gate / (1.0 + np.exp(-case.alpha * gate)) * (up + 1.0)

    return act


def xielu(case: XIELU) -> Callable[[Ndarray, Ndarray, Ndarray], Ndarray]:
    def act(x: Ndarray, alpha_p: Ndarray, alpha_n: Ndarray) -> Ndarray:
        right, left = np.logaddexp(0.0, alpha_p), case.beta + np.logaddexp(0.0, alpha_n)
        out = np.expm1(np.minimum(x, case.eps))
        out -= x
        out *= left
        np.copyto(out, right * x * x, where=x > 0)
        out += case.beta * x
        return out

    return act


def clamp(x: Ndarray, limit: float) -> Ndarray:
    return np.clip(x, -limit, limit)


# ---- element by element ----------------------------------------------------------------------------------------------


def mix(weights: Ndarray, rows: Ndarray) -> Ndarray:
    return weights @ rows


def add(a: Ndarray, b: Ndarray, scale: float) -> Ndarray:
    return a + scale * b if scale != 1.0 else a + b


def add_terms(y: Ndarray, x: Ndarray, slots: Ndarray, terms: SlotTerms) -> Ndarray:
    out = y.copy()
    down, up, gain, add, ranks = (np.asarray(array) for array in terms)
    for i in np.flatnonzero(slots >= 0):  # row by row, so that no row's bits depend on others
        s, rank = int(slots[i]), int(ranks[slots[i]])
        out[i] = gain[s] * y[i] + add[s] + (down[s, :rank] @ x[i]) @ up[s, :rank]
    return out


def scale(x: Ndarray, factor: float) -> Ndarray:
    return x * factor


def softcap(x: Ndarray, cap: float) -> Ndarray:
    out = np.tanh(x / cap)
    out *= cap
    return out


def multiply(a: Ndarray, b: Ndarray) -> Ndarray:
    return a * b


def take(x: Ndarray, rows: Ndarray) -> Ndarray:
    return x[rows]


def cut(x: Ndarray, start: int, stop: int) -> Ndarray:
    return x[..., start:stop]


def join(a: Ndarray, b: Ndarray) -> Ndarray:
    return np.concatenate((a, b), -1)
