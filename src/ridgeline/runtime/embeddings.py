"""Compute embeddings and scores of many texts in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.request import Frontend, Prompt, as_batch
from ridgeline.runtime.texts import Cut, Template, named_prompt, scoring, text_of
from ridgeline.runtime.vectors import Floats, Reader, Reading, Text, check_reading, in_passes
from ridgeline.spec.encoder import Pool


class Embeddings:
    """Embeds and scores texts. batch_tokens: most tokens of a pass, unless a text is longer."""

    def __init__(self, loaded: LoadedModel, frontend: Frontend, max_model_len: int, batch_tokens: int) -> None:
        self.reader, self._spec, self._frontend = Reader(loaded), loaded.spec, frontend
        self._vectors, self._most, self._batch_tokens = loaded.checkpoint.vectors, max_model_len, batch_tokens

    def embed(
        self, texts: Prompt | Sequence[Any], reading: Reading, cut: Cut, prompt: str | None, prompt_name: str | None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a vector for each text, float32 [texts, numbers]."""
        check_reading(self._spec, self._vectors, reading)
        before, given = named_prompt(self._vectors, prompt, prompt_name), as_batch(texts)
        inputs = [text_of(self._frontend, _input(one), before, cut, self._most) for one in given]
        return self._read(inputs, reading).astype(np.float32)

    def score(self, query: str, documents: str | Sequence[str], cut: Cut, template: Template | None) -> list[float]:
        """Return a score for each document, higher for those that fit the query better."""
        pairs = [(query, one) for one in ([documents] if isinstance(documents, str) else documents)]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise RequestError("a query and documents must be texts")
        own = scoring(self._spec, self._vectors, self._frontend, pairs, cut, self._most, template)
        return own.scores(self._read(own.texts, own.reading)) if pairs else []

    def _read(self, texts: Sequence[Text], reading: Reading) -> Floats:
        """Return what is read from each text, in passes over texts of similar length."""
        if not texts:
            return np.zeros((0, 0))
        passes = in_passes([len(text.ids) for text in texts], self._batch_tokens)
        return np.concatenate([self.reader.read(texts[some], reading) for some in passes])


class EmbedsTexts:
    """The methods of an LLM for embeddings and scores."""

    embeddings: Embeddings

    def embed(
        self,
        texts: Prompt | Sequence[Any],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        pooling: Pool | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the embeddings of texts or token ids, float32 [texts, numbers].

        prompt, prompt_name: a text that is put before each, or its name in the model's folder; nothing is added
        otherwise. pooling, dimensions, normalize: see `runtime.vectors.Reading`. truncate_prompt_tokens: most tokens of
        a text, -1 for as many as the model takes; tokens at the end are dropped. Raises RequestError for a text that is
        empty or too long, and for a model whose pooling nobody says.
        """
        reading, cut = Reading("vector", pooling, dimensions, normalize), Cut(truncate_prompt_tokens)
        return self.embeddings.embed(texts, reading, cut, prompt, prompt_name)

    def score(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        template: Template | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """Return a score for each document, higher for those that fit the query better.

        It is the score of the model's head, or the similarity of the two embeddings. template: for a model that writes
        text and answers whether the document fits. Raises RequestError as `embed` does.
        """
        return self.embeddings.score(query, documents, Cut(truncate_prompt_tokens), template)


def _input(given: Any) -> Any:
    """Return a text or token ids. Raises RequestError for anything else."""
    if isinstance(given, str) or (isinstance(given, Sequence) and not isinstance(given, bytes)):
        return given
    raise RequestError(f"an input is {given!r:.100}; it must be a text or a list of token ids")
