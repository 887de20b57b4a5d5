"""LLaDA2's forward pass from its published description, in float64, by plain loops over tokens, heads and experts.

No class of transformers has it. The definition reads a config and tensors by their names in the published files; it
shares no code with the engine, and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a published checkpoint with this config."""
    width, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    inner, experts = config["moe_intermediate_size"], config["num_experts"]
    found: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (vocab, width), "model.norm.weight": (width,), "lm_head.weight": (vocab, width)
    }  # fmt: skip

    def mlp(at: str, size: int) -> None:
        found[f"{at}.gate_proj.weight"] = found[f"{at}.up_proj.weight"] = (size, width)
        found[f"{at}.down_proj.weight"] = (width, size)

    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        found[f"{at}.input_layernorm.weight"] = found[f"{at}.post_attention_layernorm.weight"] = (width,)
        rows = (heads + 2 * kv) * head
        found[f"{at}.attention.query_key_value.weight"] = (rows, width)
        found[f"{at}.attention.dense.weight"] = (width, heads * head)
        if config["use_qkv_bias"]:
            found[f"{at}.attention.query_key_value.bias"] = (rows,)
        if config["use_bias"]:
            found[f"{at}.attention.dense.bias"] = (width,)
        if config["use_qk_norm"]:
            found[f"{at}.attention.query_layernorm.weight"] = found[f"{at}.attention.key_layernorm.weight"] = (head,)
        if i < config["first_k_dense_replace"]:
            mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        found[f"{at}.mlp.gate.weight"], found[f"{at}.mlp.gate.expert_bias"] = (experts, width), (experts,)
        for e in range(experts):
            mlp(f"{at}.mlp.experts.{e}", inner)
        if config["num_shared_experts"]:
            mlp(f"{at}.mlp.shared_experts", inner * config["num_shared_experts"])
    return found


def draw(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return random tensors in float32 whose parts all matter: sharp matrices, norms and biases away from 1 and 0."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        if name.endswith("norm.weight"):
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("expert_bias"):
            value = rng.normal(0.0, 0.2, shape)
        elif name.endswith("bias"):
            value = rng.normal(0.0, 0.5, shape)
        else:
            value = rng.normal(0.0, 1.0 if "embeddings" in name else 1.5 * shape[-1] ** -0.5, shape)
        found[name] = value.astype(np.float32)
    return found


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float, share: float) -> Tensor:
    """Rotate the first `share` of a head [head_dim]: number i with number i + half of that part."""
    size = int(len(x) * share)
    half, out = size // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / size), dtype=torch.float64)
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def mlp(x: Tensor, w: Tensors, at: str) -> Tensor:
    gate = w[f"{at}.gate_proj.weight"] @ x
    return w[f"{at}.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w[f"{at}.up_proj.weight"] @ x))


def experts(x: Tensor, config: Mapping[str, Any], w: Tensors, at: str) -> Tensor:
    """Return the experts' sum for one token: groups rank by their two best, and the bias only changes the choice."""
    scores = torch.sigmoid(w[f"{at}.gate.weight"] @ x)
    wanted = (scores + w[f"{at}.gate.expert_bias"]).tolist()
    size = len(wanted) // config["n_group"]
    groups = [wanted[g * size : (g + 1) * size] for g in range(config["n_group"])]
    ranks = sorted(range(len(groups)), key=lambda g: -sum(sorted(groups[g])[-2:]))[: config["topk_group"]]
    allowed = [e for g in ranks for e in range(g * size, (g + 1) * size)]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: config["num_experts_per_tok"]]
    total = scores[chosen].sum() if len(chosen) > 1 else 1.0
    out = sum((scores[e] / total * mlp(x, w, f"{at}.experts.{e}") for e in chosen), torch.zeros_like(x))
    out = out * config["routed_scaling_factor"]
    return out + mlp(x, w, f"{at}.shared_experts") if config["num_shared_experts"] else out


def attend(h: Tensor, config: Mapping[str, Any], w: Tensors, at: str, block: int) -> Tensor:
    """Return attention for all tokens [T, width]: a token sees its own block and the blocks before it."""
    heads, kv, head, eps = (
        config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    )
    fused = h @ w[f"{at}.query_key_value.weight"].T + w.get(f"{at}.query_key_value.bias", torch.zeros(1))
    parts = fused.view(len(h), heads + 2 * kv, head)
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv], parts[:, heads + kv :]
    if config["use_qk_norm"]:
        q, k = norm(q, w[f"{at}.query_layernorm.weight"], eps), norm(k, w[f"{at}.key_layernorm.weight"], eps)
    turn = (config["rope_theta"], config["partial_rotary_factor"])
    q = torch.stack([torch.stack([rotate(x, i, *turn) for x in row]) for i, row in enumerate(q)])
    k = torch.stack([torch.stack([rotate(x, i, *turn) for x in row]) for i, row in enumerate(k)])
    rows = []
    for i in range(len(h)):
        seen = min(len(h), (i // block + 1) * block)
        out = []
        for n in range(heads):
            own = n // (heads // kv)
            out.append(torch.softmax(k[:seen, own] @ q[i, n] * head**-0.5, 0) @ v[:seen, own])
        rows.append(torch.cat(out))
    return torch.stack(rows) @ w[f"{at}.dense.weight"].T + w.get(f"{at}.dense.bias", torch.zeros(1))


def define(config: Mapping[str, Any], w: Tensors, tokens: list[int], block: int) -> Tensor:
    """Return the logits [T, vocabulary] of one sequence. w: tensors in float64. block: tokens of a block."""
    eps, x = config["rms_norm_eps"], w["model.word_embeddings.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        x = x + attend(norm(x, w[f"{at}.input_layernorm.weight"], eps), config, w, f"{at}.attention", block)
        h = norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        is_dense = i < config["first_k_dense_replace"]
        x = x + torch.stack([mlp(t, w, f"{at}.mlp") if is_dense else experts(t, config, w, f"{at}.mlp") for t in h])
    return norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def fill(config: Mapping[str, Any], w: Tensors, prompt: list[int], count: int, block: int, threshold: float,
    mask: int) -> list[int]:  # fmt: skip
    """Return a greedy answer by the published rule: tokens above the threshold are kept, or else the likeliest one."""
    x = list(prompt)
    while len(x) < len(prompt) + count:
        x += [mask] * (block - len(x) % block)
        while mask in x[len(prompt) :]:
            logits = define(config, w, x, block)
            logits[:, mask] = -torch.inf
            best = {i: torch.softmax(logits[i], 0).max(0) for i in range(len(prompt), len(x)) if x[i] == mask}
            kept = [i for i in best if best[i].values > threshold] or [max(best, key=lambda i: best[i].values)]
            for i in kept:
                x[i] = int(best[i].indices)
    return x[len(prompt) : len(prompt) + count]
