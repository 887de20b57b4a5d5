"""Gradients of heads in training are those of definitions in float64 that draft one token after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oracle import heads
from oracle.case import VOCAB
from oracle.heads import CASES, Given
from oracle.ours import LENGTH, SPECS, random_weights
from ridgeline.load.heads import FORMATS, read_head
from ridgeline.load.safetensors import HostTensor
from ridgeline.nn import Model
from ridgeline.train.drafts import learners
from ridgeline.train.drafts.attention import open_training
from ridgeline.train.drafts.batch import Batch, Target
from ridgeline.train.drafts.continuations import Continuation
from ridgeline.train.drafts.learners import EagleLearner, MedusaLearner

TARGET, STEPS = SPECS["cla2"], 3
SIZES = ((9, 3), (7, 2), (4, 3))  # tokens of each sequence, and of its prompt


class Oracle:
    """One step of training, defined chain by chain. Logits and features of the target are given, in float64."""

    def __init__(self, name: str, tensors: Any, target: Target, some: list[Continuation], aux: tuple[int, ...]) -> None:
        self.case, self.tensors, self.some = CASES[name], tensors, some
        weights = random_weights(TARGET)
        self.embedding, self.head = (torch.from_numpy(weights[n]).double() for n in ("embed.weight", "head.weight"))
        batch = Batch(some, target.table)
        hidden, streams = target.read(batch, aux)
        lengths = [len(one.ids) for one in some]
        self.hidden = hidden.double().split(lengths)
        self.streams = [x.double().split(lengths) for x in streams or [hidden]]
        ids = np.arange(VOCAB) if target.vocabulary is None else target.vocabulary
        self.vocabulary = torch.from_numpy(np.array(ids))

    def chain(self, number: int, start: int, steps: int) -> tuple[Tensor, Tensor | None]:
        """Return the logits [steps, vocabulary] of the drafts after a row, and EAGLE-1's features [steps, width]."""
        config, tokens = self.case.config, self.some[number].ids
        if self.case.define is heads.medusa:
            rows = heads.medusa(self.tensors, config, self.hidden[number][start])
            return torch.stack(rows[:steps]), None
        streams = [x[number][: start + 1] for x in self.streams]
        given = Given(tokens[1 : start + 1 + steps].tolist(), streams, self.embedding, self.head, steps - 1)
        if self.case.define is heads.eagle:
            features = self.case.define(self.tensors, config, given._replace(head=torch.eye(heads.WIDTH).double()))
            return features[start:] @ self.head.T, features[start:]
        return self.case.define(self.tensors, config, given)[start:], None

    def chains(self) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, first row, number of drafts whose distribution the target gives)."""
        for number, one in enumerate(self.some):
            for start in range(one.prompt - 1, len(one.ids) - 1):
                yield number, start, min(STEPS, len(one.ids) - 1 - start)

    def loss(self) -> Tensor:
        parts: list[list[Tensor]] = [[] for _ in range(STEPS)]
        for number, start, steps in self.chains():
            logits, features = self.chain(number, start, steps)
            for k in range(steps):
                hidden = self.hidden[number][start + 1 + k]
                wanted = F.log_softmax(hidden @ self.head.T, -1)[self.vocabulary]
                found = F.log_softmax(logits[k], -1)
                loss = (wanted.exp() * (wanted - found)).sum()
                if features is not None:
                    far = (features[k] - hidden).abs()
                    loss = 0.1 * loss + torch.where(far < 1, far**2 / 2, far - 0.5).mean()
                parts[k].append(loss)
        means = [torch.stack(some).mean() * 0.8**k for k, some in enumerate(parts)]
        return sum(means, torch.zeros(())) / sum(0.8**k for k in range(STEPS))

    def hits(self) -> list[list[bool]]:
        found: list[list[bool]] = [[] for _ in range(STEPS)]
        for number, start, steps in self.chains():
            logits, _ = self.chain(number, start, steps)
            ids = self.some[number].ids
            for k in range(min(steps, len(ids) - 2 - start)):
                found[k].append(int(self.vocabulary[logits[k].argmax()]) == ids[start + 2 + k])
        return found


@pytest.mark.parametrize("name", ["medusa", "eagle_plain", "eagle3", "eagle3_whole"])
def test_losses_and_gradients_are_those_of_single_chains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_training("reference")
    weights: Any = {n: torch.from_numpy(x) for n, x in random_weights(TARGET).items()}
    tensors = heads.write(CASES[name], tmp_path)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    file = read_head(tmp_path)
    spec: Any = file.spec
    target = Target(Model(TARGET, weights, table, LENGTH), table, file.vocabulary)
    monkeypatch.setattr(learners, "NOISE", 0.0)
    own = MedusaLearner(spec, target) if name == "medusa" else EagleLearner(spec, target, STEPS, 0)
    with torch.no_grad():
        for key, weight in own.weights().items():
            weight.copy_(torch.from_numpy(np.array(file.weights[key].data)))
    rng = np.random.default_rng(4)
    some = [Continuation(rng.integers(3, VOCAB, n), prompt) for n, prompt in SIZES]
    oracle = Oracle(name, tensors, target, some, spec.aux(6))
    wanted = oracle.loss()
    wanted.backward()
    batch = Batch(some, table)
    loss = own.loss(batch, torch.Generator())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    grads = {n: HostTensor(p.grad.numpy(), "float32") for n, p in own.weights().items() if p.grad is not None}
    assert set(grads) == set(own.weights())
    _, found = FORMATS[file.format].write(replace(file, weights=grads))
    for given, tensor in tensors.items():
        key = given.replace("layers.0", "midlayer") if name == "eagle3_whole" else given
        if tensor.requires_grad:
            assert tensor.grad is not None
            scale = max(float(tensor.grad.abs().max()), 1e-3)
            assert np.abs(found[key].data - tensor.grad.numpy()).max() < 1e-4 * scale, key
    for right, theirs in zip(own.hits(batch, STEPS), oracle.hits(), strict=True):
        assert right.tolist() == theirs
