"""LFM2, LFM2-MoE and LFM3: gated convolutions over a few tokens, with some attention layers among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder
from ridgeline.archs.names import LLAMA, Each, Tensor
from ridgeline.archs.rope import FULL, SLIDING, Rotation, read_rope, read_ropes_of_layers
from ridgeline.spec import ChannelMixer, GatedMLP, Layer, ModelSpec, MoE, RMSNorm, ShortConvolution, TokenMixer

NAMES = LLAMA.with_parts(
    root={"embed": "model.embed_tokens", "norm": "model.embedding_norm", "head": "lm_head"},
    parts={
        "mixer_norm": "operator_norm",
        "mixer.o": "self_attn.out_proj",
        "mixer.q_norm": "self_attn.q_layernorm",
        "mixer.k_norm": "self_attn.k_layernorm",
        "mixer.in": "conv.in_proj",
        "mixer.conv": "conv.conv",
        "mixer.out": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
        "mlp.router": "feed_forward.gate",
        "mlp.choice": Tensor("feed_forward.expert_bias"),
        "mlp.experts.gate": Each("feed_forward.experts.{e}.w1"),
        "mlp.experts.up": Each("feed_forward.experts.{e}.w3"),
        "mlp.experts.down": Each("feed_forward.experts.{e}.w2"),
    },
)
KINDS = {"full_attention", "conv"}
HARMLESS = ("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
            "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
            "theta")  # fmt: skip


def lfm2(c: Config) -> ModelSpec:
    """LFM2 (arXiv:2511.23404)."""
    return _model(c, [GatedMLP(_inner_size(c))] * c.get_layer_count(), _full(c))


def lfm2_moe(c: Config) -> ModelSpec:
    """LFM2-8B-A1B: experts in all layers except the first ones."""
    dense, first = GatedMLP(c.get_size("intermediate_size", 7168)), c.get_int("num_dense_layers", 2)
    moe = MoE(
        c.get_size("num_experts", 32), c.get_size("num_experts_per_tok", 4), c.get_size("moe_intermediate_size", 1792),
        normalize=c.get_bool("norm_topk_prob", True), scores="sigmoid",
        choice_bias=c.get_bool("use_expert_bias", True),
        scale=c.get_float("routed_scaling_factor", 1.0),
    )  # fmt: skip
    c.get_list("layer_types")  # required: transformers' class has no default for it
    return _model(c, [dense if i < first else moe for i in range(c.get_layer_count())], _full(c))


def _model(c: Config, mlps: Sequence[ChannelMixer], full: Sequence[bool]) -> ModelSpec:
    """Return the model. full: which layers are attention."""
    norm, heads = RMSNorm(c.get_eps("norm_eps", 1e-5)), Heads.read(c, num_kv_heads=8, null_kv=False)
    attending = attention(heads, read_rope(c, heads.head_dim, Rotation(1e6)), qk_norm=norm)
    conv = _convolution(c, 3)
    layers = tuple(Layer(attending if is_full else conv, mlp, norm) for is_full, mlp in zip(full, mlps, strict=True))
    tied = c.get_bool("tie_word_embeddings", True)
    model = decoder(c, layers, norm, tied=tied, max_len=c.get_size("max_position_embeddings", 128_000))
    return replace(model, tie_word_embeddings=c.get_bool("tie_embedding", tied))  # it overrides the other field


def _convolution(c: Config, size: int) -> ShortConvolution:
    """Return the convolution. size: the default of the tokens that it sees."""
    if (seen := c.get_size("conv_L_cache", size)) == 1:
        raise c.error("conv_L_cache", "is 1; it must be at least 2, or the convolution mixes no tokens")
    return ShortConvolution(c.get_size("hidden_size"), seen, c.get_bool("conv_bias", False))


def _inner_size(c: Config) -> int:
    """Return two thirds of the configured size, rounded up to a multiple, unless the config disables that."""
    size = c.get_size("block_ff_dim", c.get_size("intermediate_size", 12_288))
    multiple, factor = c.get_size("block_multiple_of", 256), c.get_positive("block_ffn_dim_multiplier", 1.0)
    if not c.get_bool("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def _full(c: Config) -> list[bool]:
    """Return for each layer whether it is attention."""
    count, indices = c.get_layer_count(), c.get_indices("full_attn_idxs", None)
    kinds = c.get_choices("layer_types", count, KINDS)
    if kinds is None:
        return [indices is None or i in indices for i in range(count)]
    return [kind == "full_attention" for kind in kinds]


_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def lfm3(c: Config) -> ModelSpec:
    """LFM3: local and global attention with a gate of each head, norms after the branches too."""
    c.rename({"rms_norm_eps": "norm_eps"})
    norm, count = RMSNorm(c.get_eps("norm_eps", 1e-5)), c.get_layer_count()
    heads = Heads.read(c, num_kv_heads=4, head_dim_default=128, null_kv=False)
    c.expect("attention_bias", False)
    usual = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else "conv" for i in range(count)]
    kinds = c.get_choices("layer_types", count, {FULL, SLIDING, "conv"}) or usual
    ropes = read_ropes_of_layers(c, {k: heads.head_dim for k in dict.fromkeys(kinds) if k != "conv"}, _ROPES)
    gate, window = c.get_bool("use_attention_gate", True), c.get_size("sliding_window", 256, None)
    if window is None and SLIDING in kinds:
        raise c.error("sliding_window", "is null or switched off, but some layers are sliding; give a window")
    mixers: dict[str, TokenMixer] = {"conv": _convolution(c, 7)}
    for kind, rope in ropes.items():
        mixers[kind] = attention(
            heads, rope, qk_norm=norm, out_gate=gate, gate_over="head" if gate else "number",
            window=window if kind == SLIDING else None,
        )  # fmt: skip
    post, mlp = norm if c.get_bool("use_sandwich_norm", True) else None, GatedMLP(c.get_size("intermediate_size"))
    layers = tuple(Layer(mixers[kind], mlp, norm, post) for kind in kinds)
    return decoder(c, layers, norm, tied=True, max_len=c.get_size("max_position_embeddings"))


LFM3_NAMES = NAMES.with_parts(
    parts={
        **{f"mixer.{n}": f"self_attn.{n}_proj" for n in "qkvo"},
        **{f"mixer.{n}_norm": f"self_attn.{n}_norm" for n in "qk"},
        "mixer.out_gate": "self_attn.gate_proj",
        "mixer_post_norm": "post_operator_norm",
        "mlp_post_norm": "post_ffn_norm",
    }
)
FAMILIES = (
    Family("lfm3", lfm3, LFM3_NAMES),
    Family("lfm2", lfm2, NAMES, HARMLESS),
    Family("lfm2_moe", lfm2_moe, NAMES, HARMLESS),
)
