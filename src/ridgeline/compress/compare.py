"""Compare quantized models with their original on the same tokens, with paired intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.evals.divergence import agreements, divergences
from ridgeline.evals.documents import Document
from ridgeline.evals.estimates import Estimate, Proportion, block_mean
from ridgeline.evals.scores import logprob_blocks, losses
from ridgeline.evals.windows import SlidingContext, batches
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats

BATCH_TOKENS = 8192  # tokens of a forward pass, for each of which every layer is built
INTERVAL = 1.96  # standard errors


@dataclass(frozen=True, slots=True)
class Quality:
    """The predictions of a model on the held-out part.

    kl: KL(original || model) in nats per token; None for the original. top1: share of tokens with the same most likely
    token. perplexity: on the held-out part. change: perplexity over that of the original, from paired differences.
    """

    kl: Estimate | None
    top1: Proportion | None
    perplexity: Estimate
    change: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        out: dict[str, Any] = {
            "perplexity": self.perplexity.value, "perplexity_standard_error": self.perplexity.standard_error,
        }  # fmt: skip
        if self.kl is not None and self.top1 is not None:
            out |= {
                "kl": self.kl.value, "kl_standard_error": self.kl.standard_error, "top1_agreement": self.top1.value,
                "top1_agreement_95": [self.top1.low, self.top1.high],
            }  # fmt: skip
        if self.change is not None:
            out |= {
                "perplexity_change": self.change.value - 1,
                "perplexity_change_standard_error": self.change.standard_error,
            }
        return out


@dataclass(frozen=True, slots=True)
class Comparison:
    """The qualities of the original and of other models by name, and what the last one gains over the others.

    gains: KL of each other model less that of the last one, from paired differences, by the name of the other model.
    """

    original: Quality
    others: Mapping[str, Quality]
    num_tokens: int
    gains: Mapping[str, Estimate]

    def is_better(self, name: str) -> bool:
        """Return whether the gain over a model is greater than its interval."""
        gain = self.gains[name]
        return gain.value > INTERVAL * (gain.standard_error or 0.0)


def compare(
    original: LoadedModel, others: Mapping[str, LoadedModel], documents: Sequence[Document],
    on_tokens: Callable[[int], None] = lambda scored: None,
) -> Comparison:  # fmt: skip
    """Run the models over documents that fit into one window each."""
    context = max(len(d.token_ids) for d in documents)
    every = batches(documents, SlidingContext.choose(original.max_model_len, context, context - 1), BATCH_TOKENS)
    nll: dict[str, list[Floats]] = {name: [] for name in ("", *others)}
    kl: dict[str, list[Floats]] = {name: [] for name in others}
    same: dict[str, list[Floats]] = {name: [] for name in others}
    for batch in every:
        blocks = [logprob_blocks(model, batch) for model in (original, *others.values())]
        at = 0
        for p, *rest in zip(*blocks, strict=True):
            targets = batch.targets[at : at + len(p)]
            at += len(p)
            nll[""].append(losses(p, targets))
            for name, q in zip(others, rest, strict=True):
                nll[name].append(losses(q, targets))
                kl[name].append(divergences(p, q))
                same[name].append(agreements(p, q))
            on_tokens(len(p))
    lengths = [d.num_scored for d in documents if d.num_scored]
    whole = {name: np.concatenate(found) for name, found in kl.items()}
    loss = {name: np.concatenate(found) for name, found in nll.items()}
    qualities = {
        name: Quality(
            block_mean(whole[name], lengths),
            Proportion.of(int(np.concatenate(same[name]).sum()), len(whole[name])),
            block_mean(loss[name], lengths).exp(),
            block_mean(loss[name] - loss[""], lengths).exp(),
        )
        for name in others
    }
    *before, last = others
    gains = {name: block_mean(whole[name] - whole[last], lengths) for name in before}
    first = Quality(None, None, block_mean(loss[""], lengths).exp())
    return Comparison(first, qualities, sum(lengths), gains)
