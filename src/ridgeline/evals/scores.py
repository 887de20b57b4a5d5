"""Log probabilities of the rows of a batch, a block at a time: nobody holds [tokens, vocabulary] of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.windows import Batch
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats, Ints, log_softmax
from ridgeline.sample.sampler import BLOCK

HEAD_BLOCK = 2**24  # logits that the device computes at once: 64 MiB; the head is read once for all their rows


def logit_blocks(loaded: LoadedModel, batch: Batch, head_block: int = HEAD_BLOCK) -> Iterator[Floats]:
    """The logits of the rows of a batch, in order, as blocks [n, vocabulary] of `head_block` numbers, float32.

    Raises RequestError if they are not numbers.
    """
    memory, rows = loaded.table.memory, max(1, head_block // loaded.spec.vocab_size)
    stream = loaded.model.forward(loaded.dense_step(batch.sequences))
    for start in range(0, len(batch.rows), rows):
        logits = memory.get(loaded.model.logits(stream, memory.integers(batch.rows[start : start + rows])))
        if not np.isfinite(logits).all():
            raise RequestError("the model's logits hold NaN or infinity")
        yield logits


def logprob_blocks(
    loaded: LoadedModel, batch: Batch, head_block: int = HEAD_BLOCK, block: int = BLOCK
) -> Iterator[Floats]:
    """The log softmax of the rows of a batch, in order, as blocks [n, vocabulary] of `block` numbers, float64.

    Raises RequestError if the model's logits are not numbers.
    """
    return logprobs(logit_blocks(loaded, batch, head_block), block)


def logprobs(blocks: Iterable[Floats], block: int = BLOCK) -> Iterator[Floats]:
    """The log softmax of blocks of logits, as smaller blocks [n, vocabulary] of `block` numbers, float64."""
    for logits in blocks:
        rows = max(1, block // logits.shape[1])
        for start in range(0, len(logits), rows):
            yield log_softmax(logits[start : start + rows])


def losses(logprobs: Floats, targets: Ints) -> Floats:
    """The negative log likelihood of targets [n] in nats, from log probabilities [n, vocabulary]."""
    return -logprobs[np.arange(len(targets)), targets]


def check_documents(documents: Sequence[Document], vocab_size: int) -> None:
    """Raise RequestError for a token that the model does not have, and where nothing can be scored."""
    if not any(d.num_scored for d in documents):
        raise RequestError("there is nothing to score: no document has a token with another one before it")
    for document in documents:
        ids = np.asarray(document.token_ids, np.int64)
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise RequestError(
                f"{document.name}: token id {outside[0]} is not in 0..{vocab_size - 1}, this model's vocabulary"
            )
