"""Cases of the oracle: families that are others under a name of their own, or differ from them in few fields."""

from __future__ import annotations

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

_ministral = family(CASES, "ministral", "MinistralConfig")
_cwm = family(CASES, "cwm", "CwmConfig")
_exaone = family(CASES, "exaone", "ExaoneConfig")
_internlm3 = family(CASES, "internlm3", "InternLM3Config")
_iquestcoder = family(CASES, "iquestcoder", "IQuestCoderConfig")
_jais2 = family(CASES, "jais2", "Jais2Config")
_hyperclovax = family(CASES, "hyperclovax", "HyperCLOVAXConfig")
_vaultgemma = family(CASES, "vaultgemma", "VaultGemmaConfig")
_solar_open = family(CASES, "solar_open", "SolarOpenConfig")
_sarvam_moe = family(CASES, "sarvam_moe", "SarvamMoEConfig")
_sarvam_mla = family(CASES, "sarvam_mla", "SarvamMLAConfig")
_glm4_moe_lite = family(CASES, "glm4_moe_lite", "Glm4MoeLiteConfig")
_youtu = family(CASES, "youtu", "YoutuConfig")
_flex_olmo = family(CASES, "flex_olmo", "FlexOlmoConfig")
_exaone_moe = family(CASES, "exaone_moe", "ExaoneMoeConfig")
_afmoe = family(CASES, "afmoe", "AfmoeConfig")
_ernie4_5_moe = family(CASES, "ernie4_5_moe", "Ernie4_5_MoeConfig")

_ministral(
    "ministral", 2, "windows in two of four layers", dims(head_dim=24, **OWN, **WIN, **IN_TURN), EPS, PLAIN, WIDER, ODD,
)  # fmt: skip
_cwm(
    "cwm", 1, "three windows after each global layer; biases on the MLP; Llama 3.1's rotation by default",
    dims(head_dim=24, mlp_bias=True, **WIN), EPS, WIDER, ODD, PLAIN,
)  # fmt: skip
_exaone("exaone", 2, "Llama with GPT-2's names of fields and tensors", dims(head_dim=24, **OWN, **BIASES), EPS, PLAIN)
_internlm3("internlm3", 2, "Llama with biases", dims(head_dim=24, **OWN, **BIASES), EPS, PLAIN)
_iquestcoder("iquestcoder", 5, "Llama with heads of their own size", dims(head_dim=24, **OWN), EPS, PLAIN)
_LAYER_NORM = {"layer_norm_eps": 1e-2}
_jais2(
    "jais2", 2, "layer norms, MLPs without a gate, biases",
    {k: v for k, v in dims(**_LAYER_NORM, **OWN).items() if k != "rms_norm_eps"},
    {"layer_norm_eps": 1e-5}, {"hidden_act": "gelu"}, PLAIN,
)  # fmt: skip
_SCALES = {"embedding_multiplier": 1.4, "residual_multiplier": 0.6, "logits_scaling": 0.7, "attention_multiplier": 0.4}
_hyperclovax(
    "hyperclovax", 1, "norms before and after each branch, and four multipliers",
    dims(**_SCALES, **BIASES, **OWN), EPS, PLAIN, *({name: 1.0} for name in _SCALES),
)  # fmt: skip
_hyperclovax("hyperclovax_pre", 1, "norms before the branches alone", dims(use_post_norm=False, **_SCALES), EPS)
_SOFT = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_vaultgemma(
    "vaultgemma", 2, "Gemma 2 without norms after the branches",
    dims(head_dim=24, query_pre_attn_scalar=40, **_SOFT, **WIN, **OWN, **BIAS), EPS, PLAIN, WIDER,
    {"attn_logit_softcapping": None}, {"final_logit_softcapping": None},
)  # fmt: skip

_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2}
_SCALED = {"routed_scaling_factor": 1.7}
_solar_open(
    "solar_open", 9, "experts in every layer, whole heads rotate",
    {k: v for k, v in dims(head_dim=24, **_ROUTED, **_SCALED, **OWN, **BIAS).items() if k != "intermediate_size"},
    EPS, PLAIN, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0},
)  # fmt: skip
_sarvam_moe(
    "sarvam_moe", 1, "norms of heads; one matrix for q, k and v; one dense layer",
    dims(head_dim=24, **_ROUTED, **_SCALED, **OWN), EPS, PLAIN, {"norm_topk_prob": False},
)  # fmt: skip
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_sarvam_mla(
    "sarvam_mla", 5, "latent attention whose queries are not compressed; one dense layer; yarn",
    dims(kv=4, **_LATENT, **_ROUTED, **_SCALED, **rope(3000.0, "yarn", **YARN, mscale=0.7, mscale_all_dim=0.7)),
    EPS, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, rope(3000.0),
)  # fmt: skip
_glm4_moe_lite(
    "glm4_moe_lite", 2, "latent attention; experts in two of four layers",
    dims(
        kv=4, q_lora_rank=24, mlp_layer_types=["dense", "sparse", "sparse", "dense"], **_LATENT, **_ROUTED, **_SCALED,
        **OWN
    ), EPS, PLAIN, {"rope_interleave": False}, {"norm_topk_prob": False},
)  # fmt: skip
_youtu(
    "youtu", 1, "latent attention beside dense MLPs", dims(kv=4, q_lora_rank=24, **_LATENT, **OWN, **BIAS),
    EPS, PLAIN, {"rope_interleave": False},
)  # fmt: skip
_youtu("youtu_tied", 1, "no lm_head in the file", dims(kv=4, q_lora_rank=24, **_LATENT, **TIED), greedy_tokens=0)
_flex_olmo(
    "flex_olmo", 1, "norms after the branches and over all of q and of k; three of six experts",
    dims(96, 6, 2, num_experts=6, num_experts_per_tok=3, **OWN), {"norm_topk_prob": True}, EPS, PLAIN,
)  # fmt: skip
_MANY = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_shared_experts": 2}
_exaone_moe(
    "exaone_moe", 3, "norms of heads; two local layers, and two without positions; one dense layer",
    dims(**_MANY, **_SCALED, **OWN, **WIN, **IN_TURN), EPS, PLAIN, WIDER, {"norm_topk_prob": False},
    {"routed_scaling_factor": 1.0},
)  # fmt: skip
_afmoe(
    "afmoe", 3, "gated attention; three local layers, and a global one without positions; two dense layers",
    dims(
        head_dim=24, num_dense_layers=2, route_scale=1.7, global_attn_every_n_layers=4, mup_enabled=True, **_MANY,
        **OWN, **WIN
    ), EPS, PLAIN, WIDER, {"mup_enabled": False}, {"route_scale": 1.0},
)  # fmt: skip
_COUNTS = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2}
_ernie4_5_moe(
    "ernie4_5_moe", 7, "neighboring numbers rotate together; experts from the second to the third layer; biases",
    dims(use_bias=True, moe_layer_end_index=2, **_COUNTS, **OWN), EPS, PLAIN, {"moe_k": 2},
)  # fmt: skip
