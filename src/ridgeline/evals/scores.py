"""Compute log probabilities of a batch's rows in blocks, so that [tokens, vocabulary] is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.windows import Batch
from ridgeline.nn.step import Stream
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats, Ints, log_softmax

BLOCK = 2**16  # numbers of a block in float64: a few such blocks fit into the cache of a core
HEAD_BLOCK = 2**24  # logits that the device computes at once (64 MiB); the head is read once for all of them


def logit_blocks(loaded: LoadedModel, batch: Batch, head_block: int = HEAD_BLOCK) -> Iterator[Floats]:
    """Yield the logits of a batch's rows in order, in float32 blocks [n, vocabulary] of about `head_block` numbers.

    Raises RequestError if a logit is NaN or infinite.
    """
    loaded.spec.require_autoregressive("the likelihood of a text")
    stream = loaded.model.forward(loaded.dense_step(batch.sequences))
    yield from stream_logits(loaded, stream, batch, head_block)


def stream_logits(loaded: LoadedModel, stream: Stream, batch: Batch, head_block: int = HEAD_BLOCK) -> Iterator[Floats]:
    """Yield the logits of a batch's rows as `logit_blocks` does. stream: the batch after the last layer."""
    memory, rows = loaded.table.memory, max(1, head_block // loaded.spec.vocab_size)
    for start in range(0, len(batch.rows), rows):
        logits = memory.get(loaded.model.logits(stream, memory.integers(batch.rows[start : start + rows])))
        if not np.isfinite(logits).all():
            raise RequestError(
                "the model's logits contain NaN or infinity; use --dtype float32, or download the weights again"
            )
        yield logits


def logprob_blocks(
    loaded: LoadedModel, batch: Batch, head_block: int = HEAD_BLOCK, block: int = BLOCK
) -> Iterator[Floats]:
    """Yield the log softmax of a batch's rows in order, in float64 blocks [n, vocabulary] of about `block` numbers.

    Raises RequestError if a logit is NaN or infinite.
    """
    return logprobs(logit_blocks(loaded, batch, head_block), block)


def logprobs(blocks: Iterable[Floats], block: int = BLOCK) -> Iterator[Floats]:
    """Yield the log softmax of blocks of logits, in smaller float64 blocks [n, vocabulary] of about `block` numbers."""
    for logits in blocks:
        rows = max(1, block // logits.shape[1])
        for start in range(0, len(logits), rows):
            yield log_softmax(logits[start : start + rows])


def losses(logprobs: Floats, targets: Ints) -> Floats:
    """Return the negative log likelihood of targets [n] in nats, from log probabilities [n, vocabulary]."""
    return -logprobs[np.arange(len(targets)), targets]


def check_documents(documents: Sequence[Document], vocab_size: int) -> None:
    """Raise RequestError for a token outside the vocabulary, and if nothing can be scored."""
    if not any(d.num_scored for d in documents):
        raise RequestError("there is nothing to score: no document has at least two tokens")
    for document in documents:
        ids = np.asarray(document.token_ids, np.int64)
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise RequestError(
                f"{document.name}: token id {outside[0]} is not in 0..{vocab_size - 1}, this model's vocabulary"
            )
