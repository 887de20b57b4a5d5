"""The dense forward pass is differentiable: gradients of every parameter equal transformers'."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oracle.build import Float64, build, double
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
# and over latents; gated linear recurrent units.
NAMES = ["llama_biases", "gemma2", "phi3_partial", "gpt_neox", "gpt2", "olmo2", "qwen3_moe_mixed", "gpt_oss"]
NAMES += ["deepseek_v2", "deepseek_v3", "minimax", "qwen3_next", "qwen3_5_text", "kimi_linear"]
NAMES += ["granitemoehybrid", "nemotron_h_moe", "nemotron_h_latent", "lfm2_moe", "recurrent_gemma"]


# The float32 gradients of these cases are compared too: their activations have no corners, where the gradient jumps.
SMOOTH = ["llama_biases", "qwen3_moe_mixed", "deepseek_v3", "qwen3_next"]

Gradients = dict[str, np.ndarray]


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return the spec, the table, and the weights as leaves of a graph."""
    checkpoint, files = open_checkpoint(folder), TensorFiles(folder)
    table = open_table("reference", exact=dtype is torch.float64)
    weights: Any = load_weights(
        checkpoint.spec, checkpoint.family.names, files, table.memory, "float32", lambda done: None
    )
    return checkpoint.spec, table, {name: w.to(dtype, copy=True).requires_grad_() for name, w in weights.items()}


def next_tokens(sequences: list[list[int]]) -> Tensor:
    return torch.tensor([t for s in sequences for t in s[1:]])


def their_gradients(model: nn.Module, sequences: list[list[int]], folder: Path) -> Gradients:
    """Return transformers' gradients by our names: they are saved as if they were weights, and our loader cuts them."""
    model = copy.deepcopy(model)
    with Float64() if next(model.parameters()).dtype is torch.float64 else nullcontext():
        logits = [model(input_ids=torch.tensor([s]), use_cache=False).logits[0, :-1] for s in sequences]
    cross_entropy(torch.cat(logits), next_tokens(sequences)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.float().save_pretrained(folder)
    return {name: w.detach().numpy() for name, w in load(folder, torch.float32)[2].items()}


def our_gradients(folder: Path, sequences: list[list[int]], max_len: int, dtype: torch.dtype) -> Gradients:
    """Return our gradients, except for a bias that only decides a choice, which has none."""
    spec, table, weights = load(folder, dtype)
    step = DenseStep.build(sequences, table.memory)
    logits: Any = Model(spec, weights, table, max_len)(step)
    last = set((np.cumsum(step.lengths) - 1).tolist())  # the last token of a sequence has no next token
    rows = [i for i in range(sum(step.lengths)) if i not in last]
    cross_entropy(logits[rows], next_tokens(sequences)).backward()
    choice = {name: w for name, w in weights.items() if name.endswith("mlp.choice.bias")}
    assert all(w.grad is None for w in choice.values())
    found = {}
    for name, weight in weights.items():
        if name not in choice:
            assert weight.grad is not None, name
            found[name] = weight.grad.float().numpy()
    return found


def differences(got: Gradients, wanted: Gradients) -> dict[str, float]:
    """Return the largest difference of each parameter, as a share of its largest gradient."""
    found = {}
    for name, gradient in got.items():
        largest = float(np.abs(wanted[name]).max())
        assert largest > 1e-5, name
        found[name] = float(np.abs(gradient - wanted[name]).max()) / largest
    return found


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    """Computed in float64, so that a router or a clamp decides equally on every CPU: a number of gpt_oss is 1.6e-7 from
    its limit, where the gradient jumps.
    """
    case, sequences = CASES[name], compared(name)
    model = build(case, tmp_path / "weights")
    wanted = their_gradients(double(model), sequences, tmp_path / "gradients")
    got = our_gradients(tmp_path / "weights", sequences, case.max_model_len, torch.float64)
    assert {k for k in wanted if not k.endswith("mlp.choice.bias")} == got.keys()
    if not open_checkpoint(tmp_path / "weights").spec.ropes():
        # A key's bias moves all scores of a query equally, and softmax ignores that: the gradient is zero except for
        # noise.
        for key in [key for key in got if key.endswith("mixer.k.bias")]:
            assert max(np.abs(wanted.pop(key)).max(), np.abs(got.pop(key)).max()) < 1e-12
    for key, difference in differences(got, wanted).items():
        # rotations start from float32 frequencies, whose last bit may differ from transformers'
        assert difference < 1e-5, key


@pytest.mark.parametrize("name", SMOOTH)
def test_float32_gradients_are_as_exact_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Training computes in float32. The tolerance is ten times the difference of transformers' own float32 from its
    float64.
    """
    case, sequences = CASES[name], compared(name)
    model = build(case, tmp_path / "weights")
    exact = their_gradients(double(model), sequences, tmp_path / "exact")
    single = their_gradients(model, sequences, tmp_path / "single")
    got = our_gradients(tmp_path / "weights", sequences, case.max_model_len, torch.float32)
    noise = max(differences({key: single[key] for key in got}, exact).values())
    assert max(differences(got, exact).values()) < 10 * noise < 1e-3


def compared(name: str) -> list[list[int]]:
    """Two sequences of unequal lengths, both longer than the windows."""
    return [prompts(CASES[name])[-1][:50], prompts(CASES[name])[-2]]
