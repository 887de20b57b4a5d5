"""MXFP4 checkpoints: every byte with every scale, values as unpacked by transformers, and whole packed folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from oracle.build import double, make_model, oracle_logits, redraw
from oracle.case import Case, prompts
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.archs import quantization_of, spec_from_config
from ridgeline.archs.quantization import Mxfp4
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.load.packed import mxfp4, open_tensors
from ridgeline.load.packed.compressed import LARGEST_POWER
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.stored import Stored, dequantized
from ridgeline.ops.arrays import QuantizedStack

TOLERANCE = 1e-4
# Sizes that are multiples of a block.
SIZES = {"hidden_size": 64, "intermediate_size": 96}
PACKING = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
Tensors = dict[str, torch.Tensor]


# ---- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (2, 64, 3)])
def test_it_unpacks_as_transformers_does(shape: tuple[int, int, int], tmp_path: Path) -> None:
    """Every byte occurs in the largest stack; scales are those whose numbers bfloat16 holds."""
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, LARGEST_POWER + 1, shape, dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [expert, in, out]
    found = read_stack(blocks, scales, tmp_path)
    for e in range(shape[0]):
        np.testing.assert_array_equal(dequantized(found.read(e)), theirs[e].T.numpy())


def read_stack(blocks: torch.Tensor, scales: torch.Tensor, folder: Path) -> Stored:
    save_file({"x_blocks": blocks, "x_scales": scales}, folder / "model.safetensors")
    return mxfp4.read(Mxfp4(), TensorFiles(folder)).stored["x"]


@pytest.mark.parametrize("scale", [LARGEST_POWER + 1, 254, 255])
def test_a_scale_that_is_no_number_is_refused(scale: int, tmp_path: Path) -> None:
    scales = torch.tensor([[[127], [scale]]], dtype=torch.uint8)
    found = read_stack(torch.zeros((1, 2, 1, 16), dtype=torch.uint8), scales, tmp_path)
    with pytest.raises(CheckpointError, match=f"a scale of {scale}"):
        found.read(0)


# ---- a folder -----------------------------------------------------------------------------------------------


def pack(tensors: Tensors, seed: int) -> Tensors:
    """Return the tensors with random blocks and scales for every stack of experts, near 1.5 / sqrt(in) in size."""
    generator, out = torch.Generator().manual_seed(seed), {}
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            out[name] = value
            continue
        experts, n_in, n_out = value.shape
        shape = (experts, n_out, n_in // 32)
        out[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        out[f"{name}_scales"] = torch.randint(122, 125, shape, dtype=torch.uint8, generator=generator)
    return out


def unpacked(tensors: Tensors) -> Tensors:
    """Return the tensors that transformers unpacks."""
    out = {name: value for name, value in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [n.removesuffix("_blocks") for n in tensors if n.endswith("_blocks")]:
        found = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        out[name] = found.float()
    return out


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, Case]:
    """Return a packed folder, and transformers' model with the weights that transformers unpacks from it."""
    folder, case = tmp_path_factory.mktemp("packed"), CASES["gpt_oss"]
    model = make_model(case, **SIZES)
    redraw(model, 3)
    model.save_pretrained(folder)
    tensors = pack(load_file(folder / "model.safetensors"), 3)
    save_file(tensors, folder / "model.safetensors")
    model.load_state_dict(unpacked(tensors))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": PACKING}))
    return folder, model, case


def test_a_packed_folder_is_the_model_that_transformers_unpacks(packed: tuple[Path, nn.Module, Case]) -> None:
    folder, model, case = packed
    llm = LLM(str(folder), device="reference", kv_cache_dtype="float32")
    wanted = oracle_logits(double(model), prompts(case))
    error = max(float(np.abs(a - b).max()) for a, b in zip(llm.logits(prompts(case)), wanted, strict=True))
    print(f"largest error {error:.1e}")
    assert float(np.concatenate(wanted).std()) > 0.5
    assert error < TOLERANCE
    weights, theirs = llm.loaded.model.weights, model.state_dict()
    stack = theirs["model.layers.1.mlp.experts.gate_up_proj"]
    for name, first in (("gate", 0), ("up", 1)):
        got: Any = weights[f"layers.1.mlp.experts.{name}.weight"]
        assert isinstance(got, QuantizedStack)
        for e in range(got.shape[0]):
            matrix = replace(got[e], codes=got[e].codes.numpy(), scales=got[e].scales.numpy())
            assert torch.equal(torch.from_numpy(dequantized(matrix)), stack[e, :, first::2].T)
        bias = weights[f"layers.1.mlp.experts.{name}.bias"]
        assert torch.equal(bias, theirs["model.layers.1.mlp.experts.gate_up_proj_bias"][:, first::2])
    assert len(open_tensors(llm.loaded.checkpoint).stored) == 2 * len(llm.loaded.spec.layers)


# ---- invalid files ------------------------------------------------------------------------------------------

BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))
BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scales": (lambda t: t.pop(SCALES), f"{BLOCKS} without {SCALES}"),
    "no blocks": (lambda t: t.pop(BLOCKS), f"{SCALES} without {BLOCKS}"),
    "neither": (lambda t: (t.pop(BLOCKS), t.pop(SCALES)), f"lacks {BLOCKS.removesuffix('_blocks')}"),
    "both": (lambda t: t.update({BLOCKS.removesuffix("_blocks"): t["lm_head.weight"].clone()}), "packed and unpacked"),
    "wrong type": (lambda t: t.update({BLOCKS: t[BLOCKS].float()}), f"{BLOCKS} is F32"),
    "wrong shape": (lambda t: t.update({SCALES: t[SCALES][:, :-1].contiguous()}), f"{SCALES} U8 [6, 63, 3]"),
    "other sizes": (
        lambda t: t.update({k: t[k][:, :32].contiguous() for k in (BLOCKS, SCALES)}),
        "has codes for shape [6, 32, 96], but config.json requires [6, 64, 96]",
    ),
    "no number": (lambda t: t[SCALES].view(-1)[5:6].fill_(255), f"{SCALES} has a scale of 255"),
    "extra": (
        lambda t: t.update({"x_blocks": t[BLOCKS].clone(), "x_scales": t[SCALES].clone()}),
        "has x, which a gpt_oss model does not have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name(
    name: str, packed: tuple[Path, nn.Module, Case], tmp_path: Path
) -> None:
    change, message = BROKEN[name]
    shutil.copy(packed[0] / "config.json", tmp_path)
    tensors = load_file(packed[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        LLM(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_packed_tensors_need_a_config_that_says_so(packed: tuple[Path, nn.Module, Case], tmp_path: Path) -> None:
    shutil.copy(packed[0] / "model.safetensors", tmp_path)
    config = json.loads((packed[0] / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lacks model"):
        LLM(str(tmp_path))


def test_other_families_and_other_packings_are_refused() -> None:
    llama = {"model_type": "llama", "quantization_config": PACKING}
    with pytest.raises(ConfigError, match="quant_method 'mxfp4' is not supported"):
        quantization_of(llama)
    oss: dict[str, Any] = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "aqlm"}}
    with pytest.raises(ConfigError, match="quant_method 'aqlm' is not supported"):
        spec_from_config(oss)
    oss["quantization_config"] = {**PACKING, "block_size": 16}
    with pytest.raises(ConfigError, match=r"quantization_config\.block_size: not understood"):
        spec_from_config(oss)
    assert quantization_of({"model_type": "gpt_oss"}) is None
