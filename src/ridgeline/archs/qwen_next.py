"""Qwen3-Next, Qwen3.5 and Lara: gated delta layers beside attention."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, rms_norm
from ridgeline.archs.names import LLAMA, Each, ExpertPart, FusedRows, GroupPart, HeadPart
from ridgeline.archs.rope import FULL, MROPE, SLIDING, Rotation, read_rope
from ridgeline.spec import ChannelMixer, GatedDelta, GatedMLP, Layer, ModelSpec, MoE, TokenMixer

LINEAR = "linear_attention"


def qwen3_next(c: Config) -> ModelSpec:
    """Qwen3-Next: experts in every `decoder_sparse_step`-th layer, except for `mlp_only_layers`."""
    normalize = c.get_bool("norm_topk_prob", True)
    step, dense_layers = c.get_size("decoder_sparse_step", 1), c.get_indices("mlp_only_layers", [])
    count = c.get_layer_count()
    sparse = [i not in dense_layers and (i + 1) % step == 0 for i in range(count)]
    experts, dense = _experts(c, 512, 10, normalize), gated_mlp(c)
    return _model(c, [experts if s else dense for s in sparse], num_kv_heads=2)


def qwen3_5(c: Config) -> ModelSpec:
    """Qwen3.5, dense."""
    return _model(c, [gated_mlp(c)] * c.get_layer_count(), num_kv_heads=4)


def qwen3_5_moe(c: Config) -> ModelSpec:
    """Qwen3.5 with experts in every layer."""
    c.expect("norm_topk_prob", True)
    c.expect("mlp_only_layers", [])
    return _model(c, [_experts(c, 256, 8, normalize=True)] * c.get_layer_count(), num_kv_heads=2)


def lara_mini(c: Config) -> ModelSpec:
    """Lara 4 Mini: local layers rotate, global ones have no positions; the shared expert has no gate."""
    heads, norm = Heads.read(c, num_kv_heads=4, head_dim_default=128, null_kv=False), rms_norm(c)
    c.assume({"linear_num_value_heads": 16, "linear_num_key_heads": 8})
    bias, window = c.get_bool("attention_bias", False), c.get_size("sliding_window", 512)
    moe = replace(_experts(c, 128, 4, c.get_bool("norm_topk_prob", True)), shared_gate=False)
    rope = read_rope(c, heads.head_dim)
    full = attention(heads, None, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    mixers: dict[str, TokenMixer] = {FULL: full, SLIDING: replace(full, rope=rope, window=window), LINEAR: _delta(c)}
    count = c.get_layer_count()
    kinds = c.get_choices("layer_types", count, set(mixers)) or [_LARA[i % len(_LARA)] for i in range(count)]
    layers = tuple(Layer(mixers[kind], moe, norm) for kind in kinds)
    return decoder(c, layers, norm, tied=True)


_LARA = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)  # the kinds of its layers, in turn


def _model(c: Config, mlps: list[ChannelMixer], num_kv_heads: int) -> ModelSpec:
    norm = rms_norm(c, offset=1.0)
    heads = Heads.read(c, num_kv_heads=num_kv_heads, head_dim_default=256, null_kv=False)
    bias = c.get_bool("attention_bias", False)
    c.expect("attn_output_gate", True)
    c.expect("output_gate_type", "swish")  # the gate of the delta layers
    rope = read_rope(c, heads.head_dim, Rotation(partial=0.25, null_partial=1.0, harmless=MROPE))
    full = attention(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, out_gate=True)
    mixers: dict[str, TokenMixer] = {FULL: full, LINEAR: _delta(c)}
    kinds = zip(_layer_types(c, len(mlps)), mlps, strict=True)
    return decoder(c, tuple(Layer(mixers[kind], mlp, norm) for kind, mlp in kinds), norm)


def _delta(c: Config) -> GatedDelta:
    heads, keys = c.get_size("linear_num_value_heads", 32), c.get_size("linear_num_key_heads", 16)
    c.divide("linear_num_value_heads", heads, "linear_num_key_heads", keys)
    return GatedDelta(
        num_heads=heads, num_key_heads=keys,
        key_dim=c.get_size("linear_key_head_dim", 128), head_dim=c.get_size("linear_value_head_dim", 128),
        conv_size=c.get_size("linear_conv_kernel_dim", 4), norm=rms_norm(c),
        activation=c.get_activation("hidden_act", "silu"),
    )  # fmt: skip


def _experts(c: Config, count: int, per_token: int, normalize: bool) -> MoE:
    """Return the experts. count, per_token: the class's defaults for their number and for those that a token uses."""
    act = c.get_activation("hidden_act", "silu")
    return MoE(
        c.get_size("num_experts", count), c.get_size("num_experts_per_tok", per_token),
        c.get_size("moe_intermediate_size", 512), act, normalize=normalize,
        shared=GatedMLP(c.get_size("shared_expert_intermediate_size", 512), act), shared_gate=True,
    )  # fmt: skip


def _layer_types(c: Config, count: int) -> list[str]:
    interval, kinds = c.get_size("full_attention_interval", 4), c.get_choices("layer_types", count, {FULL, LINEAR})
    return kinds or [LINEAR if (i + 1) % interval else FULL for i in range(count)]


_MLP = ("gate", "up", "down")
_CONV = tuple(f"mixer.{n}_conv" for n in "qkv")
_QKV = tuple(f"mixer.in_{n}" for n in "qkv")
# Tensors of the draft model for multi-token prediction, and of the vision encoder; neither is loaded.
_MTP, _IMAGES = r"^mtp\.", r"^model\.visual\."
_COMMON = LLAMA.with_parts(
    parts={
        "mixer": "linear_attn",
        "mixer.q": HeadPart("self_attn.q_proj", 0, 2),
        "mixer.out_gate": HeadPart("self_attn.q_proj", 1, 2),
        **{name: FusedRows("linear_attn.conv1d", _CONV) for name in _CONV},
        "mixer.gate_norm": "linear_attn.norm",
        "mixer.out": "linear_attn.out_proj",
        "mlp.router": "mlp.gate",
        **{f"mlp.experts.{n}": Each("mlp.experts.{e}." + f"{n}_proj") for n in _MLP},
        **{f"mlp.shared.{n}": f"mlp.shared_expert.{n}_proj" for n in _MLP},
        "mlp.shared_gate": "mlp.shared_expert_gate",
    },
    ignore=(*LLAMA.ignore, _MTP),
)
_FUSED, _SCALARS = (*_QKV, "mixer.gate"), ("mixer.beta", "mixer.decay")
NEXT_NAMES = _COMMON.with_parts(
    parts={
        **{name: GroupPart("linear_attn.in_proj_qkvz", _FUSED) for name in _FUSED},
        **{name: GroupPart("linear_attn.in_proj_ba", _SCALARS) for name in _SCALARS},
    }
)
TEXT_NAMES = _COMMON.with_parts(
    parts={
        **{name: FusedRows("linear_attn.in_proj_qkv", _QKV) for name in _QKV},
        "mixer.gate": "linear_attn.in_proj_z",
        "mixer.beta": "linear_attn.in_proj_b",
        "mixer.decay": "linear_attn.in_proj_a",
    }
)
# The published multimodal files store all experts of a layer in two tensors.
WHOLE_NAMES = TEXT_NAMES.with_parts(
    root={"embed": "model.language_model.embed_tokens", "norm": "model.language_model.norm", "head": "lm_head"},
    layer="model.language_model.layers.{i}.",
    ignore=(*_COMMON.ignore, _IMAGES),
)
_GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
_PACKED = {
    **{name: ExpertPart("mlp.experts.gate_up_proj", _GATE_UP) for name in _GATE_UP},
    "mlp.experts.down": ExpertPart("mlp.experts.down_proj", ("mlp.experts.down",)),
}
PACKED_NAMES = WHOLE_NAMES.with_parts(parts=_PACKED, others=(WHOLE_NAMES,))
_LARA_ROWS = (*_QKV, "mixer.gate", "mixer.beta", "mixer.decay")
LARA_NAMES = _COMMON.with_parts(
    parts={
        **{name: FusedRows("linear_attn.in_proj", _LARA_ROWS) for name in _LARA_ROWS},
        "mixer.q": "self_attn.q_proj",
        "mixer.gate_norm": "linear_attn.out_norm",
        **_PACKED,
    }
)

_NOTE = "only the language model of this checkpoint is loaded, without the vision encoder and multi-token prediction"
# mamba_ssm_dtype: type of states, which is float32 in any case. mtp_*: fields of the layer for multi-token prediction.
_HARMLESS = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_WHOLE = (
    *_HARMLESS, "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "language_model_only",
)  # fmt: skip
FAMILIES = (
    Family("qwen3_next", qwen3_next, NEXT_NAMES),
    Family("lara_mini", lara_mini, LARA_NAMES),
    Family("qwen3_5_text", qwen3_5, TEXT_NAMES, _HARMLESS),
    # Old versions write intermediate_size, but no layer is dense.
    Family("qwen3_5_moe_text", qwen3_5_moe, TEXT_NAMES, (*_HARMLESS, "intermediate_size")),
    Family("qwen3_5", qwen3_5, WHOLE_NAMES, _WHOLE, within="text_config", note=_NOTE),
    Family("qwen3_5_moe", qwen3_5_moe, PACKED_NAMES, (*_WHOLE, "intermediate_size"), within="text_config", note=_NOTE),
)
