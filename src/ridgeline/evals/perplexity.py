"""Measure perplexity and bits per byte: how well a model predicts texts, token by token, with a sliding context."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.evals.documents import Document
from ridgeline.evals.estimates import Estimate, block_mean
from ridgeline.evals.scores import check_documents, logprob_blocks, losses
from ridgeline.evals.windows import BATCH_TOKENS, SlidingContext, batches
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts documents.

    num_tokens, num_bytes: scored ones. num_computed_tokens: tokens that the model computed; windows overlap.
    nll_per_token: mean negative log likelihood in nats. seconds: duration of the run; with two models, of both.
    """

    num_documents: int
    num_tokens: int
    num_bytes: int
    num_computed_tokens: int
    nll_per_token: Estimate
    context: int
    stride: int
    seconds: float

    @classmethod
    def of(
        cls, nll: Floats, documents: Sequence[Document], sliding: SlidingContext, computed: int, seconds: float
    ) -> Perplexity:  # fmt: skip
        """Compute the figures from the losses of all scored tokens, in nats and in the order of the documents."""
        scored = [d for d in documents if d.num_scored]
        mean = block_mean(nll, [d.num_scored for d in scored])
        num_bytes = sum(d.num_bytes for d in scored)
        return cls(len(scored), len(nll), num_bytes, computed, mean, sliding.context, sliding.stride, seconds)

    @property
    def perplexity(self) -> Estimate:
        """Return the perplexity: e to the mean loss."""
        return self.nll_per_token.exp()

    @property
    def bits_per_byte(self) -> Estimate | None:
        """Return the loss of all scored tokens in bits, divided by the bytes of their text; None if there is no text.

        The error is that of the loss; the number of tokens per byte is treated as exact.
        """
        if not self.num_bytes:
            return None
        return self.nll_per_token.scaled(self.num_tokens / (self.num_bytes * math.log(2)))

    @property
    def tokens_per_s(self) -> float:
        """Return the scored tokens per second."""
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, None for unknown ones and for a perplexity beyond the range of a float."""
        return {
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "num_computed_tokens": self.num_computed_tokens,
            **estimate_json("nll_per_token", self.nll_per_token),
            **estimate_json("perplexity", self.perplexity),
            **estimate_json("bits_per_byte", self.bits_per_byte),
            "context": self.context,
            "stride": self.stride,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
        }


def estimate_json(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return a value and its standard error under two keys; None if unknown or not finite."""
    value, error = (estimate.value, estimate.standard_error) if estimate else (None, None)
    pair = {name: value, f"{name}_standard_error": error}
    return {key: number if number is not None and math.isfinite(number) else None for key, number in pair.items()}


def measure_perplexity(
    loaded: LoadedModel, documents: Sequence[Document], *, context: int | None = None, stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS, on_tokens: Callable[[int], None] = lambda scored: None,
) -> Perplexity:  # fmt: skip
    """Score documents.

    context, stride: in tokens, see `SlidingContext.choose`. batch_tokens: tokens of one forward pass. on_tokens: called
    with the number of tokens scored since the last call. Raises RequestError if the arguments do not fit the model.
    """
    sliding = SlidingContext.choose(loaded.max_model_len, context, stride)
    check_documents(documents, loaded.spec.vocab_size)
    began, computed, nll = time.perf_counter(), 0, []
    for batch in batches(documents, sliding, batch_tokens):
        computed += batch.num_tokens
        at = 0
        for logprobs in logprob_blocks(loaded, batch):
            nll.append(losses(logprobs, batch.targets[at : at + len(logprobs)]))
            at += len(logprobs)
            on_tokens(len(logprobs))
    seconds = time.perf_counter() - began
    return Perplexity.of(np.concatenate(nll), documents, sliding, computed, seconds)
