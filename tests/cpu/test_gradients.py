"""The dense forward pass is differentiable: gradients of every parameter equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oracle.build import build
from oracle.case import prompts
from oracle.families import CASES
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.weights import load_weights
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.runtime.step import DenseStep

# Biases; softcaps, offsets and windows; fused, interleaved and transposed checkpoint tensors; norms after each
# branch; experts; sinks, and experts in one tensor with biases; latent attention, whose experts are chosen from groups,
# two ways; lightning attention in layers whose residual is normed; gated delta layers, one of each kind, gated
# attention and gated shared experts; rows of every expert's matrix; layers without a token mixer, experts without gates
# and over latents.
NAMES = ["llama_biases", "gemma2", "phi3_partial", "gpt_neox", "gpt2", "olmo2", "qwen3_moe_mixed", "gpt_oss"]
NAMES += ["deepseek_v2", "deepseek_v3", "minimax", "qwen3_next", "qwen3_5_text", "kimi_linear"]
NAMES += ["granitemoehybrid", "nemotron_h_moe", "nemotron_h_latent", "lfm2_moe"]


def load(folder: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """The spec, the table, and the weights as leaves of a graph."""
    checkpoint, files = open_checkpoint(folder), TensorFiles(folder)
    table = open_table("reference")
    weights: Any = load_weights(
        checkpoint.spec, checkpoint.family.names, files, table.memory, "float32", lambda done: None
    )
    return checkpoint.spec, table, {name: w.clone().requires_grad_() for name, w in weights.items()}


def their_gradients(model: nn.Module, sequences: list[list[int]], folder: Path) -> dict[str, np.ndarray]:
    """transformers' gradients by our names: saved in the place of the weights, and cut up by our loader."""
    tokens = torch.tensor([t for s in sequences for t in s[1:]])
    logits = [model(input_ids=torch.tensor([s]), use_cache=False).logits[0, :-1] for s in sequences]
    cross_entropy(torch.cat(logits), tokens).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return {name: w.detach().numpy() for name, w in load(folder)[2].items()}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case, tmp_path / "weights")
    sequences = [prompts(case)[-1][:50], prompts(case)[-2]]  # of unequal lengths, both longer than the windows
    spec, table, weights = load(tmp_path / "weights")
    step = DenseStep.build(sequences, table.memory)
    logits: Any = Model(spec, weights, table, case.max_model_len)(step)
    last = set((np.cumsum(step.lengths) - 1).tolist())  # whose next tokens nobody knows
    rows = [i for i in range(sum(step.lengths)) if i not in last]
    cross_entropy(logits[rows], torch.tensor([t for s in sequences for t in s[1:]])).backward()
    wanted = their_gradients(model, sequences, tmp_path / "gradients")
    assert wanted.keys() == weights.keys()
    for key, weight in weights.items():
        if key.endswith("mlp.choice.bias"):  # it decides a choice, which has no gradient
            assert weight.grad is None
            continue
        assert weight.grad is not None, key
        got, largest = weight.grad.numpy(), float(np.abs(wanted[key]).max())
        if key.endswith("mixer.k.bias") and not spec.ropes():
            # It moves all scores of a query alike, which softmax does not see: the gradient is zero but for noise.
            assert max(largest, float(np.abs(got).max())) < 1e-6
            continue
        assert largest > 1e-5, key
        np.testing.assert_allclose(got, wanted[key], rtol=1e-3, atol=1e-5 * largest, err_msg=key)
