"""Writers of quantized checkpoints: read back by our readers, and loaded by compressed-tensors and transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oracle.build import PLAIN, oracle_logits
from oracle.case import prompts
from oracle.families import CASES
from oracle.packed import ours, plain_model
from ridgeline.errors import RequestError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.export import checkpoint_matrices
from ridgeline.load.packed.write import WRITERS, check_format, write_checkpoint
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.stored import cut_rows, dequantized
from ridgeline.ops import api
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.ops.host.backend import NumpyBackend
from ridgeline.spec.quant import format_of


def coded(weight: np.ndarray, name: str) -> QuantizedMatrix:
    return NumpyBackend().primitive(api.QUANTIZE, format_of(name))(weight)


def matrix(name: str, rows: int = 64, columns: int = 96) -> QuantizedMatrix:
    return coded(np.random.default_rng(3).normal(size=(rows, columns)).astype(np.float32), name)


HELD = [
    ("compressed-tensors", "int4-exact"), ("compressed-tensors", "int4-asym-exact"),
    ("compressed-tensors", "int3-exact"), ("compressed-tensors", "int8"), ("compressed-tensors", "int8-exact"),
    ("compressed-tensors", "fp8-fp8"), ("compressed-tensors", "fp8-tensor"), ("compressed-tensors", "fp8-16x24"),
    ("awq", "int4-asym-exact"), ("gptq", "int4-exact"), ("gptq_v2", "int4-asym-exact"), ("gptq_v2", "int3-asym-exact"),
    ("gptq_v2", "int2-16-exact"), ("bitsandbytes", "int8-outliers"), ("bitsandbytes", "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "name"), HELD)
def test_what_is_written_is_read_back(format: str, name: str, tmp_path: Path) -> None:
    """The writer itself compares each matrix with what the readers return."""
    plain = {"norm.weight": HostTensor(np.ones(3, np.float32), "float32")}
    write_checkpoint(tmp_path / "out", format, {"a.weight": matrix(name)}, plain, {"model_type": "llama"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_an_order_of_columns_is_written_by_gptq(tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(96)
    ordered = replace(matrix("int4-asym-exact"), permutation=order)
    write_checkpoint(tmp_path / "out", "gptq_v2", {"a.weight": ordered}, {}, {})
    with pytest.raises(RequestError, match="take --format gptq or gptq_v2"):
        check_format("awq", {"a.weight": ordered})


def test_formats_may_be_mixed(tmp_path: Path) -> None:
    mixed = {"a.weight": matrix("int4-exact"), "b.weight": matrix("int4-exact"), "c.weight": matrix("int8-32-exact")}
    for format in ("compressed-tensors", "gptq_v2"):
        write_checkpoint(tmp_path / format, format, mixed, {}, {})


@pytest.mark.parametrize(
    ("format", "name", "message"),
    [
        ("awq", "int4-exact", "AWQ holds 4 bits with zero points .* take --format compressed-tensors or gptq"),
        ("gptq", "int8", "exact activations only; take --format compressed-tensors or bitsandbytes"),
        ("bitsandbytes", "int4-exact", "8 bits with one scale for each row"),
        ("compressed-tensors", "int8-outliers", "no activations with outliers; take --format bitsandbytes"),
        ("compressed-tensors", "int4-64-exact", "no short last group; take --format gptq"),
        ("gguf2", "int4", "is not known; known are compressed-tensors"),
    ],
)
def test_a_format_that_cannot_hold_a_matrix_says_which_can(format: str, name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_format(format, {"a.weight": matrix(name)})
    assert "\n" not in str(caught.value)


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="exists; give a folder that does not"):
        write_checkpoint(tmp_path, "awq", {"a.weight": matrix("int4-asym-exact")}, {}, {})


def test_fused_matrices_are_joined(tmp_path: Path) -> None:
    """Phi-3 stores q, k and v in one matrix."""
    _, source = plain_model("phi3")
    checkpoint = open_checkpoint(source)
    tensors = load_file(source / "model.safetensors")
    whole = coded(tensors["model.layers.0.self_attn.qkv_proj.weight"].numpy(), "int4-asym-exact")
    reads, parts = checkpoint.family.names.reads(checkpoint.spec), {}
    for part in "qkv":
        name = f"layers.0.mixer.{part}.weight"
        parts[name] = cut_rows(whole, np.arange(*reads[name].rows))  # type: ignore[misc]
    joined = checkpoint_matrices(checkpoint.spec, checkpoint.family.names, parts)
    assert list(joined) == ["model.layers.0.self_attn.qkv_proj.weight"]
    for attribute in ("codes", "scales", "zero_points"):
        np.testing.assert_array_equal(getattr(*joined.values(), attribute), getattr(whole, attribute))
    del parts["layers.0.mixer.k.weight"]
    with pytest.raises(ValueError, match="quantize all or none"):
        checkpoint_matrices(checkpoint.spec, checkpoint.family.names, parts)


def saved(scheme: str, name: str, folder: Path) -> Any:
    """Write a case's model with matrices in a scheme, and return transformers' model of it."""
    pytest.importorskip("compressed_tensors")
    model, source = plain_model(name, (("intermediate_size", 96),))
    matrices, plain = {}, {}
    for key, value in load_file(source / "model.safetensors").items():
        if "_proj.weight" in key:
            matrices[key] = coded(value.numpy(), scheme)
        else:
            plain[key] = HostTensor(value.numpy(), "float32")
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(folder, "compressed-tensors", matrices, plain, config)
    return type(model).from_pretrained(folder, dtype=torch.float32, **PLAIN).eval()


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("int4-exact", "llama_biases"), ("int3-exact", "qwen2_tied"),
        pytest.param("fp8-16x16", "llama_gqa", marks=pytest.mark.nightly),
        pytest.param("fp8-tensor", "llama_gqa", marks=pytest.mark.nightly),
        pytest.param("fp8", "qwen2_tied", marks=pytest.mark.nightly),
        pytest.param("int8-exact", "qwen2_tied", marks=pytest.mark.nightly),
        pytest.param("int2-16-exact", "llama_gqa", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_transformers_loads_what_is_written(scheme: str, name: str, tmp_path: Path) -> None:
    """compressed-tensors decompresses the matrices; the logits are those that our reader gives."""
    wanted = oracle_logits(saved(scheme, name, tmp_path / "out"), prompts(CASES[name]))
    found = ours(name, tmp_path / "out")
    assert max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)) < 1e-3


@pytest.mark.parametrize("scheme", ["int8", "fp8-fp8"])
def test_transformers_rounds_activations_as_we_do(scheme: str, tmp_path: Path) -> None:
    """Where a tie is rounded differently, logits move: their divergence is small.

    compressed-tensors divides the largest magnitude of a token by 127.5 for int8, vLLM and we by 127. So the two
    roundings differ for int8 in every number, and their divergence is below the sum of both, each from exact.
    """
    wanted = oracle_logits(saved(scheme, "llama_gqa", tmp_path / "out"), prompts(CASES["llama_gqa"]))

    def divergence(found: list[np.ndarray]) -> float:
        p, q = (torch.from_numpy(np.concatenate(x)).double().log_softmax(-1) for x in (wanted, found))
        return float((p.exp() * (p - q)).sum(-1).mean())

    exact = divergence(ours("llama_gqa", tmp_path / "out", activations="exact"))
    assert divergence(ours("llama_gqa", tmp_path / "out", activations=None)) < (2 * exact if scheme == "int8" else 1e-3)


@pytest.mark.parametrize("scheme", ["int4-asym-exact", "int3-asym-exact", "int4-exact", "int8-32-asym-exact"])
def test_compressed_tensors_decompresses_what_is_written(scheme: str, tmp_path: Path) -> None:
    """transformers 5.23 does not load zero points at all, so that the library's own function is the oracle here."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    own = matrix(scheme)
    write_checkpoint(tmp_path / "out", "compressed-tensors", {"a.weight": own}, {}, {})
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    parts = {k.removeprefix("a."): v for k, v in load_file(tmp_path / "out" / "model.safetensors").items()}
    parts["weight_scale"] = parts["weight_scale"].float()
    found = PackedQuantizationCompressor.decompress(parts, QuantizationScheme(**group))["weight"]
    np.testing.assert_array_equal(found.numpy(), dequantized(own))


def test_each_writer_names_its_loaders() -> None:
    assert all(writer.loaders for writer in WRITERS.values())
