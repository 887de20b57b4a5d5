"""Damaged quantized checkpoints and wrong configs: one line with the tensor's name, and never another error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle.packers import RECIPES, Recipe, Tensors, ct_packed, write
from ridgeline.archs import quantization_of
from ridgeline.archs.quantization import CompressedTensors
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.load.packed import READERS, PackedFiles, match
from ridgeline.load.packed.compressed import groups_of
from ridgeline.load.packed.match import match_names
from ridgeline.load.safetensors import TensorFiles

A = "a.up_proj"


def folder_of(tmp_path: Path, recipe: Recipe) -> Path:
    """Write a folder with one packed matrix of 64 x 96."""
    source = tmp_path / "plain"
    source.mkdir(parents=True)
    weight = torch.randn((64, 96), generator=torch.Generator().manual_seed(1))
    save_file({f"{A}.weight": weight, "norm.weight": torch.ones(3)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write(recipe, source, tmp_path / "packed")
    return tmp_path / "packed"


def read_all(folder: Path) -> None:
    scheme = quantization_of(json.loads((folder / "config.json").read_text()))
    assert scheme is not None
    files = TensorFiles(folder)
    packed = PackedFiles(files, READERS[type(scheme)](scheme, files))
    for name in packed:
        if name in packed.stored:
            packed.stored[name].read(0)
        else:
            packed.read(name)


def put(name: str, value: Any) -> Callable[[Tensors], None]:
    """Return a change that sets the first number of a tensor."""
    return lambda tensors: tensors[f"{A}.{name}"].view(-1)[:1].fill_(value)  # type: ignore[func-returns-value]


def cut(name: str) -> Callable[[Tensors], None]:
    """Return a change that removes the last row of a tensor."""
    return lambda tensors: tensors.update({f"{A}.{name}": tensors[f"{A}.{name}"][:-1].clone()})


def upright(name: str) -> Callable[[Tensors], None]:
    """Return a change that gives a tensor a second axis."""
    return lambda tensors: tensors.update({f"{A}.{name}": tensors[f"{A}.{name}"][:, None]})


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{A}.{name}")


DAMAGED: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("awq", put("scales", torch.nan), "a.up_proj.scales has the scale nan at [0, 0]"),
    ("awq", put("scales", 0), "every scale must be a finite number above 0"),
    ("awq", put("scales", -1), "has the scale -1"),
    ("awq", cut("scales"), "group_size 32 needs [3, 64]"),
    ("awq", drop("qzeros"), "lacks a.up_proj.qzeros"),
    ("awq", cut("qzeros"), "a.up_proj.qzeros is I32 [2, 8]; it must be I32 [3, 8]"),
    ("gptq-order", put("g_idx", 9), "does not put 32 columns into each group of 0 to 2"),
    ("gptq-order", put("g_idx", -1), "the order of columns is damaged"),
    ("gptq-order", cut("g_idx"), "check bits"),
    ("gptq-order", upright("g_idx"), "g_idx has shape [96, 1]; it must have one axis"),
    ("nf4", upright("weight.quant_state.bitsandbytes__nf4"), "it must have one axis"),
    ("gptq-order", cut("qweight"), "check bits"),
    ("gptq-sym", put("qzeros", 0), "but sym is true, where each is 8"),
    ("packed-3", put("weight_shape", 2), "a.up_proj.weight_packed is [64, 9]"),
    ("packed-3", put("weight_scale", torch.inf), "a.up_proj.weight_scale has the scale inf"),
    ("packed-4-asym", drop("weight_zero_point"), "lacks a.up_proj.weight_zero_point"),
    ("packed-order", put("weight_g_idx", 2), "a.up_proj.weight_g_idx does not put"),
    ("int8", drop("weight_scale"), "has a.up_proj.weight in I8, but lacks its scales"),
    ("int8-static", drop("input_scale"), "lacks a.up_proj.input_scale"),
    ("fp8-channel", put("weight", torch.nan), "a.up_proj.weight contains NaN"),
    ("fp8-channel", cut("weight_scale"), "needs [64, 1] or [64]"),
    ("nvfp4", put("weight_global_scale", 0), "weight_global_scale has the scale 0"),
    ("nvfp4", put("weight_scale", 0), "a.up_proj.weight_scale has the scale 0 at [0, 0]"),
    ("mxfp4", put("weight_scale", 255), "has a scale of 255"),
    ("bnb-int8", put("SCB", 0), "a.up_proj.SCB has the scale 0"),
    ("bnb-int8", put("weight_format", 2), "weight_format is 2; only 0"),
    ("nf4", cut("weight"), "64 x 96 codes need 3072"),
    ("nf4", put("weight.quant_map", 0.5), "quant_map does not hold the numbers of nf4"),
    ("nf4", put("weight.quant_state.bitsandbytes__nf4", 0), "is not readable"),
    ("nf4-nested", put("weight.nested_absmax", torch.nan), "nested_absmax has the scale nan"),
    ("modelopt-fp8", put("input_scale", torch.nan), "a.up_proj.input_scale has the scale nan"),
]


@pytest.mark.parametrize(("recipe", "change", "message"), DAMAGED, ids=[f"{r}-{m[:30]}" for r, _, m in DAMAGED])
def test_damage_is_named(recipe: str, change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, RECIPES[recipe])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"group_size": 64}, "group_size 64 needs [2, 64]"),
    ("awq", {"group_size": 0}, "group_size is 0; it must be -1"),
    ("awq", {"bits": 3}, "bits is 3"),
    ("awq", {"version": "gemv"}, "version is 'gemv'"),
    ("awq", {"surprise": 1}, "surprise: not understood"),
    ("gptq-v1", {"bits": 5}, "bits is 5; GPTQ is read with 2, 3, 4, 8 bits"),
    ("gptq-v1", {"bits": 8}, "check bits in quantization_config"),
    ("gptq-v1", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ("gptq-v1", {"dynamic": {"-:.*up_proj": {}}}, "has codes, but the rule '.*up_proj' says that it is not quantized"),
    ("gptq-v1", {"dynamic": {"+:.*(": {"bits": 4}}}, "bad regular expression"),
    ("packed-4", {"ignore": ["re:.*up_proj"]}, "quantization_config lists it in ignore"),
    ("packed-4", {"format": "marlin-24"}, "format is 'marlin-24'"),
    ("packed-4", {"config_groups": {}}, "config_groups must hold"),
    ("bnb-int8", {"llm_int8_threshold": 4.0}, "llm_int8_threshold is 4; only 6"),
    ("nf4", {"bnb_4bit_quant_type": "fp4"}, "only nf4 is read"),
    ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
]


@pytest.mark.parametrize(("recipe", "changes", "message"), WRONG, ids=[f"{r}-{m[:30]}" for r, _, m in WRONG])
def test_a_wrong_config_is_named(recipe: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    own = RECIPES[recipe]
    folder = folder_of(tmp_path, Recipe(own.pack, {**own.config, **changes}))
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        read_all(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_matched_from_their_beginning() -> None:
    assert match_names([r"model\.layers\.1\..*"], ["model.layers.1.a", "model.layers.2.a"])["model.layers.1.a"] == [0]
    assert match_names([r".*(q|k)_proj", "x"], ["a.q_proj", "b.v_proj"]) == {"a.q_proj": [0], "b.v_proj": []}


def test_an_endless_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "LIMITS", replace(match.LIMITS, seconds=2.0))
    with pytest.raises(CheckpointError, match=r"a regular expression of quantization_config cannot be used: .* 2 s"):
        match_names([r"(a+)+$"], ["a" * 60 + "b"])


def with_targets(*targets: list[str], ignore: list[str] | None = None) -> Recipe:
    """Return 4 bits in groups of 32 with a config group for each list of targets, of which the last has 3 bits."""
    own = ct_packed(4, 32)
    group = own.config["config_groups"]["group_0"]
    three = {**group, "weights": {**group["weights"], "num_bits": 3}}
    groups = {f"group_{i}": {**(three if i else group), "targets": t} for i, t in enumerate(targets)}
    return Recipe(own.pack, {**own.config, "config_groups": groups, "ignore": ignore or []})


@pytest.mark.parametrize("target", [A, "re:.*up_proj", "Linear", "LinearBase", r"re:a\..*"])
def test_rules_choose_groups_by_name_then_pattern_then_class(target: str, tmp_path: Path) -> None:
    """The first group has the 4 bits of the file. Where there are two, the weaker target has 3 bits."""
    weaker = [] if "Linear" in target else ([["Linear"]] if "re:" in target else [["Linear"], ["re:.*up_proj"]])
    for i, others in enumerate([[], *[[w] for w in weaker]]):
        read_all(folder_of(tmp_path / str(i), with_targets([target], *others)))


@pytest.mark.parametrize("target", ["a.down_proj", "re:.*down_proj", "Conv1d", "Embedding", "re:.*norm"])
def test_a_target_that_takes_no_matrix(target: str, tmp_path: Path) -> None:
    """One that takes none is an error, even if there is no other group. Class names are those of transformers."""
    with pytest.raises(CheckpointError, match="no group of quantization_config"):
        read_all(folder_of(tmp_path / "1", with_targets([target])))
    if target == "Embedding":  # a known class, of which a file may have none
        return read_all(folder_of(tmp_path / "2", with_targets(["Linear"], [target])))
    with pytest.raises(CheckpointError) as caught:
        read_all(folder_of(tmp_path / "2", with_targets(["Linear"], [target])))
    assert f"has the target {target!r}, which takes no matrix with codes" in str(caught.value)
    return None


@pytest.mark.parametrize("ignore", [["lm_head"], ["re:visual.*", "norm", "re:.*norm", "model.layers.9.x"]])
def test_what_is_ignored_need_not_be_in_the_file(ignore: list[str], tmp_path: Path) -> None:
    """Files of llm-compressor ignore tied heads, and towers of images that were left out; floats stay floats."""
    read_all(folder_of(tmp_path, with_targets(["Linear"], ignore=ignore)))


def test_tables_are_taken_by_their_class() -> None:
    scheme = quantization_of(
        {"model_type": "llama", "quantization_config": with_targets(["Linear"], ["Embedding"]).config}
    )
    assert isinstance(scheme, CompressedTensors)
    found = groups_of(scheme, ["model.embed_tokens", "lm_head", "transformer.wte"])
    assert [found[m].format.bits for m in found] == [3, 4, 3]


def test_modelopt_without_an_algorithm_is_plain(tmp_path: Path) -> None:
    """ModelOpt writes `quant_algo: null` for models of which only the KV cache, or nothing, is quantized."""
    own = RECIPES["modelopt-fp8"]
    config = {**own.config, "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    scheme = quantization_of({"model_type": "llama", "quantization_config": config})
    assert scheme is not None and (scheme.storage, scheme.has_fp8_cache) == ("", True)
    with pytest.raises(CheckpointError, match=r"has a.up_proj.weight in F8_E4M3, but lacks its scales"):
        read_all(folder_of(tmp_path, Recipe(own.pack, {**own.config, "quant_algo": None})))
    floats = TensorFiles(tmp_path / "plain")
    assert list(PackedFiles(floats, READERS[type(scheme)](scheme, floats))) == ["a.up_proj.weight", "norm.weight"]
