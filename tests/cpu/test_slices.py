"""Models that are cut: parts hold each number once, take what the planner counts, and give the whole model's tokens."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from oracle import packers
from oracle.build import build
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline.archs import spec_from_config
from ridgeline.cli import verify as verify_command
from ridgeline.cli.main import main
from ridgeline.cost.footprint import formula_bytes
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme, device_weight_bytes
from ridgeline.engine import Engine
from ridgeline.errors import CheckpointError, RankError, RequestError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.packed import open_tensors
from ridgeline.load.share import columns_of, numbers_of
from ridgeline.load.stored import dequantized
from ridgeline.load.weights import StoredWeights
from ridgeline.ops import open_table
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.runtime.slices import open_slices
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import ModelSpec, Weight
from ridgeline.spec.quant import format_of
from ridgeline.spec.request import SamplingParams
from ridgeline.spec.share import Share, shares
from ridgeline.verify import matrix
from shares import daily

SIZES = 2, 4
UNCUT = {
    "olmo2", "olmo2_bias", "olmo3", "olmo3_plain", "olmoe", "minimax_m2", "minimax", "minimax_window", "minimax_tied",
    "gemma4_experts", "mamba2_biases", "bamba_biases", "granitemoehybrid_dense", "nemotron_h_biases", "kimi_linear",
    "kimi_linear_groups", "bloom", "bloom_tied", "mpt", "flex_olmo",
    "olmo_hybrid", "olmo_hybrid_rotated", "apertus1p5",
}  # fmt: skip
# One of each kind of mixer and of each way to cut one.
CHOSEN = {
    "llama_gqa", "gpt_oss", "deepseek_v2", "mamba", "mamba2", "gpt_neox", "lfm2", "qwen3_next", "gemma4", "cla_mixed",
}  # fmt: skip
NAMES = sorted({*CASES, *(name for name in SPECS if name.startswith("cla"))} - UNCUT)


@functools.cache
def spec_of(name: str) -> ModelSpec:
    if name in SPECS:
        return SPECS[name]
    case = CASES[name]
    config = getattr(transformers, case.config_class)(**copy.deepcopy(case.kwargs))
    return spec_from_config(json.loads(config.to_json_string(use_diff=False)))


def parts(spec: ModelSpec, size: int) -> list[ModelSpec]:
    """Return the parts of a model; none if it cannot be cut like this."""
    try:
        return [spec.part(rank, size) for rank in range(size)]
    except RequestError:
        return []


def copied(spec: ModelSpec, size: int) -> set[str]:
    """Return the names of the weights of KV heads of which several ranks have copies."""
    layers = [i for i in range(len(spec.layers)) if (a := spec.attention(i)) and a.num_kv_heads < size]
    return {f"layers.{i}.mixer.{name}.{kind}" for i in layers for name in "kv" for kind in ("weight", "bias")}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_parts_hold_every_number_once(name: str, size: int) -> None:
    """The others are named: copies of KV heads, and weights that the spec does not split."""
    spec = spec_of(name)
    found = parts(spec, size)
    assert bool(found) or name in UNCUT or size == 4
    held = [shares(spec, part) for part in found]
    shapes = [{w.name: w.shape for w in part.weights()} for part in found]
    for w in spec.weights() if found else ():
        numbers = np.arange(np.prod(w.shape)).reshape(w.shape) + 1
        own = [numbers_of(numbers, h[w.name]) for h in held]
        assert all(x.shape == s[w.name] for x, s in zip(own, shapes, strict=True))
        counts = sum(np.bincount(np.unique(x[x > 0]), minlength=numbers.size + 1) for x in own)[1:]
        if w.name in copied(spec, size):
            assert len(set(counts.tolist())) == 1
        else:  # padding repeats the last row, which nobody reads
            padding = any(h[w.name].padding for h in held)
            read = numbers[: -1 if padding else None].size
            assert set(counts[:read].tolist()) == {1 if w.split or is_once(w, spec) else size}
        assert counts.all()


def is_once(w: Weight, spec: ModelSpec) -> bool:
    """Return whether a bias is added by rank 0 alone."""
    matrix = next((m for m in spec.weights() if m.name == w.name.removesuffix("bias") + "weight"), None)
    return w.name.endswith(".bias") and matrix is not None and matrix.split == "in"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_parts_take_what_the_planner_counts(name: str, size: int) -> None:
    spec, precision = spec_of(name), Precision()
    for part in parts(spec, size)[:1]:
        for whole, own in zip(spec.weights(), part.weights(), strict=True):
            counted = device_weight_bytes(whole, 4 * whole.num_params, Scheme(tp=size))
            if whole.name.split(".")[0] in ("embed", "head"):  # whole rows
                assert 0 <= 4 * own.num_params - counted < 4 * own.num_params / own.shape[0]
            elif whole.name not in copied(spec, size):
                assert 4 * own.num_params == counted, whole.name
        assert formula_bytes(part, precision, 100) == formula_bytes(spec, precision, 100, tp=size)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("olmo2", 2, "the norm over the queries of all heads"), ("minimax", 2, "the norm over all heads"),
        ("bamba_biases", 2, "the norm over each of its 1 groups"), ("gemma4_experts", 2, "one by one"),
        ("kimi_linear", 2, "its 3 heads are not a multiple of 2 ranks; take 1"),
        ("llama_gqa", 3, "are not a multiple"), ("llama_gqa", 8, "take 2"), ("llama_gqa", 0, "for 1 rank or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_says_why(name: str, size: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        spec_of(name).part(0, size)
    with pytest.raises(RequestError, match="a model is cut once"):
        spec_of("llama_gqa").part(1, 2).part(0, 2)


def answers(loaded: LoadedModel, prompt: list[int], **options: Any) -> dict[int, list[int]]:
    """Return greedy and sampled tokens of several requests at the same time."""
    memory = loaded.table.memory
    config = resolve(
        loaded.spec, min(100, loaded.max_model_len), EngineOptions(max_num_seqs=4, **options), free_bytes=1 << 28,
        fixed_len=True, kv_cache_dtype=loaded.storage.dtype, float_bytes=memory.float_bytes,
    )  # fmt: skip
    engine, found = Engine(loaded, config), dict[int, list[int]]()
    for i, temperature in enumerate((0, 0, 1)):
        params = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True)
        engine.add(i, GenerationRequest(prompt[: 1 + 9 * i], params, (NoiseKey(0, i),)))
    while len(engine):
        for event in engine.step():
            assert event.error is None
            found.setdefault(event.request, []).extend(event.tokens)
    engine.check()
    return found


@pytest.mark.parametrize("name", daily(NAMES, CHOSEN, slow=False))
def test_slices_give_the_tokens_of_the_whole_model(name: str, tmp_path: Path) -> None:
    if name in SPECS:
        write(SPECS[name], tmp_path)
    else:
        build(CASES[name], tmp_path)
    options, prompt = LoadOptions(device="cpu", max_model_len=256, threads=1), list(range(30, 60))
    wanted = answers(load_model(str(tmp_path), options), prompt)
    for size in SIZES:
        if parts(spec_of(name), size):
            with open_slices(str(tmp_path), options, size) as first:
                assert answers(first, prompt) == wanted


@pytest.mark.parametrize("device", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_slices_give_the_tokens_of_pocket(device: str) -> None:
    options = LoadOptions(device=device, threads=1 if device == "cpu" else None)
    prompt = list(range(300, 330))
    wanted = answers(load_model("pocket", options), prompt)
    for size in (2, 3, 4, 8):
        try:
            with open_slices("pocket", options, size) as first:
                assert answers(first, prompt) == wanted
        except RequestError:
            assert size not in SIZES


def test_random_weights_are_those_of_the_whole_model() -> None:
    options = LoadOptions(device="cpu", load_format="dummy", threads=1)
    wanted = answers(load_model("pocket", options), list(range(300, 330)))
    with open_slices("pocket", options, 2) as first:
        assert answers(first, list(range(300, 330))) == wanted


def test_a_slice_that_fails_ends_the_others() -> None:
    options = LoadOptions(device="cpu", threads=1)
    with open_slices("pocket", options, 2) as first:
        assert first.model.group is not None
        first.model.group.leave()
        with pytest.raises(RankError, match="a slice of 2 was lost"):
            answers(first, [300, 301])


def test_rounding_at_load_is_refused() -> None:
    with (
        pytest.raises(RequestError, match="a rank reads parts of them"),
        open_slices("pocket", LoadOptions(device="cpu", weights="int8"), 2),
    ):
        pass


@pytest.mark.parametrize("recipe", ["awq", "gptq-v1", "packed-4-asym", "packed-8"])
def test_parts_of_codes_are_those_of_the_whole_matrix(recipe: str, tmp_path: Path) -> None:
    """Scales are the whole matrix's; a cut through a group is refused."""
    config = {"intermediate_size": 128, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    build(replace(CASES["llama_gqa"], kwargs=CASES["llama_gqa"].kwargs | config), tmp_path / "plain")
    packers.write(packers.RECIPES[recipe], tmp_path / "plain", tmp_path / "packed")
    checkpoint, memory = open_checkpoint(tmp_path / "packed"), open_table("cpu").memory

    def read(part: ModelSpec | None) -> StoredWeights:
        files, names = open_tensors(checkpoint), checkpoint.family.names
        return StoredWeights(
            checkpoint.spec, names, files, memory, None, lambda done: None, activations="exact", part=part
        )  # fmt: skip

    whole = read(None)
    for rank in range(2):
        part = checkpoint.spec.part(rank, 2)
        own, held = read(part), shares(checkpoint.spec, part)
        for w in part.weights():
            found, wanted = (dequantized(x) if hasattr(x, "codes") else x for x in (own[w.name], whole[w.name]))
            assert found.shape == w.shape
            np.testing.assert_array_equal(found, numbers_of(wanted, held[w.name]))


def test_columns_that_cannot_be_cut_say_why() -> None:
    codes = np.zeros((4, 96), np.int8)
    grouped = QuantizedMatrix(format_of("int4", "exact"), codes, np.ones((4, 3), np.float32))
    with pytest.raises(CheckpointError, match=r"shares scales between 32 columns, .* column 48"):
        columns_of("o", grouped, Share(-1, ((0, 48),)))
    ordered = replace(grouped, permutation=np.arange(96))
    with pytest.raises(CheckpointError, match="act-order"):
        columns_of("o", ordered, Share(-1, ((0, 64),)))
    rounded = QuantizedMatrix(format_of("int8"), codes, np.ones((4, 1), np.float32))
    with pytest.raises(CheckpointError, match="add --activations bf16"):
        columns_of("o", rounded, Share(-1, ((0, 48),)))


def test_verify_compares_parts_with_the_whole_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build(CASES["mistral"], tmp_path)
    monkeypatch.setattr(matrix, "AXES", {"batch": matrix.AXES["batch"][:1], "drafts": matrix.AXES["drafts"][-1:]})
    monkeypatch.setattr(matrix, "NUM_QUICK_COMBINATIONS", 0)
    options = ["--quick", "--json", "--device", "cpu", "--max-model-len", "64"]
    monkeypatch.setattr("sys.argv", ["ridgeline", "verify", str(tmp_path), *options, "-tp", "4,2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    reports = json.loads(capsys.readouterr().out)["tensor_parallel_size"]
    assert list(reports) == ["2", "4"]
    assert all(report["equal"] for report in reports.values())


@pytest.mark.parametrize("given", ["", "0", "2,", "two", "2,-4", "99999", "\u0662"])
def test_numbers_of_parts_that_are_none(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="give numbers from 1 on"):
        verify_command._sizes(given or " ")
