"""Attention of a noisy and a clean copy of the same tokens, in one pass (block diffusion, arXiv:2503.09573).

A sequence of n tokens is computed as 2n rows: the tokens, and the tokens with masks. A clean row sees what it sees when
the model serves: its block and all blocks before it. A noisy row sees the noisy rows of its block, and the clean rows
of all blocks before it. So one pass gives the predictions for every block, as if each were the open one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.errors import DeviceError
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import DenseKeyValues, Op, Weights
from ridgeline.ops.reference import stored
from ridgeline.ops.reference.backend import open_reference
from ridgeline.ops.reference.primitives import softmax
from ridgeline.spec import Attention

_MASKS_KEPT = 64  # segments of a batch have many lengths, and batches repeat only the longest


class TwoCopies:
    """Serves attention of models that see blocks, over a clean and a noisy copy; an `ops.api.Backend`."""

    name = "two_copies"

    def refuses(self, op: Op[Any], case: object) -> str | None:
        return None if op is api.ATTENTION else "attention only"  # no other backend may read two copies as one

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return None

    def primitive(self, op: Op[Any], case: Any) -> Callable[..., Any]:
        masks = lru_cache(_MASKS_KEPT)(lambda n, device: sees(n, case.sight.block).to(device))

        def attend(q: Tensor, kv: DenseKeyValues, sinks: Tensor | None = None) -> Tensor:
            parts: tuple[Any, Any] = (kv.keys, kv.values)
            k, v = (stored.as_floats(x, q.dtype, scale) for x, scale in zip(parts, kv.scales, strict=True))
            lengths = list(kv.lengths)
            sequences = zip(torch.split(q, lengths), torch.split(k, lengths), torch.split(v, lengths), strict=True)
            out = [_attend(case, a, b, c, masks(len(a) // 2, q.device), sinks) for a, b, c in sequences]
            return torch.cat(out).flatten(1)

        return attend

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        raise DeviceError(f"attention over two copies has no fused {op.name}")


def open_two_copies(device: str) -> OpsTable:
    """Return the kernels of a training device, with attention over a clean and a noisy copy."""
    memory, backends = open_reference(device)
    return OpsTable(memory, (TwoCopies(), *backends))


def sees(n: int, size: int) -> Tensor:
    """Return which rows each row sees, bool [2n, 2n]: n clean rows, and then n noisy ones. size: tokens of a block."""
    block = torch.arange(n) // size
    query, key = block[:, None], block[None, :]
    clean = torch.cat((key <= query, torch.zeros(n, n, dtype=torch.bool)), 1)
    noisy = torch.cat((key < query, key == query), 1)
    return torch.cat((clean, noisy))


def _attend(case: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Attend within one sequence: q [2n, H, D], k and v [2n, K, D], seen [2n, 2n] -> [2n, H, D]."""
    groups = case.num_heads // case.num_kv_heads
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, 2n, D]
    if case.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=case.scale)[0].transpose(0, 1)
    scores = q @ k.transpose(1, 2) * case.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    weights = softmax(scores.masked_fill(~seen, -torch.inf), None if sinks is None else sinks[:, None])
    return (weights @ v).transpose(0, 1)
