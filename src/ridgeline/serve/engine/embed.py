"""Compute embeddings and scores between the steps of the engine, a bounded number of tokens at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.runtime.vectors import Floats, Reading, Text
from ridgeline.serve.engine.messages import Embed, Embedded, Lost, Refused
from ridgeline.serve.engine.meters import EngineMeters

Answer = Embedded | Refused | Lost


class Reads(Protocol):
    """Computes rows of numbers for texts, as `runtime.vectors.Reader` does."""

    def read(self, texts: Sequence[Text], reading: Reading) -> Floats: ...


@dataclass(slots=True, eq=False)
class _Open:
    """A request that is not complete. rows: results so far. count: number of their texts."""

    message: Embed
    rows: list[Floats] = field(default_factory=list)
    count: int = 0

    @property
    def left(self) -> int:
        return len(self.message.texts) - self.count


class _Part(NamedTuple):
    """Texts of one request that share a pass with those of others."""

    request: _Open
    texts: Sequence[Text]


class Embedder:
    """Computes passes of at most `batch_tokens` tokens, or of one longer text, so that streams continue between them.

    Requests take turns: each pass begins with another one, and is filled up with texts of the next ones.
    """

    def __init__(self, reader: Reads, batch_tokens: int, meters: EngineMeters) -> None:
        self._reader, self._batch_tokens, self._meters = reader, batch_tokens, meters
        self._waiting: deque[_Open] = deque()

    def __len__(self) -> int:
        """Return the number of incomplete requests."""
        return len(self._waiting)

    def add(self, message: Embed) -> None:
        """Add a request."""
        self._waiting.append(_Open(message))

    def abort(self, request_id: int) -> None:
        """Drop a request. Nothing happens if it is complete."""
        self._waiting = deque(one for one in self._waiting if one.message.id != request_id)

    def advance(self) -> list[Answer]:
        """Compute the next pass. Return the answers of the requests that it completes, or that fail in it."""
        parts = self._next()
        answers = []
        try:
            self._compute(parts)
        except Exception as e:  # a bug, or hidden states with NaN: it ends only its own request
            if len(parts) == 1:
                answers.append(self._failed(parts[0].request, e))
            else:  # one text fails for all, so each request runs alone
                answers += [found for part in parts if (found := self._alone(part)) is not None]
        first = parts[0].request
        if self._waiting and self._waiting[0] is first:
            self._waiting.rotate(-1)
        for request in [part.request for part in parts]:
            if not request.left and request in self._waiting:
                self._waiting.remove(request)
                answers.append(Embedded(request.message.id, np.concatenate(request.rows)))
        return answers

    def _next(self) -> list[_Part]:
        """Return the texts of the next pass: of the first request, and of others from which the same is read."""
        parts, tokens = list[_Part](), 0
        reading = self._waiting[0].message.reading
        for request in self._waiting:
            if request.message.reading != reading:
                continue
            start = end = request.count
            texts = request.message.texts
            while end < len(texts) and (
                not (parts or end > start) or tokens + len(texts[end].ids) <= self._batch_tokens
            ):
                tokens += len(texts[end].ids)
                end += 1
            if end > start:
                parts.append(_Part(request, texts[start:end]))
            if tokens >= self._batch_tokens or end < len(texts):
                break
        return parts

    def _compute(self, parts: Sequence[_Part]) -> None:
        texts = [text for part in parts for text in part.texts]
        rows = self._reader.read(texts, parts[0].request.message.reading)
        start = 0
        for request, own in parts:
            request.rows.append(rows[start : start + len(own)])
            request.count += len(own)
            start += len(own)
        self._meters.embedded_texts += len(texts)
        self._meters.embedded_tokens += sum(len(text.ids) for text in texts)

    def _alone(self, part: _Part) -> Answer | None:
        try:
            self._compute([part])
        except Exception as e:  # as above
            return self._failed(part.request, e)
        return None

    def _failed(self, request: _Open, error: Exception) -> Answer:
        """Drop a request, and return the answer that says why."""
        self.abort(request.message.id)
        if isinstance(error, RequestError):
            return Refused(request.message.id, str(error))
        # An error of the device or too little memory ends only this request.
        logging.getLogger(__name__).error("an embedding failed", exc_info=error)
        return Lost([request.message.id], f"the embedding failed ({type(error).__name__}); shorter inputs may succeed")
