"""Objectives, which a training run makes small: cross-entropy, divergence from a teacher, distance of hidden states.

An objective holds the model that is trained and is called as the model is, with a batch; it returns the sum of its loss
over the batch's targets. Its parameters are those of the model, so that data parallelism can wrap it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.errors import DataError
from ridgeline.nn import Capture, Model
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec
from ridgeline.train.module import LanguageModel, sum_in_blocks


class Predictions(Protocol):
    """A teacher's distributions over the token after each of T tokens."""

    def divergence(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the sum of KL(teacher || student) over rows [n], in nats. logits: the student's, [n, vocabulary]."""
        ...


class Teacher(Protocol):
    """Gives the distributions that a student learns."""

    def read(self, step: DenseStep) -> Predictions:
        """Return the distributions for the tokens of a step."""
        ...


class Objective(nn.Module):
    """A loss of a student. Without a subclass, it is the cross-entropy."""

    def __init__(self, student: LanguageModel) -> None:
        super().__init__()
        self.student = student

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], targets: Tensor) -> Tensor:
        """Return the sum of the loss over targets [T] (negative: none) of sequences of `lengths`, end to end."""
        out: Tensor = self.student(token_ids, positions, lengths, targets)
        return out


class LogitDivergence(Objective):
    """KL(teacher || student) of the next token, in nats (Hinton et al., arXiv:1503.02531, at temperature 1)."""

    def __init__(self, student: LanguageModel, teacher: Teacher) -> None:
        super().__init__(student)
        self._teacher = teacher

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], targets: Tensor) -> Tensor:
        step = self.student.step(token_ids, positions, lengths)
        wanted, stream = self._teacher.read(step), self.student.stream(step)
        rows = (targets >= 0).nonzero().squeeze(1)
        return sum_in_blocks(
            lambda some: wanted.divergence(self.student.project(stream, some), some), rows, self.student.spec.vocab_size
        )


class StreamDistance(Objective):
    """Distance of the student's residual stream after each layer from the teacher's.

    The distance of a token is |student - teacher|^2 / |teacher|^2, and the loss the mean over layers. Layer i of n
    imitates the teacher's layers from `bounds[i]` up to `bounds[i + 1]`, without the last.

    Args:
        apart: each layer reads the teacher's stream, so that no layer repairs an error of those before it (the second
            stage of MOHAWK, arXiv:2408.10189); otherwise it reads what the student's own layers give.
    """

    def __init__(self, student: LanguageModel, teacher: Model, *, apart: bool) -> None:
        super().__init__(student)
        check_widths(student.spec, teacher.spec)
        self._teacher = [teacher]  # in a list, as everything that is no part of the student
        self._apart = apart
        self._bounds = bounds(len(student.spec.layers), len(teacher.spec.layers))

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], targets: Tensor) -> Tensor:
        step = self.student.step(token_ids, positions, lengths)
        wanted = self._streams(step)
        found = self.student.run_apart(step, wanted[:-1]) if self._apart else self._own(step)
        rows = targets >= 0
        pairs = [(a.float()[rows], b.float()[rows]) for a, b in zip(found, wanted[1:], strict=True)]
        sums = [((a - b).square().sum(-1) / b.square().sum(-1)).sum() for a, b in pairs]
        return torch.stack(sums).mean()

    @torch.no_grad()
    def _streams(self, step: DenseStep) -> list[Tensor]:
        """Return the teacher's stream before its first layer and at each bound after it."""
        model, names = self._teacher[0], [stream_name(b) for b in self._bounds]
        capture = Capture(model.spec, names)
        model.forward(step, capture)
        return [cast("Tensor", capture.outputs[name]) for name in names]

    def _own(self, step: DenseStep) -> list[Tensor]:
        names = [stream_name(i + 1) for i in range(len(self.student.spec.layers))]
        capture = Capture(self.student.spec, names)
        self.student.stream(step, capture)
        return [cast("Tensor", capture.outputs[name]) for name in names]


def stream_name(layers: int) -> str:
    """Return the name of the stream after a number of layers."""
    return f"layers.{layers - 1}" if layers else "embed"


def bounds(student: int, teacher: int) -> list[int]:
    """Return [student + 1] numbers of teacher's layers: after i of its layers, the student imitates this many."""
    return [round(i * teacher / student) for i in range(student + 1)]


def check_widths(student: ModelSpec, teacher: ModelSpec) -> None:
    """Raise DataError for streams that cannot be compared."""
    own, other = student.hidden_size, teacher.hidden_size
    if own != other:
        raise DataError(
            f"the student's hidden size is {own} and the teacher's {other}, so their hidden states cannot be compared; "
            "use --stages logits"
        )


class ModelTeacher:
    """A teacher that runs beside the student. Its logits are computed a block of rows at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @torch.no_grad()
    def read(self, step: DenseStep) -> Predictions:
        return _Streamed(self._model, self._model.forward(step))


class _Streamed:
    """Distributions that are computed from the teacher's last stream."""

    def __init__(self, model: Model, stream: Any) -> None:
        self._model, self._stream = model, stream

    def divergence(self, logits: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            given: Any = rows
            wanted: Any = self._model.logits(self._stream, given)
            p = F.log_softmax(wanted.float(), -1)
        return F.kl_div(F.log_softmax(logits.float(), -1), p, log_target=True, reduction="sum")


class TopPredictions:
    """The most likely tokens of a teacher with their probabilities, and the mass of all others.

    The divergence is that of the distributions over those tokens and one event for all others. It is at most the
    divergence of the whole distributions, and less by the mass of the others times the divergence among them.

    Args:
        ids: [T, k] token ids.
        logprobs: [T, k] their log probabilities, in nats.
    """

    def __init__(self, ids: Tensor, logprobs: Tensor) -> None:
        self._ids, self._logprobs = ids, logprobs

    def divergence(self, logits: Tensor, rows: Tensor) -> Tensor:
        ids, p = self._ids[rows], self._logprobs[rows]
        q = F.log_softmax(logits.float(), -1)
        found = (p.exp() * (p - q.gather(-1, ids))).sum()
        if ids.shape[-1] == q.shape[-1]:
            return found
        rest = (1.0 - p.exp().sum(-1)).clamp(min=0.0)
        others = q.scatter(-1, ids, -torch.inf).logsumexp(-1)
        return found + (torch.xlogy(rest, rest) - rest * others).sum()


def freeze(model: LanguageModel, trained: Sequence[str]) -> None:
    """Let only those parameters train whose name matches one of the patterns, such as layers.*.mixer.*.

    Raises DataError for a pattern that matches none.
    """
    weights = {name: p for name, p in model.weights().items() if p.requires_grad}
    for pattern in trained:
        if not any(fnmatchcase(name, pattern) for name in weights):
            raise DataError(
                f"no weight that can train matches the pattern {pattern!r} (--train); names are "
                f"{', '.join(list(weights)[:3])} and so on"
            )
    for name, parameter in weights.items():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trained))
