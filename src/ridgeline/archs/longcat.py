"""LongCat-Flash: layers of two attentions and two MLPs, with experts as a shortcut around the second half."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.deepseek import V2_NAMES, latent_attention
from ridgeline.archs.family import Family, decoder, rms_norm
from ridgeline.archs.names import Flat, Tensor
from ridgeline.spec import GatedMLP, IdentityExperts, Layer, ModelSpec, MoE, ShortcutMLP


def longcat_flash(c: Config) -> ModelSpec:
    """LongCat-Flash: each layer of the config is two of ours; some experts return their input (arXiv:2509.01322)."""
    hidden, norm, count = c.get_size("hidden_size"), rms_norm(c, 1e-5), c.get_layer_count("num_layers")
    act = c.get_activation("hidden_act", "silu")
    for name, value in (("mla_scale_q_lora", True), ("mla_scale_kv_lora", True), ("router_bias", False)):
        c.expect(name, value)
    c.expect("zero_expert_type", "identity")
    c.expect("attention_method", "MLA")
    mixer = latent_attention(c, interleaved=True, base=1e7)
    if mixer.q_lora_rank is None:
        raise c.error("q_lora_rank", "is null, which has no meaning here")
    mixer = replace(
        mixer,
        scale=mixer.scale * (hidden / mixer.q_lora_rank) ** 0.5,
        latent_scale=(hidden / mixer.kv_lora_rank) ** 0.5,
    )
    zero = c.get_int("zero_expert_num", 256)
    if zero < 0:
        raise c.error("zero_expert_num", f"is {zero}; it must not be negative")
    experts, chosen = c.get_size("n_routed_experts", 512), c.get_size("moe_topk", 12)
    if chosen > experts + zero:
        raise c.error("moe_topk", f"is {chosen}, more than the {experts + zero} experts")
    moe = MoE(
        experts, chosen,
        c.get_size("expert_ffn_hidden_size", 2048), act, normalize=False, choice_bias=True,
        scale=c.get_float("routed_scaling_factor", 6.0),
        identity=IdentityExperts(zero) if zero else None,
    )  # fmt: skip
    dense = GatedMLP(c.get_size("ffn_hidden_size", 12288), act)
    pair = Layer(mixer, ShortcutMLP(dense, moe), norm), Layer(mixer, dense, norm)
    return decoder(c, pair * count, norm)


_PARTS = {
    "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm", "o": "o_proj",
}  # fmt: skip
_MLP = ("gate", "up", "down")
NAMES = V2_NAMES.with_parts(
    parts={
        "mixer_norm": "input_layernorm.{s}",
        "mlp_norm": "post_attention_layernorm.{s}",
        **{f"mixer.{n}": f"self_attn.{{s}}.{name}" for n, name in _PARTS.items()},
        "mixer.kv_b": Flat("self_attn.{s}.kv_b_proj"),
        "mlp.router": "mlp.router.classifier",
        "mlp.choice": Tensor("mlp.router.e_score_correction_bias"),
        **{f"mlp.{part}{n}": f"mlps.{{s}}.{n}_proj" for n in _MLP for part in ("", "dense.")},
    },
    # Draft layers for multi-token prediction; transformers writes matrices of experts that have none.
    ignore=(*V2_NAMES.ignore, r"^model\.mtp\.", r"\.mlp\.experts\.{identity}\."),
    sublayers=2,
)
FAMILIES = (
    # Other fields give the head sizes; renamed fields are read; draft layers are not loaded.
    Family(
        "longcat_flash", longcat_flash, NAMES, ("num_key_value_heads", "head_dim", "qk_head_dim", "num_hidden_layers")
    ),
)
