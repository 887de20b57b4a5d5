"""A sliding context: which tokens a model sees when it scores a token, and how windows share a forward pass.

The windows are those of the recipe in transformers' documentation ("Perplexity of fixed-length models"), and the two
numbers mean the same: a window is `context` tokens, the scored ones among them, and begins `stride` after the one
before. Of each window those tokens are scored that no window before has scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.sample.logits import Ints

DEFAULT_CONTEXT = 2048  # tokens, where the model's own is not shorter
BATCH_TOKENS = 4096  # of one forward pass


class Window(NamedTuple):
    """Tokens [start, stop) of a document. Scored are [first, stop); start < first < stop."""

    start: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class SlidingContext:
    """Windows of `context` tokens, `stride` apart.

    Every token is scored once, and from its document's second window on has at least context - stride tokens before
    it: more of them cost more windows. `stride` is less than `context`, or a window's first token had none.
    """

    context: int
    stride: int

    @classmethod
    def choose(cls, max_model_len: int, context: int | None = None, stride: int | None = None) -> SlidingContext:
        """What was asked for, or a default. Raises RequestError for what does not fit.

        The default context is the model's, up to DEFAULT_CONTEXT; the default stride is half of it: no token is
        scored with less than half a context, for about twice the work of windows that do not overlap.
        """
        if context is None:
            context = min(max_model_len, DEFAULT_CONTEXT)
        if not 2 <= context <= max_model_len:
            raise RequestError(f"context (--context) is {context}; it must be from 2 to {max_model_len} tokens")
        if stride is None:
            stride = context // 2
        if not 1 <= stride < context:
            raise RequestError(
                f"stride (--stride) is {stride}; it must be from 1 to {context - 1}, less than the context: the first "
                "token of a window can only be scored with the one before it"
            )
        return cls(context, stride)

    def windows(self, num_tokens: int, num_unscored: int = 1) -> Iterator[Window]:
        """The windows of a document of so many tokens, the first `num_unscored` of which are not scored."""
        scored, start = num_unscored, 0
        while scored < num_tokens:
            stop = min(start + self.context, num_tokens)
            if scored < stop:
                yield Window(start, scored, stop)
                scored = stop
            start += self.stride


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of one forward pass.

    sequences: token ids of each, without its last token, which predicts nothing. rows [n]: of the pass, those that
    predict scored tokens; targets [n]: these tokens, in the order of the documents.
    """

    sequences: Sequence[Sequence[int]]
    rows: Ints
    targets: Ints

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads."""
        return sum(map(len, self.sequences))


def batches(
    documents: Sequence[Document], sliding: SlidingContext, batch_tokens: int = BATCH_TOKENS
) -> Iterator[Batch]:
    """All windows of all documents in order, as many in a pass as have `batch_tokens` tokens together, at least one."""
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
