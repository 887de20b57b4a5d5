"""Factor the keys and values of a layer: components that stay rotated, and one latent for all the rest.

Both choices minimize the same number: the mean square of the change of the layer's output, to first order, if changes
of different tokens are independent. A change of a score counts with what the value of its token adds to the output, a
change of a value with what the output matrix makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.compress.convert.latent.moments import Doubles, Matrices, Moments

Complexes = np.ndarray[Any, np.dtype[np.complex128]]
FLOOR = 1e-3  # smallest size of a direction of queries or values, as a share of the largest one
DAMPING = 1e-6  # share of what keys and values would be for inputs without correlations


@dataclass(frozen=True, slots=True)
class Components:
    """Components of the rotated keys of a layer, across its heads; each is rotated with the frequency of its pair.

    A component of pair i is the complex number vectors[i, :, r]* @ (sizes[i] * keys of the heads), the largest first.

    gains: by how much the layer's output changes, in the mean square, if a component is not rotated [P / 2, K], as a
        share of the output's own. vectors: [P / 2, K, K]. sizes: [P / 2, K]. turns: the mean rotation between query and
        key for each query head [H, P / 2].
    """

    gains: Doubles
    vectors: Complexes
    sizes: Doubles
    turns: Complexes


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrices of latent attention, whose scale is (D + rotated)^-0.5.

    q: [H, D + rotated, width]. kv_a: [rank + rotated, width]. kv_b: [H, 2D, rank]. lost: mean square of the change of
    the output that the latent makes, as a share of what the latent carries.
    """

    q: Doubles
    kv_a: Doubles
    kv_b: Doubles
    lost: float


def components(own: Matrices, moments: Moments, scale: float) -> Components:
    """Return the components of a layer's rotated keys (RoRoPE: any unitary map across heads commutes with RoPE)."""
    kv, size, rotated = len(own.k), own.k.shape[1], own.num_rotated
    importance, turns = _importance(own, moments), moments.turns(own.frequencies)
    energy = np.einsum("hdd->hd", moments.queries)[:, :rotated].reshape(len(own.q), -1, 2).sum(axis=2) / moments.num
    lost = np.clip(1 - np.abs(turns) ** 2, 0, None) * energy * importance[:, None] * (scale * own.factor) ** 2
    weights = lost.reshape(kv, own.group, -1).sum(axis=1).T  # [P / 2, K]
    largest = weights.max(axis=1, keepdims=True)
    sizes = np.sqrt(np.maximum(weights, FLOOR**2 * np.where(largest > 0, largest, 1.0)))
    keys = (moments.joint[: kv * size, : kv * size] / moments.weight).reshape(kv, size, kv, size)
    same = np.einsum("gaha->agh", keys)[:rotated]
    real = same[0::2] + same[1::2]
    even, odd = np.arange(0, rotated, 2), np.arange(1, rotated, 2)
    across = keys.transpose(1, 3, 0, 2)  # [D, D, K, K]
    imaginary = across[odd, even] - across[even, odd]
    moment = (real + 1j * imaginary) * sizes[:, :, None] * sizes[:, None, :]
    values, vectors = np.linalg.eigh(moment)
    output = max(_output(own, moments), 1e-300)
    gains = np.clip(values[:, ::-1], 0, None) / output
    return Components(gains, vectors[:, :, ::-1], sizes, turns)


def factored(own: Matrices, moments: Moments, found: Components, counts: Any, rank: int, scale: float) -> Factors:
    """Return latent attention with `rank` numbers for all that is not rotated.

    counts: how many components of each pair stay rotated [P / 2]. scale: factor on q @ k of the layer.
    """
    kv, size = len(own.k), own.k.shape[1]
    still, into, kept = _split(own, found, counts)
    left = np.eye(2 * kv * size)
    left[: kv * size, : kv * size] = _left(own, found, counts)
    up = left @ np.concatenate([own.k, own.v]).reshape(2 * kv * size, -1)
    moment = left @ (moments.joint / moments.weight) @ left.T
    plain = up @ up.T
    moment += plain * (DAMPING * np.trace(moment) / max(float(np.trace(plain)), 1e-300))
    metric, inverse = _metric(own, moments, still, scale)
    values, vectors = np.linalg.eigh(metric @ moment @ metric)
    values, vectors = np.clip(values[::-1], 0, None), vectors[:, ::-1][:, :rank]
    numbers = np.sqrt(max(float(values[:rank].sum()) / rank, 1e-300))  # so that those of a latent are about 1
    kv_a = np.concatenate([vectors.T @ metric @ up / numbers, kept])
    keys, values_of = (inverse @ vectors * numbers).reshape(2, kv, size, -1)
    kv_b = np.concatenate([keys, values_of], axis=1).repeat(own.group, axis=0)
    q = np.concatenate([still, into], axis=1) @ own.q
    lost = float(values[rank:].sum() / max(values.sum(), 1e-300))
    return Factors(q * (scale * np.sqrt(q.shape[1])), kv_a, kv_b, lost)


def _importance(own: Matrices, moments: Moments) -> Doubles:
    """Return for each query head the mean square of what the value of one token adds to the layer's output [H]."""
    kv, size = len(own.k), own.k.shape[1]
    mean = (moments.mean[kv * size :] / moments.weight).reshape(kv, size)
    found = np.einsum("hij,hij->h", _reads(own), _values(own, moments).repeat(own.group, axis=0))
    common = np.einsum("hij,hi,hj->h", _reads(own), *(mean.repeat(own.group, axis=0),) * 2)
    importance: Doubles = np.maximum(found - common, FLOOR * found)
    return importance


def _output(own: Matrices, moments: Moments) -> float:
    values = _values(own, moments).repeat(own.group, axis=0)
    return float(np.einsum("hij,hij->", _reads(own), values))


def _reads(own: Matrices) -> Doubles:
    """Return for each query head the square of the output matrix [H, D, D]."""
    found: Doubles = np.einsum("whi,whj->hij", own.o, own.o)
    return found


def _values(own: Matrices, moments: Moments) -> Doubles:
    """Return for each KV head the mean of the products of its values [K, D, D]."""
    kv, size = len(own.k), own.k.shape[1]
    blocks = moments.joint[kv * size :, kv * size :].reshape(kv, size, kv, size)
    return np.stack([blocks[g, :, g] for g in range(kv)]) / moments.weight


def _split(own: Matrices, found: Components, counts: Any) -> tuple[Doubles, Doubles, Doubles]:
    """Return what maps queries to their parts that are not rotated [H, D, D] and that are [H, rotated, D], and the
    matrix of the rotated key [rotated, width].
    """
    heads, size, total = len(own.q), own.q.shape[1], 2 * int(np.sum(counts))
    still = np.zeros((heads, size, size))
    still[:] = np.eye(size)
    into, kept = np.zeros((heads, total, size)), np.zeros((total, own.k.shape[2]))
    for i in range(len(counts)):
        still[:, 2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = _blocks(found.turns[:, i] * own.factor)
    at = 0
    for i, r in [(i, r) for i, count in enumerate(counts) for r in range(count)]:
        share = found.sizes[i] / np.sqrt(np.mean(found.sizes[i] ** 2))
        vector = found.vectors[i, :, r].conj()
        pair = slice(2 * i, 2 * i + 2)
        into[:, at : at + 2, pair] = _blocks((vector / share).repeat(own.group) * own.factor)
        kept[at : at + 2] = np.einsum("gij,gjw->iw", _blocks(vector * share), own.k[:, pair])
        at += 2
    return still, into, kept


def _left(own: Matrices, found: Components, counts: Any) -> Doubles:
    """Return the map of the keys of all heads to what is left of them without the rotated components [KD, KD]."""
    kv, size = len(own.k), own.k.shape[1]
    out = np.eye(kv * size).reshape(kv, size, kv, size)
    for i, count in enumerate(counts):
        vectors = found.vectors[i, :, :count]
        projector = (vectors @ vectors.conj().T) * found.sizes[i] / found.sizes[i][:, None]
        out[:, 2 * i : 2 * i + 2, :, 2 * i : 2 * i + 2] -= _blocks(projector).transpose(0, 2, 1, 3)
    return out.reshape(kv * size, kv * size)


def _metric(own: Matrices, moments: Moments, still: Doubles, scale: float) -> tuple[Doubles, Doubles]:
    """Return the square root of what changes of keys and values do to the output, and its inverse [2KD, 2KD]."""
    kv, size = len(own.k), own.k.shape[1]
    queries = still @ (moments.queries / moments.num) @ still.swapaxes(1, 2)
    keys = queries * (_importance(own, moments) * scale**2)[:, None, None]
    blocks = [part.reshape(kv, own.group, size, size).sum(axis=1) for part in (keys, _reads(own))]
    values, vectors = np.linalg.eigh(np.concatenate(blocks))
    least = np.maximum(values.max(axis=1, keepdims=True), FLOOR**2 * max(float(values.max()), 1e-300)) * FLOOR**2
    roots = np.sqrt(np.maximum(values, least))
    metric, inverse = np.zeros((2 * kv * size,) * 2), np.zeros((2 * kv * size,) * 2)
    for i in range(2 * kv):
        at = slice(i * size, (i + 1) * size)
        metric[at, at] = (vectors[i] * roots[i]) @ vectors[i].T
        inverse[at, at] = (vectors[i] / roots[i]) @ vectors[i].T
    return metric, inverse


def _blocks(numbers: Complexes) -> Doubles:
    """Return the 2 x 2 matrices that multiply pairs by complex numbers [..., 2, 2]."""
    a, b = numbers.real, numbers.imag
    return np.stack([np.stack([a, -b], axis=-1), np.stack([b, a], axis=-1)], axis=-2)
