"""Scales of KV caches in checkpoints: their names, the checks, and the same meaning as in vLLM."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle import packers
from oracle.case import prompts
from oracle.families import CASES
from oracle.packed import plain_model
from oracle.packers import RECIPES, Tensors, compressed, ct_packed, write
from ridgeline import LLM, SamplingParams
from ridgeline.archs import quantization_of
from ridgeline.cli.main import main
from ridgeline.errors import CheckpointError, ConfigError, RequestError
from ridgeline.load.kv_scales import describe_scales
from ridgeline.runtime.load import LoadedModel
from ridgeline.settings import choose_storage
from ridgeline.spec.storage import STORAGES

KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ONLY_KV = {
    "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [], "kv_cache_scheme": KV,
}  # fmt: skip
# The keys of llama's case reach 2 and its values 1.5: the second layer's scales make some of them saturate.
SCALES = {0: (0.031, 0.0123), 1: (0.0021, 0.0017), 2: (1.0, 0.25), 3: (0.0625, 0.5)}


def tensors_of(name: str = "model.layers.{}.self_attn.{}_scale") -> Tensors:
    return {name.format(i, part): torch.tensor([s]) for i, own in SCALES.items() for part, s in zip("kv", own)}  # noqa: B905


def folder_of(tmp_path: Path, extra: Tensors, config: dict[str, Any] | None = None) -> Path:
    """Copy llama's case with more tensors, and a quantization config that quantizes no matrix."""
    _, source = plain_model("llama")
    out = tmp_path / "scaled"
    out.mkdir()
    raw = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"quantization_config": ONLY_KV if config is None else config}))
    save_file({**load_file(source / "model.safetensors"), **extra}, out / "model.safetensors")
    return out


def load(folder: Path, dtype: str = "fp8", device: str = "cpu", **more: Any) -> LLM:
    return LLM(str(folder), kv_cache_dtype=dtype, device=device, max_model_len=CASES["llama"].max_model_len, **more)


def logits(loaded: LoadedModel) -> np.ndarray:
    return loaded.table.memory.get(loaded.model(loaded.dense_step(prompts(CASES["llama"]))))


# ---- meaning ---------------------------------------------------------------------------------------------------------


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what an fp8 cache of vLLM holds: x / scale, saturated, in e4m3, times the scale."""
    codes = (x.float() / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.to(x.dtype) * scale


@cache
def in_transformers() -> np.ndarray:
    """Return logits of transformers whose cache rounds the keys and values that it is given."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, keys: Any, values: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
            key, value = SCALES[layer_idx]
            return super().update(rounded(keys, key), rounded(values, value), layer_idx, *rest, **more)

    model, _ = plain_model("llama")
    with torch.no_grad():
        found = [
            model(torch.tensor([ids]), cache=Rounding(), use_cache=True).logits[0] for ids in prompts(CASES["llama"])
        ]
    return torch.cat(found).numpy()


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_logits_are_those_of_transformers_with_such_a_cache(device: str, tmp_path: Path) -> None:
    """A number beside a rounding tie may be stored one step away, so that a few logits differ by more."""
    loaded = load(folder_of(tmp_path, tensors_of()), device=device, cache="off").loaded
    wanted, found, plain = in_transformers(), logits(loaded), logits(replace(loaded, storage=STORAGES["float32"]))
    error = np.abs(found - wanted).max(1)
    assert np.median(error) < 1e-4 and error.max() < 0.05 * np.abs(plain - wanted).max()


def test_the_library_that_writes_the_scales_rounds_alike() -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    from ridgeline.ops.host.stored import as_floats, store_rows

    x = torch.randn(50, 3, 40, generator=torch.Generator().manual_seed(0)) * 3
    for scale in (0.0123, 0.25, 0.0021):
        theirs = fake_quantize(x, torch.tensor(scale), None, QuantizationArgs(num_bits=8, type="float"))
        mine = as_floats(store_rows(STORAGES["fp8"])(x.numpy(), scale), scale)
        np.testing.assert_array_equal(mine, theirs.numpy())


def test_with_and_without_a_cache_the_logits_are_the_same_to_the_bit(tmp_path: Path) -> None:
    folder, found = folder_of(tmp_path, tensors_of()), []
    prompt: Any = {"prompt_token_ids": [3 + i % 40 for i in range(50)]}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
    for dtype, mode in (("fp8", "on"), ("fp8_e4m3", "off"), ("auto", "on")):
        (answer,) = load(folder, dtype, cache=mode).generate([prompt], params)
        found.append([entry.top for entry in answer.outputs[0].logprobs or ()])
    assert found[0] == found[1] != found[2]


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["model.layers.{}.self_attn.{}_scale", "model.layers.{}.self_attn.{}_proj.{}_scale",
     "model.layers.{}.self_attn.{}_proj.output_scale", "model.layers.{}.self_attn.attn.{}_scale",
     "model.layers.{}.self_attn.qkv_proj.{}_scale"],
)  # fmt: skip
def test_every_spelling_is_read(name: str, tmp_path: Path) -> None:
    extra = {name.replace("{}", str(i), 1).replace("{}", part): torch.tensor(s).reshape(())
             for i, own in SCALES.items() for part, s in zip("kv", own, strict=True)}  # fmt: skip
    found = load(folder_of(tmp_path, extra), cache="off").loaded
    assert found.model.kv_scales == {i: tuple(map(np.float32, own)) for i, own in SCALES.items()}
    np.testing.assert_array_equal(logits(found), logits(load_from_names(tmp_path)))


def load_from_names(tmp_path: Path) -> LoadedModel:
    (tmp_path / "other").mkdir()
    return load(folder_of(tmp_path / "other", tensors_of()), cache="off").loaded


def test_an_older_scale_is_that_of_keys_and_values(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(0.5 + i) for i in range(3)}
    found = load(folder_of(tmp_path, extra), cache="off").loaded
    assert found.model.kv_scales == {i: (0.5 + i, 0.5 + i) for i in range(3)}
    assert "scales for 3 of 4 layers: keys 0.5 to 2.5, values 0.5 to 2.5; other layers have scale 1" in " ".join(
        found.notes
    )


@pytest.mark.parametrize("recipe", ["modelopt-fp8", "fp8-dynamic", "fp8-channel", "packed-4", "modelopt-nvfp4"])
def test_scales_beside_quantized_matrices(recipe: str, tmp_path: Path) -> None:
    own = RECIPES[recipe]
    ask: dict[str, Any] = {"kv_cache_scheme": KV}
    if recipe.startswith("modelopt"):
        ask = {"kv_cache_quant_algo": "FP8"}
    elif recipe == "fp8-dynamic":
        ask = {"kv_cache_scheme": "static"}
    _, source = plain_model("llama", (("intermediate_size", 96),))
    write(replace(own, config={**own.config, **ask}, extra=tensors_of()), source, tmp_path / "p")
    llm = load(tmp_path / "p", "auto", cache="off")
    assert llm.loaded.storage.dtype == "float16" and len(llm.loaded.model.kv_scales) == 4
    assert any("asks for an fp8 KV cache, but state is stored in float16" in note for note in llm.loaded.notes)


BAD: list[tuple[str, Tensors, str]] = [
    ("a zero", {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, "k_scale has the scale 0"),
    ("NaN", {"model.layers.0.self_attn.v_scale": torch.tensor(float("nan"))}, "v_scale has the scale nan"),
    ("infinite", {"model.layers.0.self_attn.v_scale": torch.tensor(float("inf"))}, "v_scale has the scale inf"),
    ("negative", {"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)}, "k_scale has the scale -1"),
    ("huge", {"model.layers.0.self_attn.k_scale": torch.tensor(1e30)}, "must lie between 2^-64 and 2^64"),
    ("by head", {"model.layers.0.self_attn.k_scale": torch.ones(2)}, "k_scale is F32 [2]"),
    ("half", {"model.layers.0.self_attn.k_scale": torch.ones(1)}, "no scale of the KV cache for values"),
    ("twice", {"model.layers.0.self_attn.attn.k_scale": torch.tensor(9.0)}, "layer 0 has another scale"),
    ("no layer", {"model.self_attn.k_scale": torch.ones(1)}, "no number of a layer"),
    ("beyond", {"model.layers.9.self_attn.k_scale": torch.ones(1)}, "layer 9, which keeps no keys and values"),
    ("another", {"model.layers.0.self_attn.q_scale": torch.ones(1)}, "self_attn.q_scale, which a llama model"),
]


@pytest.mark.parametrize(("extra", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_a_bad_scale_is_named(extra: Tensors, message: str, dtype: str, tmp_path: Path) -> None:
    good = {} if message.startswith(("no scale", "layer 9")) else tensors_of()
    with pytest.raises(CheckpointError) as caught:
        load(folder_of(tmp_path, {**good, **extra}), dtype, cache="off")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"type": "int"}, "read for fp8 by tensor"), ({"strategy": "attn_head"}, "read for fp8 by tensor"),
     ({"dynamic": True}, "dynamic"), ({"surprise": 1}, "surprise: not understood")],
)  # fmt: skip
def test_another_scheme_of_the_cache_is_refused(change: dict[str, Any], message: str) -> None:
    for config in (
        ONLY_KV | {"kv_cache_scheme": KV | change},
        packers.MODELOPT_FP8 | {"kv_cache_scheme": KV | change},
    ):
        with pytest.raises(ConfigError, match=message):
            quantization_of({"model_type": "llama", "quantization_config": config})


# ---- notes and names -------------------------------------------------------------------------------------------------


def test_names_of_vllm() -> None:
    assert choose_storage("fp8_e4m3", "int8") == choose_storage("fp8", "int8") == (STORAGES["fp8"], "as given")
    with pytest.raises(RequestError, match=r"fp8_e5m2.*2 bits of mantissa.*use fp8"):
        choose_storage("fp8_e5m2", "int8")
    with pytest.raises(RequestError, match=r"fp8_inc.*known are auto, float32, bfloat16, float16, int8, fp8"):
        choose_storage("fp8_inc", "int8")


def test_notes_say_what_is_used(tmp_path: Path) -> None:
    with_scales = folder_of(tmp_path, tensors_of())
    (tmp_path / "b").mkdir()
    without = folder_of(tmp_path / "b", {})
    for folder, dtype, text in (
        (
            with_scales,
            "fp8",
            "state in fp8: the checkpoint's scales for 4 of 4 layers: keys 0.0021 to 1, values 0.0017",
        ),
        (with_scales, "auto", "state is stored in float32; --kv-cache-dtype fp8 stores it in fp8, with the checkpoint"),
        (without, "fp8", "state in fp8: scale 1, because the checkpoint has no scales; magnitudes beyond 448 become"),
        (without, "int8", "asks for an fp8 KV cache, but state is stored in int8; --kv-cache-dtype fp8 stores it in"),
        (plain_model("llama")[1], "fp8", "state in fp8: scale 1, because the checkpoint has no scales"),
    ):
        assert text in "\n".join(load(folder, dtype, cache="off").loaded.notes)
    assert not [note for note in load(plain_model("llama")[1], "auto", cache="off").loaded.notes if "fp8" in note]
    assert describe_scales({0: (0.5, 0.5)}, 1) == "the checkpoint's scales for 1 of 1 layers: keys 0.5, values 0.5"


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        return " ".join(capsys.readouterr().out.split())

    return call


def test_inspect_shows_them(run: Run, tmp_path: Path) -> None:
    folder = str(folder_of(tmp_path, tensors_of()))
    own = "fp8 KV cache the checkpoint's scales for 4 of 4 layers: keys 0.0021 to 1, values 0.0017 to 0.5"
    assert f"{own}; used with --kv-cache-dtype fp8" in run("inspect", folder)
    told = run("inspect", folder, "--kv-cache-dtype", "fp8")
    assert own in told and "used with" not in told and re.search(r"state .*per token in fp8", told)
    assert json.loads(run("inspect", folder, "--json"))["kv_scales"]["2"] == [1.0, 0.25]


def test_codes_and_scales_together(tmp_path: Path) -> None:
    config = compressed("pack-quantized", packers.args(4, "int", "group", 32)) | {"kv_cache_scheme": KV}
    write(packers.Recipe(ct_packed().pack, config, tensors_of()), plain_model("llama")[1], tmp_path / "p")
    a, b = (logits(load(tmp_path / "p", dtype, cache="off").loaded) for dtype in ("fp8", "auto"))
    assert 1e-3 < np.abs(a - b).max() < 10
