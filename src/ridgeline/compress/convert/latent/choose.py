"""Say which layers can become latent attention, and choose the numbers of keys that stay rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.compress.convert.latent.factor import Components
from ridgeline.compress.convert.options import Rotate
from ridgeline.errors import RequestError
from ridgeline.nn.rotary import frequencies
from ridgeline.spec import Attention, LongRopeScaling, ModelSpec, Rope

Counts = np.ndarray[Any, np.dtype[np.int64]]
_CLOSE = 1e-6  # largest relative difference of frequencies that are the same


def check_layers(spec: ModelSpec, to: str) -> dict[int, Attention]:
    """Return the attention of the layers that become latent attention. Raises RequestError, which names the part, where
    one cannot.
    """
    found: dict[int, Attention] = {}
    for i in range(len(spec.layers)):
        own = spec.attention(i)
        if own is None:
            continue
        if reason := _obstacle(spec, i, own):
            raise RequestError(f"--to {to}: layer {i} {reason}, which latent attention does not have")
        found[i] = own
    if not found:
        raise RequestError(f"--to {to}: {spec.family} has no attention layer with KV heads")
    return found


def _obstacle(spec: ModelSpec, index: int, own: Attention) -> str:
    """Return what a layer has that latent attention cannot have; nothing if there is nothing."""
    readers = [i for i in range(len(spec.layers)) if spec.state_layer(i) == index != i]
    if spec.state_layer(index) != index or readers:
        return "shares keys and values with another layer"
    window = own.window is not None and own.window < spec.max_position_embeddings
    parts = {
        "has a pattern of keys": own.pattern is not None, f"has a window of {own.window} tokens": window,
        "has sinks": own.sinks, "has a gate": own.out_gate, "has a softcap": own.softcap is not None,
        "has biases of q, k and v": own.qkv_bias,
    }  # fmt: skip
    if reason := next((part for part, has in parts.items() if has), ""):
        return reason
    if own.rope is None:
        return "has keys without rotation"
    return "has a rotation that depends on the length" if own.rope.follows_length else ""


def check_sizes(spec: ModelSpec, layers: Mapping[int, Attention], latent: int, rotated: int, to: str) -> None:
    """Raise RequestError for sizes that no layer can use, with the ones that it can."""
    for i, own in layers.items():
        assert own.rope is not None
        most = own.num_kv_heads * own.rope.dim
        if rotated < 2 or rotated % 2 or rotated > most:
            raise RequestError(
                f"--to {to}: {rotated} rotated numbers do not fit layer {i}; take an even number from 2 to {most}, "
                f"which is that of its {own.num_kv_heads} KV heads"
            )
        full = full_rank(spec, own, rotated)
        if latent > full:
            raise RequestError(
                f"--to {to}: a latent of {latent} numbers is wider than full rank, which is {full} for layer {i} with "
                f"{rotated} rotated numbers; take mla={full}+{rotated} or less"
            )


def full_rank(spec: ModelSpec, own: Attention, rotated: int) -> int:
    """Return the width of a latent from which the keys that are not rotated, and all values, are computed exactly."""
    return min(spec.hidden_size, 2 * own.num_kv_heads * own.head_dim - rotated)


def chosen_counts(found: Sequence[Components], rotated: int, rotate: Rotate, to: str) -> Counts:
    """Return how many components of each pair stay rotated in all layers [P / 2].

    The choice by contribution keeps the components without whose rotation the outputs of all layers change most.
    """
    pairs, kv = found[0].gains.shape
    if any(one.gains.shape != (pairs, kv) for one in found):
        raise RequestError(f"--to {to}: the layers have keys of different sizes; no one number fits them")
    if rotate == "uniform":
        return _uniform(pairs, rotated // 2, to)
    gains = np.sum([one.gains for one in found], axis=0)
    best = np.argsort(-gains.reshape(-1), kind="stable")[: rotated // 2]
    counts: Counts = np.bincount(best // kv, minlength=pairs)
    return counts


def _uniform(pairs: int, wanted: int, to: str) -> Counts:
    if wanted % pairs == 0:
        return np.full(pairs, wanted // pairs)
    if pairs % wanted:
        raise RequestError(
            f"--to {to}: --rotate uniform needs a share or a multiple of the {2 * pairs} rotated numbers of a head; "
            "take --rotate contribution"
        )
    counts: Counts = (np.arange(pairs) % (pairs // wanted) == 0).astype(np.int64)
    return counts


def rope_of(own: Attention, counts: Counts, length: int) -> Rope:
    """Return the rotation of the components that stay, without a scaling where none is needed.

    length: the longest context in tokens.
    """
    assert own.rope is not None
    inverse = frequencies(own.rope, length)[0].repeat(counts)
    plain = Rope(2 * len(inverse), own.rope.theta, interleaved=True)
    if np.allclose(frequencies(plain, length)[0], inverse, rtol=_CLOSE, atol=0):
        return plain
    divisors = tuple(float(d) for d in np.float32(1) / inverse)
    scaling = LongRopeScaling(divisors, divisors, length, 1.0)
    return Rope(2 * len(inverse), 1.0, interleaved=True, scaling=scaling)
