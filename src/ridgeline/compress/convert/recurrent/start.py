"""The weights of a recurrent mixer that begins as the attention in whose place it stands.

Values become its inputs, keys say where they are stored, and queries where they are read (Mamba in the Llama,
arXiv:2408.15237). Parts that attention does not have are constant at first. Recurrent mixers have few biases, so a
constant is a product with the input: a vector u with u x close to 1 for all inputs x exists where their mean is large
beside their spread.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ridgeline.compress.convert.recurrent.taylor import Matrix, Scores, reduced
from ridgeline.spec import Attention, GatedDelta, LightningAttention, Mamba2, TaylorAttention

SHIFT = 2.0  # of values, in their root mean square: silu is close to a line there
GATE = 1.0  # of gates before their activation
UNIT_STEP = math.log(math.e - 1)  # softplus of it is 1
RATES = 1 / 2, 1 / 8, 1 / 32, 1 / 128, 1 / 2048  # of decay per token, from which a head's is chosen


@dataclass(frozen=True, slots=True)
class Projections:
    """Matrices that attention multiplies its input by, with one row for each number of a head.

    q, k and v: [heads, head size, width], keys and values repeated for the heads that share them, each divided by the
    root mean square of what it gives. constant: u [width]. out: [width, heads * head size]. scores: how attention makes
    scores of products of q and k.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    constant: Matrix
    out: Matrix
    scores: Scores


def projections(
    own: Attention, read: Callable[[str], Matrix | None], mean: Matrix, square: Matrix, length: int,
    damping: float = 1e-4,
) -> Projections:  # fmt: skip
    """Return the projections of a layer.

    Args:
        read: returns a weight of the mixer by its name; None for one that it does not have.
        mean: the mean input [width]. square: the mean product of inputs with themselves [width, width].
        length: longest context in tokens.
    """
    width = len(mean)
    u = np.linalg.solve(square + np.eye(width) * damping * np.trace(square) / width, mean)
    u /= max(float(u @ mean), 1e-12)

    def heads(name: str, count: int, norm: bool) -> tuple[Matrix, Matrix]:
        """Return unit rows for each query head, and the root mean square of what they give where attention sees it."""
        weight, bias = read(f"{name}.weight"), read(f"{name}.bias")
        assert weight is not None
        rows = weight if bias is None else weight + bias[:, None] * u
        found = rows.reshape(count, own.head_dim, width)
        power = np.einsum("hdw,wv,hdv->hd", found, square, found).mean(axis=1)
        found = found / np.sqrt(np.maximum(power, 1e-12))[:, None, None]
        gain = read(f"{name}_norm.weight") if norm else None
        if gain is not None:
            assert own.qk_norm is not None
            found = found * (gain + getattr(own.qk_norm, "offset", 0.0)).reshape(-1, own.head_dim, 1)
        if norm:
            power = power / np.maximum(power if own.qk_norm_over == "head" else power.mean(), 1e-12)
        group = own.num_heads // count
        return np.repeat(found, group, axis=0), np.repeat(np.sqrt(power), group)

    has_norm = own.qk_norm is not None
    (q, q_sizes), (k, k_sizes) = heads("q", own.num_heads, has_norm), heads("k", own.num_kv_heads, has_norm)
    out = read("o.weight")
    assert out is not None
    scores = Scores(own, own.scale * q_sizes * k_sizes, mean, square, length)
    return Projections(q, k, heads("v", own.num_kv_heads, False)[0], u, out, scores)


def mamba2_weights(mixer: Mamba2, own: Projections, rates: Matrix) -> dict[str, Matrix]:
    """Return the weights of a Mamba-2 mixer by name, but for those of `out`."""
    u, width = own.constant, len(own.constant)
    parts = (
        np.broadcast_to(GATE * u, (mixer.inner_size, width)), _rows(own.v + SHIFT * u), _rows(own.k), _rows(own.q),
        np.zeros((mixer.num_heads, width)),
    )  # fmt: skip
    return {
        "in.weight": np.concatenate(parts), "conv.weight": _same(mixer.conv_channels, mixer.conv_size),
        "conv.bias": np.zeros(mixer.conv_channels), "dt_bias": np.full(mixer.num_heads, UNIT_STEP),
        "A_log": np.log(rates), "D": np.zeros(mixer.num_heads), "gate_norm.weight": np.ones(mixer.inner_size),
    }  # fmt: skip


def delta_weights(mixer: GatedDelta, own: Projections, rates: Matrix) -> dict[str, Matrix]:
    """Return the weights of a gated delta mixer by name, but for those of `out`. Each token corrects half of what is
    stored for its key.
    """
    u, width = own.constant, len(own.constant)
    none = np.zeros((mixer.num_heads, width))
    return {
        "in_q.weight": _rows(own.q), "in_k.weight": _rows(own.k), "in_v.weight": _rows(own.v + SHIFT * u),
        **{f"{name}_conv.weight": _same(size, mixer.conv_size) for name, size in zip("qkv", mixer.sizes, strict=True)},
        "decay.weight": none, "beta.weight": none, "A_log": np.log(rates),
        "dt_bias": np.full(mixer.num_heads, UNIT_STEP),
        "gate.weight": np.broadcast_to(GATE * u, (mixer.num_heads * mixer.head_dim, width)),
        "gate_norm.weight": np.ones(mixer.head_dim),
    }  # fmt: skip


def lightning_weights(mixer: LightningAttention, own: Projections, rates: Matrix) -> dict[str, Matrix]:
    """Return the weights of lightning attention by name, but for those of `out`. Its decays cannot be chosen."""
    u = own.constant
    return {
        "qkv.weight": _rows(np.stack([own.q, own.k, own.v + SHIFT * u], axis=1)),
        "gate.weight": np.broadcast_to(GATE * u, (mixer.inner_size, len(u))),
        "out_norm.weight": np.ones(mixer.inner_size),
    }  # fmt: skip


def taylor_weights(mixer: TaylorAttention, own: Projections, rates: Matrix) -> dict[str, Matrix]:
    """Return the weights of the Taylor expansion of softmax attention by name, but for those of `o`."""
    q, k = reduced(own.q, own.k, own.scores, own.constant, rates, mixer.feature_dim)
    return {"q.weight": _rows(q), "k.weight": _rows(k), "v.weight": _rows(own.v)}


def hedgehog_weights(mixer: TaylorAttention, own: Projections, rates: Matrix) -> dict[str, Matrix]:
    """Return the weights of linear attention with the features of Hedgehog, but for those of `o`.

    To the first order of its numbers, softmax(x) is (1 + x - mean(x)) / D. Where the mean is 0, the products of both
    pairs of features are 2 (1 + q k / D) / D, which is the first order of exp(q k / D). So scores times D are the
    products of q and k, which have D - 1 numbers in the directions whose mean is 0.
    """
    size = mixer.feature_dim
    turn = np.linalg.svd(np.eye(size) - 1 / size)[0][:, : size - 1]
    found = reduced(own.q, own.k, own.scores, own.constant, rates, size - 1)
    q, k = (turn @ x * np.sqrt(size / max(1, size - 1) ** 0.5) for x in found)
    return {"q.weight": _rows(q), "k.weight": _rows(k), "v.weight": _rows(own.v)}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of recurrent mixer that attention can become.

    weights: returns its weights, but for those of the last matrix. rates: rates of decay, one of which each head gets.
    out: the name of the last matrix.
    """

    weights: Callable[[Any, Projections, Matrix], dict[str, Matrix]]
    rates: tuple[float, ...]
    out: str = "out"


# By the name that --to takes.
KINDS: Mapping[str, Kind] = MappingProxyType({
    "mamba2": Kind(mamba2_weights, RATES),
    "delta": Kind(delta_weights, RATES),
    "lightning": Kind(lightning_weights, RATES[:1]),
    "taylor": Kind(taylor_weights, RATES, "o"),
    "hedgehog": Kind(hedgehog_weights, RATES, "o"),
})  # fmt: skip


def random_weights(start: Mapping[str, Matrix], seed: int, layer: int) -> dict[str, Matrix]:
    """Return random matrices with the standard deviations of those that are given, and vectors as they are."""

    def drawn(name: str, x: Matrix) -> Matrix:
        rng = np.random.default_rng([seed, layer, zlib.crc32(name.encode())])
        return np.asarray(rng.normal(0.0, float(x.std()), x.shape))

    return {name: drawn(name, x) if x.ndim == 2 else x for name, x in start.items()}


def _rows(x: Matrix) -> Matrix:
    return x.reshape(-1, x.shape[-1])


def _same(channels: int, size: int) -> Matrix:
    """Return filters [channels, 1, size] that give each token its own number."""
    found = np.zeros((channels, 1, size))
    found[:, 0, -1] = 1.0
    return found
