"""Cases of the oracle: positions, norms, activations and routers that few families have."""

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
    WIDER,
    WIN,
    YARN,
    Case,
    dims,
    family,
    rope,
)

CASES: dict[str, Case] = {}

# positions ------------------------------------------------------------------------------------------------

_hunyuan = family(CASES, "hunyuan_v1_dense", "HunYuanDenseV1Config")
_hunyuan_moe = family(CASES, "hunyuan_v1_moe", "HunYuanMoEV1Config")
_ministral3 = family(CASES, "ministral3", "Ministral3Config")
_mistral3 = family(CASES, "mistral3", "Mistral3Config")
_ALPHA = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 20.0, "factor": 1.0}}
_hunyuan(
    "hunyuan", 3, "heads are rotated before their norm; a larger base that follows no length; biases",
    dims(head_dim=24, **_ALPHA, **BIAS), EPS, rope(300.0),
)  # fmt: skip
_hunyuan_moe(
    "hunyuan_moe", 4, "heads are rotated before their norm; three of six experts, and a shared one",
    dims(head_dim=24, num_experts=6, moe_topk=3, **OWN), EPS, PLAIN, {"moe_topk": 2},
)  # fmt: skip
_GROWING = {"llama_4_scaling_beta": 0.4, **YARN}
_ministral3(
    "ministral3", 4, "queries grow every 64 tokens; yarn",
    dims(head_dim=24, **rope(3000.0, "yarn", **_GROWING)), EPS,
    rope(3000.0, "yarn", **(_GROWING | {"llama_4_scaling_beta": 0.0})),
)  # fmt: skip
_ministral3(
    "ministral3_window", 2, "queries grow; a window in all layers",
    dims(head_dim=24, **WIN, **rope(3000.0, llama_4_scaling_beta=0.4, original_max_position_embeddings=20)), WIDER,
)  # fmt: skip
_EYES = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_mistral3(
    "mistral3", 1, "the language model of one that also sees",
    {
        "text_config": {"model_type": "ministral3"} | dims(head_dim=24, **rope(3000.0, "yarn", **_GROWING)),
        "vision_config": _EYES, "tie_word_embeddings": False,
    },
)  # fmt: skip
_mistral3(
    "mistral3_window", 2, "Mistral inside, with a window",
    {
        "text_config": {"model_type": "mistral"} | dims(head_dim=24, **WIN, **OWN), "vision_config": _EYES,
        "tie_word_embeddings": False,
    },
)  # fmt: skip

# norms and activations ------------------------------------------------------------------------------------

_apertus = family(CASES, "apertus", "ApertusConfig")
_olmo = family(CASES, "olmo", "OlmoConfig")
_nanochat = family(CASES, "nanochat", "NanoChatConfig")
_nemotron = family(CASES, "nemotron", "NemotronConfig")
_axk1 = family(CASES, "axk1", "AXK1Config")


def _without(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in config.items() if field != name}


_apertus("apertus", 3, "an activation with learned numbers; norms of heads; biases", dims(**OWN, **BIAS), EPS, PLAIN)
_apertus("apertus_relu", 2, "any other activation", dims(hidden_act="relu2", **OWN), EPS)
_olmo(
    "olmo", 1, "layer norms without weights; queries, keys and values are limited",
    _without("rms_norm_eps", dims(clip_qkv=1.5, **OWN, **BIAS)), PLAIN, {"clip_qkv": None}, {"clip_qkv": 2.0},
)  # fmt: skip
_nanochat(
    "nanochat", 4, "norms without weights, of embeddings and heads too; heads rotate backward; capped logits",
    dims(final_logit_softcapping=3.0, **OWN, **BIAS), EPS, PLAIN, {"final_logit_softcapping": None},
    {"hidden_act": "gelu"},
)  # fmt: skip
_nemotron(
    "nemotron", 1, "layer norms stored as weight - 1; half of each head rotates; biases",
    _without("rms_norm_eps", dims(head_dim=24, norm_eps=1e-2, **rope(3000.0, partial_rotary_factor=0.5), **BIASES)),
    {"norm_eps": 1e-5}, {"hidden_act": "gelu"}, rope(3000.0, partial_rotary_factor=0.25),
)  # fmt: skip
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_ROUTED = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_axk1(
    "axk1", 2, "DeepSeek-V3 with a norm after the experts, in two of four layers",
    dims(kv=4, mlp_layer_types=["dense", "sparse", "dense", "sparse"], **_LATENT, **_ROUTED, **OWN),
    EPS, PLAIN, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, {"rope_interleave": False},
)  # fmt: skip

# routers --------------------------------------------------------------------------------------------------

_phimoe = family(CASES, "phimoe", "PhimoeConfig")
_kolibri1 = family(CASES, "kolibri1", "Kolibri1Config")
_cohere2_moe = family(CASES, "cohere2_moe", "Cohere2MoeConfig")
_phimoe(
    "phimoe", 3, "two of six experts, chosen one after the other; layer norms; a bias on the head; biases",
    dims(num_local_experts=6, router_jitter_noise=0.3, lm_head_bias=True, **OWN, **BIAS), EPS, PLAIN,
    {"router_jitter_noise": 0.1},
)  # fmt: skip
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0], "long_factor": [2.0 + i for i in range(8)]}
_MSCALES = {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 200}
_phimoe(
    "phimoe_longrope", 18, "as published: longrope with a factor of its own, at lengths below the trained one",
    dims(num_local_experts=6, **rope(3000.0, "longrope", **_FACTORS, **_MSCALES)), rope(3000.0), max_model_len=200,
)  # fmt: skip
_phimoe("phimoe_window", 1, "a window in all layers", dims(num_local_experts=6, **WIN), WIDER)
_MANY = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_kolibri1(
    "kolibri1", 1, "norms before and after each branch; two local layers; a bias on the logits of the choice",
    _without(
        "intermediate_size", dims(head_dim=24, shared_expert_intermediate_size=56, **_MANY, **OWN, **WIN, **IN_TURN)
    ), EPS, PLAIN, WIDER, ODD, {"norm_topk_prob": True}, {"num_experts_per_tok": 2},
)  # fmt: skip
_COUNTS = {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "logit_scale": 0.7}
_KINDS = {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 72}
_cohere2_moe(
    "cohere2_moe", 2, "parallel branches; three of six experts, averaged with two shared ones; biases",
    dims(head_dim=24, **_COUNTS, **_KINDS, **OWN, **WIN, **IN_TURN, **BIAS), EPS, PLAIN, WIDER, ODD,
    {"shared_expert_combination_strategy": "sum"}, {"expert_selection_fn": "sigmoid"},
    {"prefix_dense_sliding_window_pattern": 4},
)  # fmt: skip
_cohere2_moe(
    "cohere2_moe_sigmoid", 3, "sigmoid scores that are not normalized, no shared experts, layer norms",
    dims(
        head_dim=24, rms_norm_eps=None, layer_norm_eps=1e-2, expert_selection_fn="sigmoid", norm_topk_prob=False,
        **(_COUNTS | {"num_shared_experts": 0}), **OWN, **WIN
    ), {"layer_norm_eps": 1e-5}, {"norm_topk_prob": True},
)  # fmt: skip
_cohere2_moe("cohere2_moe_tied", 1, "no lm_head in the file", dims(head_dim=24, **_COUNTS, **TIED), greedy_tokens=0)
