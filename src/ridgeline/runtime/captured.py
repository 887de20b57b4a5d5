"""Run token sequences through a model, and pass on outputs of layers and inputs of matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from ridgeline.nn import Capture, PassingModel
from ridgeline.ops.api import Array
from ridgeline.runtime.load import LoadedModel

Floats = np.ndarray[Any, np.dtype[np.float32]]
Receive = Callable[[str, tuple[int, ...], Floats], None]  # (name, indices of the sequences, rows [tokens, columns])


def capture(
    loaded: LoadedModel, sequences: Sequence[Sequence[int]], names: Collection[str], receive: Receive,
    batch_tokens: int,
) -> None:  # fmt: skip
    """Run sequences of token ids, and call `receive` with each captured array as soon as it is computed.

    Sequences of equal length are computed together, in passes of at most batch_tokens tokens or of one sequence. Where
    inputs of matrices are captured, the model is built again layer by layer, and one layer is in memory at a time.
    Raises RequestError for a name that the model does not have.
    """
    together: tuple[int, ...] = ()

    def pass_on(name: str, output: Array) -> None:
        rows = np.array(loaded.table.memory.get(output), np.float32)  # a copy: kernels use their arrays again
        receive(name, together, rows.reshape(-1, rows.shape[-1]))

    model = loaded.model
    wanted = Capture(loaded.spec, names, pass_on)
    if wanted.has_inputs:
        model = PassingModel(
            model.spec, model.weights, loaded.table, model.max_model_len, model.formats, capture=wanted,
            kv_scales=model.kv_scales,
        )  # fmt: skip
    for together in _batches([len(s) for s in sequences], batch_tokens):
        model.forward(loaded.dense_step([sequences[i] for i in together]), wanted)


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield the indices of sequences of equal length, as many as have batch_tokens tokens together, at least one."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    start = 0
    while start < len(order):
        length = lengths[order[start]]
        end = start + 1
        while end < len(order) and lengths[order[end]] == length and (end + 1 - start) * length <= batch_tokens:
            end += 1
        yield tuple(order[start:end])
        start = end
