"""Models that a user writes: any mixers in one stack, under all of the engine's powers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.plan import EngineOptions
from ridgeline.spec import (
    Attention,
    FirstTokens,
    GatedMLP,
    LatentAttention,
    Layer,
    Mamba,
    Mamba2,
    ModelSpec,
    RMSNorm,
    Rope,
    SharedAttention,
    ShortConvolution,
    TaylorAttention,
    TokenMixer,
    to_json,
)
from ridgeline.verify import verify

NORM = RMSNorm(1e-5)
WIDTH, VOCAB = 32, 97
FULL = Attention(4, 1, 8, 8**-0.5, Rope(8))
LOCAL = Attention(4, 2, 8, 8**-0.5, Rope(8), window=20)
FIRST = replace(LOCAL, window=8, sinks=True, pattern=FirstTokens(5))
LATENT = LatentAttention(4, 12, 8, 4, 8, 12**-0.5, NORM, rope=Rope(4))
MAMBA = Mamba(inner_size=48, state_size=8, conv_size=4, dt_rank=3)
MAMBA2 = Mamba2(num_heads=4, head_dim=8, state_size=8, num_groups=2, conv_size=4, norm=NORM)
CONVOLUTION = ShortConvolution(WIDTH, 3)
TAYLOR = TaylorAttention(num_heads=2, head_dim=8, feature_dim=4)
STACKS: dict[str, tuple[TokenMixer | None, ...]] = {
    "based": (CONVOLUTION, TAYLOR, LOCAL),
    "mamba and a window": (MAMBA, LOCAL, MAMBA),
    "mamba-2 and one full layer": (MAMBA2, FULL, MAMBA2),
    "everything": (FULL, MAMBA, LOCAL, MAMBA2, CONVOLUTION, TAYLOR),
    "no attention": (TAYLOR, MAMBA2),
    "mlps alone": (None, MAMBA2, None, None, FULL, None),
    "latents and shared keys": (
        FIRST, LATENT, MAMBA2, FULL, SharedAttention(3, FULL), CONVOLUTION, SharedAttention(0, FIRST),
    ),
}  # fmt: skip


def spec_of(*mixers: TokenMixer | None, longest: int = 256) -> ModelSpec:
    mlps = [GatedMLP(48) if i % 2 or mixer is None else None for i, mixer in enumerate(mixers)]
    layers = tuple(Layer(mixer, mlp, NORM) for mixer, mlp in zip(mixers, mlps, strict=True))
    return ModelSpec("hybrid", VOCAB, WIDTH, longest, layers, NORM)


def load(folder: Path, spec: ModelSpec, **options: Any) -> LLM:
    (folder / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": to_json(spec)}))
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("name", STACKS)
def test_any_stack_is_exact(name: str, tmp_path: Path) -> None:
    llm = load(tmp_path, spec_of(*STACKS[name]), cache="off")
    report = verify(llm.loaded, new_tokens=6, quick=True)
    assert report.equal, [r for r in report.results if r.verdict not in ("equal", "not run")]


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_the_whole_matrix_for_any_stack(name: str, tmp_path: Path) -> None:
    llm = load(tmp_path, spec_of(*STACKS[name]), cache="off")
    report = verify(llm.loaded, new_tokens=8)
    assert report.equal, [r for r in report.results if r.verdict not in ("equal", "not run")]


@pytest.mark.parametrize("chunk", [500, 512])
def test_a_shared_prompt_is_computed_at_most_twice(chunk: int, tmp_path: Path) -> None:
    """With 256 tokens to a snapshot: the second request shows where prompts part; later ones begin there."""
    engine = EngineOptions(max_num_batched_tokens=chunk)
    llm = load(tmp_path, spec_of(MAMBA, FULL, MAMBA, longest=4096), engine=engine)
    shared = [i * i % VOCAB for i in range(2000)]
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    hits = []
    for i in range(4):
        before = llm.stats().hit_tokens
        llm.generate([{"prompt_token_ids": [*shared, *(j * (i + 3) % VOCAB for j in range(30))]}], greedy)
        hits.append((llm.stats().hit_tokens - before) / 2000)
    assert hits[0] == 0 and hits[1] >= 0.85 and min(hits[2:]) >= 0.99, hits


def test_state_is_constant_in_length_and_what_the_formulas_say() -> None:
    assert MAMBA.state().elements == 48 * (8 + 4 - 1)
    assert MAMBA2.state().elements == 4 * 8 * 8 + (4 * 8 + 2 * 2 * 8) * 3
    assert CONVOLUTION.state().elements == 2 * WIDTH
    assert TAYLOR.state().elements == 2 * 9 * (1 + 4 + 16)
    spec = spec_of(MAMBA, TAYLOR, FULL)
    grown = spec.state_elements(100_000) - spec.state_elements(1_000)
    assert grown == 99_000 * 2 * 8  # the attention layer's alone


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda mixer: mixer.update(fields)


@pytest.mark.parametrize(
    ("mixer", "edit", "message"),
    [
        (LOCAL, change(window=0), r"layers\[1\].*window must be positive, not 0"),
        (FULL, change(num_kv_heads=3), r"layers\[1\].*num_heads 4 is not a multiple of num_kv_heads 3"),
        (MAMBA, change(type="Mambo"), r"layers\[1\].*type 'Mambo' is none of"),
        (MAMBA2, change(num_groups=3), r"layers\[1\].*num_heads 4 is not a multiple of num_groups 3"),
        (CONVOLUTION, change(conv_size=1), r"layers\[1\].*conv_size must be at least 2"),
        (TAYLOR, change(feature_dim=0), r"layers\[1\].*feature_dim must be positive, not 0"),
    ],
)
def test_a_spec_that_cannot_work_names_the_layer_and_the_rule(
    mixer: TokenMixer, edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    described = to_json(spec_of(FULL if mixer is not FULL else LOCAL, mixer))
    edit(described["layers"][1]["layer"]["mixer"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": described}))
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
