"""Sliding windows: the context in which each token is scored, and how windows are batched into forward passes.

The windows are those in transformers' documentation ("Perplexity of fixed-length models"), and the two numbers mean the
same: a window has `context` tokens and begins `stride` tokens after the previous one. In each window the tokens are
scored that no earlier window has scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.sample.logits import Ints

DEFAULT_CONTEXT = 2048  # tokens; the model's longest context if that is shorter
BATCH_TOKENS = 4096  # tokens of one forward pass


class Window(NamedTuple):
    """Tokens [start, stop) of a document. The scored ones are [first, stop), with start < first < stop."""

    start: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class SlidingContext:
    """Windows of `context` tokens, `stride` apart.

    Every token is scored once. From a document's second window on, it has at least context - stride tokens before it; a
    smaller stride gives more context and more windows. `stride` is less than `context`, so that the first token of a
    window is never scored.
    """

    context: int
    stride: int

    @classmethod
    def choose(cls, max_model_len: int, context: int | None = None, stride: int | None = None) -> SlidingContext:
        """Return the requested windows, or the default ones. Raises RequestError for values that do not fit the model.

        The default context is the model's longest, at most DEFAULT_CONTEXT. The default stride is half of it: after the
        first window, every token has at least half a context before it, for about twice the work of windows without
        overlap.
        """
        if context is None:
            context = min(max_model_len, DEFAULT_CONTEXT)
        if not 2 <= context <= max_model_len:
            raise RequestError(f"context (--context) is {context}; it must be from 2 to {max_model_len} tokens")
        if stride is None:
            stride = context // 2
        if not 1 <= stride < context:
            raise RequestError(
                f"stride (--stride) is {stride}; it must be from 1 to {context - 1}, less than the context: the "
                "first token of a window has no token before it"
            )
        return cls(context, stride)

    def windows(self, num_tokens: int, num_unscored: int = 1) -> Iterator[Window]:
        """Yield the windows of a document of `num_tokens` tokens, of which the first `num_unscored` are not scored."""
        scored, start = num_unscored, 0
        while scored < num_tokens:
            stop = min(start + self.context, num_tokens)
            if scored < stop:
                yield Window(start, scored, stop)
                scored = stop
            start += self.stride


@dataclass(frozen=True, slots=True)
class Batch:
    """The windows of one forward pass.

    sequences: token ids of each window, without the last one, which predicts nothing. rows [n]: rows of the pass that
    predict scored tokens. targets [n]: those tokens, in the order of the documents.
    """

    sequences: Sequence[Sequence[int]]
    rows: Ints
    targets: Ints

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the model computes."""
        return sum(map(len, self.sequences))


def batches(
    documents: Sequence[Document], sliding: SlidingContext, batch_tokens: int = BATCH_TOKENS
) -> Iterator[Batch]:
    """Yield all windows of all documents in order, in batches of at most `batch_tokens` tokens (at least one
    window).
    """
    pending: list[tuple[Document, Window]] = []
    size = 0
    for document in documents:
        for window in sliding.windows(len(document.token_ids), document.num_unscored):
            length = window.stop - 1 - window.start
            if pending and size + length > batch_tokens:
                yield _batch(pending)
                pending, size = [], 0
            pending.append((document, window))
            size += length
    if pending:
        yield _batch(pending)


def _batch(pending: Sequence[tuple[Document, Window]]) -> Batch:
    sequences, rows, targets = [], [], []
    at = 0
    for document, (start, first, stop) in pending:
        sequences.append(document.token_ids[start : stop - 1])
        rows.append(np.arange(first - 1 - start, stop - 1 - start) + at)
        targets.append(np.asarray(document.token_ids[first:stop], np.int64))
        at += stop - 1 - start
    return Batch(sequences, np.concatenate(rows), np.concatenate(targets))
