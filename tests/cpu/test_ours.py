"""Models with layers that no class of transformers has, compared with their definition in float64
(oracle/definition.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.definition import define, wide
from oracle.ours import LENGTH, SPECS, random_weights, sequences, write
from ridgeline import LLM, SamplingParams
from ridgeline.archs import spec_from_config
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import Attention, Chunked, Dilated, FirstTokens, Pattern, Strided, from_json, to_json
from ridgeline.spec.groups import state_groups
from shares import daily

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    weights = wide(write(SPECS[name], tmp_path))
    prompts = sequences()
    got = LLM(str(tmp_path)).logits(prompts)
    wanted = [define(SPECS[name], weights, tokens).numpy() for tokens in prompts]
    assert 0.5 < float(np.concatenate(wanted).std()) < 4.0
    error = max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))
    print(f"{name}: largest error {error:.1e}")
    assert error < TOLERANCE


# Maps a name to the prompt's seed, chosen so that no token is a near tie.
GREEDY = {"cla2": 2, "cla3_mqa": 1, "cla_mixed": 1, "cla_character": 1, "first_tokens": 1, "patterns": 1}
GREEDY |= {"s4": 1, "s4d_alone": 1, "lightning": 1, "based": 1, "taylor": 1, "hedgehog": 1}


@pytest.mark.parametrize("name", daily(SPECS, SPECS.keys() - {"cla2", "cla3_mqa", "cla_character"}, slow=False))
def test_greedy_tokens_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    weights = wide(write(SPECS[name], tmp_path))
    prompt, ids, margin = sequences(GREEDY[name])[1], [], math.inf
    for _ in range(40):
        best = define(SPECS[name], weights, [*prompt, *ids])[-1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    assert margin > 1e-3
    assert len(set(ids)) > 10
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    (answer,) = LLM(str(tmp_path)).generate([prompt], params)
    assert answer.outputs[0].token_ids == ids


@pytest.mark.parametrize("name", ["cla_mixed", "patterns", "s4", "lightning", "based", "taylor", "hedgehog"])
def test_gradients_are_those_of_the_definition(name: str) -> None:
    """An owner's projections get gradients from every layer that reads its keys and values."""
    spec, tokens = SPECS[name], sequences()[2]
    drawn = random_weights(spec)
    ours: Any = {name: torch.from_numpy(x).requires_grad_() for name, x in drawn.items()}
    theirs = {name: x.requires_grad_() for name, x in wide(drawn).items()}
    table = open_table("reference")
    logits: Any = Model(spec, ours, table, LENGTH)(DenseStep.build([tokens], table.memory))
    toward = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * toward).sum().backward()
    (define(spec, theirs, tokens) * toward).sum().backward()
    for key, weight in theirs.items():
        largest = float(weight.grad.abs().max())
        assert largest > 1e-3, key
        torch.testing.assert_close(
            ours[key].grad.double(),
            weight.grad,
            rtol=1e-3,
            atol=2e-5 * largest,
            msg=lambda m, key=key: f"{key}: {m}",
        )


@pytest.mark.parametrize("name", SPECS)
def test_json_round_trip(name: str) -> None:
    text = json.dumps(to_json(SPECS[name]), allow_nan=False)
    assert from_json(json.loads(text)) == SPECS[name]
    assert spec_from_config({"model_type": "ridgeline", "spec": json.loads(text)}) == SPECS[name]


# ---- patterns of keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first_tokens", "patterns"])
def test_every_pattern_moves_the_logits(name: str) -> None:
    """In each layer, one more first token, another step, another stride, or no pattern changes the logits."""
    spec, table = SPECS[name], open_table("reference")
    weights: Any = {key: torch.from_numpy(x) for key, x in random_weights(spec).items()}
    step = DenseStep.build(sequences(), table.memory)

    def run(layers: list[Any]) -> np.ndarray:
        return table.memory.get(Model(replace(spec, layers=tuple(layers)), weights, table, LENGTH)(step))

    base, count = run(list(spec.layers)), 0
    for i, layer in enumerate(spec.layers):
        if not isinstance(layer.mixer, Attention) or layer.mixer.pattern is None:
            continue
        p = layer.mixer.pattern
        for other in (*others(p), None):
            layers = list(spec.layers)
            layers[i] = replace(layer, mixer=replace(layer.mixer, pattern=other))
            if i == 0 and other is None and name == "first_tokens":
                continue  # the last layer shares these keys, and still attends to the first tokens
            moved = float(np.abs(run(layers) - base).max())
            assert moved > 100 * TOLERANCE, f"layers[{i}] {p} as {other}: {moved:.1e}"
            count += 1
    assert count >= 3


def others(pattern: Pattern) -> Iterator[Pattern]:
    match pattern:
        case FirstTokens(count):
            yield FirstTokens(count + 1)
        case Dilated(step):
            yield Dilated(step + 1)
        case Strided(stride):
            yield Strided(stride + 1)


def test_state_of_patterns() -> None:
    """First tokens are kept in addition to the window, a dilated window reaches further back, a stride reads
    everything.
    """
    first, far, *_ = state_groups(SPECS["first_tokens"], page_tokens=4)
    assert (first.lookback, first.first_tokens, first.first_pages) == (23, 5, 2)
    assert (far.lookback, far.first_tokens, far.first_pages) == (23, 20, 5)
    dilated, *_ = state_groups(SPECS["patterns"], page_tokens=4)
    assert (dilated.lookback, dilated.first_tokens) == (24, 0)
    a = Attention(4, 2, 8, 0.3, window=9, pattern=FirstTokens(5))
    assert [a.state().elements_at(n) // 32 for n in (1, 13, 14, 500)] == [1, 13, 13, 13]


@pytest.mark.parametrize(
    "pattern", [FirstTokens(5), FirstTokens(50), Dilated(1), Dilated(4), Strided(1), Strided(6), Chunked()]
)
@pytest.mark.parametrize("window", [1, 7, 30])
def test_work_counts_the_keys_of_the_pattern(window: int, pattern: Pattern) -> None:
    from oracle.definition import seen_by

    a = Attention(4, 2, 8, 0.3, window=window, pattern=pattern)
    for context in (1, 2, 7, 8, 31, 100):
        assert a.work(1, context) == 2 * len(seen_by(a, context - 1)) * 4 * 8
