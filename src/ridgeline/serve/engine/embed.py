"""Compute embeddings from the hidden states of a generative model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.runtime.load import LoadedModel
from ridgeline.serve.engine.messages import Embed, Embedded, Lost, Pooling, Refused


class Embedder:
    """Computes embeddings, oldest request first. It computes one prompt per call, so that streams continue between."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._waiting: dict[int, Embed] = {}
        self._vectors: list[list[float]] = []  # vectors of the oldest request

    def __len__(self) -> int:
        """Return the number of incomplete requests."""
        return len(self._waiting)

    def add(self, message: Embed) -> None:
        """Add a request."""
        self._waiting[message.id] = message

    def abort(self, request_id: int) -> None:
        """Drop a request. Nothing happens if it is complete."""
        if request_id in self._waiting:
            if request_id == next(iter(self._waiting)):
                self._vectors = []
            del self._waiting[request_id]

    def advance(self) -> Embedded | Refused | Lost | None:
        """Compute the next prompt. Return the answer if that completes its request, or the error that ended it."""
        message = next(iter(self._waiting.values()))
        answer: Embedded | Refused | Lost
        try:
            self._vectors.append(embed(self._loaded, message.prompts[len(self._vectors)], message.pooling))
            if len(self._vectors) < len(message.prompts):
                return None
            answer = Embedded(message.id, self._vectors)
        except RequestError as e:
            answer = Refused(message.id, str(e))
        except Exception as e:  # an error of the device or too little memory ends only this request
            logging.getLogger(__name__).exception("an embedding failed")
            answer = Lost([message.id], f"the embedding failed ({type(e).__name__}); shorter inputs may succeed")
        self.abort(message.id)
        return answer


def embed(loaded: LoadedModel, prompt: Sequence[int], pooling: Pooling) -> list[float]:
    """Return a vector [hidden_size] of length 1 for one prompt.

    pooling: "mean" takes the mean of the tokens' hidden states after the last norm, "last" the last token's. Each
    prompt is a forward pass of its own, so its vector does not depend on other prompts. Raises RequestError for a
    vector that is not finite or is zero.
    """
    stream = loaded.model.forward(loaded.dense_step([prompt]))
    hidden = loaded.table.memory.get(loaded.model.hidden(stream)).astype(np.float64)
    vector = hidden.mean(axis=0) if pooling == "mean" else hidden[-1]
    length = float(np.sqrt((vector * vector).sum()))
    if not np.isfinite(length) or length == 0:
        raise RequestError("the model's hidden states for this input are zero or contain NaN or infinity")
    found: list[float] = (vector / length).tolist()
    return found
