"""Sums over a calibration text that say what an attention layer does with its queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.compress.deliver import OnProgress
from ridgeline.nn import Capture, Model
from ridgeline.nn.capture import INPUT
from ridgeline.nn.rotary import frequencies
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import Attention, Rope

Doubles = np.ndarray[Any, np.dtype[np.float64]]
BATCH_TOKENS = 2048  # tokens of a forward pass
WEIGHTLESS_CONTEXT = 512  # tokens over which keys are thought to be spread if there is no text


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of an attention layer in float64, with the pairs of rotated numbers side by side.

    q: [H, D, width]. k, v: [K, D, width]. o: [width, H, D]. frequencies: angle per position of each pair [P / 2], where
    P numbers of each head are rotated. factor: on rotated scores.
    """

    q: Doubles
    k: Doubles
    v: Doubles
    o: Doubles
    frequencies: Doubles
    factor: float

    @property
    def group(self) -> int:
        """Return the number of query heads for each KV head."""
        return len(self.q) // len(self.k)

    @property
    def num_rotated(self) -> int:
        """Return how many numbers of a head are rotated."""
        return 2 * len(self.frequencies)


@dataclass(slots=True)
class Moments:
    """Sums over tokens, each weighted by the squares of the attention that it gets.

    joint: products of keys before rotation and values with each other [2KD, 2KD]. mean: keys and values [2KD]. weight:
    the weights. queries: products of each head's queries, without weights [H, D, D]. num: number of queries. distances:
    squared attention by head and by distance of query and key [H, longest].
    """

    joint: Doubles
    mean: Doubles
    weight: float
    queries: Doubles
    num: float
    distances: Doubles

    def turns(self, frequencies: Doubles) -> np.ndarray[Any, np.dtype[np.complex128]]:
        """Return the mean of exp(i * frequency * distance) for each head and frequency [H, P / 2]."""
        angles = np.outer(np.arange(self.distances.shape[1]), frequencies)
        shares = self.distances / np.maximum(self.distances.sum(axis=1, keepdims=True), 1e-300)
        found: np.ndarray[Any, np.dtype[np.complex128]] = shares @ np.exp(1j * angles)
        return found


def pair_order(rope: Rope | None, head_dim: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the order of the numbers of a head in which rotated pairs are side by side, and come first."""
    rotated = rope.dim if rope else 0
    first = np.arange(rotated)
    if rope and not rope.interleaved:
        first = first.reshape(2, -1).T.reshape(-1)
    return np.concatenate([first, np.arange(rotated, head_dim)])


def matrices_of(m: Attention, weights: Mapping[str, Any], prefix: str, widen: Any, length: int) -> Matrices:
    """Return the matrices of a layer. prefix: begins the names of its weights. length: longest context in tokens."""

    def heads(name: str, count: int) -> Doubles:
        found: Doubles = np.asarray(widen(weights[f"{prefix}.{name}.weight"]), np.float64)
        return found.reshape(count, m.head_dim, -1)

    order = pair_order(m.rope, m.head_dim)
    o = np.asarray(widen(weights[f"{prefix}.o.weight"]), np.float64)
    inverse, factor = frequencies(m.rope, length) if m.rope else (np.zeros(0, np.float32), 1.0)
    return Matrices(
        heads("q", m.num_heads)[:, order], heads("k", m.num_kv_heads)[:, order], heads("v", m.num_kv_heads),
        o.reshape(len(o), m.num_heads, m.head_dim), inverse.astype(np.float64), factor**2,
    )  # fmt: skip


def moments_of_text(
    original: LoadedModel, matrices: Mapping[int, Matrices], sequences: Sequence[Sequence[int]], on_progress: OnProgress
) -> dict[int, Moments]:
    """Return the moments of layers over sequences of equal length."""
    length, found = len(sequences[0]), dict[int, Moments]()

    def receive(name: str, x: Any) -> None:
        layer = int(name.split(".")[1])
        m = original.spec.attention(layer)
        assert m is not None
        given = original.table.memory.get(x).astype(np.float64)
        for one in given.reshape(-1, length, given.shape[-1]):
            own = _of_sequence(matrices[layer], one, m.scale)
            found[layer] = own if layer not in found else _sum(found[layer], own)

    capture = Capture(original.spec, [f"layers.{i}.mixer.k{INPUT}" for i in matrices], receive)
    model = Model(original.spec, original.model.weights, original.table, original.max_model_len, capture=capture)
    per_batch = max(1, BATCH_TOKENS // length)
    for i in range(0, len(sequences), per_batch):
        on_progress("reading queries, keys and values", i, len(sequences))
        model.forward(original.dense_step(sequences[i : i + per_batch]), capture)
    return found


def moments_of_weights(own: Matrices, gain: Doubles) -> Moments:
    """Return moments as they are for inputs without correlations. gain: the size of each number of an input [width]."""
    y = np.concatenate([own.k.reshape(-1, own.k.shape[-1]), own.v.reshape(-1, own.v.shape[-1])]) * gain
    q = own.q * gain
    spread = 1 / (1.0 + np.arange(WEIGHTLESS_CONTEXT))
    return Moments(
        y @ y.T, np.zeros(len(y)), 1.0, q @ q.swapaxes(1, 2), 1.0, np.tile(spread, (len(q), 1)),
    )  # fmt: skip


def _of_sequence(own: Matrices, x: Doubles, scale: float) -> Moments:
    """Return the moments of one sequence. x: the layer's inputs [T, width]."""
    q, k, v = (np.einsum("tw,hdw->htd", x, part) for part in (own.q, own.k, own.v))
    length, heads = len(x), len(own.q)
    back = np.arange(length)[:, None] - np.arange(length)
    angles = np.outer(np.arange(length), own.frequencies)
    rotated, keys = _rotated(q, angles, own.factor), _rotated(k, angles, 1.0)
    received, distances = np.zeros(length), np.zeros((heads, length))
    for h in range(heads):
        scores = np.where(back >= 0, scale * rotated[h] @ keys[h // own.group].T, -np.inf)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = (shares / shares.sum(axis=1, keepdims=True)) ** 2
        received += shares.sum(axis=0)
        distances[h] = np.bincount(np.maximum(back, 0).ravel(), shares.ravel(), length)
    y = np.concatenate([k, v]).swapaxes(0, 1).reshape(length, -1)
    weighted = y * received[:, None]
    return Moments(
        weighted.T @ y, weighted.sum(axis=0), float(received.sum()), q.swapaxes(1, 2) @ q, float(length), distances
    )


def _rotated(x: Doubles, angles: Doubles, factor: float) -> Doubles:
    """Return heads [H, T, D] whose first numbers are rotated in pairs by angles [T, P / 2], times a factor."""
    count = 2 * angles.shape[1]
    pairs = (x[..., 0:count:2] + 1j * x[..., 1:count:2]) * np.exp(1j * angles) * factor
    out = x.copy()
    out[..., 0:count:2], out[..., 1:count:2] = pairs.real, pairs.imag
    return out


def _sum(a: Moments, b: Moments) -> Moments:
    return Moments(
        a.joint + b.joint, a.mean + b.mean, a.weight + b.weight, a.queries + b.queries, a.num + b.num,
        a.distances + b.distances,
    )  # fmt: skip
