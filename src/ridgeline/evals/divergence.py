"""Measure how far a model is from its original on the same tokens, for example after quantization."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.estimates import Estimate, Proportion, block_mean
from ridgeline.evals.perplexity import Perplexity, estimate_json
from ridgeline.evals.scores import check_documents, logit_blocks, logprob_blocks, logprobs, losses
from ridgeline.evals.windows import BATCH_TOKENS, Batch, SlidingContext, batches
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats


@dataclass(frozen=True, slots=True)
class Divergence:
    """A model compared with its original over the predictions of all scored tokens, in nats per token.

    kl: mean of KL(original || other), with its median and 99th percentile. top1_agreement: share of tokens for which
    both have the same most likely token. nll_difference: loss of the other minus loss of the original; its error is
    computed from the paired differences.
    """

    original: Perplexity
    other: Perplexity
    kl: Estimate
    kl_median: float
    kl_p99: float
    top1_agreement: Proportion
    nll_difference: Estimate

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers of the comparison, without those of each model."""
        agreement = self.top1_agreement
        return {
            **estimate_json("kl", self.kl),
            "kl_median": self.kl_median,
            "kl_p99": self.kl_p99,
            "top1_agreement": agreement.value,
            "top1_agreement_95": [agreement.low, agreement.high],
            **estimate_json("nll_difference", self.nll_difference),
        }


def measure_divergence(
    original: LoadedModel, other: LoadedModel, documents: Sequence[Document], *, context: int | None = None,
    stride: int | None = None, batch_tokens: int = BATCH_TOKENS,
    on_tokens: Callable[[int], None] = lambda scored: None,
) -> Divergence:  # fmt: skip
    """Score documents with both models; the arguments and errors are those of `measure_perplexity`.

    The default context fits both models. Raises RequestError if their vocabularies have different sizes.
    """
    sizes = original.spec.vocab_size, other.spec.vocab_size
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"the original has a vocabulary of {sizes[0]:,} tokens and the other model one of {sizes[1]:,}, so their "
            "predictions cannot be compared"
        )
    limit = min(original.max_model_len, other.max_model_len)
    sliding = SlidingContext.choose(limit, context, stride)
    check_documents(documents, sizes[0])
    every = batches(documents, sliding, batch_tokens)
    return _compare(lambda batch: logprob_blocks(original, batch), other, documents, sliding, every, on_tokens)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The logits of a model for some documents, in float32, so that the model can be freed before another one is
    loaded.
    """

    documents: Sequence[Document]
    sliding: SlidingContext
    logits: Sequence[Sequence[Floats]]  # batch by batch

    @classmethod
    def of(cls, original: LoadedModel, documents: Sequence[Document]) -> Recorded:
        """Record a model. The arguments and errors are those of `measure_divergence`."""
        sliding = SlidingContext.choose(original.max_model_len)
        check_documents(documents, original.spec.vocab_size)
        every = batches(documents, sliding)
        return cls(documents, sliding, [[x.copy() for x in logit_blocks(original, batch)] for batch in every])

    def measure(self, other: LoadedModel) -> Divergence:
        """Compare another model, with the same vocabulary and context, with the recorded one."""
        kept = iter(self.logits)
        every = batches(self.documents, self.sliding)
        return _compare(lambda batch: logprobs(next(kept)), other, self.documents, self.sliding, every, lambda n: None)


def _compare(
    original: Callable[[Batch], Iterable[Floats]], other: LoadedModel, documents: Sequence[Document],
    sliding: SlidingContext, every: Iterable[Batch], on_tokens: Callable[[int], None],
) -> Divergence:  # fmt: skip
    """Compare two models. original: returns the log probabilities of a batch's rows, in blocks."""
    began, computed, columns = time.perf_counter(), 0, []
    for batch in every:
        computed += batch.num_tokens
        at = 0
        for p, q in zip(original(batch), logprob_blocks(other, batch), strict=True):
            targets = batch.targets[at : at + len(p)]
            columns.append(np.stack([losses(p, targets), losses(q, targets), divergences(p, q), agreements(p, q)]))
            at += len(p)
            on_tokens(len(p))
    seconds = time.perf_counter() - began
    nll, other_nll, kl, agree = np.concatenate(columns, axis=1)
    lengths = [d.num_scored for d in documents if d.num_scored]
    return Divergence(
        Perplexity.of(nll, documents, sliding, computed, seconds),
        Perplexity.of(other_nll, documents, sliding, computed, seconds),
        block_mean(kl, lengths),
        float(np.median(kl)),
        float(np.quantile(kl, 0.99)),
        Proportion.of(int(agree.sum()), len(agree)),
        block_mean(other_nll - nll, lengths),
    )


def divergences(p: Floats, q: Floats) -> Floats:
    """Return KL(p || q) of each row in nats, from log probabilities [n, vocabulary]. Values that rounding makes
    negative become 0.
    """
    found: Floats = (np.exp(p) * (p - q)).sum(axis=1)
    return np.maximum(found, 0.0, out=found)


def agreements(p: Floats, q: Floats) -> Floats:
    """Return 1 for each row in which both have the same most likely token, and 0 otherwise. Equal values go to the
    lower id.
    """
    found: Floats = (p.argmax(axis=1) == q.argmax(axis=1)).astype(np.float64)
    return found
