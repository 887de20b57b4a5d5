"""The drafts that can be trained, as modules with a loss. All of them read batches in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.nn.heads import Eagle3Head, EagleHead, MedusaHead, build_head
from ridgeline.spec import ModelSpec
from ridgeline.spec.heads import Eagle3Spec, EagleSpec, HeadSpec, MedusaSpec
from ridgeline.train.drafts.attention import ChainStep
from ridgeline.train.drafts.batch import Batch, Logits, Target, hits, rank_hits
from ridgeline.train.module import RESIDUAL, LanguageModel

FALLING = 0.8  # weight of each draft depth relative to the one before (arXiv:2401.10774)
NOISE = 0.1  # half the range of the uniform noise on EAGLE-1's features
CLASSES = 0.1  # weight of EAGLE-1's loss on tokens beside that on features (arXiv:2401.15077)
Bools = np.ndarray[Any, Any]


class Learner(Protocol):
    """A draft that is being trained."""

    def weights(self) -> Mapping[str, nn.Parameter]:
        """Return all parameters by the spec's names."""
        ...

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Return the mean loss of a batch, in nats for all but EAGLE-1. generator: gives the noise."""
        ...

    def hits(self, batch: Batch, depth: int) -> list[Bools]:
        """Return for each of `depth` drafts, [n_k], whether it is the token of the continuation.

        Draft k is that of the rows of `Batch.chains(k, known=True)`, after right drafts.
        """
        ...


def falling_mean(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of the losses by depth, with weights 1, FALLING, FALLING ** 2, and so on."""
    weights = [FALLING**k for k in range(len(losses))]
    return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)


class MedusaLearner:
    """Medusa heads: KL from the target's distribution over each token to the head that proposes it.

    Blocks begin at zero and output matrices as the target's head, so that each head first proposes what the target says
    next (arXiv:2401.10774).
    """

    def __init__(self, spec: MedusaSpec, target: Target) -> None:
        matrix = target.head_matrix()
        self._target, self._weights = target, dict[str, nn.Parameter]()
        for w in spec.weights():
            initial = matrix.clone() if w.name.startswith("heads.") else matrix.new_zeros(w.shape)
            self._weights[w.name] = nn.Parameter(initial)
        self._head = cast("MedusaHead", _built(spec, self._weights, target))

    def weights(self) -> Mapping[str, nn.Parameter]:
        return self._weights

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        hidden, _ = self._target.read(batch)
        losses = []
        for k in range(self._head.spec.num_heads):
            at, rows = batch.chains(k)
            found = self._target.divergence(hidden, rows, self._draft(hidden, k), at)
            losses.append(found / max(1, len(rows)))
        return falling_mean(losses)

    @torch.no_grad()
    def hits(self, batch: Batch, depth: int) -> list[Bools]:
        hidden, _ = self._target.read(batch)
        found = []
        for k in range(depth):
            at, _ = batch.chains(k, known=True)
            found.append(hits(batch, k, self._draft(hidden, k), at, self._head.to_target))
        return found

    @torch.no_grad()
    def rank_hits(self, batch: Batch, ranks: int) -> list[Bools]:
        """Return for each head, [n_k, ranks], whether its token of each rank is that of the continuation."""
        hidden, _ = self._target.read(batch)
        found = []
        for k in range(self._head.spec.num_heads):
            at, _ = batch.chains(k, known=True)
            found.append(rank_hits(batch, k, self._draft(hidden, k), at, self._head.to_target, ranks))
        return found

    def _draft(self, hidden: Tensor, number: int) -> Logits:
        """Return a function from rows to the logits of one head."""
        return lambda rows: self._logits(hidden[rows], number)

    def _logits(self, hidden: Tensor, number: int) -> Tensor:
        out: Any = self._head.logits_of(hidden, number)
        return cast("Tensor", out)


class EagleLearner:
    """A head of EAGLE-1 or EAGLE-3, over one or several draft steps in which it reads its own outputs.

    EAGLE-1 learns the target's features (smooth L1) and, with a smaller weight, its distribution; its inputs have
    noise. EAGLE-3 learns the distribution alone.
    """

    def __init__(self, spec: EagleSpec | Eagle3Spec, target: Target, steps: int, seed: int) -> None:
        self._target, self._steps, self._spec = target, steps, spec
        self._weights = _initial(spec, target, seed)
        self._head = cast("EagleHead | Eagle3Head", _built(spec, self._weights, target))
        self._aux = spec.aux(len(target.model.spec.layers))

    def weights(self) -> Mapping[str, nn.Parameter]:
        return self._weights

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        hidden, streams = self._target.read(batch, self._aux)
        if isinstance(self._spec, EagleSpec):
            noise = torch.rand(hidden.shape, generator=generator).to(hidden) * 2 - 1
            streams = [hidden + NOISE * noise]
        losses = []
        for k, features in enumerate(self._outputs(batch, streams, self._steps)):
            at, rows = batch.chains(k)
            at = at + k
            found = self._target.divergence(hidden, rows, self._draft(features), at)
            loss = found / max(1, len(rows))
            if isinstance(self._spec, EagleSpec):
                far = F.smooth_l1_loss(features[at], hidden[rows], reduction="sum") / max(1, len(rows))
                loss = CLASSES * loss + far / self._spec.hidden_size
            losses.append(loss)
        return falling_mean(losses)

    @torch.no_grad()
    def hits(self, batch: Batch, depth: int) -> list[Bools]:
        hidden, streams = self._target.read(batch, self._aux)
        found = []
        for k, features in enumerate(self._outputs(batch, streams or [hidden], depth)):
            at, _ = batch.chains(k, known=True)
            found.append(hits(batch, k, self._draft(features), at + k, self._head.to_target))
        return found

    def _outputs(self, batch: Batch, streams: list[Tensor], steps: int) -> list[Tensor]:
        """Return the features [T, hidden_size] that each draft step gives. Row i + k of draft k belongs to the chain
        that begins at row i.
        """
        following: Any = batch.following
        step = ChainStep(following, batch.positions, batch.lengths, batch.memory)
        given: Any = streams
        features: Any = self._head.fuse(given)
        found = []
        for _ in range(steps):
            features = self._head.feature(self._head.forward(step, features))
            found.append(features)
            features = features.roll(1, 0)  # row j reads the output of row j - 1; first rows of sequences are not used
        return found

    def _draft(self, features: Tensor) -> Logits:
        """Return a function from rows to their logits."""
        return lambda rows: self._logits(features[rows])

    def _logits(self, features: Any) -> Tensor:
        out: Any = self._head.logits(features)
        return cast("Tensor", out)


class ModelLearner:
    """A small decoder: KL from the target's distribution to its own, at each token of the continuation."""

    def __init__(self, spec: ModelSpec, target: Target, max_len: int, seed: int) -> None:
        self._target, self._model = target, LanguageModel(spec, target.table, max_len, seed=seed)

    def weights(self) -> Mapping[str, nn.Parameter]:
        return self._model.weights()

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        hidden, _ = self._target.read(batch)
        stream = self._model.stream(batch.step())
        _, rows = batch.chains(0)
        found = self._target.divergence(hidden, rows, lambda r: self._model.project(stream, r), rows)
        return found / max(1, len(rows))

    @torch.no_grad()
    def hits(self, batch: Batch, depth: int) -> list[Bools]:
        stream = self._model.stream(batch.step())
        found = []
        for k in range(depth):
            _, rows = batch.chains(k, known=True)
            found.append(hits(batch, k, lambda r: self._model.project(stream, r), rows, lambda ids: ids))
        return found


def _built(spec: HeadSpec, weights: Mapping[str, nn.Parameter], target: Target) -> Any:
    table, model = target.table, target.model
    given: Any = weights
    return build_head(spec, given, model, table, model.max_model_len, target.vocabulary)


def _initial(spec: EagleSpec | Eagle3Spec, target: Target, seed: int) -> dict[str, nn.Parameter]:
    """Return initial weights with which a head passes on what the target says next.

    fc begins with the identity on the last stream, matrices that write to the residual stream at zero, and EAGLE-3's
    norm and head as the target's. All other matrices are random, with a variance of 1 / inputs.
    """
    generator, found = torch.Generator().manual_seed(seed), {}
    matrix = target.head_matrix()
    for w in spec.weights():
        if w.name == "head.weight":
            initial = matrix.clone()
        elif w.name == "norm.weight":
            initial = target.norm_weight().clone()
        elif w.name.endswith(RESIDUAL):
            initial = torch.zeros(w.shape)
        elif w.is_matrix:
            initial = torch.randn(w.shape, generator=generator) * w.shape[1] ** -0.5
        else:
            initial = torch.zeros(w.shape) if w.name.endswith(".bias") else torch.ones(w.shape)
        if w.name == "fc.weight" and spec.target_hidden_size == spec.hidden_size:
            initial[:, -spec.hidden_size :] = torch.eye(spec.hidden_size)
        found[w.name] = nn.Parameter(initial.to(matrix))
    return found
