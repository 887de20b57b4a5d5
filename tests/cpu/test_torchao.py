"""torchao's checkpoints, built number by number: matrices, logits of transformers, and files that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle.packed import TOLERANCE, ours, plain_model, theirs
from oracle.packers import KEPT, Tensors, rounded, spread
from ridgeline.archs import quantization_of
from ridgeline.errors import RidgelineError
from ridgeline.load.packed import READERS
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.stored import dequantized

CONFIG = {
    "quant_method": "torchao", "modules_to_not_convert": None, "include_input_output_embeddings": False,
    "untie_embedding_weights": False,
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}  # fmt: skip
PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}}


def described(kind: str, shape: Any, block: list[int], **more: Any) -> dict[str, Any]:
    return {
        "_type": kind,
        "_data": {"block_size": block, "dtype": {"_type": "torch.dtype", "_data": "float32"}, **more},
    }


def int8(w: torch.Tensor) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Return the parts of an Int8Tensor, whose zero points are 0, its numbers, and its description."""
    scale = w.abs().amax(1, keepdim=True) / 127
    codes = (w / scale).round().to(torch.int8)
    parts = {"qdata": codes, "scale": scale, "zero_point": torch.zeros(scale.shape, dtype=torch.int8)}
    act = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {
        "granularity": PER_ROW, "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}, "reduce_range": False,
    }}  # fmt: skip
    more = {"act_quant_kwargs": act, "reduce_range": False}
    return parts, codes * scale, described("Int8Tensor", w.shape, [1, w.shape[1]], **more)


def int4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Return the parts of an IntxUnpackedToInt8Tensor of 4 bits in groups of 8."""
    codes, scales, zeros = rounded(w.numpy(), 4, 8, False)
    parts = {
        "qdata": torch.from_numpy((codes - 8).astype(np.int8)), "scale": torch.from_numpy(scales.astype(np.float32)),
        "zero_point": torch.from_numpy((zeros - 8).astype(np.int8)),
    }  # fmt: skip
    dense = (codes - spread(zeros, w.shape[1], 8)) * spread(scales.astype(np.float32), w.shape[1], 8)
    more = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "activation_quantization": None}
    return (
        parts,
        torch.from_numpy(dense.astype(np.float32)),
        described("IntxUnpackedToInt8Tensor", w.shape, [1, 8], **more),
    )


def fp8(w: torch.Tensor) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Return the parts of a Float8Tensor with a scale for the whole matrix."""
    scale = (w.abs().max() / 448).reshape(1, 1)
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {"qdata": codes, "scale": scale}, codes.float() * scale, described("Float8Tensor", w.shape, list(w.shape))


KINDS = {"int8": int8, "int4": int4, "fp8": fp8}


def write(kind: str, name: str, folder: Path, sizes: Mapping[str, int] = {}) -> Tensors:
    """Write a case's model, and return the tensors of the dequantized checkpoint. sizes: other sizes of the model."""
    _, source = plain_model(name, tuple(sizes.items()))
    packed: Tensors = {}
    dense: Tensors = {}
    metadata: dict[str, str] = {"format": "pt"}
    for key, value in load_file(source / "model.safetensors").items():
        if value.ndim != 2 or KEPT.search(key):
            packed[key] = dense[key] = value
            metadata[key] = json.dumps({"_type": "Tensor"})
            continue
        parts, dense[key], about = KINDS[kind](value)
        packed |= {f"{key.removesuffix('weight')}_weight_{part}": x for part, x in parts.items()}
        metadata[key] = json.dumps(about)
    metadata["tensor_names"] = json.dumps(list(dense))
    folder.mkdir(parents=True)
    save_file(packed, folder / "model.safetensors", metadata)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return dense


def stored(folder: Path) -> Any:
    scheme = quantization_of(json.loads((folder / "config.json").read_text()))
    assert scheme is not None
    return READERS[type(scheme)](scheme, TensorFiles(folder)).stored


@pytest.mark.parametrize(("kind", "format"), [("int8", "int8"), ("int4", "int4-8-asym-exact"), ("fp8", "fp8-tensor")])
def test_matrices_are_those_of_the_tool(kind: str, format: str, tmp_path: Path) -> None:
    dense = write(kind, "llama", tmp_path / "m")
    found = stored(tmp_path / "m")
    assert len(found) == 28
    for name, matrix in found.items():
        assert matrix.format.name == format
        back = matrix.read(0)
        assert back.format == matrix.format
        np.testing.assert_allclose(dequantized(back), dense[name].numpy(), rtol=1e-6)


@pytest.mark.parametrize(("kind", "name"), [("int8", "llama_gqa"), ("int4", "qwen2_tied")])
def test_the_logits_are_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    dense = write(kind, name, tmp_path / "m")
    wanted, found = theirs(name, dense, tmp_path / "dense", {}), ours(name, tmp_path / "m")
    assert max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)) < TOLERANCE


Q = "model.layers.0.self_attn.q_proj"


def change(folder: Path, description: str | None = None, **tensors: Any) -> None:
    """Change the description of one matrix, and parts of it."""
    from safetensors import safe_open

    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata, every = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if description is not None:
        metadata[f"{Q}.weight"] = description
    save_file(every | {f"{Q}._weight_{k}": v for k, v in tensors.items()}, path, metadata)


def says(kind: str, data: Any) -> dict[str, str]:
    return {"description": json.dumps({"_type": kind, "_data": data})}


BAD = [
    ("int8", says("Int4TilePackedTo4dTensor", {}), "is a Int4TilePackedTo4dTensor of torchao"),
    ("int8", {"description": "["}, "the metadata of .* is not readable"),
    ("int8", says("Int8Tensor", 3), "is not readable"),
    ("int8", says("Int8Tensor", {"block_size": [2, 64]}), "block_size"),
    ("int8", says("Int8Tensor", {"block_size": "x"}), "block_size"),
    ("int4", says("IntxUnpackedToInt8Tensor", {"block_size": [1, 8]}), "target_dtype"),
    ("int8", {"scale": torch.full((64, 1), float("nan"))}, "must be a finite number"),
    ("int8", {"scale": torch.ones(64, 2)}, "it must be"),
    ("int4", {"qdata": torch.full((64, 64), 9, dtype=torch.int8)}, "4 bits hold"),
    ("int8", {"act_pre_scale": torch.ones(64)}, "is a part of a quantized matrix that is not read"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), BAD)
def test_wrong_files_are_one_line(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(kind, "llama", tmp_path / "m")
    change(tmp_path / "m", **changes)
    with pytest.raises(RidgelineError) as caught:
        for matrix in stored(tmp_path / "m").values():
            matrix.read(0)
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)


def test_configs_without_a_type_are_refused() -> None:
    for kind in ("int4_weight_only", {"layers": {}}, None):
        with pytest.raises(RidgelineError, match="quant_type"):
            quantization_of({"model_type": "llama", "quantization_config": {**CONFIG, "quant_type": kind}})


def test_activations_that_are_not_computed_are_noted() -> None:
    default = {"default": {"_type": "Int8DynamicActivationIntxWeightConfig"}}
    scheme = quantization_of({"model_type": "llama", "quantization_config": {**CONFIG, "quant_type": default}})
    assert scheme is not None and "activations are taken exactly" in scheme.notes[0] and scheme.storage == "int4"
