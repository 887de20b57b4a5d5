"""Measure how much each part of a model suffers from fewer bits, and choose the bits of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ridgeline.compress.compare import compare
from ridgeline.compress.data import Samples
from ridgeline.compress.layers import Part, parts
from ridgeline.compress.mixed import Choice, spend
from ridgeline.compress.scheme import BITS, Scheme
from ridgeline.compress.write import Writer, accepts
from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.nn import PassingModel
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec.quant import NUMBERS, PLAIN, Format, FormatTable

TOKENS = 2048  # calibration tokens on which each part is measured


def mixed_formats(
    original: LoadedModel, scheme: Scheme, samples: Samples, bits: float, writer: Writer,
    on_progress: Callable[[str, int, int], None],
) -> dict[str, Format]:  # fmt: skip
    """Return the format of each matrix, by name, so that codes have at most `bits` bits on average.

    writer: says which numbers of bits there are. Raises RequestError for bits out of range.
    """
    if not 2 <= bits <= 8:
        raise RequestError(f"bits (--bits) is {bits}; it must be from 2 to 8")
    every = list(parts(original.spec))
    shapes = {w.shape for part in every for w in part.matrices}
    known = [name for name in BITS if all(accepts(writer, _in(scheme, name), shape) for shape in shapes)]
    count = max(1, TOKENS // len(samples.calibration[0]))
    documents = [Document(s) for s in samples.calibration[:count]]
    options: dict[str, list[Choice]] = {}
    for i, part in enumerate(every):
        on_progress(f"measuring {part.name} in 2 to 8 bits", i, len(every))
        if part.matrices:
            options[part.name] = [_measure(original, part, _in(scheme, name), documents) for name in known]
    budget = bits / 8 * sum(w.num_params for part in every for w in part.matrices)
    try:
        chosen = spend(options, budget)
    except ValueError as e:
        raise RequestError(f"bits (--bits) is {bits}: {e}; take more bits or another --format") from None
    return {
        w.name: _in(scheme, f"int{chosen[part.name].bits}") for part in every for w in part.matrices
    }  # fmt: skip


def _in(scheme: Scheme, name: str) -> Format:
    return replace(scheme.format, numbers=next(n for n in BITS if n == name))


def _measure(original: LoadedModel, part: Part, format: Format, documents: list[Document]) -> Choice:
    """Return the divergence of a model of which only this part is rounded."""
    table = FormatTable(PLAIN, {w.name: format for w in part.matrices})
    model = PassingModel(original.spec, original.model.weights, original.table, original.max_model_len, table)
    found = compare(original, {"": replace(original, model=model)}, documents).others[""].kl
    assert found is not None
    count = sum(int(np.prod(w.shape)) for w in part.matrices)
    return Choice(NUMBERS[format.numbers].bits, count * NUMBERS[format.numbers].bits / 8, found.value)
