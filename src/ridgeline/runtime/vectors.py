"""Turn texts into vectors and into scores: passes over whole texts without padding, and what is read from each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import erf
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.load.vectors import dense_weights
from ridgeline.ops.api import Array
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec
from ridgeline.spec.encoder import DenseLayer, LabelHead, Pool, Vectors

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of a text, or of a pair of texts. types: 0 or 1 for each token; None: all are 0."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A choice of numbers to read from a pass over a text.

    Args:
        kind: "vector": an embedding; "labels": the scores of an encoder's head; "tokens": the probability that the
            second of two tokens comes next, where only these two are compared.
        pool: Which hidden states are read, instead of what the model's folder says.
        dimensions: Numbers of a vector; None: all.
        normalize: Whether a vector has length 1; None: as the model's folder says, or true if it says nothing.
        tokens: The two tokens of the kind "tokens".
    """

    kind: str = "vector"
    pool: Pool | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    tokens: tuple[int, int] | None = None


def check_reading(spec: ModelSpec, vectors: Vectors | None, reading: Reading) -> None:
    """Raise RequestError for a reading that the model or its folder does not allow."""
    if reading.kind == "labels":
        head_of(spec)
        return
    if reading.kind == "tokens":
        spec.require_logits("a score by two tokens")
        return
    if spec.encoder and spec.encoder.head:
        raise RequestError("this model scores labels and gives no embeddings; use score, /v1/score or /v1/rerank")
    if reading.pool is None and (vectors is None or vectors.pool is None):
        raise RequestError(
            "the model's folder does not say how hidden states become a vector (modules.json); set pooling to cls, "
            "mean or last"
        )
    own = vectors or Vectors()
    size, wanted = own.size(spec.hidden_size) if reading.pool is None else spec.hidden_size, reading.dimensions
    if wanted is None or wanted == size:
        return
    if not (1 <= wanted <= size and (own.any_dimension or wanted in own.dimensions)):
        known = f"from 1 to {size}" if own.any_dimension else " or ".join(map(str, (*own.dimensions, size)))
        raise RequestError(
            f"dimensions is {wanted}; this model's vectors have {known} numbers, since its config.json names no others "
            "(matryoshka_dimensions)"
        )


def head_of(spec: ModelSpec) -> LabelHead:
    """Return the head that scores labels. Raises RequestError for a model without one."""
    if spec.encoder is None or spec.encoder.head is None:
        raise RequestError(f"{spec.family} has no head that scores labels")
    return spec.encoder.head


class Reader:
    """Reads vectors and scores from a model's hidden states. Results do not depend on which texts share a pass.

    Raises CheckpointError for matrices after the pooling that cannot be read.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._spec, self._memory = loaded, loaded.spec, loaded.table.memory
        self.vectors = loaded.checkpoint.vectors
        self._dense, self._head = self._read_dense(), self._read_head()

    def read(self, texts: Sequence[Text], reading: Reading) -> Floats:
        """Return a row of numbers for each text, [texts, numbers], from one pass over all of them.

        Raises RequestError for hidden states from which no vector follows.
        """
        model, typed = self._loaded.model, self._spec.encoder is not None and self._spec.encoder.num_token_types > 1
        types = [t.types or [0] * len(t.ids) for t in texts] if typed and any(t.types for t in texts) else None
        step = self._loaded.dense_step([t.ids for t in texts], types=types)
        stream = model.forward(step)
        if reading.kind == "tokens":
            assert reading.tokens is not None
            logits = self._host(model.logits(stream, step.last_rows(self._memory)))[:, list(reading.tokens)]
            return _sigmoid(logits[:, 1:] - logits[:, :1])
        states = self._memory.get(model.hidden(stream))
        if reading.kind == "labels":
            return self._scores(_pooled(states, step.lengths, head_of(self._spec).pool))
        return self._finished(_pooled(states, step.lengths, reading.pool or self._pool()), reading)

    def _pool(self) -> Pool:
        assert self.vectors is not None and self.vectors.pool is not None, "check_reading refuses others"
        return self.vectors.pool

    def _host(self, array: Array) -> Floats:
        return np.asarray(self._memory.get(array), np.float64)

    def _finished(self, x: Floats, reading: Reading) -> Floats:
        """Return vectors after the matrices of the model's folder, cut to their dimensions, with their length."""
        own = self.vectors or Vectors()
        if reading.pool is None:
            for weight, bias, layer in self._dense:
                x = x @ weight.T + (0.0 if bias is None else bias)
                x = np.tanh(x) if layer.activation == "tanh" else x
        x = x[:, : reading.dimensions]
        lengths = np.sqrt((x * x).sum(1, keepdims=True))
        if not np.isfinite(lengths).all() or (lengths == 0).any():
            raise RequestError("the model's hidden states for this input are zero or contain NaN or infinity")
        says = own.normalize if own.pool is not None and reading.pool is None else True
        return x / lengths if (says if reading.normalize is None else reading.normalize) else x

    def _read_dense(self) -> list[tuple[Floats, Floats | None, DenseLayer]]:
        layers = self.vectors.dense if self.vectors else ()
        return [(*dense_weights(self._loaded.checkpoint.folder, layer), layer) for layer in layers]

    def _scores(self, x: Floats) -> Floats:
        """Return the scores of an encoder's head [texts, labels] of hidden states [texts, width]."""
        head, own = head_of(self._spec), self._head
        x = x @ own["dense.weight"].T + own.get("dense.bias", 0.0)
        x = _activated(x, head.activation)
        if head.norm is not None:
            x = x - x.mean(1, keepdims=True)
            x = x / np.sqrt((x * x).mean(1, keepdims=True) + head.norm.eps)
            x = x * own["norm.weight"] + own.get("norm.bias", 0.0)
        logits = x @ own["out.weight"].T + own["out.bias"]
        if not np.isfinite(logits).all():
            raise RequestError("the model's scores for this input contain NaN or infinity")
        return _sigmoid(logits) if head.labels == 1 and head.scores == "sigmoid" else logits

    def _read_head(self) -> dict[str, Floats]:
        if self._spec.encoder is None:
            return {}
        names = [w.name for w in self._spec.weights() if w.name.startswith("labels.")]
        weights, widen = self._loaded.model.weights, self._memory.widen
        return {name.removeprefix("labels."): self._host(widen(weights[name])) for name in names}


def _pooled(states: np.ndarray[Any, Any], lengths: Sequence[int], pool: Pool) -> Floats:
    """Return one row for each text of hidden states [tokens, width], in float64."""
    ends = np.cumsum(lengths)
    if pool == "mean":
        parts = np.split(states, ends[:-1])
        return np.stack([part.mean(0, dtype=np.float64) for part in parts])
    found: Floats = states[ends - 1 if pool == "last" else ends - np.asarray(lengths)].astype(np.float64)
    return found


def _activated(x: Floats, name: str) -> Floats:
    found: Floats
    match name:
        case "tanh":
            found = np.tanh(x)
        case "silu":
            found = x * _sigmoid(x)
        case "gelu":
            found = 0.5 * x * (1.0 + np.vectorize(erf)(x / np.sqrt(2.0)))
        case "gelu_tanh":
            found = 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
        case "relu2":
            found = np.maximum(x, 0.0) ** 2
        case _:
            found = np.maximum(x, 0.0)
    return found


def _sigmoid(x: Floats) -> Floats:
    found: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return found


def in_passes(lengths: Sequence[int], most_tokens: int) -> Iterator[slice]:
    """Yield slices of neighboring texts with at most `most_tokens` tokens together, or of one longer text."""
    start = tokens = 0
    for i, length in enumerate(lengths):
        if i > start and tokens + length > most_tokens:
            yield slice(start, i)
            start, tokens = i, 0
        tokens += length
    if start < len(lengths):
        yield slice(start, len(lengths))
