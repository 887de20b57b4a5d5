"""Granite's mixtures of experts, Granite 4 (Mamba-2 and attention layers), and Granite with windows and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.archs.bamba import MAMBA, mamba2_mixer
from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows, rms_norm
from ridgeline.archs.names import FUSED_GATE_UP, LLAMA, ExpertPart, FusedRows, Tensor
from ridgeline.archs.rope import read_rope
from ridgeline.spec import Attention, ChannelMixer, GatedMLP, Layer, ModelSpec, MoE, TokenMixer

_INPUTS = ("mlp.experts.gate", "mlp.experts.up")
_SHARED = ("mlp.shared.gate", "mlp.shared.up")
EXPERT_NAMES = LLAMA.with_parts(
    parts={
        **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down")),
        "mlp.router": "block_sparse_moe.router.layer",
        **{name: ExpertPart("block_sparse_moe.input_linear.weight", _INPUTS) for name in _INPUTS},
        "mlp.experts.down": "block_sparse_moe.output_linear",
        **{name: FusedRows("shared_mlp.input_linear", _SHARED) for name in _SHARED},
        "mlp.shared.down": "shared_mlp.output_linear",
    }
)
NAMES = EXPERT_NAMES.with_parts(
    parts={
        **MAMBA,
        **{name: FusedRows("shared_mlp.input_linear", ("mlp.gate", "mlp.up")) for name in FUSED_GATE_UP},
        "mlp.down": "shared_mlp.output_linear",
    }
)
# Both names of each kind of layer -> whether it has attention.
KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}
# The chunk size of a scan, the initialization of weights, and the kind of norm, which the class fixes.
HARMLESS = ("mamba_chunk_size", "init_method", "normalization_function")


def granitemoe(c: Config) -> ModelSpec:
    """Granite 3 1B-A400M and 3B-A800M: experts in every layer."""
    return _model(c, [_attention(c)] * c.get_layer_count(), _experts(c, None))


def granitemoeshared(c: Config) -> ModelSpec:
    """Granite with experts plus a shared MLP that every token uses."""
    size = c.get_int("shared_intermediate_size", 0)
    return _model(c, [_attention(c)] * c.get_layer_count(), _experts(c, _mlp(c, size) if size else None))


def granitemoehybrid(c: Config) -> ModelSpec:
    """Granite 4: Mamba-2 and attention, mostly without positions; models without experts use only the shared MLP."""
    full, shared = _attention(c), _mlp(c, c.get_int("shared_intermediate_size", 1024))
    attends = _attends(c)
    if c.get_str("position_embedding_type", None, None) != "rope":
        c.expect("position_embedding_type", "nope")
        full = attention(Heads(full.num_heads, full.num_kv_heads, full.head_dim), None, scale=full.scale,
                         qkv_bias=full.qkv_bias, out_bias=full.out_bias)  # fmt: skip
    mamba = mamba2_mixer(c, rms_norm(c))
    mlp: ChannelMixer = shared
    if c.get_int("num_local_experts", 8):
        mlp = _experts(c, shared)
    else:
        c.get_int("intermediate_size", 0)  # size of the experts, which do not exist here
        c.get_int("num_experts_per_tok", 0, 0)
    return _model(c, [full if attend else mamba for attend in attends], mlp)


def granite_swa(c: Config) -> ModelSpec:
    """Granite with sinks, windows in three of four layers, and a base of rotations for each layer."""
    c.assume({"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True})
    return _model(c, _windowed(c), gated_mlp(c, bias=c.get_bool("mlp_bias", False)))


def granitemoe_swa(c: Config) -> ModelSpec:
    """Granite with sinks and windows, with experts in every layer."""
    size = c.get_int("shared_intermediate_size", 0)
    return _model(c, _windowed(c), _experts(c, _mlp(c, size) if size else None))


def _windowed(c: Config) -> list[Attention]:
    """Return the attention of each layer; a base of zero means no rotation."""
    full, windows = _attention(c), layer_windows(c, lambda i: i % 4 != 0, c.get_size("sliding_window", 128, None))
    assert full.rope is not None
    bases = c.get_list("layer_rope_theta", None, None)
    bases = [full.rope.theta] * len(windows) if bases is None else bases
    if len(bases) != len(windows) or not all(type(b) in (int, float) and b >= 0 for b in bases):
        raise c.error("layer_rope_theta", f"must hold {len(windows)} entries, each a number that is not negative")
    ropes = [replace(full.rope, theta=float(base)) if base else None for base in bases]
    return [replace(full, sinks=True, window=w, rope=rope) for w, rope in zip(windows, ropes, strict=True)]


def _attention(c: Config) -> Attention:
    heads, bias = Heads.read(c), c.get_bool("attention_bias", False)
    rope, scale = read_rope(c, heads.head_dim), c.get_positive("attention_multiplier", 1.0)
    return attention(heads, rope, qkv_bias=bias, out_bias=bias, scale=scale)


def _mlp(c: Config, size: int) -> GatedMLP:
    return GatedMLP(size, c.get_activation("hidden_act", "silu"))


def _experts(c: Config, shared: GatedMLP | None) -> MoE:
    """Return the experts; their default numbers are those of transformers' class."""
    count, chosen = c.get_size("num_local_experts", 8), c.get_size("num_experts_per_tok", 2)
    return MoE(count, chosen, c.get_size("intermediate_size"), c.get_activation("hidden_act", "silu"), shared=shared)


def _attends(c: Config) -> list[bool]:
    """Return for each layer whether it has attention."""
    count = c.get_layer_count()
    kinds = c.get_choices("layer_types", count, KINDS) or c.get_choices("layers_block_type", count, KINDS)
    return [KINDS[kind] for kind in kinds or ["mamba"] * count]


def _model(c: Config, mixers: Sequence[TokenMixer], mlp: ChannelMixer) -> ModelSpec:
    """Return the model with Granite's four multipliers."""
    norm, scale = rms_norm(c), c.get_float("residual_multiplier", 1.0)
    layers = tuple(Layer(mixer, mlp, norm, residual_scale=scale) for mixer in mixers)
    return decoder(
        c, layers, norm,
        embedding_scale=c.get_float("embedding_multiplier", 1.0),
        logit_scale=1.0 / c.get_positive("logits_scaling", 1.0),
    )  # fmt: skip


SWA_NAMES = LLAMA.with_parts(parts={"mixer": "self_attn"})  # for the sinks
MOE_SWA_NAMES = EXPERT_NAMES.with_parts(
    parts={
        "mixer": "self_attn",
        "mlp.router": "block_sparse_moe.router",
        **{name: ExpertPart("block_sparse_moe.experts.gate_up_proj", _INPUTS) for name in _INPUTS},
        "mlp.experts.down": Tensor("block_sparse_moe.experts.down_proj"),
    }
)

FAMILIES = (
    Family("granite_swa", granite_swa, SWA_NAMES),
    Family("granitemoe_swa", granitemoe_swa, MOE_SWA_NAMES),
    Family("granitemoe", granitemoe, EXPERT_NAMES),
    Family("granitemoeshared", granitemoeshared, EXPERT_NAMES),
    Family("granitemoehybrid", granitemoehybrid, NAMES, HARMLESS),
)
