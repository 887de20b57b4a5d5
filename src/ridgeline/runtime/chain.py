"""Forward passes that propose one draft token after the other: those of a draft model, and those of an EAGLE head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ridgeline.nn.heads import Eagle3Head, EagleHead
from ridgeline.nn.model import Model
from ridgeline.nn.rotary import FrequencyTables
from ridgeline.nn.step import Step
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array
from ridgeline.runtime.features import Features
from ridgeline.sample.logits import Floats


class Passed(NamedTuple):
    """Results of a pass for its n last rows.

    logits: [n, vocabulary of the drafts]. features: [n, hidden_size], which the rows after them read; None if the
    drafts come from a model.
    """

    logits: Array
    features: Array | None


class Chain(Protocol):
    """Runs passes. lag: row p reads the token at position p + lag, and proposes the one after it.

    features: holds the features that rows read besides tokens; None if there are none. tokens: the target's token of
    each of the drafts' vocabulary, on the device; None where they are the same.
    """

    lag: int
    features: Features | None
    tokens: Array | None

    @property
    def frequency_tables(self) -> FrequencyTables | None:
        """Return the tables of rotations that follow the lengths of sequences; None if there are none."""
        ...

    def constants(self) -> Sequence[Array]:
        """Return all arrays that a pass reads besides its step, except those that kernels own."""
        ...

    def run(self, step: Step, features: Array | None, last: Array | None) -> Passed:
        """Run T rows. features: [T, hidden_size]. last: indices of the rows that propose; None: all."""
        ...

    def write(self, step: Step, features: Array | None) -> None:
        """Run T rows for their state alone."""
        ...

    def ids(self, ids: Array) -> Array:
        """Return the target's tokens for tokens [n] of the drafts' vocabulary, on the device."""
        ...

    def spread(self, logits: Floats) -> Floats:
        """Return logits [n, vocabulary] over the target's tokens for logits over those of the drafts."""
        ...


class ModelChain:
    """Passes of a draft model. vocab_size: number of tokens of the target, which may have fewer unused ones."""

    lag = 0

    def __init__(self, model: Model, vocab_size: int, table: OpsTable) -> None:
        self.features: Features | None = None
        self.tokens: Array | None = None
        self._model, self._vocab_size = model, vocab_size
        self._cut, self._is_whole = table.primitive(api.CUT), model.spec.vocab_size <= vocab_size

    @property
    def frequency_tables(self) -> FrequencyTables | None:
        return self._model.frequency_tables

    def constants(self) -> Sequence[Array]:
        return self._model.constants()

    def run(self, step: Step, features: Array | None, last: Array | None) -> Passed:
        logits = self._model.logits(self._model.forward(step), last)
        return Passed(logits if self._is_whole else self._cut(logits, 0, self._vocab_size), None)

    def write(self, step: Step, features: Array | None) -> None:
        self._model.forward(step)

    def ids(self, ids: Array) -> Array:
        return ids

    def spread(self, logits: Floats) -> Floats:
        return logits


class EagleChain:
    """Passes of an EAGLE head, whose row p reads the feature at p and the token at p + 1."""

    lag = 1

    def __init__(self, head: EagleHead | Eagle3Head, target: Model, features: Features, table: OpsTable) -> None:
        self._head, self._target, self._rows = head, target, table.primitive(api.EMBEDDING)
        self.features: Features | None = features
        self._array, self._vocabulary = features.array, head.vocabulary
        self._vocab_size = head.spec.vocab_size
        self.tokens = None if head.vocabulary is None else table.memory.integers(head.vocabulary)

    @property
    def frequency_tables(self) -> FrequencyTables | None:
        return self._head.frequency_tables

    def constants(self) -> Sequence[Array]:
        tokens = [] if self.tokens is None else [self.tokens]
        return [self._array, *tokens, *self._head.constants(), *self._target.constants()]

    def run(self, step: Step, features: Array | None, last: Array | None) -> Passed:
        assert features is not None
        found = self._head.feature(self._head.forward(step, features))
        if last is not None:
            found = self._rows(found, last)
        return Passed(self._head.logits(found), found)

    def write(self, step: Step, features: Array | None) -> None:
        assert features is not None
        self._head.forward(step, features)

    def ids(self, ids: Array) -> Array:
        return self._head.to_target(ids)

    def spread(self, logits: Floats) -> Floats:
        return spread(logits, self._vocabulary, self._vocab_size)


def spread(logits: Floats, vocabulary: np.ndarray | None, vocab_size: int) -> Floats:
    """Return logits [n, vocab_size] that are minus infinity for tokens that a head cannot propose.

    logits: [n, draft vocabulary]. vocabulary: the target's token of each of them; None where they are the same.
    """
    if vocabulary is None:
        return logits
    found = np.full((len(logits), vocab_size), -np.inf, np.float32)
    found[:, vocabulary] = logits
    return found
