"""Attention in float64, with first-order error bounds for a float32 kernel and for keys and values in a smaller type.

Notation for one query: s are the scores, w the weights (their sum is 1), u = 2^-24 and gamma(n) = n u / (1 - n u)
(Higham, Accuracy and Stability of Numerical Algorithms, 3.1):

    out = sum of w v. If each weight has an error factor in [1 - e, 1 + e] before the division by their sum, the error
    of out is at most 2 e / (1 - e) times sum of w |v|. Scores with errors of up to log(1 + e) have the same bound.

float32    A score is a chain of D operations and three products: gamma(D + 3) sum of |q k| times its scale. A softcap
           keeps that, and adds 4 u of tanh and three products, relative to the cap. A weight adds 1.3 u of exp2 and u
           of the score's distance to the largest, once more for each later tile with a larger score. Sums and values
           are a chain through a segment and its tiles, and two operations for each segment.
unit       In a matrix unit (csrc/attention.h) queries and weights are two slices of bf16: the first is within half a
           unit of 8 bits, the second of 8 + 1 more, because it has a sign, so that the sum is within 2^-17. Keys and
           values in bfloat16 are exact. In float16 they are two slices without error, and the product of both second
           slices, which are at most 2^-8, is left out: 2^-16. Products of slices are exact. 16 of them are a chain, two
           chains are added, and their sum is added to those before: 17 + p ceil(D / 32) roundings of a score, where
           p = 2 or 3 is the number of products of slices, and 17 + 2 p of a value in a tile. Magnitudes of slices add
           up to 1 + 2^-7 times that of the number, for both factors. Numbers below 2^-126 are zeros: each operation may
           err by as much.
rounded    Queries, keys and values are rounded to bf16 first, as torch rounds them; errors are those over the rounded
           numbers. A weight is one bf16, within 2^-8, and exp2 is within 2^-18; sums are of rounded weights. In vectors
           a score and a value are chains as in float32, in a unit as above with one product of slices, and numbers
           below 2^-126 are zeros in both.
smaller    If an element of a key has the error r, a score has scale times sum of |q| r, with the same e for all keys.
           The error of an element of a value is r. An error of a query counts as one of a key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ridgeline.ops.host.attention import sees
from ridgeline.spec import Attention
from ridgeline.spec.storage import StateDType

Array = np.ndarray[Any, Any]
U = 2.0**-24
TILE, SEGMENT = 64, 512  # csrc/attention.h


def gamma(n: float) -> float:
    return n * U / (1 - n * U)


class Exact(NamedTuple):
    """The result in float64. out, bound [n, H, D]: output, and its error bound for the kernel with equal inputs.
    weights [H, n, S].
    """

    out: Array
    bound: Array
    weights: Array


class Rounding(NamedTuple):
    """Errors of a kernel, relative to the sum of magnitudes: of a score, and of a result. tiny: least error of an
    operation. weight: the error of a weight, relative to it.
    """

    score: float
    value: float
    tiny: float = 0.0
    weight: float = 1.3 * U


def rounding_of(case: Attention, n: int, scaled: bool, unit: StateDType | None, rounds: bool) -> Rounding:
    """Return the errors of vectors, or of a matrix unit with state of the type `unit`. rounds: with one slice."""
    others = 2 * -(-n // TILE) + 2 * -(-n // SEGMENT) + 10
    weight = 2.0**-8 + 2.0**-17 if rounds else 1.3 * U
    if unit is None:
        errors = gamma(case.head_dim + 3 + scaled), 2 * gamma(min(n, SEGMENT) + others)
        return Rounding(*errors, 2.0**-126 if rounds else 0.0, weight)
    products, sliced, larger = 2 + (unit == "float16"), 2.0**-17, (1 + 2.0**-7) ** 2
    if unit == "float16":
        sliced += 2.0**-16
    if rounds:
        products, sliced, larger = 1, 0.0, 1.0
    score = 17 + products * -(-case.head_dim // 32) + 3
    sums = gamma(min(n, SEGMENT) / 16 + 4 + others)  # a sum of every 16th weight, and then of 16 sums
    return Rounding(
        sliced + larger * gamma(score), sliced + larger * gamma(17 + 2 * products + others) + sums, 2.0**-126, weight
    )


def attend(
    case: Attention, q: Array, k: Array, v: Array, sinks: Array | None, scaled: bool = False,
    unit: StateDType | None = None, rounds: bool = False,
) -> Exact:  # fmt: skip
    """Compute one sequence, q [n, H, D], k and v [n, K, D]. scaled: numbers are stored as codes and a scale. unit: the
    type of state if a matrix unit computes, else None. rounds: q, k and v are rounded to bf16 first.
    """
    q, k, v = (to_bf16(x) if rounds else x.astype(np.float64) for x in (q, k, v))
    n, groups = len(q), case.num_heads // case.num_kv_heads
    k, v = (np.repeat(x, groups, 1).transpose(1, 0, 2) for x in (k, v))  # [H, S, D]
    scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) * case.scale
    errors = rounding_of(case, n, scaled, unit, rounds)
    wrong = np.abs(q).transpose(1, 0, 2) @ np.abs(k).transpose(0, 2, 1) * case.scale * errors.score
    wrong += errors.tiny * case.head_dim * case.scale * (np.abs(q).max() + np.abs(k).max() + 4)
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
        wrong = np.minimum(wrong, 2 * case.softcap) + 8 * U * case.softcap
    seen = sees(case, np.arange(n)[:, None], np.arange(n))
    logits = np.where(seen, scores, -np.inf)
    if sinks is not None:
        logits = np.concatenate((logits, np.broadcast_to(sinks[:, None, None], (len(k), n, 1))), 2)
    top = logits.max(2, keepdims=True)
    weights = np.exp(logits - top)
    weights = (weights / weights.sum(2, keepdims=True))[..., :n]
    spread = np.where(seen, top - scores, 0).max(2, keepdims=True)
    tiles, segments = -(-n // TILE), -(-n // SEGMENT)
    e = np.where(seen, wrong, 0).max(2, keepdims=True) + U * (2 * spread + (1.3 + 1) * (tiles + segments + 2) + 1)
    e += errors.weight
    e = np.expm1(e)
    bound = (2 * e / (1 - e) + errors.value) * (weights @ np.abs(v)) + errors.tiny * n * (np.abs(v).max() + 4)
    out = weights @ v
    return Exact(out.transpose(1, 0, 2), bound.transpose(1, 0, 2), weights)


def to_bf16(x: Array) -> Array:
    """Return the nearest numbers of bfloat16, ties to even, in float64."""
    return np.asarray(torch.from_numpy(x.astype(np.float32)).bfloat16().double())


def rounding(x: Array, dtype: StateDType) -> Array:
    """Return how far an element of x [..., D] may be from its stored value. With p bits, the nearest number is within
    2^-p.
    """
    x = np.abs(x.astype(np.float64))
    if dtype == "int8":
        return np.broadcast_to(x.max(-1, keepdims=True) / 127 * (0.5 + 4 * 127 * U), x.shape)
    if dtype == "fp8":  # 4 bits and a fixed step of 2^-9 below 2^-6
        return np.where(x <= 448, np.maximum(x * 2.0**-4, 2.0**-10), x - 448)
    bits = {"float32": 64, "bfloat16": 8, "float16": 11}[dtype]
    return x * 2.0**-bits + (2.0**-25 if dtype == "float16" else 0.0)  # below 2^-14 float16 has a fixed step


def price(
    case: Attention, q: Array, k: Array, v: Array, exact: Exact, dtype: StateDType, queries: bool = False
) -> Array:
    """Return how far rounding keys and values may move the output from `exact` [n, H, D]. queries: and queries."""
    groups = case.num_heads // case.num_kv_heads
    key, value, whole, wide = (
        np.repeat(x, groups, 1).transpose(1, 0, 2) for x in (rounding(k, dtype), rounding(v, dtype), k, v)
    )
    size = np.abs(q).astype(np.float64).transpose(1, 0, 2)
    moved = size @ key.transpose(0, 2, 1)
    if queries:
        moved += rounding(q, dtype).transpose(1, 0, 2) @ (np.abs(whole) + key).transpose(0, 2, 1)
    moved *= case.scale
    e = np.expm1(np.where(exact.weights > 0, moved, 0).max(2, keepdims=True))
    assert (e < 1).all()
    found = 2 * e / (1 - e) * (exact.weights @ np.abs(wide)) + (1 + e) / (1 - e) * (exact.weights @ value)
    return found.transpose(1, 0, 2)
