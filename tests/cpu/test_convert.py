"""Conversion to fewer KV heads: exact for equal heads, opened by transformers, and better than random ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from oracle.build import make_model, oracle_logits, redraw
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline import LLM
from ridgeline.archs import spec_from_config
from ridgeline.cli.main import app
from ridgeline.compress.convert import ConvertOptions, convert
from ridgeline.compress.convert.heads import PooledWeights, with_kv_heads
from ridgeline.compress.convert.options import Pool, Tie
from ridgeline.compress.convert.run import Change, write_converted
from ridgeline.compress.convert.shared import fitted_inputs, with_shared_keys
from ridgeline.compress.data import Samples
from ridgeline.compress.folder import open_original
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.documents import Document
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.runtime.step import DenseStep

pytestmark = pytest.mark.usefixtures("short_rates")

SEQUENCES = [[(7 * i * i + 3 * j + i * j) % 90 + 3 for i in range(40)] for j in range(2)]


def folder_of(name: str, folder: Path, equal: bool = False) -> tuple[Path, Any]:
    """Write a case's model, with equal KV heads on request."""
    model = make_model(CASES[name])
    redraw(model, 3)
    if equal:
        heads = model.config.num_key_value_heads
        for module, x in model.named_parameters():
            if ".k_proj." in module or ".v_proj." in module or (name == "olmo2" and ".k_norm." in module):
                parts = x.data.view(heads, -1, *x.shape[1:])
                parts[:] = parts[:1].clone()
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "qwen2_window", "gemma2", "olmo2"])
@pytest.mark.parametrize("pool", ["mean", "first"])
def test_equal_heads_become_one_exactly(name: str, pool: Pool, tmp_path: Path) -> None:
    source, _ = folder_of(name, tmp_path / "source", equal=True)
    convert(str(source), "kv_heads=1", out=tmp_path / "out", options=ConvertOptions(pool=pool))
    before, after = (LLM(str(path), skip_tokenizer_init=True) for path in (source, tmp_path / "out"))
    assert {m.num_kv_heads for m in after.loaded.spec.attentions(shared=True)} == {1}
    for a, b in zip(before.logits(SEQUENCES), after.logits(SEQUENCES), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3"])
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    source, model = folder_of(name, tmp_path / "source")
    convert(str(source), "kv_heads=1", out=tmp_path / "out", options=ConvertOptions(format="family"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    ours = LLM(str(tmp_path / "out"), skip_tokenizer_init=True).logits(SEQUENCES)
    for own, other in zip(ours, oracle_logits(theirs, SEQUENCES), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)
    k = model.state_dict()["model.layers.1.self_attn.k_proj.weight"]
    torch.testing.assert_close(
        theirs.state_dict()["model.layers.1.self_attn.k_proj.weight"], k.view(2, -1, k.shape[1]).mean(0)
    )


def test_as_many_heads_are_the_same_model(tmp_path: Path) -> None:
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    report = convert(str(source), "kv_heads=2", out=tmp_path / "out")
    original, converted = (replace(report.prices[name], measured=None) for name in ("original", "converted"))
    assert original == converted
    before, after = (LLM(str(path), skip_tokenizer_init=True) for path in (source, tmp_path / "out"))
    for a, b in zip(before.logits(SEQUENCES), after.logits(SEQUENCES), strict=True):
        np.testing.assert_array_equal(a, b)


def test_layers_that_share_keys_read_the_pooled_ones(tmp_path: Path) -> None:
    spec = SPECS["cla2"]
    weights = write(spec, tmp_path)
    for name, x in weights.items():
        if ".mixer.k." in name or ".mixer.v." in name:
            parts = x.reshape(2, -1, x.shape[1])
            parts[1] = parts[0]
    new, table = with_kv_heads(spec, 1), open_table("cpu")
    types: Any = dict.fromkeys(weights, "float32")
    pooled = PooledWeights(spec, new, weights, types, table.memory.get, "mean", 0)
    step = DenseStep.build(SEQUENCES, table.memory)
    before, after = Model(spec, weights, table, 256)(step), Model(new, pooled, table, 256)(step)
    np.testing.assert_allclose(np.asarray(before), np.asarray(after), atol=1e-4)


def python_text(folder: Path) -> Path:
    path = folder / "text.py"
    path.write_text("".join(p.read_text() for p in sorted(Path(json.__file__).parent.glob("*.py"))))
    return path


def test_trained_heads_lose_less_than_random_ones(tmp_path: Path) -> None:
    """On the built-in model, right after the conversion. Its keys have norms, and mean and first lose about as much."""
    text, kl = python_text(tmp_path), {}
    for pool in get_args(Pool):
        options = ConvertOptions(pool=pool, length=128, held_out_tokens=1024)
        report = convert("pocket", "kv_heads=1", out=tmp_path / pool, data=[text], options=options)
        assert report.comparison is not None
        quality = report.comparison.others["converted"].kl
        kl[pool] = quality.value if quality else 0.0
    assert max(kl["mean"], kl["first"]) < 0.7 * kl["random"], kl
    config = json.loads((tmp_path / "mean" / "config.json").read_text())
    assert config["model_type"] == "qwen3" and spec_from_config(config).attentions(shared=True)[0].num_kv_heads == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "kv_heads=3"), "--to kv_heads=3: layer 0 has 2 KV heads; use one of 1, 2"),
        (("--to", "kv_heads=0"), "write kv_heads=2"),
        (("--to", "heads=2"), "use kv_heads, hybrid, cla, mla, window"),
        (("--to", "cla=1"), "it must be at least 2"),
        (("--to", "cla=5"), "qwen3 has 4 with equal attention; use at most 4"),
        (("--to", "cla=2", "--tie", "fit"), "name some with --calibrate, or take --tie mean"),
        (("--to", "cla=2:1"), "write cla=2"),
        (("--to", "window=0"), "write window=256:3"),
        (("--to", "window=9:0"), "write window=256:3"),
        (("--to", "window=9:1"), "name some with --calibrate"),
        (("--to", "kv_heads=1", "--pool", "max"), "--pool is 'max'; use mean, first, random"),
    ],
)
def test_bad_input_gives_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", "pocket", *words, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, RidgelineError)
    assert message in str(result.exception) and not list(tmp_path.iterdir())


def test_a_model_without_kv_heads_is_refused(tmp_path: Path) -> None:
    source, _ = folder_of("mamba2", tmp_path / "source")
    with pytest.raises(RequestError, match="has no attention layer with KV heads"):
        convert(str(source), "kv_heads=1", out=tmp_path / "out")


# ---- windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "gpt2", "bamba"])
def test_a_window_of_the_whole_context_changes_nothing(name: str, tmp_path: Path) -> None:
    source, _ = folder_of(name, tmp_path / "source")
    convert(str(source), "window=256:1", out=tmp_path / "out")
    before, after = (LLM(str(path), skip_tokenizer_init=True) for path in (source, tmp_path / "out"))
    assert any(m.window == 256 for m in after.loaded.spec.attentions(shared=True))
    for a, b in zip(before.logits(SEQUENCES), after.logits(SEQUENCES), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_layer_that_looks_far_stays_whole(tmp_path: Path) -> None:
    """In all other layers, the values are 0, so that a window changes nothing there."""
    source, model = folder_of("llama_gqa", tmp_path / "source")
    for i in (0, 1, 3):
        model.get_submodule(f"model.layers.{i}.self_attn.v_proj").weight.data.zero_()
    model.save_pretrained(source)
    original = open_original(str(source), None)
    samples = Samples(SEQUENCES, [Document(ids) for ids in SEQUENCES])
    report = write_converted(
        "M", original, Change("window", 4, 3), samples, "texts", tmp_path / "out", ConvertOptions()
    )
    assert "window 4 in all layers but 2" in report.title
    after = LLM(str(tmp_path / "out"), skip_tokenizer_init=True)
    assert [m.window for m in after.loaded.spec.attentions(shared=True)] == [4, 4, None, 4]
    assert report.comparison is not None and report.comparison.others["converted"].perplexity.value > 0
    before = LLM(str(source), skip_tokenizer_init=True)
    for a, b in zip(before.logits(SEQUENCES), after.logits(SEQUENCES), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_windows_need_longer_sequences(tmp_path: Path) -> None:
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    samples = Samples(SEQUENCES, [Document(ids) for ids in SEQUENCES])
    with pytest.raises(RequestError, match="sequences of 40 tokens show nothing of such a window"):
        write_converted(
            "M", open_original(str(source), None), Change("window", 40, 3), samples, "", tmp_path / "out",
            ConvertOptions(),
        )  # fmt: skip


def test_windows_in_all_layers_load_in_transformers(tmp_path: Path) -> None:
    """Llama with windows everywhere is Mistral."""
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    convert(str(source), "window=8", out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mistral"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    ours = LLM(str(tmp_path / "out"), skip_tokenizer_init=True).logits(SEQUENCES)
    for own, other in zip(ours, oracle_logits(theirs, SEQUENCES), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)


# ---- layers that share keys and values ----------------------------------------------------------------------


def converted(source: Path, out: Path, tie: Tie) -> Any:
    """Convert to cla=2 on a short text of ids."""
    samples = Samples(TEXTS, [Document(ids) for ids in SEQUENCES])
    options = ConvertOptions(tie=tie)
    return write_converted("M", open_original(str(source), None), Change("cla", 2), samples, "texts", out, options)


TEXTS = np.random.default_rng(0).integers(3, 250, (12, 40)).tolist()


@pytest.mark.parametrize("tie", ["mean", "fit"])
@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "qwen2_window", "gpt2"])
def test_equal_layers_share_keys_exactly(name: str, tie: Tie, tmp_path: Path) -> None:
    """The first layer of each pair adds nothing to the stream, and the second has its keys, values and norm."""
    source, model = folder_of(name, tmp_path / "source")
    silent = ("o_proj", "down_proj", "c_proj")
    layers = model.get_submodule("transformer.h" if name == "gpt2" else "model.layers")
    for i in range(0, len(layers) - 1, 2):
        for key, x in layers[i].named_parameters():
            if any(f".{part}." in key for part in silent):
                x.data.zero_()
            elif any(part in key for part in ("k_proj", "v_proj", "k_norm", "input_layernorm", "ln_1")):
                layers[i + 1].get_parameter(key).data.copy_(x.data)
            elif "c_attn" in key:  # q, k and v side by side
                width = x.shape[-1] // 3
                layers[i + 1].get_parameter(key).data[..., width:] = x.data[..., width:]
    model.save_pretrained(source)
    report = converted(source, tmp_path / "out", tie)
    assert report.prices["converted"].state_bytes < report.prices["original"].state_bytes
    before, after = (LLM(str(path), skip_tokenizer_init=True) for path in (source, tmp_path / "out"))
    for a, b in zip(before.logits(SEQUENCES), after.logits(SEQUENCES), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_mean_takes_the_weights_of_norms_into_account(tmp_path: Path) -> None:
    """A norm whose weights are doubled and matrices that are halved are the same layer."""
    source, model = folder_of("llama_gqa", tmp_path / "source")
    converted(source, tmp_path / "first", "mean")
    layer = model.get_submodule("model.layers.1")
    layer.input_layernorm.weight.data *= 2
    for part in ("q_proj", "k_proj", "v_proj"):
        layer.self_attn.get_submodule(part).weight.data /= 2
    model.save_pretrained(source)
    converted(source, tmp_path / "second", "mean")
    first, second = (open_original(str(tmp_path / n), None).model.weights for n in ("first", "second"))
    np.testing.assert_allclose(first["layers.0.mixer.k.weight"], second["layers.0.mixer.k.weight"], atol=1e-6)


def test_inputs_are_mapped_by_least_squares(tmp_path: Path) -> None:
    """The map from the input of the first layer to that of the second is numpy's, of inputs in transformers."""
    source, model = folder_of("llama_gqa", tmp_path / "source")
    original = open_original(str(source), None)
    found = fitted_inputs(original, with_shared_keys(original.spec, 2), TEXTS, lambda what, done, total: None)
    inputs: dict[int, Any] = {}
    for i in range(2):
        layer = model.get_submodule(f"model.layers.{i}.self_attn.k_proj")
        layer.register_forward_hook(lambda module, given, out, i=i: inputs.update({i: given[0].detach()}))
    model(torch.tensor(TEXTS))
    x, y = (inputs[i].flatten(0, 1).double().numpy() for i in range(2))
    wanted = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(x @ found[1].T, x @ wanted, atol=1e-4)
