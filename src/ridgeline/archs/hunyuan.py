"""Hunyuan V1, dense and with experts: heads are rotated before their norm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, rms_norm
from ridgeline.archs.moe import QWEN_NAMES
from ridgeline.archs.names import LLAMA
from ridgeline.archs.rope import SCALINGS, Rotation, read_rope
from ridgeline.spec import Attention, Layer, ModelSpec, MoE, RMSNorm, Rope

# Fields of a rotation that only other scalings read; published files have them beside `alpha`.
ROTATION = ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")


def hunyuan_v1_dense(c: Config) -> ModelSpec:
    """Hunyuan 0.5B to 7B (Tencent, 2025)."""
    norm, mixer = _attention(c)
    return decoder(c, (Layer(mixer, gated_mlp(c), norm),) * c.get_layer_count(), norm, max_len=_context(c))


def hunyuan_v1_moe(c: Config) -> ModelSpec:
    """Hunyuan A13B: experts and an equally large shared one in every layer."""
    c.rename({"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"})
    (norm, mixer), dense = _attention(c), gated_mlp(c)
    experts, chosen = _of_layers(c, "num_experts"), _of_layers(c, "moe_topk")
    layers = tuple(
        Layer(mixer, MoE(count, best, dense.intermediate_size, dense.activation, shared=dense), norm)
        for count, best in zip(experts, chosen, strict=True)
    )
    return decoder(c, layers, norm, max_len=_context(c))


def _attention(c: Config) -> tuple[RMSNorm, Attention]:
    for name, value in (("use_qk_norm", True), ("use_cla", False), ("norm_type", "rms"), ("mlp_bias", False)):
        c.expect(name, value)
    heads, norm, bias = Heads.read(c, null_head_dim=True), rms_norm(c, 1e-5), c.get_bool("attention_bias", False)
    mixer = attention(heads, _rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias, qk_norm=norm, norms_rotated=True)
    return norm, mixer


def _rope(c: Config, head_dim: int) -> Rope:
    """Return the rotation. The kind "dynamic" with `alpha` has a larger base that follows no length."""
    old, new = c.sub("rope_scaling"), c.sub("rope_parameters")
    fields = old if old is not None and old.filled else new
    alpha = fields.get_positive("alpha", None, None) if fields and fields.present("alpha") else None
    if fields is None or alpha is None or fields.fields().get("rope_type", fields.fields().get("type")) != "dynamic":
        return read_rope(c, head_dim)
    fields.get_positive("factor")  # transformers requires it, and nothing reads it
    if head_dim < 4:
        raise c.error("head_dim", f"is {head_dim}; a base that grows with alpha needs at least 4")
    kinds = {**SCALINGS, "dynamic": lambda f: None}
    rope = read_rope(c, head_dim, Rotation(kinds=kinds, harmless=ROTATION))
    return replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))


def _context(c: Config) -> int:
    return c.get_size("max_position_embeddings")


def _of_layers(c: Config, name: str) -> list[int]:
    """Return a number of each layer, from one number or from a list."""
    count, read = c.get_layer_count(), partial(c.get_size, name, 1)
    if not isinstance(c.fields().get(name), list):
        return [read()] * count
    values = c.get_list(name)
    if len(values) < count or not all(type(v) is int and v > 0 for v in values):
        raise c.error(name, f"must hold {count} entries, each a number above zero")
    return values[:count]


_NORMS = {"mixer.q_norm": "self_attn.query_layernorm", "mixer.k_norm": "self_attn.key_layernorm"}
NAMES = LLAMA.with_parts(parts=_NORMS)
MOE_NAMES = QWEN_NAMES.with_parts(
    parts={
        **_NORMS,
        "mlp.router": "mlp.gate.wg",
        **{f"mlp.shared.{n}": f"mlp.shared_mlp.{n}_proj" for n in ("gate", "up", "down")},
    }
)
# Ids of special tokens, sizes that other fields repeat, and parts that other models of this code have.
_HARMLESS = (
    "attention_head_dim", "cla_share_factor", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id",
    "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id", "use_rotary_pos_emb",
)  # fmt: skip
FAMILIES = (
    Family("hunyuan_v1_dense", hunyuan_v1_dense, NAMES, _HARMLESS),
    Family("hunyuan_v1_moe", hunyuan_v1_moe, MOE_NAMES, _HARMLESS),
)
