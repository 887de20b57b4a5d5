"""Heads for speculative decoding from their definitions in float64, and tiny random ones in the keys of every format.

A definition reads a checkpoint's own tensors and config, and shares no code with the readers. The heads' values are
away from every default, so that a tensor or a field that is ignored changes the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oracle.case import VOCAB

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 64, 88, 4, 2, 24, 97
Tensors = Mapping[str, Tensor]


class Given(NamedTuple):
    """Inputs of an EAGLE head: the tokens after each position [T], and the target's streams [T, width] at first.

    embedding, head: the target's matrices. steps: number of draft steps that follow, each with one token more, whose
    feature is the head's last output.
    """

    tokens: list[int]
    streams: list[Tensor]
    embedding: Tensor
    head: Tensor
    steps: int = 0


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate heads [heads, D]: numbers i and i + D / 2 by the position times theta^(-2i / D)."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    a, b = x[:, :half], x[:, half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Layer:
    """A decoder layer, one position after the other."""

    def __init__(self, t: Tensors, c: Mapping[str, Any], at: str) -> None:
        self.t, self.c, self.at = t, c, at
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.t.get(f"{self.at}.{name}.bias")
        out = self.t[f"{self.at}.{name}.weight"] @ x
        return out if bias is None else out + bias

    def heads(self, name: str, x: Tensor, count: int) -> Tensor:
        out = self.linear(f"self_attn.{name}_proj", x).view(count, -1)
        norm = self.t.get(f"{self.at}.self_attn.{name}_norm.weight")
        return out if norm is None else rms(out, norm, self.c["rms_norm_eps"])

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the output at the next position. x: the numbers that q, k and v read."""
        c, position = self.c, len(self.keys)
        q = rotate(self.heads("q", x, c["num_attention_heads"]), position, c["rope_theta"])
        self.keys.append(rotate(self.heads("k", x, c["num_key_value_heads"]), position, c["rope_theta"]))
        self.values.append(self.heads("v", x, c["num_key_value_heads"]))
        group, rows = c["num_attention_heads"] // c["num_key_value_heads"], []
        for h, query in enumerate(q):
            scores = torch.stack([k[h // group] @ query for k in self.keys]) / len(query) ** 0.5
            rows.append(sum(p * v[h // group] for p, v in zip(scores.softmax(0), self.values, strict=True)))
        out = residual + self.linear("self_attn.o_proj", torch.cat(rows))
        y = rms(out, self.t[f"{self.at}.post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate = self.linear("mlp.gate_proj", y)
        return out + self.linear("mlp.down_proj", gate * torch.sigmoid(gate) * self.linear("mlp.up_proj", y))


def follow(given: Given, first: list[Tensor], run: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """Return the outputs of all rows: those of the target's features, then those of the head's own."""
    outputs = [run(token, feature) for token, feature in zip(given.tokens, first, strict=False)]
    for token in given.tokens[len(first) :]:
        outputs.append(run(token, outputs[-1]))
    return outputs


def eagle(t: Tensors, c: Mapping[str, Any], given: Given) -> Tensor:
    """Return the logits [T + steps, vocabulary] of EAGLE-1 (arXiv:2401.15077)."""
    layer, embedding = Layer(t, c, "layers.0"), t.get("embed_tokens.weight", given.embedding)

    def run(token: int, feature: Tensor) -> Tensor:
        x = t["fc.weight"] @ torch.cat((embedding[token], feature)) + t.get("fc.bias", torch.zeros(WIDTH))
        return layer(x, x)

    return torch.stack(follow(given, list(given.streams[0]), run)) @ given.head.T


def eagle3(t: Tensors, c: Mapping[str, Any], given: Given) -> Tensor:
    """Return the logits [T + steps, draft vocabulary] of EAGLE-3 (arXiv:2503.01840) with the options of speculators."""
    inner = {**c, **c.get("transformer_layer_config", {})}
    at = "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0"
    eps, layer = inner["rms_norm_eps"], Layer(t, inner, at)
    embedding = t.get("embed_tokens.weight", given.embedding)
    streams = given.streams
    if c.get("fc_norm"):
        streams = [rms(x, t[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(streams)]
    joined = torch.cat(streams, -1)
    if c.get("norm_before_fc"):
        joined = rms(joined, t["input_norm.weight"], eps)

    def run(token: int, feature: Tensor) -> Tensor:
        hidden = rms(feature, t[f"{at}.hidden_norm.weight"], eps)
        beside = rms(embedding[token], t[f"{at}.input_layernorm.weight"], eps)
        out = layer(torch.cat((beside, hidden)), hidden if c["norm_before_residual"] else feature)
        return rms(out, t["norm.weight"], eps) if c.get("norm_output") else out

    outputs = torch.stack(follow(given, list(joined @ t["fc.weight"].T), run))
    return (outputs if c.get("norm_output") else rms(outputs, t["norm.weight"], eps)) @ t["lm_head.weight"].T


def medusa(t: Tensors, c: Mapping[str, Any], hidden: Tensor) -> list[Tensor]:
    """Return the logits [n, vocabulary] of each head (arXiv:2401.10774), from the keys of Medusa's own files."""
    found = []
    for h in range(c["medusa_num_heads"]):
        x = hidden
        for b in range(c["medusa_num_layers"]):
            y = x @ t[f"{h}.{b}.linear.weight"].T + t[f"{h}.{b}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        found.append(x @ t[f"{h}.{c['medusa_num_layers']}.weight"].T)
    return found


def vllm_medusa(t: Tensors, c: Mapping[str, Any], hidden: Tensor) -> list[Tensor]:
    """Return the logits [n, draft vocabulary] of each head, from vLLM's keys."""
    t, found = {name.removeprefix("medusa_heads."): x for name, x in t.items()}, []
    for h in range(c["num_heads"]):
        x = hidden
        for b in range(c["num_hidden_layers"]):
            y = x @ t[f"blocks.{h}.layers.{b}.weight"].T + t.get(f"blocks.{h}.layers.{b}.bias", torch.zeros(WIDTH))
            x = x + y * torch.sigmoid(y)
        matrix = t["lm_head.weight"] if c["original_lm_head"] else t[f"lm_heads.{h}.weight"]
        found.append(x @ (matrix if len(matrix) == c["truncated_vocab_size"] else matrix[t["token_map"].long()]).T)
    return found


# ---- tiny random heads -----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A head in the keys of a format.

    sizes: shape of each tensor of floats. define: its definition. aux: ids of the streams that it reads, None for the
    default or where it reads the last one. gain: size of matrices, so small for EAGLE-1 that its features, which no
    norm bounds, do not grow from draft to draft.
    """

    format: str
    config: dict[str, Any]
    sizes: dict[str, tuple[int, ...]]
    define: Callable[..., Any]
    file: str = "model.safetensors"
    aux: tuple[int, ...] | None = None
    streams: int = 1
    width: int = WIDTH
    gain: float = 1.5


LAYER = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": 0.01, "rope_theta": 3000.0, "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}  # fmt: skip
EMBED = {"embed_tokens.weight": (VOCAB, WIDTH)}


def layer(at: str, reads: int, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False) -> dict:
    """Return the shapes of a decoder layer. reads: numbers that q, k and v read."""
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    sizes: dict[str, tuple[int, ...]] = {f"{at}.self_attn.{n}_proj.weight": (r, reads) for n, r in rows.items()}
    sizes |= {f"{at}.self_attn.{n}_proj.bias": (r,) for n, r in rows.items() if qkv_bias}
    sizes |= {f"{at}.self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk" if qk_norm}
    sizes |= {f"{at}.self_attn.o_proj.weight": (WIDTH, rows["q"]), f"{at}.post_attention_layernorm.weight": (WIDTH,)}
    sizes |= {f"{at}.self_attn.o_proj.bias": (WIDTH,)} if out_bias else {}
    sizes |= {f"{at}.mlp.{n}_proj.weight": (INNER, WIDTH) for n in ("gate", "up")}
    return sizes | {f"{at}.mlp.down_proj.weight": (WIDTH, INNER)}


def eagle3_sizes(at: str, draft_vocab: int, streams: int = 3, width: int = WIDTH, **layer_parts: bool) -> dict:
    norms = {f"{at}.{n}.weight": (WIDTH,) for n in ("input_layernorm", "hidden_norm")}
    ends = {"fc.weight": (WIDTH, streams * width), "norm.weight": (WIDTH,), "lm_head.weight": (draft_vocab, WIDTH)}
    return {**norms, **ends, **layer(at, 2 * WIDTH, **layer_parts)}


def speculators(**fields: Any) -> dict[str, Any]:
    layer_config = {**LAYER, **fields.pop("layer", {})}
    return {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "speculators_version": "0.9.0",
        "draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "target_hidden_size": None, "embed_requires_grad": False,
        "transformer_layer_config": layer_config,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        **fields,
    }  # fmt: skip


AUX = "eagle_aux_hidden_state_layer_ids"
BLOCKS = {f"{h}.{b}.linear.weight": (WIDTH, WIDTH) for h in range(3) for b in range(2)}
CASES = {
    "medusa": Case(
        "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "some/target"},
        {**BLOCKS, **{name.replace("weight", "bias"): (WIDTH,) for name in BLOCKS},
         **{f"{h}.2.weight": (VOCAB, WIDTH) for h in range(3)}},
        medusa, "medusa_lm_head.safetensors",
    ),
    "vllm_medusa": Case(
        "vllm-medusa",
        {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": WIDTH, "vocab_size": VOCAB,
         "truncated_vocab_size": DRAFT_VOCAB, "num_heads": 3, "num_hidden_layers": 1, "original_lm_head": False},
        {**{f"medusa_heads.blocks.{h}.layers.0.weight": (WIDTH, WIDTH) for h in range(3)},
         **{f"medusa_heads.lm_heads.{h}.weight": (VOCAB, WIDTH) for h in range(3)}},
        vllm_medusa,
    ),
    "vllm_medusa_shared": Case(
        "vllm-medusa",
        {"model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCAB, "truncated_vocab_size": VOCAB,
         "num_heads": 2, "num_hidden_layers": 1, "original_lm_head": True, "medusa_fc_bias": True},
        {**{f"blocks.{h}.layers.0.weight": (WIDTH, WIDTH) for h in range(2)},
         **{f"blocks.{h}.layers.0.bias": (WIDTH,) for h in range(2)}, "lm_head.weight": (VOCAB, WIDTH)},
        vllm_medusa,
    ),
    "eagle": Case(
        "eagle", {**LAYER, "architectures": ["LlamaForCausalLM"], "bias": True},
        {**EMBED, "fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,), **layer("layers.0", WIDTH)}, eagle, gain=0.7,
    ),
    "eagle_plain": Case(
        "eagle", {**LAYER, "bias": False, "qkv_bias": True, "target_layer_count": 6},
        {"fc.weight": (WIDTH, 2 * WIDTH), **layer("layers.0", WIDTH, qkv_bias=True)}, eagle, gain=0.7,
    ),
    "eagle3": Case(
        "eagle3",
        {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB,
         "norm_before_residual": True, "eagle_config": {AUX: [0, 1, 5], "use_aux_hidden_state": True}},
        {**EMBED, **eagle3_sizes("midlayer", DRAFT_VOCAB)}, eagle3, aux=(1, 2, 6), streams=3,
    ),
    "eagle3_whole": Case(
        "eagle3",
        {**LAYER, "draft_vocab_size": VOCAB, "norm_before_residual": False, "attention_bias": True, AUX: [0, 3]},
        eagle3_sizes("layers.0", VOCAB, 2, qkv_bias=True, out_bias=True), eagle3, aux=(0, 3), streams=2,
    ),
    "speculators": Case(
        "speculators", speculators(fc_norm=True, norm_output=True, **{AUX: [2, 4, 6]}),
        {**EMBED, **eagle3_sizes("layers.0", DRAFT_VOCAB), **{f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}},
        eagle3, aux=(2, 4, 6), streams=3,
    ),
    "speculators_qwen3": Case(
        "speculators",
        speculators(norm_before_residual=True, norm_before_fc=True, layer={"model_type": "qwen3"}, **{AUX: [1, 5, 6]}),
        {**EMBED, **eagle3_sizes("layers.0", DRAFT_VOCAB, qk_norm=True), "input_norm.weight": (3 * WIDTH,)},
        eagle3, aux=(1, 5, 6), streams=3,
    ),
}  # fmt: skip


def draw(case: Case, seed: int = 1) -> dict[str, np.ndarray]:
    """Return random tensors of a head, by the keys of its format."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in case.sizes.items():
        if len(shape) == 1:
            centre, spread = (0.0, 0.5) if name.endswith("bias") else (1.0, 0.3)
            found[name] = rng.normal(centre, spread, shape)
        elif name.startswith("embed_tokens"):
            found[name] = rng.normal(0.0, 1.0, shape)
        else:
            found[name] = rng.normal(0.0, case.gain * shape[1] ** -0.5, shape)
    tensors = {name: x.astype(np.float32) for name, x in found.items()}
    chosen = np.sort(rng.choice(VOCAB, DRAFT_VOCAB, replace=False))
    if case.format == "vllm-medusa" and case.config["truncated_vocab_size"] < VOCAB:
        tensors["medusa_heads.token_map"] = rng.permutation(chosen)
    if case.define is eagle3 and case.config["draft_vocab_size"] < VOCAB:
        tensors["d2t"] = chosen - np.arange(DRAFT_VOCAB)
        tensors["t2d"] = np.isin(np.arange(VOCAB), chosen)
    return tensors


def write(case: Case, folder: Path, tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Tensors:
    """Write a head with safetensors' own writer, and return its tensors in float64. config: fields that replace others;
    None removes one.
    """
    from safetensors.numpy import save_file

    given = draw(case) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(given), folder / case.file)
    removed = {name for name, value in config.items() if value is None}
    fields = {name: value for name, value in {**case.config, **config}.items() if name not in removed}
    (folder / "config.json").write_text(json.dumps(fields))
    return {n: torch.from_numpy(x).double() if x.dtype == np.float32 else torch.from_numpy(x) for n, x in given.items()}
