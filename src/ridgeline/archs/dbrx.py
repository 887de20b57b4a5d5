"""DBRX: experts in every layer, and limits on queries, keys and values."""

from __future__ import annotations

from ridgeline.archs.config import HARMLESS, Config
from ridgeline.archs.family import Family, Heads, attention, decoder
from ridgeline.archs.names import ExpertRows, FusedRows, Names
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import Layer, LayerNorm, ModelSpec, MoE


def dbrx(c: Config) -> ModelSpec:
    """DBRX 132B: two objects describe attention and experts; the rotation's base is one of attention's fields."""
    names = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
    names["max_seq_len"] = "max_position_embeddings"
    for name in names:
        c.get_size(name)  # files have these names, and may have the usual ones too
    c.rename(names)
    c.expect("tie_word_embeddings", False)
    own, ffn = (c.sub(name) or c.inside(name, {}) for name in ("attn_config", "ffn_config"))
    kv_heads = own.get_size("kv_n_heads", 1)
    if c.get_size("num_key_value_heads", kv_heads) != kv_heads:
        raise c.error("num_key_value_heads", f"is not the kv_n_heads {kv_heads} of attn_config; both must be equal")
    heads, norm = Heads.read(c.assume({"num_key_value_heads": kv_heads})), LayerNorm(1e-5, bias=False)
    theta = own.get_positive("rope_theta", 1e4)
    rope = read_rope(c, heads.head_dim, Rotation(theta))
    if own.present("rope_theta") and rope.theta != theta:
        raise c.error("rope_theta", f"is {rope.theta}, but in attn_config it is {theta}; both must be equal")
    mixer = attention(heads, rope, clip=own.get_positive("clip_qkv", None, None))
    ffn.expect("moe_normalize_expert_weights", 1, 1.0)
    ffn.expect("hidden_size", c.get_size("hidden_size"))
    act = ffn.sub("ffn_act_fn") or ffn.inside("ffn_act_fn", {})
    moe = MoE(
        ffn.get_size("moe_num_experts", 4), ffn.get_size("moe_top_k", 1), ffn.get_size("ffn_hidden_size", 3584),
        act.get_activation("name", "silu"), normalize=not ffn.is_null("moe_normalize_expert_weights"),
    )  # fmt: skip
    ffn.expect("uniform_expert_assignment", False)
    own.finish({*HARMLESS, "attn_pdrop", "tie_word_embeddings"})  # published files give parts a flag of the whole
    ffn.finish({*HARMLESS, "moe_jitter_eps", "moe_loss_weight", "tie_word_embeddings"})
    act.finish()
    return decoder(c, (Layer(mixer, moe, norm),) * c.get_layer_count(), norm)


_QKV = ("mixer.q", "mixer.k", "mixer.v")
NAMES = Names(
    root={"embed": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"},
    layer="transformer.blocks.{i}.",
    parts={
        "mixer_norm": "norm_attn_norm.norm_1",
        "mlp_norm": "norm_attn_norm.norm_2",
        **{name: FusedRows("norm_attn_norm.attn.Wqkv", _QKV) for name in _QKV},
        "mixer.o": "norm_attn_norm.attn.out_proj",
        "mlp.router": "ffn.router.layer",
        "mlp.experts.gate": ExpertRows("ffn.experts.mlp.w1"),
        "mlp.experts.up": ExpertRows("ffn.experts.mlp.v1"),
        "mlp.experts.down": ExpertRows("ffn.experts.mlp.w2", transposed=True),
    },
)
FAMILIES = (Family("dbrx", dbrx, NAMES, harmless=("emb_pdrop",)),)
