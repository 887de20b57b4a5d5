"""Cases of the oracle: DBRX, OLMo Hybrid, GLM 5, LFM3, Laguna, Apertus 1.5, Beam and the decoders of ModernBERT."""

from __future__ import annotations

from oracle.case import BIAS, BIASES, EPS, OWN, PLAIN, TIED, VOCAB, WIDER, WIN, Case, dims, family, rope, ropes

CASES: dict[str, Case] = {}

_dbrx = family(CASES, "dbrx", "DbrxConfig")
_olmo = family(CASES, "olmo_hybrid", "OlmoHybridConfig")
_lfm3 = family(CASES, "lfm3", "Lfm3Config")
_laguna = family(CASES, "laguna", "LagunaConfig")
_apertus = family(CASES, "apertus1p5_text", "Apertus1p5TextConfig")
_beam = family(CASES, "beam", "BeamConfig")
_modernbert = family(CASES, "modernbert-decoder", "ModernBertDecoderConfig")
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

# lfm3 -------------------------------------------------------------------------------------------------

CONV, SLIDING = "conv", "sliding_attention"


def _lfm3_dims(**more: object) -> dict[str, object]:
    own = {key: value for key, value in dims(**more).items() if key != "rms_norm_eps"}
    return {"norm_eps": 1e-2, "head_dim": 24, **own}


_lfm3(
    "lfm3", 1, "convolutions, local and global layers; a gate of each head; half of each head rotates in global layers",
    _lfm3_dims(
        layers=5, conv_L_cache=4, **WIN, layer_types=[CONV, FULL, SLIDING, CONV, SLIDING],
        **ropes(rope(3000.0, "proportional", partial_rotary_factor=0.5), rope(700.0)),
    ),
    {"norm_eps": 1e-5}, WIDER, ropes(rope(3000.0), rope(700.0)),
    {"layer_types": [CONV, SLIDING, FULL, CONV, SLIDING]},
)  # fmt: skip
_lfm3(
    "lfm3_tied", 1, "tied, as published; no gates, no norms after the branches; biases of convolutions; layers by rule",
    _lfm3_dims(layers=5, conv_bias=True, use_attention_gate=False, use_sandwich_norm=False, **WIN, **TIED),
    WIDER, greedy_tokens=0,
)  # fmt: skip

# laguna -----------------------------------------------------------------------------------------------

_LAGUNA = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 28,
    "head_dim": 24, "moe_routed_scaling_factor": 1.7,
}  # fmt: skip
_laguna(
    "laguna", 6, "a gate of each head; 4 or 6 heads; a part of each head rotates; local layers; experts behind layer 0",
    dims(
        num_attention_heads_per_layer=[4, 6, 6, 4], layer_types=[FULL, SLIDING, SLIDING, FULL], **WIN, **_LAGUNA,
        **ropes(rope(3000.0, partial_rotary_factor=0.5), rope(700.0)),
    ),
    EPS, WIDER, {"moe_routed_scaling_factor": 1.0}, {"num_experts_per_tok": 1}, {"hidden_act": "gelu"},
    ropes(rope(3000.0, partial_rotary_factor=1.0), rope(700.0)),
)  # fmt: skip
_laguna(
    "laguna_numbers", 1, "a gate of each number; global layers and rotations by rule; experts in layers 0 and 2",
    dims(gating="per-element", mlp_layer_types=["sparse", "dense", "sparse", "dense"], **_LAGUNA),
    EPS, {"moe_routed_scaling_factor": 1.0},
)  # fmt: skip

# apertus1p5_text --------------------------------------------------------------------------------------

_apertus(
    "apertus1p5", 2, "an embedding with 33 rows that the head does not have; biases",
    {**dims(**OWN, **BIAS), "vocab_size": VOCAB + 33, "output_vocab_size": VOCAB}, EPS, PLAIN,
)  # fmt: skip
_apertus(
    "apertus1p5_tied", 1, "tied: the head has all rows of the embedding", dims(**OWN, **TIED), EPS, greedy_tokens=0
)  # fmt: skip

# beam -------------------------------------------------------------------------------------------------

_BEAM = {
    "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
_KINDS = {"rope_parameters": {SLIDING: rope(700.0)["rope_parameters"], FULL: None}}
_beam(
    "beam", 1, "branches that weigh less the later they are; gates with a bias of heads; global layers do not rotate",
    dims(
        layer_types=[FULL, SLIDING, SLIDING, FULL], mlp_layer_types=["dense", "sparse", "sparse", "dense"], **WIN,
        **_BEAM, **_KINDS, n_group=4, topk_group=2, final_logit_softcapping=20.0,
    ),
    EPS, WIDER, {"routed_scaling_factor": 1.0}, {"num_experts_per_tok": 2}, {"final_logit_softcapping": None},
    {"topk_group": 3}, {"hidden_act": "gelu"}, ropes(rope(700.0), rope(700.0)),
)  # fmt: skip
_beam(
    "beam_rotated", 1, "all layers rotate; biases; experts without groups or norm of their weights; layers by rule",
    dims(
        **_BEAM, **BIAS, **WIN, n_group=1, topk_group=1, norm_topk_prob=False, final_logit_softcapping=None,
        **ropes(rope(3000.0), rope(700.0)),
    ),
    EPS, {"norm_topk_prob": True},
)  # fmt: skip

# modernbert-decoder -----------------------------------------------------------------------------------


def _modernbert_dims(**more: object) -> dict[str, object]:
    left_out = ("rms_norm_eps", "num_key_value_heads")
    return {key: value for key, value in dims(norm_eps=1e-2, **more).items() if key not in left_out}


_modernbert(
    "modernbert_decoder", 1, "layer norms, none before the first branch; local layers by rule; tied, as published",
    _modernbert_dims(layers=5, local_attention=2 * WIN["sliding_window"], **TIED, **ropes(rope(3000.0), rope(700.0))),
    {"norm_eps": 1e-5}, {"local_attention": 2 * WIN["sliding_window"] + 2}, {"hidden_activation": "silu"},
    {"classifier_activation": "silu"}, ropes(rope(700.0), rope(3000.0)), greedy_tokens=0,
)  # fmt: skip
_modernbert(
    "modernbert_decoder_biased", 1, "biases everywhere but of the head; a head of its own; all layers local but two",
    _modernbert_dims(
        local_attention=2 * WIN["sliding_window"], norm_bias=True, classifier_bias=True, decoder_bias=False, **BIASES,
        layer_types=[SLIDING, FULL, SLIDING, FULL], **ropes(rope(3000.0), rope(700.0)),
    ),
    {"norm_eps": 1e-5},
)  # fmt: skip
