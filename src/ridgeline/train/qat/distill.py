"""Train the codes of a model until its predictions are close to those of the original, its teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ridgeline.errors import DataError
from ridgeline.nn.step import Stream
from ridgeline.ops.api import QuantizedMatrix, QuantizedStack
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec
from ridgeline.train.module import LOSS_ELEMENTS
from ridgeline.train.optimizer import BETAS, learning_rate
from ridgeline.train.qat.rounding import code_limits
from ridgeline.train.qat.student import Codes, Student
from ridgeline.train.saves import Saves

OnStep = Callable[[int, int, float], None]  # called with the finished updates, all updates, and the mean KL
EPS = 1e-12  # of AdamW: gradients of single weights are far below torch's default of 1e-8
WARMUP = 0.05  # share of the updates in which the rate rises
SAVES = 20  # checkpoints of a run


@dataclass(frozen=True, slots=True)
class Original:
    """The model that is the teacher. weights: floats by the spec's names, as numpy arrays."""

    spec: ModelSpec
    weights: Mapping[str, Any]
    max_len: int


@dataclass(frozen=True, slots=True)
class Distillation:
    """How codes are trained.

    tokens: tokens to train on, repetitions included; at least one update is made. batch_tokens: tokens of an update, in
    whole sequences. reach: how far noise alone moves a number in a run, in units of the mean distance of neighboring
    numbers of its matrix. At its peak, the learning rate is reach / sqrt(updates), and at most `rate`, for weights, for
    the largest number of a group where its scale changes, and for zero points. seed: seed of the order of the
    sequences.
    """

    tokens: int
    batch_tokens: int = 1024
    reach: float = 0.15
    rate: float = 0.01
    seed: int = 0

    def rows(self, length: int) -> int:
        """Return the number of sequences of an update."""
        return max(1, self.batch_tokens // length)

    def steps(self, length: int) -> int:
        """Return the number of updates, for sequences of `length` tokens: no more tokens than are allowed."""
        return max(1, self.tokens // (self.rows(length) * length))


def distill(
    original: Original, initial: Mapping[str, QuantizedMatrix | QuantizedStack], sequences: Sequence[Sequence[int]],
    options: Distillation, device: str, folder: Path, *, threads: int | None = None,
    on_step: OnStep = lambda done, steps, kl: None,
) -> Codes:  # fmt: skip
    """Return codes whose model has a small KL(original || model) on the sequences.

    A run that was interrupted continues from the newest checkpoint in `folder`; on a CPU, its result is that of one
    run, to the bit. The original and the student are in memory as a whole, in float32, with two moments of each weight.

    Args:
        initial: codes to begin with, by the name of the weight. Formats, permutations and all other weights are kept.
        sequences: token ids, all of one length.
        device: as `training_device` names it. folder: has the checkpoints of this run only.
        threads: threads of torch on a CPU; None: those that it has.

    Raises:
        DataError: if the loss is not finite, or if a checkpoint cannot be written.
    """
    with _threads(threads):
        return _Run(original, initial, sequences, options, device, folder).train(on_step)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch have this number of threads; None: those that it has."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """The state of a run: the student, the moments of its optimizer, and the number of finished updates."""

    def __init__(
        self, original: Original, initial: Mapping[str, QuantizedMatrix | QuantizedStack],
        sequences: Sequence[Sequence[int]], options: Distillation, device: str, folder: Path,
    ) -> None:  # fmt: skip
        self._sequences, self._options, self._length = sequences, options, len(sequences[0])
        self._student = Student(original.spec, original.weights, initial, device, original.max_len)
        self._parameters = dict(self._student.parameters())
        self._peaks = {name: self._peak(name) for name in self._parameters}
        groups = [{"params": [p], "name": name} for name, p in self._parameters.items()]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, weight_decay=0.0)
        self._saves = Saves(folder, {"options": asdict(options), "device": device})

    def _peak(self, name: str) -> float:
        """Return the learning rate of a parameter at its peak."""
        matrix, kind = self._student.owner(name)
        units = {"weight": matrix.unit, "scale": matrix.unit / code_limits(matrix.format)[1], "zero": 1.0}
        o = self._options
        return min(o.rate, o.reach / math.sqrt(o.steps(self._length))) * units[kind]

    def train(self, on_step: OnStep) -> Codes:
        """Run all updates that are left, and return the codes."""
        steps = self._options.steps(self._length)
        for step in range(self._resume(), steps):
            loss = self._update(step, steps)
            done = step + 1
            if not math.isfinite(loss):
                raise DataError(f"the KL of update {done} of {steps} is {loss}; take more bits or smaller groups")
            on_step(done, steps, loss)
            if done % max(1, steps // SAVES) == 0 or done == steps:
                self._saves.write(done, self._tensors(), {}, -1)
        return self._student.codes()

    def _update(self, step: int, steps: int) -> float:
        """Make one update. Return the mean KL of its tokens before it, in nats."""
        warmup = math.ceil(WARMUP * steps)
        share = learning_rate(step, steps, 1.0, warmup, steps - warmup, 0.0)
        for group in self._optimizer.param_groups:
            group["lr"] = share * self._peaks[group["name"]]
        batch = DenseStep.build(self._batch(step), self._student.memory)
        loss = self._loss(batch)
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._student.project()
        return float(loss.detach())

    def _batch(self, step: int) -> list[Sequence[int]]:
        """Return the sequences of an update. They depend only on the seed and the number of the update."""
        rows, count = self._options.rows(self._length), len(self._sequences)
        numbers = range(step * rows, (step + 1) * rows)
        order = {epoch: _order(count, self._options.seed, epoch) for epoch in {n // count for n in numbers}}
        return [self._sequences[order[n // count][n % count]] for n in numbers]

    def _loss(self, batch: DenseStep) -> Tensor:
        """Return the mean of KL(original || student) over all tokens of a batch, in nats."""
        with torch.no_grad():
            wanted: Any = self._student.teacher.forward(batch)
        found: Any = self._student.model.forward(batch)
        count = sum(batch.lengths)
        rows = torch.arange(count, device=found.residual.device)
        parts = torch.split(rows, max(1, LOSS_ELEMENTS // self._student.model.spec.vocab_size))
        if len(parts) == 1:
            return self._divergence(wanted, found, rows) / count
        # Logits of a few rows at a time are in memory, and are computed again in the backward pass.
        sums = [checkpoint(self._divergence, wanted, found, part, use_reentrant=False) for part in parts]
        return torch.stack(sums).sum() / count

    def _divergence(self, wanted: Stream, found: Stream, rows: Tensor) -> Tensor:
        with torch.no_grad():
            target: Any = self._student.teacher.logits(wanted, rows)
            p = F.log_softmax(target, -1)
        logits: Any = self._student.model.logits(found, rows)
        return F.kl_div(F.log_softmax(logits, -1), p, log_target=True, reduction="sum")

    def _tensors(self) -> dict[str, Tensor]:
        """Return everything that an update changes, by name."""
        out: dict[str, Tensor] = {f"weight:{name}": p for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for kind, value in self._optimizer.state[parameter].items():
                out[f"optimizer:{name}:{kind}"] = torch.as_tensor(value)
        return out

    def _resume(self) -> int:
        """Load the newest checkpoint, and return the number of its updates; 0 for a new run."""
        if not (steps := self._saves.steps()):
            return 0
        tensors, _ = self._saves.read(steps[-1])
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weight:{name}"])
            prefix = f"optimizer:{name}:"
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            self._optimizer.state[parameter] = {k: v.to(parameter.device) if v.dim() else v for k, v in own.items()}
        return steps[-1]


def _order(count: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the sequences in an epoch."""
    found: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return found
