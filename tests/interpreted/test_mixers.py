"""The engine over every kind of layer, weights and pages: recorded steps, unrecorded ones, and the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from interpreted.engines import defined, engine, events, on_tape, request, unrecorded
from interpreted.tiny import LENGTH, MODELS
from ridgeline.engine import Engine
from ridgeline.ops.table import NO_KERNEL, OpsTable
from ridgeline.spec.request import SamplingParams

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
# A prompt in two chunks; tokens drawn on the device; and, in two steps that the host samples, log probabilities.
REQUESTS = [
    request(9, GREEDY),
    request(6, replace(GREEDY, temperature=1.0, top_k=20, seed=3)),
    request(3, replace(GREEDY, max_tokens=2, logprobs=8)),
]


class Said(NamedTuple):
    """The tokens of each request, and log probabilities by request, position and token."""

    tokens: dict[int, list[int]]
    logprobs: dict[tuple[int, int, int], float]


def said(running: Engine) -> Said:
    """Return what an engine says to the requests."""
    found = Said({}, {})
    for event in events(running, REQUESTS, every=1):
        before = found.tokens.setdefault(event.request, [])
        for offset, entry in enumerate(event.logprobs):
            found.logprobs.update({(event.request, len(before) + offset, token): value for token, value in entry.top})
        before += event.tokens
    return found


def without_kernels(table: OpsTable) -> list[str]:
    """Return a line for each operation that has kernels, but not for its case."""
    refused = [(choice, dict(choice.refusals).get("triton", NO_KERNEL)) for choice in table.choices()]
    return [f"{choice.op} {choice.case}: {why}" for choice, why in refused if why != NO_KERNEL]


@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_are_the_unrecorded_ones_and_the_definition(name: str) -> None:
    """Recorded steps give the bits of unrecorded ones; the definition in float64 has the same tokens."""
    tiny = MODELS[name]
    model, _ = on_tape(tiny.spec(), LENGTH, weights=tiny.weights, pages=tiny.pages)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 8}
    running = engine(model, steps_in_flight=2, **options)
    found = said(running)
    assert running.stats().unrecorded is None and running._runner.graphs._graphs
    assert found == said(unrecorded(engine(model, **options)))
    assert not without_kernels(model.table)
    exact = said(engine(defined(tiny.spec(), LENGTH, weights=tiny.weights, pages=tiny.pages), **options))
    off = max(abs(found.logprobs[where] - exact.logprobs.get(where, np.inf)) for where in found.logprobs)
    print(f"log probabilities are {off:.1e} off")
    assert found.tokens == exact.tokens and off < tiny.off, (off, found.tokens, exact.tokens)
