"""LLaDA2 against its definition in float64: logits, answers, `ridgeline verify`, and configs that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from oracle import llada2
from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.spec import Blocks, MaskedDiffusion
from ridgeline.verify import verify

TOLERANCE = 1e-4
MASK, SIZE = 3, 8
CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "torch_dtype": "float32", "vocab_size": 257,
    "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256, "rope_theta": 3000.0,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-2, "hidden_act": "silu", "use_qkv_bias": True, "use_bias": True,
    "use_qk_norm": True, "norm_head": False, "tie_word_embeddings": False, "first_k_dense_replace": 1,
    "num_experts": 12, "num_experts_per_tok": 3, "num_shared_experts": 2, "moe_intermediate_size": 20, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "rotary_dim": 12, "use_sliding_window": False,
    "sliding_window": 4096, "max_window_layers": 28, "rope_scaling": None, "eos_token_id": 2, "pad_token_id": 2,
    "embedding_dropout": 0.1, "output_dropout": 0.1, "block_size": SIZE, "mask_token_id": MASK,
}  # fmt: skip
# Every other value of a field must move the logits, or the comparison would not see that it was misread.
CHANGES: list[dict[str, Any]] = [
    {"rope_theta": 10000.0}, {"partial_rotary_factor": 0.25}, {"rms_norm_eps": 1e-6}, {"num_experts_per_tok": 2},
    {"n_group": 2}, {"topk_group": 3}, {"routed_scaling_factor": 2.5},
]  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"use_qkv_bias": False, "use_bias": False, "num_shared_experts": 0, "n_group": 1, "topk_group": 1},
    {"use_qk_norm": False, "first_k_dense_replace": 0, "num_experts_per_tok": 1, "num_shared_experts": 1},
]


def write(folder: Path, config: Mapping[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Write a checkpoint as it is published, and return its tensors in float64."""
    tensors = llada2.draw(config, seed)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return {name: torch.from_numpy(x).double() for name, x in tensors.items()}


def sequences(lengths: tuple[int, ...] = (1, 7, 33)) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(4, CONFIG["vocab_size"], n).tolist() for n in lengths]


@pytest.mark.parametrize("other", [{}, *OTHERS], ids=["all parts", "one group", "one expert"])
def test_logits_equal_the_definition(other: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIG | other
    w = write(tmp_path, config)
    llm = LLM(str(tmp_path))
    assert llm.loaded.spec.sight == Blocks(SIZE)
    assert llm.loaded.spec.diffusion == MaskedDiffusion(MASK, trained_blocks=(32,), edits=True)
    found = llm.logits(sequences())
    for got, tokens in zip(found, sequences(), strict=True):
        assert np.abs(got - llada2.define(config, w, tokens, SIZE).numpy()).max() < TOLERANCE
    assert found[-1].std() > 0.5


def test_every_field_is_seen(tmp_path: Path) -> None:
    w, (tokens,) = write(tmp_path, CONFIG), sequences((20,))
    right = llada2.define(CONFIG, w, tokens, SIZE)
    for change in CHANGES:
        assert (llada2.define(CONFIG | change, w, tokens, SIZE) - right).abs().max() > 100 * TOLERANCE, change
    assert (llada2.define(CONFIG, w, tokens, SIZE + 1) - right).abs().max() > 100 * TOLERANCE


def test_answers_equal_the_published_rule(tmp_path: Path) -> None:
    w, (prompt,) = write(tmp_path, CONFIG), sequences((11,))
    llm = LLM(str(tmp_path))
    for threshold in (0.1, 0.95):
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, confidence_threshold=threshold)
        (answer,) = llm.generate([prompt], params)
        wanted = llada2.fill(CONFIG, w, prompt, 12, SIZE, threshold, MASK)
        assert answer.outputs[0].token_ids == wanted


def test_no_setting_changes_an_answer(tmp_path: Path) -> None:
    write(tmp_path, CONFIG)
    report = verify(LLM(str(tmp_path), cache="off").loaded, quick=True)
    assert report.equal
    assert report.complete


def test_published_defaults_and_refusals(tmp_path: Path) -> None:
    """The published configs name neither the block nor the mask token."""
    plain = {name: value for name, value in CONFIG.items() if name not in ("block_size", "mask_token_id")}
    write(tmp_path, plain)
    with pytest.raises(ConfigError, match="mask_token 156895 is not below vocab_size 257"):
        LLM(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**plain, "mask_token_id": MASK}))
    trained = LLM(str(tmp_path))
    assert trained.loaded.spec.sight == Blocks(32)
    assert not any("trained" in note for note in trained.loaded.notes)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (note,) = [note for note in LLM(str(tmp_path)).loaded.notes if "trained" in note]
    assert note.startswith(
        "blocks have 8 tokens (block_size), but the weights of llada2_moe were trained with blocks of 32"
    )
    for change in ({"score_function": "softmax"}, {"norm_head": True}, {"use_sliding_window": True}, {"canvas": 3}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
        with pytest.raises(ConfigError, match=next(iter(change))):
            LLM(str(tmp_path))
