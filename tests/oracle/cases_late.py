"""Cases of the oracle: DBRX, OLMo Hybrid and GLM 5."""

from __future__ import annotations

from oracle.case import BIAS, EPS, OWN, PLAIN, VOCAB, Case, dims, family

CASES: dict[str, Case] = {}

_dbrx = family(CASES, "dbrx", "DbrxConfig")
_olmo = family(CASES, "olmo_hybrid", "OlmoHybridConfig")
_glm = family(CASES, "glm_moe_dsa", "GlmMoeDsaConfig")

# dbrx -------------------------------------------------------------------------------------------------

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _dbrx_dims(attention: dict[str, object], experts: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 256, **_TOKENS,
        "tie_word_embeddings": False, "attn_config": attention, "ffn_config": experts, **more,
    }  # fmt: skip


_EXPERTS = {"moe_num_experts": 6, "moe_top_k": 3, "ffn_hidden_size": 40}
_CLIPPED = {"clip_qkv": 1.2, "kv_n_heads": 2, "rope_theta": 3000.0}
_dbrx(
    "dbrx", 2, "limits on q, k and v; experts in every layer; layer norms without biases",
    _dbrx_dims(_CLIPPED, _EXPERTS, **OWN),
    {"attn_config": {**_CLIPPED, "clip_qkv": 2.0}}, PLAIN, {"ffn_config": {**_EXPERTS, "moe_top_k": 2}},
    {"ffn_config": {**_EXPERTS, "moe_normalize_expert_weights": None}},
)  # fmt: skip
_dbrx(
    "dbrx_plain", 1, "wider limits; weights of experts as their softmax gives them; gelu",
    _dbrx_dims(
        {"kv_n_heads": 4, "clip_qkv": 3.0, "rope_theta": 10000.0},
        {**_EXPERTS, "moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}},
    ),
    {"ffn_config": {**_EXPERTS, "ffn_act_fn": {"name": "gelu"}}},
)  # fmt: skip

# olmo_hybrid ------------------------------------------------------------------------------------------

# Queries, keys and values are equally wide together: transformers saves their filters as three equal parts.
_DELTA = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
FULL, LINEAR = "full_attention", "linear_attention"
_TYPES = {"layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL]}
_olmo(
    "olmo_hybrid", 3, "delta layers whose beta reaches 2; attention with norms after its branches; no positions",
    dims(layers=5, **_DELTA, **_TYPES, rope_parameters={"rope_type": "default", "rope_theta": None}),
    {"linear_allow_neg_eigval": False}, EPS, OWN,
)  # fmt: skip
_olmo(
    "olmo_hybrid_rotated", 3, "layers by rule, heads and keys of the delta layers by default; biases",
    dims(linear_allow_neg_eigval=False, linear_value_head_dim=12, **OWN, **BIAS), PLAIN,
    {"linear_allow_neg_eigval": True}, {"hidden_act": "gelu"},
)  # fmt: skip

# glm_moe_dsa ------------------------------------------------------------------------------------------

_LATENT = {"kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
_INDEXED = {"index_topk": 20, "index_head_dim": 24, "index_n_heads": 12}
_SPARSE = {
    "moe_intermediate_size": 40, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
_glm(
    "glm_moe_dsa", 9, "an indexer whose neighbors rotate together selects 20 keys; experts behind",
    dims(kv=4, **_LATENT, **_INDEXED, **_SPARSE, **OWN),
    {"index_topk": 21}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, EPS, PLAIN,
)  # fmt: skip
