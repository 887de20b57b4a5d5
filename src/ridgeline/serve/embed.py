"""Vectors of texts, out of a model that was made to continue them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.runtime.load import LoadedModel


def embed(loaded: LoadedModel, prompts: Sequence[Sequence[int]], pooling: str) -> list[list[float]]:
    """One vector [hidden_size] of length 1 for each prompt: the mean of its tokens' hidden states after the last norm,
    or the last token's.

    A prompt is one dense pass of its own, so its vector does not depend on its company. Raises RequestError for a
    vector that is not finite or has no length.
    """
    memory, vectors = loaded.table.memory, []
    for prompt in prompts:
        stream = loaded.model.forward(loaded.dense_step([prompt]))
        hidden = memory.get(loaded.model.hidden(stream)).astype(np.float64)
        vector = hidden.mean(axis=0) if pooling == "mean" else hidden[-1]
        length = float(np.sqrt((vector * vector).sum()))
        if not np.isfinite(length) or length == 0:
            raise RequestError("the model's hidden states hold NaN or infinity, or are zero")
        vectors.append((vector / length).tolist())
    return vectors
