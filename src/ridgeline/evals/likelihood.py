"""Score continuations of contexts: the log likelihood of each, and whether greedy decoding would write it.

Texts are cut into tokens as lm-eval does it: spaces at a context's end belong to the continuation, and the continuation
has the tokens of the whole text that come after as many as the context alone has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.scores import check_documents, logprob_blocks, losses
from ridgeline.evals.windows import BATCH_TOKENS, SlidingContext, batches
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats


class Pair(NamedTuple):
    """Token ids of a context, at least one, and of a continuation."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """The log likelihood of a continuation in nats, and whether each of its tokens is the most likely one."""

    logprob: float
    is_greedy: bool


def first_token(tokenizer: Tokenizer, loaded: LoadedModel) -> int:
    """Return the id before a text without a context: the BOS, or the end token of models without one."""
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    if loaded.eos_token_ids:
        return min(loaded.eos_token_ids)
    raise RequestError("a text without a context needs a BOS or an end token, and this model has neither")


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, first: int) -> Pair:
    """Return the tokens of a context and its continuation. first: the id before an empty context; `first_token`."""
    if not context:
        ids = tokenizer.encode(continuation, add_special_tokens=False)
        return Pair(ids[:1], ids[1:]) if ids[:1] == [first] else Pair([first], ids)
    bare = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    num_context = len(tokenizer.encode(bare))
    return Pair(whole[:num_context], whole[num_context:]) if num_context else Pair([first], whole)


def score(
    loaded: LoadedModel, pairs: Sequence[Pair], *, batch_tokens: int = BATCH_TOKENS,
    on_pairs: Callable[[int], None] = lambda scored: None,
) -> list[Likelihood]:  # fmt: skip
    """Return the likelihood of each continuation, in order.

    A context is cut at its left if both do not fit the model's context. batch_tokens: tokens of one forward pass.
    on_pairs: called with the number of pairs scored since the last call. Raises RequestError for a continuation that is
    longer than the model's context, and for a token outside the vocabulary.
    """
    most = loaded.max_model_len
    documents = [_document(pair, most) for pair in pairs]
    if any(d.num_scored for d in documents):
        check_documents(documents, loaded.spec.vocab_size)
    ends = np.cumsum([d.num_scored for d in documents])
    logprobs: list[Floats] = [np.zeros(0)]
    greedy, done = [np.zeros(0, bool)], 0
    # The last token of a document is only predicted, so a window of one token more than the context holds it whole.
    for batch in batches(documents, SlidingContext(most + 1, most), batch_tokens):
        at = 0
        for block in logprob_blocks(loaded, batch):
            targets = batch.targets[at : at + len(block)]
            logprobs.append(-losses(block, targets))
            greedy.append(block.argmax(1) == targets)
            at += len(block)
        now = int(np.searchsorted(ends, sum(map(len, logprobs)), side="right"))
        on_pairs(now - done)
        done = now
    on_pairs(len(pairs) - done)
    values, hits = np.concatenate(logprobs), np.concatenate(greedy)
    starts = [0, *ends[:-1]]
    return [
        Likelihood(float(values[a:b].sum()), bool(hits[a:b].all())) for a, b in zip(starts, ends, strict=True)
    ]  # fmt: skip


def _document(pair: Pair, most: int) -> Document:
    if len(pair.continuation) > most:
        raise RequestError(
            f"a continuation has {len(pair.continuation)} tokens, and the model's context is {most}; use a larger "
            "--max-model-len or a shorter text"
        )
    ids = [*pair.context, *pair.continuation][-(most + 1) :]
    return Document(ids, num_unscored=len(ids) - len(pair.continuation), name="a pair of context and continuation")
