"""Models whose tokens see ahead, whole sequences and blocks, against their definition in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.definition import define, wide
from oracle.ours import SPECS, sequences, write
from ridgeline import LLM
from ridgeline.errors import RequestError
from ridgeline.evals.scores import logit_blocks
from ridgeline.evals.windows import Batch
from ridgeline.spec import Attention, Blocks, MaskedDiffusion, ModelSpec, SharedAttention, Sight, WholeSequence

TOLERANCE = 1e-4
SIGHTS = [Blocks(1), Blocks(4), Blocks(7), Blocks(64), WholeSequence()]


def seeing(spec: ModelSpec, sight: Sight) -> ModelSpec:
    """Return a spec whose layers all see as far ahead as `sight` says, without windows."""

    def changed(mixer: Any) -> Any:
        if isinstance(mixer, SharedAttention):
            return replace(mixer, attention=changed(mixer.attention))
        assert isinstance(mixer, Attention)
        return replace(mixer, sight=sight, window=None, pattern=None)

    layers = tuple(replace(layer, mixer=changed(layer.mixer)) for layer in spec.layers)
    return replace(spec, layers=layers, diffusion=MaskedDiffusion(spec.vocab_size - 1))


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_logits_are_those_of_the_definition(sight: Sight, device: str, tmp_path: Path) -> None:
    """Shared keys, sinks, caps, norms of queries and experts included (the model `cla_mixed`)."""
    spec = seeing(SPECS["cla_mixed"], sight)
    weights, prompts = wide(write(spec, tmp_path)), sequences()
    got = LLM(str(tmp_path), device=device).logits(prompts)
    wanted = [define(spec, weights, tokens).numpy() for tokens in prompts]
    error = max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))
    print(f"{sight}, {device}: largest error {error:.1e}")
    assert error < TOLERANCE


def test_what_tokens_see_moves_the_logits(tmp_path: Path) -> None:
    """Each way to see ahead is another model: a block one longer, or a whole sequence, changes the logits."""
    found = []
    for i, sight in enumerate(SIGHTS):
        folder = tmp_path / str(i)
        folder.mkdir()
        write(seeing(SPECS["cla2"], sight), folder)
        found.append(LLM(str(folder)).logits(sequences()[3:])[0])
    for i, a in enumerate(found):
        assert all(float(np.abs(a - b).max()) > 100 * TOLERANCE for b in found[:i])


def test_blocks_of_one_token_are_causal(tmp_path: Path) -> None:
    plain, blocks = tmp_path / "plain", tmp_path / "blocks"
    for folder, spec in ((plain, SPECS["cla2"]), (blocks, seeing(SPECS["cla2"], Blocks(1)))):
        folder.mkdir()
        write(spec, folder)
    a, b = (LLM(str(folder)).logits(sequences()) for folder in (plain, blocks))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_needs_an_autoregressive_model_is_refused(tmp_path: Path) -> None:
    write(seeing(SPECS["cla2"], Blocks(4)), tmp_path)
    loaded = LLM(str(tmp_path)).loaded
    with pytest.raises(RequestError, match="the likelihood of a text needs an autoregressive model; cla2 is a"):
        list(logit_blocks(loaded, Batch([[5, 6, 7]], np.arange(3), np.array([6, 7, 8]))))
