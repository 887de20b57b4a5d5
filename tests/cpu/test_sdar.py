"""SDAR against transformers: it is Qwen 3 with a mask of blocks, which transformers' Qwen 3 takes as an argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from oracle.build import build
from oracle.case import prompts
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.spec import Blocks, MaskedDiffusion

TOLERANCE = 1e-4
MASK = 3


def rename(folder: Path, size: int, **more: Any) -> None:
    """Make the config of a Qwen 3 that of an SDAR. A value None leaves a field out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": size, "mask_token_id": MASK,
        "fuse_cross_entropy": True, "attn_implementation": "flex_attention", **more,
    }  # fmt: skip
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def block_logits(model: Any, tokens: list[int], size: int) -> np.ndarray:
    """Return transformers' logits with a mask that shows each token its block and the blocks before it."""
    block = torch.arange(len(tokens)) // size
    seen = block[None, :] <= block[:, None]
    mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)[None, None]
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]
    return np.asarray(found.double().numpy())


@pytest.mark.parametrize("size", [1, 4, 16])
def test_logits_and_answers_equal_transformers(size: int, tmp_path: Path) -> None:
    case = CASES["qwen3"]
    build(case, tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    model.eval()
    rename(tmp_path, size)
    llm = LLM(str(tmp_path))
    assert llm.loaded.spec.sight == Blocks(size)
    assert llm.loaded.spec.diffusion == MaskedDiffusion(MASK)
    given = prompts(case)
    for got, tokens in zip(llm.logits(given), given, strict=True):
        assert np.abs(got - block_logits(model, list(tokens), size)).max() < TOLERANCE
    known = [token for token in given[1] if token != MASK][:9]
    (answer,) = llm.generate([known], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert answer.outputs[0].token_ids == filled(model, known, 12, size)


def filled(model: Any, known: list[int], count: int, size: int) -> list[int]:
    """Return the answer by SDAR's rule: the likeliest token of the open block is kept, one in each pass."""
    tokens = list(known)
    while len(tokens) < len(known) + count:
        start = len(tokens)
        tokens += [MASK] * (size - start % size)
        while MASK in tokens:
            logits = block_logits(model, tokens, size)
            logits[:, MASK] = -np.inf
            best = {i: logits[i] for i in range(start, len(tokens)) if tokens[i] == MASK}
            chances = {i: 1 / np.exp(row - row.max()).sum() for i, row in best.items()}
            at = max(chances, key=lambda i: chances[i])
            tokens[at] = int(best[at].argmax())
    return tokens[len(known) : len(known) + count]


def test_a_config_without_its_blocks_is_refused(tmp_path: Path) -> None:
    build(CASES["qwen3"], tmp_path)
    for missing in ("block_size", "mask_token_id"):
        rename(tmp_path, 4, **{missing: None})
        with pytest.raises(ConfigError, match=missing):
            LLM(str(tmp_path))
    rename(tmp_path, 4, mask_token_id=10**6)
    with pytest.raises(ConfigError, match="mask_token 1000000 is not below vocab_size"):
        LLM(str(tmp_path))
    rename(tmp_path, 4, canvas=3)
    with pytest.raises(ConfigError, match="canvas"):
        LLM(str(tmp_path))


def test_a_recommended_penalty_is_named_and_not_applied(tmp_path: Path) -> None:
    """Every request was refused for a penalty that only generation_config.json asked for."""
    build(CASES["qwen3"], tmp_path)
    rename(tmp_path, 4)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.1, "temperature": 0.5}')
    llm = LLM(str(tmp_path))
    assert "not applied: repetition_penalty" in " ".join(llm.loaded.notes)
    assert llm.loaded.checkpoint.sampling_defaults == {"temperature": 0.5}
    assert llm.generate([[5, 6, 7]])[0].outputs[0].token_ids
