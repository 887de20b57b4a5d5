"""Cases of the oracle: sinks and windows, and further relatives of families that the other files have."""

from __future__ import annotations

from typing import Any

from oracle.case import (
    BIAS,
    BIASES,
    EPS,
    IN_TURN,
    ODD,
    OWN,
    PLAIN,
    TIED,
    VOCAB,
    WIDER,
    WIN,
    Case,
    dims,
    family,
    rope,
    ropes,
)

CASES: dict[str, Case] = {}

_granite_swa = family(CASES, "granite_swa", "GraniteSWAConfig")
_granitemoe_swa = family(CASES, "granitemoe_swa", "GraniteMoeSWAConfig")
_mellum = family(CASES, "mellum", "MellumConfig")
_flint = family(CASES, "flint", "FlintConfig")
_hy_v3 = family(CASES, "hy_v3", "HYV3Config")
_minicpm3 = family(CASES, "minicpm3", "MiniCPM3Config")
_biogpt = family(CASES, "biogpt", "BioGptConfig")
_japanese = family(CASES, "gpt_neox_japanese", "GPTNeoXJapaneseConfig")

_SCALES = {"embedding_multiplier": 1.4, "residual_multiplier": 0.6, "logits_scaling": 0.7, "attention_multiplier": 0.4}
_BASES = {"layer_rope_theta": [3000.0, 0, 500.0, 3000.0]}
_granite_swa(
    "granite_swa", 3, "sinks; two windows; three bases of rotations, of which one is zero; biases",
    dims(**OWN, **WIN, **IN_TURN, **BIASES, **_SCALES, **_BASES), EPS, WIDER, ODD, {"layer_rope_theta": None},
    *({name: 1.0} for name in _SCALES),
)  # fmt: skip
_granite_swa(
    "granite_swa_tied", 1, "no lm_head in the file", dims(attention_multiplier=0.4, **WIN, **TIED), greedy_tokens=0
)
_granitemoe_swa(
    "granitemoe_swa", 2, "the same with three of six experts and a shared MLP",
    dims(num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=56, **OWN, **WIN, **_SCALES, **_BASES),
    EPS, WIDER, {"num_experts_per_tok": 2}, {"layer_rope_theta": None},
)  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_mellum(
    "mellum", 5, "windows and a rotation of their own in two of four layers; one dense layer; biases",
    dims(
        head_dim=24, mlp_layer_types=["sparse", "dense", "sparse", "sparse"], **_EXPERTS, **WIN, **IN_TURN, **BIAS,
        **ropes(rope(3000.0), rope(500.0))
    ), EPS, WIDER, ODD, ropes(rope(3000.0), rope(3000.0)), {"norm_topk_prob": False}, {"num_experts_per_tok": 2},
)  # fmt: skip
_flint(
    "flint", 2, "sinks; two windows, and two layers without positions; one dense layer; a shared expert",
    dims(head_dim=24, shared_expert_intermediate_size=56, mlp_only_layers=[1], **_EXPERTS, **OWN, **WIN, **IN_TURN),
    EPS, PLAIN, WIDER, ODD, {"norm_topk_prob": False}, {"num_experts_per_tok": 2},
)  # fmt: skip
_hy_v3(
    "hy_v3", 3, "norms of heads, DeepSeek-V3's router, two shared experts, two dense layers; biases",
    dims(
        head_dim=24, num_shared_experts=2, router_scaling_factor=1.7,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"], **_EXPERTS, **OWN, **BIASES
    ), EPS, PLAIN, {"router_scaling_factor": 1.0}, {"num_experts_per_tok": 2},
)  # fmt: skip
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_minicpm3(
    "minicpm3", 3, "latent attention; factors on embeddings, branches and logits; biases",
    dims(kv=4, scale_emb=1.3, scale_depth=1.2, dim_model_base=80, **_LATENT, **OWN, **BIASES),
    EPS, PLAIN, {"scale_emb": 1.0}, {"scale_depth": 2.0}, {"dim_model_base": 64},
)  # fmt: skip
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_TOKENS = {"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLAIN_NORM = {"layer_norm_eps": 1e-5}
_biogpt(
    "biogpt", 11, "learned positions after two rows, scaled embeddings",
    _SIZES | _TOKENS | {"intermediate_size": 88, "tie_word_embeddings": False},
    {"hidden_act": "relu"}, {"scale_embedding": False},
)  # fmt: skip
_biogpt("biogpt_tied", 1, "tied, as published", _SIZES | _TOKENS | {"intermediate_size": 88}, greedy_tokens=0)
_japanese(
    "gpt_neox_japanese", 5, "one bias, in the last layer; half of each head rotates",
    _SIZES | _TOKENS | rope(3000.0, partial_rotary_factor=0.5)
    | {"intermediate_multiple_size": 2, "layer_norm_eps": 1e-2, "tie_word_embeddings": False},
    _PLAIN_NORM, {"hidden_act": "relu"}, rope(3000.0, partial_rotary_factor=0.25),
)  # fmt: skip
