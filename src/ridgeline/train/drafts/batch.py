"""Batches of continuations, and the frozen target that reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ridgeline.nn import Model
from ridgeline.ops import OpsTable
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import RMSNorm
from ridgeline.train.drafts.continuations import Continuation
from ridgeline.train.module import LOSS_ELEMENTS

Logits = Callable[[Tensor], Tensor]  # rows [n] -> logits [n, vocabulary]


class Batch:
    """Continuations that are computed together, laid end to end: T tokens.

    A draft at row i continues the token of row i + 1, which the target has given: draft k (from 0) is the token of row
    i + 2 + k, and the target's own distribution over it is at row i + 1 + k.
    """

    def __init__(self, some: Sequence[Continuation], table: OpsTable) -> None:
        self.lengths = tuple(len(one.ids) for one in some)
        self.prompts = tuple(one.prompt for one in some)
        self.memory = table.memory
        self.token_ids: Any = self.memory.integers(np.concatenate([one.ids for one in some]))
        self.positions: Any = self.memory.integers(np.concatenate([np.arange(n) for n in self.lengths]))

    @cached_property
    def following(self) -> Tensor:
        """Return the token after each token [T]; after the last one of a sequence, which nothing reads, any token."""
        return cast("Tensor", self.token_ids).roll(-1)

    def step(self) -> DenseStep:
        """Return the step that reads the tokens."""
        return DenseStep(self.token_ids, self.positions, self.lengths, self.memory)

    def chains(self, depth: int, *, known: bool = False) -> tuple[Tensor, Tensor]:
        """Return the rows i at which drafting may begin and the target's rows i + 1 + depth, [n] each.

        known: leave out drafts of the token after the last one, which the continuation does not have.
        """
        starts, begin = [], 0
        for length, prompt in zip(self.lengths, self.prompts, strict=True):
            starts.append(begin + np.arange(prompt - 1, length - 1 - depth - int(known)))
            begin += length
        rows: Any = self.memory.integers(np.concatenate(starts).astype(np.int64))
        return rows, rows + 1 + depth


class Target:
    """The model that a draft is for, with frozen weights in float32.

    vocabulary: the tokens that a draft can propose; None: all.
    """

    def __init__(self, model: Model, table: OpsTable, vocabulary: np.ndarray[Any, Any] | None = None) -> None:
        self.model, self.table = model, table
        self.vocabulary = vocabulary
        self._kept: Any = None if vocabulary is None else table.memory.integers(vocabulary)

    @torch.no_grad()
    def read(self, batch: Batch, aux: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return the stream after the last norm [T, hidden_size], and those with the ids `aux`."""
        stream: Any = self.model.forward(batch.step(), aux=aux)
        return cast("Tensor", self.model.hidden(stream)), list(stream.aux)

    def project(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocabulary] of rows of `read`, or of rows that imitate them."""
        out: Any = self.model.project(hidden)
        return cast("Tensor", out)

    @torch.no_grad()
    def head_matrix(self) -> Tensor:
        """Return the matrix of its head [vocabulary, hidden_size] as floats, however it is stored."""
        found = self.project(torch.eye(self.model.spec.hidden_size, device=self._device)).T
        return (found if self._kept is None else found[self._kept]).contiguous()

    def norm_weight(self) -> Tensor:
        """Return the factors of its last norm [hidden_size]."""
        weight: Any = self.model.weights["norm.weight"]
        norm = self.model.spec.norm
        return cast("Tensor", weight) + (norm.offset if isinstance(norm, RMSNorm) else 0.0)

    @property
    def num_draft_tokens(self) -> int:
        """Return the number of tokens that a draft can propose."""
        return self.model.spec.vocab_size if self.vocabulary is None else len(self.vocabulary)

    @property
    def _device(self) -> torch.device:
        zeros: Any = self.table.memory.zeros((1,))
        return cast("Tensor", zeros).device

    def divergence(self, hidden: Tensor, rows: Tensor, draft: Logits, at: Tensor) -> Tensor:
        """Return the sum over n rows of KL(target || draft), in nats.

        hidden: the first result of `read`. rows: the target's rows [n]. draft: function from rows to the draft's
        logits. at: its rows [n]. With a reduced vocabulary, tokens outside of it are left out of the sum.
        """
        size = max(1, LOSS_ELEMENTS // self.model.spec.vocab_size)
        parts = list(zip(torch.split(rows, size), torch.split(at, size), strict=True))
        if len(parts) == 1:
            return self._divergence(hidden, rows, draft, at)
        # Logits of a few rows at a time are in memory, and are computed again in the backward pass.
        sums = [checkpoint(self._divergence, hidden, a, draft, b, use_reentrant=False) for a, b in parts]
        return torch.stack(sums).sum()

    def _divergence(self, hidden: Tensor, rows: Tensor, draft: Logits, at: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(self.project(hidden[rows]), -1)
            if self._kept is not None:
                wanted = wanted[:, self._kept]
        return F.kl_div(F.log_softmax(draft(at), -1), wanted, log_target=True, reduction="sum")


def rank_hits(
    batch: Batch, depth: int, draft: Logits, at: Tensor, to_target: Callable[[Any], Any], ranks: int
) -> np.ndarray[Any, Any]:
    """Return [n, ranks] whether the best token of draft `depth`, its second one, ... is that of the continuation.

    Arguments: as those of `hits`. ranks: at most the number of tokens that the draft can propose.
    """
    _, rows = batch.chains(depth, known=True)
    best = torch.cat([draft(part).topk(ranks, -1).indices for part in torch.split(at, 1024)])
    ids = cast("Tensor", to_target(best.flatten())).view(-1, ranks)
    same: np.ndarray[Any, Any] = (ids == cast("Tensor", batch.token_ids)[rows + 1, None]).cpu().numpy()
    return same


def hits(batch: Batch, depth: int, draft: Logits, at: Tensor, to_target: Callable[[Any], Any]) -> np.ndarray[Any, Any]:
    """Return [n] whether draft `depth` is the continuation's token, for the rows of `chains(depth, known=True)`.

    at: the rows of the draft's logits. to_target: function from draft tokens to the target's.
    """
    _, rows = batch.chains(depth, known=True)
    found = [draft(part).argmax(-1) for part in torch.split(at, 1024)]
    ids = cast("Tensor", to_target(torch.cat(found)))
    same: np.ndarray[Any, Any] = (ids == cast("Tensor", batch.token_ids)[rows + 1]).cpu().numpy()
    return same
