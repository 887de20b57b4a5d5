"""Models that a user writes: any mixers in one stack, with all features of the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oracle.mixers import CONVOLUTION, FULL, LATENT, LOCAL, MAMBA, MAMBA2, NORM, TAYLOR, VOCAB, WIDTH
from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.sched.work import StepPlan
from ridgeline.settings import EngineOptions
from ridgeline.spec import (
    S4,
    S4D,
    AnyLayer,
    DeepNormLayer,
    FirstTokens,
    GatedConvolution,
    GatedDelta,
    GatedMLP,
    KimiDelta,
    Layer,
    LightningAttention,
    ModelSpec,
    SharedAttention,
    TokenMixer,
    to_json,
)
from ridgeline.verify import Report, verify

FIRST = replace(LOCAL, window=8, sinks=True, pattern=FirstTokens(5))
BASED_CONVOLUTION = GatedConvolution(2 * WIDTH, 3)
S4_FULL, S4_DIAGONAL = S4(WIDTH, 8), S4D(WIDTH, 12)
LIGHTNING = LightningAttention(num_heads=4, head_dim=8, norm=NORM, slope_scale=0.3)
GATED = replace(FULL, out_gate=True)
DELTA = GatedDelta(num_heads=4, num_key_heads=2, key_dim=6, head_dim=8, conv_size=4, norm=NORM)
CHANNELS = KimiDelta(num_heads=3, head_dim=8, conv_size=3, rank=5, norm=NORM)
STACKS: dict[str, tuple[TokenMixer | None, ...]] = {
    "based": (BASED_CONVOLUTION, TAYLOR, BASED_CONVOLUTION, LOCAL),
    "mamba and a window": (MAMBA, LOCAL, MAMBA),
    "mamba-2 and one full layer": (MAMBA2, FULL, MAMBA2),
    "everything": (FULL, MAMBA, LOCAL, MAMBA2, CONVOLUTION, TAYLOR),
    "no attention": (TAYLOR, replace(TAYLOR, features="hedgehog"), MAMBA2),
    "state spaces": (S4_FULL, LOCAL, S4_DIAGONAL),
    "state spaces alone": (S4_DIAGONAL, S4_FULL),
    "lightning": (LIGHTNING, LIGHTNING, FULL, LIGHTNING),
    "gated delta rule": (DELTA, CHANNELS, GATED, DELTA, LATENT, CHANNELS, SharedAttention(2, GATED)),
    "mlps alone": (None, MAMBA2, None, None, FULL, None),
    "latents and shared keys": (
        FIRST, LATENT, MAMBA2, FULL, SharedAttention(3, FULL), CONVOLUTION, SharedAttention(0, FIRST),
    ),
}  # fmt: skip


def layer_of(mixer: TokenMixer | None, i: int) -> AnyLayer:
    """Return a layer; lightning attention gets a layer whose residual is normalized, as in MiniMax-01."""
    if isinstance(mixer, LightningAttention):
        return DeepNormLayer(mixer, GatedMLP(48), NORM, 1.5, 0.8, 1.2, 1.1)
    return Layer(mixer, GatedMLP(48) if i % 2 or mixer is None else None, NORM)


def spec_of(*mixers: TokenMixer | None, longest: int = 256) -> ModelSpec:
    layers = tuple(layer_of(mixer, i) for i, mixer in enumerate(mixers))
    return ModelSpec("hybrid", VOCAB, WIDTH, longest, layers, NORM)


def load(folder: Path, spec: ModelSpec, **options: Any) -> LLM:
    (folder / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": to_json(spec)}))
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options)


def check(report: Report) -> None:
    """Check that all results are equal, and that the features that are difficult with a state were in use."""
    features = ("prefix", "preempted", "drafts", "forks")
    unused = [r for r in report.results if r.missing and r.case.axis in features]
    assert report.equal and not unused, [r for r in report.results if r.verdict not in ("equal", "not run")]


@pytest.mark.parametrize("name", STACKS)
def test_any_stack_is_exact(name: str, tmp_path: Path) -> None:
    llm = load(tmp_path, spec_of(*STACKS[name]), cache="off")
    report = verify(llm.loaded, new_tokens=6, quick=True)
    check(report)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STACKS)
def test_the_whole_matrix_for_any_stack(name: str, tmp_path: Path) -> None:
    llm = load(tmp_path, spec_of(*STACKS[name]), cache="off")
    report = verify(llm.loaded, new_tokens=8)
    check(report)


@pytest.mark.parametrize("interval", [None, 256, 2048])
@pytest.mark.parametrize("chunk", [500, 512])
def test_a_shared_prompt_is_computed_at_most_twice(chunk: int, interval: int | None, tmp_path: Path) -> None:
    """Whatever the interval of state snapshots, the second request shows where prompts differ, and later ones start
    there.
    """
    engine = EngineOptions(max_num_batched_tokens=chunk, state_snapshot_tokens=interval)
    llm = load(tmp_path, spec_of(MAMBA, FULL, MAMBA, longest=4096), engine=engine)
    shared = [i * i % VOCAB for i in range(2000)]
    prompts = [[*shared, *(j * (i + 3) % VOCAB for j in range(30))] for i in range(5)]
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    hits, answers = [], []
    for prompt in prompts:
        before = llm.stats().hit_tokens
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy)
        answers.append(answer.outputs[0].token_ids)
        hits.append((llm.stats().hit_tokens - before) / len(shared))
    assert hits[0] == 0 and min(hits[2:]) >= 0.9, hits
    assert hits[1] >= (0.85 if interval != 2048 else 0), hits
    assert answers == [[int(t) for t in without_cache(llm, prompt, 2)] for prompt in prompts]
    stats = llm.stats()
    assert stats.restored == sum(hit > 0 for hit in hits)
    assert stats.recomputed_tokens == pytest.approx(2000 * (1 - hits[1]), abs=32)
    # Each step leaves at most one snapshot, and one snapshot is where the prompts differ.
    assert stats.snapshots >= 2000 // max(llm.config.state_snapshot_tokens, chunk) + 1


def without_cache(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens from whole passes without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(llm.logits([tokens])[0][-1].argmax()))
    return tokens[len(prompt) :]


def test_chunks_end_on_state_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that passes snapshot positions ends on the last of them; only a prompt's end may be elsewhere."""
    ends, submit = [], DeviceRunner.submit

    def record(self: DeviceRunner, plan: StepPlan, sampling: Any) -> Any:
        ends.extend(w.start + len(w.tokens) for w in plan.works)
        return submit(self, plan, sampling)

    monkeypatch.setattr(DeviceRunner, "submit", record)
    for chunk, wanted in ((500, [384, 768, 1152, 1536, 1920, 2000]), (100, [100, 128, 228, 256, 300])):
        ends.clear()
        engine = EngineOptions(max_num_batched_tokens=chunk, state_snapshot_tokens=128)
        llm = load(tmp_path, spec_of(MAMBA, FULL, longest=4096), engine=engine)
        llm.generate([{"prompt_token_ids": [5] * wanted[-1]}], SamplingParams(temperature=0.0, max_tokens=1))
        assert ends == wanted


def test_state_is_constant_in_length_and_equals_the_formulas() -> None:
    assert MAMBA.state().elements == 48 * (8 + 4 - 1)
    assert MAMBA2.state().elements == 4 * 8 * 8 + (4 * 8 + 2 * 2 * 8) * 3
    assert CONVOLUTION.state().elements == 2 * WIDTH
    assert BASED_CONVOLUTION.state().elements == 2 * 2 * WIDTH
    assert DELTA.state().elements == 4 * 6 * 8 + (2 * 2 * 6 + 4 * 8) * 3
    assert CHANNELS.state().elements == 3 * 8 * 8 + 3 * 3 * 8 * 2
    assert TAYLOR.state().elements == 2 * 9 * (1 + 4 + 16)
    assert S4_FULL.state().elements == WIDTH * 8 and S4_DIAGONAL.state().elements == WIDTH * 12
    assert LIGHTNING.state().elements == 4 * 8 * 8
    spec = spec_of(MAMBA, TAYLOR, FULL)
    grown = spec.state_elements(100_000) - spec.state_elements(1_000)
    assert grown == 99_000 * 2 * 8  # the growth is that of the attention layer alone


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
        (BASED_CONVOLUTION, change(conv_size=1), r"layers\[1\].*conv_size must be at least 2"),
        (DELTA, change(num_key_heads=3), r"layers\[1\].*num_heads 4 is not a multiple of num_key_heads 3"),
        (CHANNELS, change(rank=0), r"layers\[1\].*rank must be positive, not 0"),
        (TAYLOR, change(feature_dim=0), r"layers\[1\].*feature_dim must be positive, not 0"),
        (S4_FULL, change(state_size=7), r"layers\[1\].*state_size must be even and at least 2, .*, not 7"),
        (S4_FULL, change(channels=16), r"layers\[1\].*channels 16 is not hidden_size 32, and S4 has no projection"),
        (S4_DIAGONAL, change(channels=0), r"layers\[1\].*channels must be positive, not 0"),
        (S4_DIAGONAL, change(activation="tanh"), r"layers\[1\].*activation.*tanh"),
        (LIGHTNING, change(slope_scale=-0.1), r"layers\[1\].*slope_scale must not be negative, not -0.1"),
        (LIGHTNING, change(head_dim=0), r"layers\[1\].*head_dim must be positive, not 0"),
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
