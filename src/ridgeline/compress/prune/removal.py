"""Score layers by the loss of the model without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.scores import logprobs, losses, stream_logits
from ridgeline.evals.windows import SlidingContext, batches
from ridgeline.nn import Model
from ridgeline.nn.model import residual_scale
from ridgeline.nn.step import Step, Stream
from ridgeline.runtime.load import LoadedModel


class _Shortened(Model):
    """A model that can leave out one layer."""

    def without_each(self, step: Step) -> Iterator[Stream]:
        """Yield the stream after the last layer of the model without each layer. The layers before it run once for all.

        The layer after a removed one would add the branch before it with the factor of the removed layer, so that
        branch is added here.
        """
        rotaries, before = self.rotaries(step), self.begin(step)
        blocks, scales = list(self._blocks), [residual_scale(layer) for layer in self.spec.layers]
        for i, block in enumerate(blocks):
            stream = before._replace(residual=self._whole(before, scales[i - 1]), delta=None)
            for later in blocks[i + 1 :]:
                stream = self.run_block(later, stream, step, rotaries)
            yield stream
            before = self.run_block(block, before, step, rotaries)


def losses_without(
    original: LoadedModel, sequences: Sequence[Sequence[int]], on_progress: Callable[[str, int, int], None]
) -> Floats:
    """Return for each layer the mean loss of the model without it, in nats per token: the logarithm of perplexity.

    Raises RequestError where layers share keys and values.
    """
    spec = original.spec
    if any(spec.state_layer(i) != i for i in range(len(spec.layers))):
        raise RequestError("layers that share keys and values cannot be pruned here; prune mlp or heads")
    model = _Shortened(spec, original.model.weights, original.table, original.max_model_len)
    context, count = max(len(ids) for ids in sequences), len(spec.layers)
    documents = [Document(ids) for ids in sequences]
    every = list(batches(documents, SlidingContext.choose(original.max_model_len, context, context - 1)))
    loaded, sums = replace(original, model=model), np.zeros(count)
    for number, batch in enumerate(every):
        for i, stream in enumerate(model.without_each(original.dense_step(batch.sequences))):
            on_progress("removing each layer", number * count + i, len(every) * count)
            at = 0
            for p in logprobs(stream_logits(loaded, stream, batch)):
                sums[i] += float(losses(p, batch.targets[at : at + len(p)]).sum())
                at += len(p)
    return sums / sum(len(batch.targets) for batch in every)
