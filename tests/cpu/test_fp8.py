"""Checkpoints with fp8 matrices and a scale per block: dequantized at load, each number exact to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle.build import build, oracle_logits
from oracle.case import prompts
from oracle.families import CASES
from ridgeline.archs.quantization import Fp8Blocks
from ridgeline.errors import CheckpointError
from ridgeline.llm import LLM
from ridgeline.load.packed import PackedFiles, fp8, open_tensors
from ridgeline.load.safetensors import SINGLE, TensorFiles
from ridgeline.load.stored import dequantized
from ridgeline.ops.arrays import QuantizedMatrix, QuantizedStack
from ridgeline.spec.quant import NUMBERS

Tensors = dict[str, torch.Tensor]
BLOCKS = (16, 24)  # neither size divides all matrices: the last blocks of rows and columns are smaller
QUANTIZED = ("_proj.weight", "_proj_with_mqa.weight")
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCKS)}


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each element of a matrix."""
    rows, columns = torch.arange(shape[0]) // BLOCKS[0], torch.arange(shape[1]) // BLOCKS[1]
    return scale[rows][:, columns]


def quantized(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix as DeepSeek-V3 stores it: fp8 with a float32 scale per block, its largest number over 448."""
    shape = [-(-n // size) for n, size in zip(matrix.shape, BLOCKS, strict=True)]
    scale = torch.zeros(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            block = matrix[i * BLOCKS[0] : (i + 1) * BLOCKS[0], j * BLOCKS[1] : (j + 1) * BLOCKS[1]]
            scale[i, j] = block.abs().max() / 448
    return (matrix / spread(scale, matrix.shape)).to(torch.float8_e4m3fn), scale


def quantize(source: Path, target: Path, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    """Return a copy of a model folder with its projections in fp8."""
    tensors: Tensors = {}
    for key, value in load_file(source / SINGLE).items():
        if key.endswith(QUANTIZED):
            tensors[key], tensors[f"{key}_scale_inv"] = quantized(value)
        else:
            tensors[key] = value
    change(tensors)
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    save_file(tensors, target / SINGLE)
    return target


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder), skip_tokenizer_init=True, device="reference")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_byte() -> None:
    """Compare with torch's own type: subnormals, both zeros, and the two NaN codes."""
    values = np.array(NUMBERS["fp8"].levels, np.float32)
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(values, wanted)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(values[numbers]), np.signbit(wanted[numbers]))
    assert np.nanmax(values) == 448


@pytest.mark.parametrize("shape", [(1, 1), (16, 24), (17, 25), (40, 7), (5, 100)])
def test_a_matrix(shape: tuple[int, int], tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 127, shape, generator=rng, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand([-(-n // size) for n, size in zip(shape, BLOCKS, strict=True)], generator=rng)
    save_file({"a": codes, "a_scale_inv": scale, "b": torch.ones(3)}, tmp_path / SINGLE)
    files = TensorFiles(tmp_path)
    packed = PackedFiles(files, fp8.read_blocks(Fp8Blocks(blocks=BLOCKS), files))
    assert sorted(packed) == ["a", "b"]
    assert "a" in packed and "a_scale_inv" not in packed
    found = packed.stored["a"].read(0)
    np.testing.assert_array_equal(dequantized(found), (codes.float() * spread(scale, codes.shape)).numpy())
    assert packed.num_bytes() == sum(np.asarray(part).nbytes for part in found.arrays) + 12


@pytest.mark.parametrize("name", ["deepseek_v3", "llama_gqa"])
def test_a_model(name: str, tmp_path: Path) -> None:
    """The logits equal those of transformers with the dequantized matrices, also for stacked experts and matrices per
    head.
    """
    case = CASES[name]
    model = build(case, tmp_path / "plain")
    folder = quantize(tmp_path / "plain", tmp_path / "fp8")
    stored = load_file(folder / SINGLE)
    plain: Tensors = {
        key: value.float() * spread(stored[f"{key}_scale_inv"], value.shape) if f"{key}_scale_inv" in stored else value
        for key, value in stored.items()
        if not key.endswith("_scale_inv")
    }
    assert sum(not torch.equal(value, load_file(tmp_path / "plain" / SINGLE)[key]) for key, value in plain.items()) > 20
    (tmp_path / "widened").mkdir()
    (tmp_path / "widened" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    save_file(plain, tmp_path / "widened" / SINGLE, metadata={"format": "pt"})
    llm = LLM(str(folder), skip_tokenizer_init=True, device="reference", kv_cache_dtype="float32")
    again = LLM(str(tmp_path / "widened"), skip_tokenizer_init=True, device="reference", kv_cache_dtype="float32")
    for key, weight in again.loaded.model.weights.items():
        assert torch.equal(wide(llm.loaded.model.weights[key]), weight), key  # type: ignore[call-overload]
    exact = oracle_logits(type(model).from_pretrained(tmp_path / "widened", dtype=torch.float32).eval(), prompts(case))
    found = llm.logits(prompts(case))
    assert max(float(np.abs(a - b).max()) for a, b in zip(found, exact, strict=True)) < 1e-4
    names = {key.removesuffix("_scale_inv") for key in stored if key.endswith("_scale_inv")}
    assert set(open_tensors(llm.loaded.checkpoint).stored) == names


def wide(weight: Any) -> Any:
    """Return the numbers of a weight that may be codes."""
    if isinstance(weight, QuantizedStack):
        return torch.stack([wide(weight[e]) for e in range(weight.shape[0])])
    if not isinstance(weight, QuantizedMatrix):
        return weight
    parts = {"codes": weight.codes.numpy(), "scales": weight.scales.numpy()}  # type: ignore[attr-defined]
    return torch.from_numpy(dequantized(replace(weight, **parts)))


KEY = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(f"{KEY}_scale_inv"), ("lacks", f"{KEY}_scale_inv")),
        (lambda t: t.update({f"{KEY}_scale_inv": torch.ones(2, 2)}), (KEY, "[144, 32]", "[9, 2]", "[2, 2]")),
        (lambda t: t.update({f"{KEY}_scale_inv": torch.ones(9, 2, dtype=torch.int8)}), (KEY, "F32", "I8")),
        (
            lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(9, 2)}),
            ("lm_head.weight_scale_inv", "does not have"),
        ),
        (lambda t: t.pop(KEY) is t.pop(f"{KEY}_scale_inv"), ("lacks", KEY)),
    ],
    ids=["no scales", "shape", "type", "scales of nothing", "no matrix"],
)
def test_errors_name_the_tensor(change: Callable[[Tensors], object], parts: tuple[str, ...], tmp_path: Path) -> None:
    build(CASES["deepseek_v3"], tmp_path / "plain")
    message = refusal(quantize(tmp_path / "plain", tmp_path / "fp8", change))
    assert all(part in message for part in parts), message


def test_without_the_config_fp8_is_refused(tmp_path: Path) -> None:
    build(CASES["llama_gqa"], tmp_path / "plain")
    folder = quantize(tmp_path / "plain", tmp_path / "fp8", lambda t: [t.pop(k) for k in list(t) if "_inv" in k])
    (folder / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    assert "F8_E4M3" in refusal(folder)
