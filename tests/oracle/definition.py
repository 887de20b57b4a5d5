"""A whole model computed from its definition in float64, by plain loops over layers, heads and queries.

It judges layers that no class of transformers has, and shares no code with them. Attention is written from the papers.
A layer without key and value projections uses the keys and values that its owner computed from its own normalized input
(arXiv:2405.12981, section 2). A pattern is the list of keys that a query attends to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle import definition_recurrent
from ridgeline.spec import (
    Attention,
    Blocks,
    Chunked,
    DeepNormLayer,
    Dilated,
    FirstTokens,
    GatedMLP,
    LayerNorm,
    LinearScaling,
    ModelSpec,
    MoE,
    Norm,
    ParallelLayer,
    Rope,
    SharedAttention,
    Strided,
    WholeSequence,
)

Weights = dict[str, Tensor]


def normalize(norm: Norm | None, x: Tensor, w: Weights, name: str) -> Tensor:
    if norm is None:
        return x
    if isinstance(norm, LayerNorm):
        centered = x - x.mean(-1, keepdim=True)
        spread = (centered**2).mean(-1, keepdim=True) + norm.eps
        return centered / spread.sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
    return x / ((x**2).mean(-1, keepdim=True) + norm.eps).sqrt() * w[f"{name}.weight"]


def project(x: Tensor, w: Weights, name: str) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def turn(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotate x [T, heads, D]: each pair (i, i + dim / 2) by the position times its frequency."""
    if rope is None:
        return x
    assert rope.dim == x.shape[-1] and not rope.interleaved
    frequencies = rope.theta ** (-torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    if isinstance(rope.scaling, LinearScaling):
        frequencies = frequencies / rope.scaling.factor
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def heads_of(x: Tensor, a: Attention, w: Weights, at: str, name: str) -> Tensor:
    num = a.num_heads if name == "q" else a.num_kv_heads
    out = project(x, w, f"{at}.{name}")
    if a.qk_norm and a.qk_norm_over == "all_heads":
        out = normalize(a.qk_norm, out, w, f"{at}.{name}_norm")
    out = out.view(len(x), num, a.head_dim)
    if a.qk_norm and a.qk_norm_over == "head":
        out = normalize(a.qk_norm, out, w, f"{at}.{name}_norm")
    return turn(out, a.rope)


def seen_by(a: Attention, i: int, count: int | None = None) -> list[int]:
    """Return the keys that the token at position i attends to. count: tokens of its sequence; None: i + 1."""
    count = i + 1 if count is None else count
    if isinstance(a.sight, WholeSequence):
        return list(range(count))
    if isinstance(a.sight, Blocks):
        return [j for j in range(count) if j // a.sight.size <= i // a.sight.size]
    if a.window is None:
        return list(range(i + 1))
    near = set(range(max(0, i - a.window + 1), i + 1))
    match a.pattern:
        case FirstTokens(count):
            near |= set(range(min(count, i + 1)))
        case Dilated(step):
            near = {i - step * j for j in range(a.window) if step * j <= i}
        case Strided(stride):
            near |= {j for j in range(i + 1) if (i - j) % stride == 0}
        case Chunked():
            near = {j for j in range(i + 1) if j // a.window == i // a.window}
    return sorted(near)


def attend(a: Attention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute attention for one head and one query after the other."""
    rows = []
    for i in range(len(q)):
        keys = seen_by(a, i, len(q))
        for h in range(a.num_heads):
            own = h // (a.num_heads // a.num_kv_heads)
            scores = k[keys, own] @ q[i, h] * a.scale
            if a.softcap:
                scores = a.softcap * torch.tanh(scores / a.softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[h : h + 1]))
            shares = torch.softmax(scores, 0)[: len(keys)]
            rows.append(shares @ v[keys, own])
    return torch.stack(rows).view(len(q), -1)


def mix_channels(mlp: Any, x: Tensor, w: Weights, at: str) -> Tensor:
    if isinstance(mlp, GatedMLP):
        gate = project(x, w, f"{at}.gate")
        return project(gate * torch.sigmoid(gate) * project(x, w, f"{at}.up"), w, f"{at}.down")
    assert isinstance(mlp, MoE)
    rows = []
    for row, logits in zip(x, project(x, w, f"{at}.router"), strict=True):
        best = np.argsort(-logits.detach().numpy(), kind="stable")[: mlp.num_experts_per_tok].tolist()
        out = torch.zeros_like(row)
        for e, share in zip(best, torch.softmax(logits[best], 0), strict=True):
            gate, up, down = (w[f"{at}.experts.{n}.weight"][e] for n in ("gate", "up", "down"))
            out = out + share * (down @ ((gate @ row) * torch.sigmoid(gate @ row) * (up @ row)))
        rows.append(out)
    return torch.stack(rows)


def mix_tokens(mixer: Any, i: int, h: Tensor, w: Weights, owned: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Mix the tokens of one layer. owned: keys and values of earlier layers, to which this layer's are added."""
    at = f"layers.{i}.mixer"
    if isinstance(mixer, definition_recurrent.KINDS):
        return definition_recurrent.mix(mixer, h, w, at)
    a = mixer.attention if isinstance(mixer, SharedAttention) else mixer
    if isinstance(mixer, SharedAttention):
        keys, values = owned[mixer.source]
    else:
        values = project(h, w, f"{at}.v").view(len(h), a.num_kv_heads, a.head_dim)
        keys, values = owned[i] = heads_of(h, a, w, at, "k"), values
    return project(attend(a, heads_of(h, a, w, at, "q"), keys, values, w.get(f"{at}.sinks")), w, f"{at}.o")


def define(spec: ModelSpec, w: Weights, tokens: list[int]) -> Tensor:
    """Return the logits [T, vocabulary] of one sequence."""
    x, owned = w["embed.weight"][tokens], {}
    for i, layer in enumerate(spec.layers):
        at = f"layers.{i}"
        h = normalize(layer.pre_norm, x, w, f"{at}.mixer_norm")
        mixed = mix_tokens(layer.mixer, i, h, w, owned)
        if isinstance(layer, DeepNormLayer):
            h = normalize(layer.pre_norm, layer.mixer_alpha * h + layer.mixer_beta * mixed, w, f"{at}.mlp_norm")
            x = layer.mlp_alpha * h + layer.mlp_beta * mix_channels(layer.mlp, h, w, f"{at}.mlp")
            continue
        if isinstance(layer, ParallelLayer):
            x = x + mixed + mix_channels(layer.mlp, normalize(layer.pre_norm, x, w, f"{at}.mlp_norm"), w, f"{at}.mlp")
            continue
        x = x + layer.residual_scale * normalize(layer.post_norm, mixed, w, f"{at}.mixer_post_norm")
        if layer.mlp is None:
            continue
        out = mix_channels(layer.mlp, normalize(layer.pre_norm, x, w, f"{at}.mlp_norm"), w, f"{at}.mlp")
        x = x + layer.residual_scale * normalize(layer.post_norm, out, w, f"{at}.mlp_post_norm")
    return project(normalize(spec.norm, x, w, "norm"), w, "head")


def wide(weights: dict[str, np.ndarray]) -> Weights:
    return {name: torch.from_numpy(x).double() for name, x in weights.items()}
