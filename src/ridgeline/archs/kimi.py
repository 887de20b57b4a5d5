"""Kimi-Linear: delta layers with a decay per channel, and some layers with latent attention without positions."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.deepseek import V2_NAMES
from ridgeline.archs.family import Family, decoder, expert_groups, gated_mlp, rms_norm
from ridgeline.archs.names import Each, Tensor
from ridgeline.archs.rope import FULL
from ridgeline.spec import (
    GatedMLP,
    KimiDelta,
    LatentAttention,
    Layer,
    ModelSpec,
    MoE,
    RMSNorm,
    TokenMixer,
)

LINEAR = "linear_attention"


def kimi_linear(c: Config) -> ModelSpec:
    """Kimi-Linear (arXiv:2510.26692)."""
    norm, dense, experts = rms_norm(c, 1e-5), gated_mlp(c), _experts(c)
    c.expect("mla_use_nope", True)
    for name, allowed in (("moe_router_activation_func", "sigmoid"), ("topk_method", "noaux_tc")):
        c.expect(name, allowed)
    for name, value in (("use_grouped_topk", True), ("moe_layer_freq", 1), ("num_nextn_predict_layers", 0)):
        c.expect(name, value)
    kinds, delta = _mixers(c)
    mixers: dict[str, TokenMixer] = {FULL: _attention(c), LINEAR: delta}
    layers = zip(kinds, _sparse(c), strict=True)
    return decoder(
        c, tuple(Layer(mixers[kind], experts if sparse else dense, norm) for kind, sparse in layers), norm,
        max_len=_either(c, "model_max_length", "max_position_embeddings", 1 << 20),
    )  # fmt: skip


def _either(c: Config, name: str, other: str, default: int, least: int = 1) -> int:
    """Read a number that transformers and the published code store under different names."""
    value = c.get_int(name, c.get_int(other, default))
    if c.get_int(other, value) != value:
        raise c.error(other, f"is {c.get_int(other)}, but {name} is {value}; both must be equal")
    if value < least:
        raise c.error(name, f"is {value}; it must be at least {least}")
    return value


def _mixers(c: Config) -> tuple[list[str], KimiDelta]:
    """Return the kind of every layer, and the delta layers, from the published field or from transformers' own."""
    count, kinds, delta = c.get_layer_count(), c.get_list("layer_types", None, None), c.sub("linear_attn_config")
    heads, size = c.get_size("linear_num_heads", 32), c.get_size("linear_head_dim", 128)
    conv = c.get_size("linear_conv_kernel_dim", 4)
    if c.is_null("linear_attn_config"):
        raise c.error("linear_attn_config", "is null, which has no meaning here")
    if delta is not None:
        heads, size = delta.get_size("num_heads", heads), delta.get_size("head_dim", size)
        conv = delta.get_size("short_conv_kernel_size", conv)
        full, linear = delta.get_list("full_attn_layers", None), delta.get_list("kda_layers", None)
        delta.finish()
        if kinds is None and full is not None and linear is not None:  # indices count from 1
            if not all(type(i) is int for i in (*full, *linear)) or sorted([*full, *linear]) != list(
                range(1, count + 1)
            ):
                raise c.error("linear_attn_config", f"must name each of the layers 1 to {count} once")
            kinds = [FULL if i + 1 in full else LINEAR for i in range(count)]
    if kinds is None:
        kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    if len(kinds) != count or not all(kind in (FULL, LINEAR) for kind in kinds):
        raise c.error("layer_types", f"must hold {count} entries, each {FULL!r} or {LINEAR!r}")
    act = c.get_activation("hidden_act", "silu")
    return kinds, KimiDelta(heads, size, conv, size, rms_norm(c, 1e-5), act)


def _attention(c: Config) -> LatentAttention:
    nope, shared = c.get_size("qk_nope_head_dim", 128), c.get_size("qk_rope_head_dim", 64)
    bias = c.get_bool("attention_bias", False)
    return LatentAttention(
        num_heads=c.get_size("num_attention_heads"), kv_lora_rank=c.get_size("kv_lora_rank", 512),
        qk_nope_head_dim=nope, qk_rope_head_dim=shared, v_head_dim=c.get_size("v_head_dim", 128),
        scale=(nope + shared) ** -0.5, latent_norm=RMSNorm(1e-6),  # independent of rms_norm_eps
        q_lora_rank=c.get_size("q_lora_rank", None, None), latent_bias=bias, out_bias=bias,
    )  # fmt: skip


def _experts(c: Config) -> MoE:
    inner, act = c.get_size("moe_intermediate_size", 1024), c.get_activation("hidden_act", "silu")
    shared = _either(c, "num_shared_experts", "n_shared_experts", 1, least=0)
    experts = _either(c, "num_experts", "num_local_experts", 256)
    count = _either(c, "num_expert_group", "n_group", 1)
    groups = expert_groups(
        c,
        ("num_experts", experts),
        ("num_expert_group", count),
        ("topk_group", c.get_size("topk_group", 1)),
        "best_two",
    )
    normalize = c.get_bool("norm_topk_prob", c.get_bool("moe_renormalize", True))
    if c.get_bool("moe_renormalize", normalize) != normalize:
        raise c.error("norm_topk_prob", f"is {normalize}, but moe_renormalize is not; both must be equal")
    return MoE(
        experts,
        _either(c, "num_experts_per_token", "num_experts_per_tok", 8),
        inner, act, normalize=normalize, scores="sigmoid", choice_bias=True,
        groups=groups,
        scale=c.get_float("routed_scaling_factor", 2.446),
        shared=GatedMLP(inner * shared, act) if shared else None,
    )  # fmt: skip


def _sparse(c: Config) -> list[bool]:
    """Return for each layer whether it has experts."""
    count, kinds, first = (
        c.get_layer_count(),
        c.get_list("mlp_layer_types", None, None),
        c.get_int("first_k_dense_replace", 1),
    )
    if kinds is None:
        return [i >= first for i in range(count)]
    if len(kinds) != count or not all(kind in ("dense", "sparse") for kind in kinds):
        raise c.error("mlp_layer_types", f"must hold {count} entries, each 'dense' or 'sparse'")
    return [kind == "sparse" for kind in kinds]


_MLP = ("gate", "up", "down")
NAMES = V2_NAMES.with_parts(
    parts={
        "mixer": "self_attn",
        "mixer.A_log": Tensor("self_attn.A_log", axes=(2, 1)),
        **{f"mixer.in_{n}": f"self_attn.{n}_proj" for n in "qkv"},
        **{f"mixer.{n}_conv": f"self_attn.{n}_conv1d" for n in "qkv"},
        **{f"mixer.decay_{n}": f"self_attn.f_{n}_proj" for n in "ab"},
        **{f"mixer.gate_{n}": f"self_attn.g_{n}_proj" for n in "ab"},
        "mixer.beta": "self_attn.b_proj",
        "mixer.gate_norm": "self_attn.o_norm",
        "mixer.out": "self_attn.o_proj",
        "mlp.router": "block_sparse_moe.gate",
        "mlp.choice": Tensor("block_sparse_moe.gate.e_score_correction_bias"),
        **{
            f"mlp.experts.{n}": Each("block_sparse_moe.experts.{e}." + w)
            for n, w in zip(_MLP, ("w1", "w3", "w2"), strict=True)
        },
        **{f"mlp.shared.{n}": f"block_sparse_moe.shared_experts.{n}_proj" for n in _MLP},
    }
)
# transformers saves dense layers under the names of sparse ones.
SAVED_NAMES = NAMES.with_parts(parts={f"mlp.{n}": f"block_sparse_moe.{n}_proj" for n in _MLP})

FAMILIES = (
    Family(
        "kimi_linear", kimi_linear, NAMES.with_parts(others=(SAVED_NAMES,)),
        # Head sizes that other fields give, and RoPE fields that no layer uses.
        harmless=("num_key_value_heads", "head_dim", "qk_head_dim", "rope_theta", "rope_scaling"),
    ),
)  # fmt: skip
