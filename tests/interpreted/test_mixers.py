"""The engine over every kind of layer, weights and pages: recorded steps, unrecorded ones, and the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from interpreted.engines import defined, engine, events, on_tape, request, unrecorded
from interpreted.tiny import LENGTH, MODELS, Tiny
from ridgeline.engine import Engine
from ridgeline.ops.table import NO_KERNEL, OpsTable
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec.request import SamplingParams
from shares import daily

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


OPTIONS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 8}
# Every mixer and MLP, and two formats. The other models add formats and types of pages, which are tested by kernel.
TODAY = [
    "norms of heads and gates", "windows, sinks and soft caps", "first tokens, and keys of another layer",
    "layer norms and parallel layers", "latents", "experts", "mamba", "mamba2 and experts", "gated delta", "kimi delta",
    "lightning", "short convolutions", "state spaces", "based", "int8, int8 pages", "fp8, fp8 pages",
]  # fmt: skip


def recorded(tiny: Tiny) -> tuple[LoadedModel, Said]:
    """Return a model, and what it says in recorded steps."""
    model, _ = on_tape(tiny.spec(), LENGTH, weights=tiny.weights, pages=tiny.pages)
    running = engine(model, steps_in_flight=2, **OPTIONS)
    found = said(running)
    assert running.stats().unrecorded is None and running._runner.graphs._graphs
    return model, found


@pytest.mark.parametrize("name", daily(MODELS, TODAY, slow=False))
def test_recorded_steps_are_the_definition(name: str) -> None:
    """The definition in float64 has the tokens of recorded steps."""
    tiny = MODELS[name]
    model, found = recorded(tiny)
    assert not without_kernels(model.table)
    exact = said(engine(defined(tiny.spec(), LENGTH, weights=tiny.weights, pages=tiny.pages), **OPTIONS))
    off = max(abs(found.logprobs[where] - exact.logprobs.get(where, np.inf)) for where in found.logprobs)
    print(f"log probabilities are {off:.1e} off")
    assert found.tokens == exact.tokens and off < tiny.off, (off, found.tokens, exact.tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_are_the_unrecorded_ones(name: str) -> None:
    """They have the same bits. test_engine.py compares both each day, for attention, windows and recurrent layers."""
    model, found = recorded(MODELS[name])
    assert found == said(unrecorded(engine(model, **OPTIONS)))
