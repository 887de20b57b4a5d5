"""Fewer KV heads: each group of neighbors becomes one (GQA, Ainslie et al., arXiv:2305.13245)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.convert.options import Pool
from ridgeline.compress.grid import Floats
from ridgeline.errors import RequestError
from ridgeline.plan import rewrite
from ridgeline.spec import ModelSpec
from ridgeline.spec.dtype import DType

_KEYS = ("mixer.k.weight", "mixer.k.bias", "mixer.v.weight", "mixer.v.bias")


def with_kv_heads(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the model with fewer KV heads. Raises RequestError for a count that does not divide those of each layer,
    and for a model without KV heads.
    """
    for i in range(len(spec.layers)):
        own = spec.attention(i)
        if own is None or spec.state_layer(i) != i:
            continue
        if own.num_kv_heads % count or count > own.num_kv_heads:
            able = ", ".join(str(n) for n in range(1, own.num_kv_heads + 1) if own.num_kv_heads % n == 0)
            raise RequestError(f"--to kv_heads={count}: layer {i} has {own.num_kv_heads} KV heads; use one of {able}")
    try:
        return rewrite.with_kv_heads(spec, count)
    except RequestError as e:
        raise RequestError(f"--to kv_heads={count}: {e}") from None


class PooledWeights(SameWeights):
    """The weights of a model with fewer KV heads.

    Args:
        spec: the new model, with the layers of `original`.
        weights: the weights of the original.
        widen: returns an array of the original as float32.
    """

    def __init__(
        self, original: ModelSpec, spec: ModelSpec, weights: Mapping[str, Any], types: Mapping[str, DType],
        widen: Callable[[Any], Floats], pool: Pool, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, types, widen)
        self._original, self._pool, self._seed = original, pool, seed

    def computed(self, name: str) -> Floats:
        x = super().computed(name)
        layer, _, part = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            return x
        before, after = (spec.attention(int(layer)) for spec in (self._original, self.spec))
        if before is None or after is None:
            return x
        is_norm = part.startswith("mixer.k_norm.") and before.qk_norm_over == "all_heads"
        if part not in _KEYS and not is_norm:
            return x
        parts = x.reshape(after.num_kv_heads, -1, before.head_dim, *x.shape[1:])
        return self._pooled(parts, name).reshape(-1, *x.shape[1:])

    def _pooled(self, parts: Floats, name: str) -> Floats:
        """Return one head for each group. parts: [groups, heads, head size, ...]."""
        if self._pool == "random" and parts.ndim > 3:  # biases and norms have no directions
            rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
            return rng.normal(0.0, float(parts.std()), parts[:, 0].shape).astype(np.float32)
        found: Floats = parts[:, 0] if self._pool == "first" else parts.mean(axis=1)
        return found
