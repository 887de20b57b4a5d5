"""Llama 4: local layers see their own chunk, layers without positions grow their queries, and experts weigh inputs."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import WITHOUT_SIGHT, Family, Heads, attention, decoder, rms_norm
from ridgeline.archs.names import LLAMA, ExpertPart
from ridgeline.archs.rope import FULL, Rotation, read_rope
from ridgeline.spec import Attention, Chunked, GatedMLP, Layer, ModelSpec, MoE, QueryGrowth, RMSNorm

CHUNKED = "chunked_attention"


def llama4(c: Config) -> ModelSpec:
    """Llama 4 Scout and Maverick, the language model."""
    norm, activation, count = rms_norm(c, 1e-5), c.get_activation("hidden_act", "silu"), c.get_layer_count()
    inner = c.get_size("intermediate_size")
    moe = MoE(
        c.get_size("num_local_experts", 16), c.get_size("num_experts_per_tok", 1), inner, activation,
        normalize=False, scores="sigmoid", weighs_inputs=True, shared=GatedMLP(inner, activation),
    )  # fmt: skip
    dense, step = GatedMLP(c.get_size("intermediate_size_mlp", 16_384), activation), "interleave_moe_layer_step"
    every = c.get_size(step, 1)
    sparse = c.get_indices("moe_layers", list(range(every - 1, count, every)))
    mixers = _mixers(c, norm, count)
    layers = tuple(Layer(mixer, moe if i in sparse else dense, norm) for i, mixer in enumerate(mixers))
    return decoder(c, layers, norm)


def _mixers(c: Config, norm: RMSNorm, count: int) -> list[Attention]:
    """Return the attention of each layer. Layers without positions are global, unless `layer_types` says more."""
    heads = Heads.read(c, num_kv_heads=8, head_dim_default=128, null_kv=False)
    bias, chunk = c.get_bool("attention_bias", False), c.get_size("attention_chunk_size", 8192, None)
    own = RMSNorm(norm.eps, weight=False) if c.get_bool("use_qk_norm", True) else None
    beta, every = c.get_float("attn_scale", 0.1), c.get_size("floor_scale", 8192)
    grows = c.get_bool("attn_temperature_tuning", True) and beta != 0
    period = c.get_size("no_rope_layer_interval", 4)
    rotates = c.get_indices("no_rope_layers", []) or [int((i + 1) % period != 0) for i in range(count)]
    if len(rotates) < count:
        raise c.error("no_rope_layers", f"must hold {count} entries, one for each layer, and has {len(rotates)}")
    by_rule = [CHUNKED if turned and chunk else FULL for turned in rotates[:count]]
    kinds = c.get_choices("layer_types", count, {CHUNKED, FULL}) or by_rule
    if CHUNKED in kinds and chunk is None:
        raise c.error("attention_chunk_size", "is null or switched off, but some layers are sliding; give a size")
    rotated = attention(
        heads, read_rope(c, heads.head_dim, Rotation(5e5, interleaved=True)), qkv_bias=bias, out_bias=bias,
        qk_norm=own, norms_rotated=own is not None,
    )  # fmt: skip
    unrotated = replace(
        rotated, rope=None, qk_norm=None, norms_rotated=False, growth=QueryGrowth(beta, every, 1) if grows else None
    )
    found = [rotated if turned else unrotated for turned in rotates[:count]]
    return [
        replace(mixer, window=chunk, pattern=Chunked()) if kind == CHUNKED else mixer
        for mixer, kind in zip(found, kinds, strict=True)
    ]


_GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
NAMES = LLAMA.with_parts(
    parts={
        **{f"mlp.{n}": f"feed_forward.{n}_proj" for n in ("gate", "up", "down")},
        "mlp.router": "feed_forward.router",
        **{f"mlp.shared.{n}": f"feed_forward.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
        **{name: ExpertPart("feed_forward.experts.gate_up_proj", _GATE_UP, transposed=True) for name in _GATE_UP},
        "mlp.experts.down": ExpertPart("feed_forward.experts.down_proj", ("mlp.experts.down",), transposed=True),
    }
)
# Noise of training, and a flag of a tool that quantizes.
_HARMLESS = ("router_jitter_noise", "for_llm_compressor")
_WHOLE = (
    "vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "boi_token_id", "eoi_token_id",
    "image_token_id",
)  # fmt: skip
FAMILIES = (
    Family("llama4_text", llama4, NAMES, _HARMLESS),
    Family("llama4", llama4, NAMES.within_sight(), (*_HARMLESS, *_WHOLE), within="text_config", note=WITHOUT_SIGHT),
)
