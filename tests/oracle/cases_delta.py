"""Cases of the oracle: the gated delta rule beside attention, in Qwen3-Next, Qwen3.5 and Kimi-Linear."""

from __future__ import annotations

from typing import Any

from oracle.case import BIAS, EPS, TIED, Case, dims, family, rope

CASES: dict[str, Case] = {}

_next = family(CASES, "qwen3_next", "Qwen3NextConfig")
_text = family(CASES, "qwen3_5_text", "Qwen3_5TextConfig")
_moe_text = family(CASES, "qwen3_5_moe_text", "Qwen3_5MoeTextConfig")
_whole = family(CASES, "qwen3_5", "Qwen3_5Config")
_moe_whole = family(CASES, "qwen3_5_moe", "Qwen3_5MoeConfig")
_kimi = family(CASES, "kimi_linear", "KimiLinearConfig")

FULL, LINEAR = "full_attention", "linear_attention"
_TYPES = {"layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL]}
_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3, "head_dim": 24,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
}  # fmt: skip
_HALF = rope(3000.0, partial_rotary_factor=0.5)
_QUARTER = rope(3000.0, partial_rotary_factor=0.25)
_TURNED = rope(10000.0, partial_rotary_factor=0.5)

# qwen3_next -------------------------------------------------------------------------------------------

_next(
    "qwen3_next",
    1,
    "three heads to a key, keys narrower than values; half a head rotates; an MLP in layer 1, experts elsewhere",
    dims(layers=5, **_HEADS, **_EXPERTS, **_TYPES, **_HALF, mlp_only_layers=[1]),
    {"num_experts_per_tok": 2},
    {"norm_topk_prob": False},
    _QUARTER,
    _TURNED,
    EPS,
)
_next(
    "qwen3_next_biases",
    4,
    "a key for every head; biases of attention; experts in every second layer, not renormalized; gelu; layers by rule",
    dims(
        **_HEADS | {"linear_num_key_heads": 6, "linear_conv_kernel_dim": 4}, **_EXPERTS, **BIAS, **_QUARTER,
        decoder_sparse_step=2, norm_topk_prob=False, hidden_act="gelu",
    ),
    {"norm_topk_prob": True},
    {"hidden_act": "silu"},
)  # fmt: skip

# qwen3_5 ----------------------------------------------------------------------------------------------

_text(
    "qwen3_5_text",
    1,
    "the delta layers' matrices apart; an MLP in every layer",
    dims(layers=5, **_HEADS, **_TYPES, **_HALF),
    _QUARTER,
    EPS,
)
_text("qwen3_5_tied", 1, "tied, as the smallest ones", dims(**_HEADS, **_QUARTER) | TIED, greedy_tokens=0)
_moe_text(
    "qwen3_5_moe_text",
    6,
    "experts in every layer",
    dims(layers=5, **_HEADS, **_EXPERTS, **_TYPES, **_HALF),
    {"num_experts_per_tok": 2},
    EPS,
)


def _inside(text: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}


_whole("qwen3_5", 1, "the language model of one that sees", _inside(dims(layers=5, **_HEADS, **_TYPES, **_HALF)))
_moe_whole("qwen3_5_moe", 14, "the same with experts", _inside(dims(**_HEADS, **_EXPERTS, **_HALF)))

# kimi_linear ------------------------------------------------------------------------------------------

_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_DELTA = {"linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 3}
_SIGMOID = {"num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_GROUPS = {"num_local_experts": 12, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2}
_SPARSE = {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}
_IN_TURN = {"layer_types": [LINEAR, FULL, LINEAR, FULL]}
_ALL_BIASES = {"q_lora_rank": 24, "hidden_act": "gelu", **BIAS}

_kimi(
    "kimi_linear",
    9,
    "a dense first layer; one group of experts, one shared expert; queries not compressed",
    dims(kv=4, **_LATENT, **_DELTA, **_SIGMOID, **_IN_TURN, routed_scaling_factor=1.7),
    {"num_experts_per_tok": 2},
    {"norm_topk_prob": False},
    {"routed_scaling_factor": 1.0},
    EPS,
)
_kimi(
    "kimi_linear_groups",
    2,
    "experts of the best two of four groups, not renormalized, two shared; compressed queries; all biases; gelu",
    dims(kv=4, **_LATENT, **_DELTA, **_SIGMOID | _GROUPS, **_SPARSE, **_ALL_BIASES, layer_types=[FULL, LINEAR] * 2),
    {"topk_group": 3},
    {"n_group": 1, "topk_group": 1},
    {"hidden_act": "silu"},
)
