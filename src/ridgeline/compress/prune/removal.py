"""Score layers by the loss of the model without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.scores import logprob_blocks, losses
from ridgeline.evals.windows import SlidingContext, batches
from ridgeline.nn import Model
from ridgeline.nn.model import residual_scale
from ridgeline.nn.step import Step, Stream
from ridgeline.ops.api import Rotary
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import Rope


class _Without(Model):
    """A model that leaves out one layer.

    The layer after it adds the branch before it with the factor of the removed layer, so that branch is added here.
    """

    left_out: int | None = None
    _at = 0

    def forward(self, step: Step, capture: Any = None, aux: Sequence[int] = ()) -> Stream:
        self._at = 0
        return super().forward(step, capture, aux)

    def run_block(
        self, block: Callable[..., Stream], stream: Stream, step: Step, rotaries: Mapping[Rope, Rotary]
    ) -> Stream:
        index, self._at = self._at, self._at + 1
        if index != self.left_out:
            return super().run_block(block, stream, step, rotaries)
        if stream.delta is None:
            return stream
        return Stream(
            self._add(stream.residual, stream.delta, residual_scale(self.spec.layers[index - 1])), None, stream.shared
        )


def losses_without(
    original: LoadedModel, sequences: Sequence[Sequence[int]], on_progress: Callable[[str, int, int], None]
) -> Floats:
    """Return for each layer the mean loss of the model without it, in nats per token: the logarithm of perplexity.

    Raises RequestError where layers share keys and values.
    """
    spec = original.spec
    if any(spec.state_layer(i) != i for i in range(len(spec.layers))):
        raise RequestError("layers that share keys and values cannot be pruned here; prune mlp or heads")
    model = _Without(spec, original.model.weights, original.table, original.max_model_len)
    found = np.zeros(len(spec.layers))
    documents = [Document(ids) for ids in sequences]
    context = max(len(ids) for ids in sequences)
    every = list(batches(documents, SlidingContext.choose(original.max_model_len, context, context - 1)))
    loaded = replace(original, model=model)
    for i in range(len(spec.layers)):
        on_progress("removing each layer", i, len(spec.layers))
        model.left_out, total, count = i, 0.0, 0
        for batch in every:
            at = 0
            for p in logprob_blocks(loaded, batch):
                total += float(losses(p, batch.targets[at : at + len(p)]).sum())
                at += len(p)
            count += at
        found[i] = total / count
    return found
