"""Perplexity and bits per byte: how well a model predicts texts, token by token, under a sliding context."""

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

    num_tokens, num_bytes: scored. num_computed_tokens: read by the model; windows overlap. nll_per_token: mean negative
    log likelihood in nats. seconds: of the run; where two models ran, of both.
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
        """From the losses of all scored tokens in nats, in the order of the documents."""
        scored = [d for d in documents if d.num_scored]
        mean = block_mean(nll, [d.num_scored for d in scored])
        num_bytes = sum(d.num_bytes for d in scored)
        return cls(len(scored), len(nll), num_bytes, computed, mean, sliding.context, sliding.stride, seconds)

    @property
    def perplexity(self) -> Estimate:
        """e to the mean loss."""
        return self.nll_per_token.exp()

    @property
    def bits_per_byte(self) -> Estimate | None:
        """The loss of all scored tokens in bits over the bytes of their text; None where there is no text.

        The error is that of the loss: how many tokens there are to a byte is taken as given.
        """
        if not self.num_bytes:
            return None
        return self.nll_per_token.scaled(self.num_tokens / (self.num_bytes * math.log(2)))

    @property
    def tokens_per_s(self) -> float:
        """Scored tokens per second."""
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; None for what is not known, and for a perplexity that is too large for a float."""
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
    """A value and its standard error under two keys; None for what is not known or not finite."""
    value, error = (estimate.value, estimate.standard_error) if estimate else (None, None)
    pair = {name: value, f"{name}_standard_error": error}
    return {key: number if number is not None and math.isfinite(number) else None for key, number in pair.items()}


def measure_perplexity(
    loaded: LoadedModel, documents: Sequence[Document], *, context: int | None = None, stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS, on_tokens: Callable[[int], None] = lambda scored: None,
) -> Perplexity:  # fmt: skip
    """Score documents.

    context, stride: in tokens, see `SlidingContext.choose`. batch_tokens: of one forward pass. on_tokens: called with
    the number of tokens that were scored since the last call. Raises RequestError for what does not fit the model.
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
