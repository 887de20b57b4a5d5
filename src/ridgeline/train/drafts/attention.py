"""Attention of the draft steps that EAGLE heads practise in training (training-time test, arXiv:2503.01840).

While it drafts, a head reads its own outputs: row j of draft step s continues the output of row j - 1 of step s - 1. It
attends to the rows of the first step, which have the target's features, up to row j - s + 1, and to the rows of its own
chain: row j - 1 of step s - 1, row j - 2 of step s - 2, and so on, and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import DeviceError
from ridgeline.nn.step import WritePages
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, DenseKeyValues, DenseRows, Op, Weights
from ridgeline.ops.reference.backend import SdpaBackend, open_reference
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import Attention
from ridgeline.spec.storage import KVScales


@dataclass(frozen=True)
class ChainStep(DenseStep):
    """Draft steps over whole sequences, one after the other. The head's layer runs once for each of them.

    earlier: keys and values of the draft steps so far, [T, K, D] each.
    """

    earlier: list[Sequence[Array]] = field(default_factory=list)

    def append_kv(self, layer: int, write: WritePages, scales: KVScales, *parts: Array) -> DenseRows:
        """Return the keys and values of the first draft step, [T, K, D]; later those of all S steps, [S, T, K, D]."""
        self.earlier.append(parts)
        if len(self.earlier) == 1:
            return DenseRows(parts, self.lengths, scales)
        all_steps: Any = zip(*self.earlier, strict=True)
        return DenseRows(tuple(torch.stack(some) for some in all_steps), self.lengths, scales)


class ChainBackend:
    """Serves attention over the rows of several draft steps, and refuses all else; an `ops.api.Backend`."""

    name = "chain"

    def __init__(self) -> None:
        self._plain = SdpaBackend()

    def refuses(self, op: Op[Any], case: object) -> str | None:
        is_local = getattr(case, "window", None) is not None or getattr(case, "pattern", None) is not None
        if op is api.ATTENTION and is_local:
            return "supports whole contexts only"
        return self._plain.refuses(op, case)

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return None

    def primitive(self, op: Op[Any], case: Any) -> Callable[..., Any]:
        plain = self._plain.primitive(op, case)

        def attend(q: Tensor, kv: DenseKeyValues, sinks: None = None) -> Tensor:
            keys: Any = kv.keys
            values: Any = kv.values
            if keys.dim() == 3:
                out: Tensor = plain(q, kv, sinks)
                return out
            lengths = list(kv.lengths)
            parts = (torch.split(q, lengths), torch.split(keys, lengths, 1), torch.split(values, lengths, 1))
            sequences = zip(*parts, strict=True)
            return torch.cat([_attend(case, *sequence) for sequence in sequences]).flatten(1)

        return attend

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        raise DeviceError(f"the chain backend has no fused {op.name}")


def open_training(device: str) -> OpsTable:
    """Return the kernels of a training device, with attention over draft steps."""
    memory, backends = open_reference(device)
    return OpsTable(memory, (ChainBackend(), *backends))


def _attend(case: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in the last of S draft steps, within one sequence: q [n, H, D], k and v [S, n, K, D] -> [n, H, D]."""
    steps, n = k.shape[:2]
    k, v = (x.repeat_interleave(case.num_heads // case.num_kv_heads, 2) for x in (k, v))
    row = torch.arange(n, device=q.device)
    first = torch.einsum("jhd,ihd->jhi", q, k[0]) * case.scale
    scores = [first.masked_fill((row[None, :] > row[:, None] - (steps - 1))[:, None], -torch.inf)]
    chain = [(step, steps - 1 - step) for step in range(1, steps)]  # draft steps from 1, and how far back their row is
    for step, back in chain:
        own = (q * k[step].roll(back, 0)).sum(-1, keepdim=True) * case.scale
        scores.append(own.masked_fill((row < back)[:, None, None], -torch.inf))
    weights = torch.cat(scores, -1).softmax(-1)
    out = torch.einsum("jhi,ihd->jhd", weights[..., :n], v[0])
    for i, (step, back) in enumerate(chain):
        out = out + weights[..., n + i, None] * v[step].roll(back, 0)
    return out
