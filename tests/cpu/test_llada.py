"""LLaDA and Dream against their definitions in float64: logits, and the answers of their published loops."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from oracle import llada
from oracle.denoise import kept_by_time
from ridgeline import LLM, SamplingParams
from ridgeline.diffusion.commit import shares_by_time
from ridgeline.diffusion.denoiser import PassNoise
from ridgeline.errors import ConfigError
from ridgeline.sample.noise import PURPOSE_ORDER
from ridgeline.spec import MaskedDiffusion, WholeSequence
from ridgeline.verify import verify

TOLERANCE = 1e-4
MASK = 3
COMMON = {
    "torch_dtype": "float32",
    "rope_theta": 3000.0,
    "rms_norm_eps": 1e-2,
    "mask_token_id": MASK,
    "eos_token_id": 2,
}
LLADA: dict[str, Any] = {
    **COMMON, "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 64, "n_layers": 2, "n_heads": 4,
    "n_kv_heads": 2, "mlp_hidden_size": 88, "embedding_size": 257, "vocab_size": 257, "max_sequence_length": 128,
    "weight_tying": False, "include_bias": False, "include_qkv_bias": False, "activation_type": "silu",
    "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "attention_layer_norm": False, "attention_layer_norm_with_affine": True, "bias_for_layer_norm": False, "rope": True,
    "rope_full_precision": True, "alibi": False, "alibi_bias_max": 8.0, "scale_logits": False, "init_fn": "mitchell",
    "init_device": "meta", "init_std": 0.02, "init_cutoff_factor": None, "input_emb_norm": False, "mlp_ratio": 4,
    "embedding_dropout": 0.0, "residual_dropout": 0.0, "attention_dropout": 0.0, "multi_query_attention": None,
    "flash_attention": False, "precision": "amp_bf16", "pad_token_id": 2, "use_cache": False,
}  # fmt: skip
DREAM: dict[str, Any] = {
    **COMMON, "model_type": "Dream", "architectures": ["DreamModel"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 88, "vocab_size": 257,
    "hidden_act": "silu",
    "max_position_embeddings": 128, "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False,
    "tie_word_embeddings": False, "rope_scaling": None, "use_mrope": False,
}  # fmt: skip
MODELS = {"llada": LLADA, "dream": DREAM}


def write(folder: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Write a checkpoint as it is published, and return its tensors in float64."""
    tensors = llada.draw(config, 1)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return {name: torch.from_numpy(x).double() for name, x in tensors.items()}


def sequence(length: int) -> list[int]:
    return np.random.default_rng([5, length]).integers(4, 257, length).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_definition(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    w, llm = write(tmp_path, config), LLM(str(tmp_path))
    spec = llm.loaded.spec
    assert spec.sight == WholeSequence()
    shift = name == "dream"
    assert spec.diffusion == MaskedDiffusion(MASK, predicts_next=shift, schedule="time" if shift else "equal")
    lengths = (1, 7, 63)
    for got, n in zip(llm.logits([sequence(n) for n in lengths]), lengths, strict=True):
        assert np.abs(got - llada.define(config, w, sequence(n)).numpy()).max() < TOLERANCE


@pytest.mark.parametrize(("block", "steps", "cfg"), [(12, 12, 0.0), (4, 12, 0.0), (6, 4, 0.0), (12, 5, 1.5)])
def test_answers_are_those_of_lladas_loop(block: int, steps: int, cfg: float, tmp_path: Path) -> None:
    w, llm, prompt = write(tmp_path, LLADA), LLM(str(tmp_path)), sequence(9)
    params = SamplingParams(
        max_tokens=12, temperature=0, ignore_eos=True, block_length=block, denoising_passes=steps * block // 12,
        cfg_scale=cfg,
    )  # fmt: skip
    (answer,) = llm.generate([prompt], params)
    look = partial(llada.define, LLADA, w)
    assert answer.outputs[0].token_ids == llada.llada_generate(look, prompt, 12, block, steps, cfg, MASK)
    assert answer.num_passes == steps * (2 if cfg else 1)


ALGORITHMS = {"maskgit_plus": "low_confidence", "topk_margin": "top_margin", "entropy": "entropy"}


@pytest.mark.parametrize(("steps", "alg"), [(12, "entropy"), (5, "entropy"), (5, "topk_margin"), (7, "maskgit_plus")])
def test_answers_are_those_of_dreams_loop(steps: int, alg: str, tmp_path: Path) -> None:
    w, llm, prompt = write(tmp_path, DREAM), LLM(str(tmp_path)), sequence(9)
    params: Any = {"remasking": ALGORITHMS[alg], "denoising_passes": steps}
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, **params))
    wanted = llada.dream_generate(partial(llada.define, DREAM, w), prompt, 12, steps, alg, MASK)
    assert answer.outputs[0].token_ids == wanted


@pytest.mark.parametrize("steps", [5, 12, 40])
def test_answers_are_those_of_dreams_own_order(steps: int, tmp_path: Path) -> None:
    """With many steps, most of them keep nothing, and are not computed."""
    w, llm, prompt = write(tmp_path, DREAM), LLM(str(tmp_path)), sequence(9)
    params = SamplingParams(
        max_tokens=12, temperature=0, ignore_eos=True, seed=4, remasking="origin", denoising_passes=steps
    )
    (answer,) = llm.generate([prompt], params)
    (key,) = llm.frontend.request(prompt, params).noise

    def draw(step: int, position: int) -> float:
        return PassNoise(key.seed, key.choice, step).uniform(position, PURPOSE_ORDER)

    wanted = llada.dream_generate(partial(llada.define, DREAM, w), prompt, 12, steps, "origin", MASK, draw)
    assert answer.outputs[0].token_ids == wanted
    assert 1 < answer.num_passes <= min(steps, 12)


def test_dreams_passes_keep_as_many_tokens_as_its_loop() -> None:
    for masks in (1, 2, 12, 63, 100, 257):
        for steps in (1, 3, 12, 64, 257):
            assert shares_by_time(masks, steps) == kept_by_time(masks, steps)
            assert sum(shares_by_time(masks, steps)) == masks


@pytest.mark.parametrize("name", MODELS)
def test_no_setting_changes_an_answer(name: str, tmp_path: Path) -> None:
    write(tmp_path, MODELS[name])
    report = verify(LLM(str(tmp_path), cache="off").loaded, quick=True)
    assert report.equal
    assert report.complete


def test_configs_that_are_refused(tmp_path: Path) -> None:
    for config, change in (
        (LLADA, {"block_type": "sequential"}),
        (LLADA, {"alibi": True}),
        (LLADA, {"n_kv_heads": 3}),
        (LLADA, {"canvas": 3}),
        (DREAM, {"canvas": 3}),
        (DREAM, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    ):
        write(tmp_path, config)
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=next(iter(change)).replace("n_kv_heads", "n_heads")):
            LLM(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LLADA.items() if k != "mask_token_id"}))
    with pytest.raises(ConfigError, match="mask_token_id is missing"):
        LLM(str(tmp_path))
