"""Files of one model in several layouts: as published, as transformers writes them, and inside a multimodal model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle.build import build
from oracle.case import prompts
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.archs import FAMILIES
from ridgeline.errors import CheckpointError
from ridgeline.load.checkpoint import open_checkpoint

Tensors = dict[str, torch.Tensor]
TEXT = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def same_logits(name: str, left: Path, right: Path) -> None:
    a, b = (LLM(str(folder), skip_tokenizer_init=True).logits(prompts(CASES[name])) for folder in (left, right))
    for x, y in zip(a, b, strict=True):
        assert np.abs(x - y).max() < 2e-5  # the alignment of a matrix in a file can change the last digit


def inside(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Put a text model into a multimodal model with multi-token prediction."""
    kind = config["model_type"].removesuffix("_text")
    whole = {"model_type": kind, "text_config": config, "vision_config": {"depth": 2}, "image_token_id": 5}
    found = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    found |= {"model.visual.pos_embed.weight": torch.ones(3, 2), "mtp.fc.weight": torch.ones(3, 2)}
    return whole, found


def together(tensors: Tensors) -> None:
    """Join all experts of a layer in two tensors."""
    for at in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        parts = {
            n: torch.stack([tensors.pop(f"{at}.experts.{e}.{n}_proj.weight") for e in range(6)])
            for n in ("gate", "up", "down")
        }
        tensors[f"{at}.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{at}.experts.down_proj"] = parts["down"]


@pytest.mark.parametrize("packed", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("kind", TEXT)
def test_a_language_model_inside_one_that_sees(kind: str, packed: bool, tmp_path: Path) -> None:
    build(CASES[TEXT[kind]], tmp_path / "text")
    config, tensors = inside(*read(tmp_path / "text"))
    if packed:
        together(tensors)
    folder = write(tmp_path / "whole", config, tensors)
    same_logits(TEXT[kind], tmp_path / "text", folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.family == kind
    assert checkpoint.eos_token_ids == (2,)
    assert [note for note in checkpoint.notes if "vision" in note] == [FAMILIES[kind].note]
    assert not open_checkpoint(tmp_path / "text").notes


def test_a_lack_in_the_packed_layout_is_named(tmp_path: Path) -> None:
    build(CASES["qwen3_5_moe_text"], tmp_path / "text")
    config, tensors = inside(*read(tmp_path / "text"))
    together(tensors)
    name = "model.language_model.layers.2.mlp.experts.gate_up_proj"
    short = {**tensors, name: tensors[name][:, 1:]}
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[6, 39, 64\].*\[6, 40, 64\]"):
        LLM(str(write(tmp_path / "short", config, short)), skip_tokenizer_init=True)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks {name}, which qwen3_5_moe needs"):
        LLM(str(write(tmp_path / "without", config, tensors)), skip_tokenizer_init=True)


def published(name: str) -> str:
    """Rename Kimi-Linear's dense layers as in its published files."""
    return name.replace("block_sparse_moe", "mlp") if ".layers.0." in name else name


@pytest.mark.parametrize("rename", [lambda name: name, published], ids=["transformers", "published"])
def test_either_name_of_a_dense_layer(rename: Callable[[str], str], tmp_path: Path) -> None:
    build(CASES["kimi_linear"], tmp_path / "saved")
    config, tensors = read(tmp_path / "saved")
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in tensors
    same_logits(
        "kimi_linear",
        tmp_path / "saved",
        write(tmp_path / "other", config, {rename(name): x for name, x in tensors.items()}),
    )


def test_kimis_published_config_says_the_same(tmp_path: Path) -> None:
    build(CASES["kimi_linear"], tmp_path)
    config, _ = read(tmp_path)
    spec = open_checkpoint(tmp_path).spec
    full = [i + 1 for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    config["linear_attn_config"] = {
        "full_attn_layers": full, "kda_layers": sorted({1, 2, 3, 4} - set(full)),
        "head_dim": config.pop("linear_head_dim"), "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }  # fmt: skip
    for name in ("layer_types", "mlp_layer_types"):
        del config[name]
    config |= {"first_k_dense_replace": 1, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).spec == spec


def test_layers_for_a_second_token_are_ignored(tmp_path: Path) -> None:
    build(CASES["qwen3_next"], tmp_path / "plain")
    config, tensors = read(tmp_path / "plain")
    more = {
        f"mtp.{name}": torch.ones(3, 2) for name in ("fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight")
    }
    same_logits("qwen3_next", tmp_path / "plain", write(tmp_path / "more", config, {**tensors, **more}))
