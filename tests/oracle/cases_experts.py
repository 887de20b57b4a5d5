"""Cases of the oracle: GPT-OSS and DeepSeek."""

from __future__ import annotations

from oracle.case import BIAS, EPS, IN_TURN, ODD, OWN, PLAIN, WIDER, WIN, YARN, Case, dims, family, rope

CASES: dict[str, Case] = {}

_gpt_oss = family(CASES, "gpt_oss", "GptOssConfig")
_deepseek_v2 = family(CASES, "deepseek_v2", "DeepseekV2Config")
_deepseek_v3 = family(CASES, "deepseek_v3", "DeepseekV3Config")

# gpt_oss ----------------------------------------------------------------------------------------------

_CLAMP = {"swiglu_alpha": 1.3, "swiglu_limit": 1.5, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24}
_UNCUT = {"beta_fast": 5.0, "beta_slow": 0.5, "truncate": False}
_OSS_YARN = rope(3000.0, "yarn", **YARN, **_UNCUT)

_gpt_oss(
    "gpt_oss",
    1,
    "sinks; windowed and full layers in turn; six experts with biases, a clamped gate; an untruncated YaRN",
    dims(**_CLAMP, **WIN, **_OSS_YARN),
    {"swiglu_alpha": 1.702},
    {"swiglu_limit": 7.0},
    {"num_experts_per_tok": 2},
    rope(3000.0, "yarn", **YARN, **(_UNCUT | {"truncate": True})),
    WIDER,
    EPS,
)
_gpt_oss(
    "gpt_oss_plain",
    5,
    "no scaling, no biases of attention; layer types in an order of their own; two of six experts",
    dims(**(_CLAMP | {"num_experts_per_tok": 2, "swiglu_limit": 2.0}), **WIN, **ODD, **OWN) | {"attention_bias": False},
    IN_TURN,
    PLAIN,
)

# deepseek ---------------------------------------------------------------------------------------------

_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_MANY = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 20}
_LIMITED = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
_V2 = {"topk_method": "group_limited_greedy", "q_lora_rank": 24, "attention_bias": True, "mlp_bias": True}
_PLAIN_CHOICE = {"topk_method": "greedy", "q_lora_rank": None, "first_k_dense_replace": 2}
_ALL_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "n_shared_experts": 1, "q_lora_rank": None}
_SCALE = {**YARN, "beta_fast": 5.0, "beta_slow": 0.5}
_TWO_SCALES = rope(3000.0, "yarn", **_SCALE, mscale=1.4, mscale_all_dim=0.6)
_ONE_SCALE = rope(3000.0, "yarn", **_SCALE, mscale=0.707, mscale_all_dim=0.707)

_deepseek_v2(
    "deepseek_v2",
    1,
    "compressed queries; experts of the best two of four groups; yarn with two temperatures; all biases",
    dims(kv=4, **_LATENT, **_MANY, **_LIMITED, **_V2, **_TWO_SCALES),
    {"topk_method": "greedy"},
    {"topk_group": 3},
    {"num_experts_per_tok": 2},
    {"routed_scaling_factor": 1.0},
    _ONE_SCALE,
    rope(3000.0, "yarn", **_SCALE, mscale=1.4),
    rope(3000.0),
    EPS,
)
_deepseek_v2(
    "deepseek_v2_lite",
    2,
    "as V2-Lite: queries not compressed, experts from everywhere, one temperature",
    dims(kv=4, **_LATENT, **_MANY, **_PLAIN_CHOICE, **_ONE_SCALE),
    {"num_experts_per_tok": 2},
    {"routed_scaling_factor": 1.7},
    rope(3000.0, "yarn", **_SCALE),
)
_deepseek_v3(
    "deepseek_v3",
    6,
    "sigmoid scores, a bias on the choice, groups by their two best; compressed queries; yarn",
    dims(kv=4, **_LATENT, **_MANY, **_LIMITED, q_lora_rank=24, **_ONE_SCALE),
    {"norm_topk_prob": False},
    {"topk_group": 3},
    {"n_group": 6},
    {"rope_interleave": False},
    {"routed_scaling_factor": 1.0},
    rope(3000.0, "yarn", **_SCALE),
    EPS,
)
_deepseek_v3(
    "deepseek_v3_plain",
    1,
    "one group; weights not renormalized; halves rotate; no scaling; all biases",
    dims(kv=4, **_LATENT, **_MANY | _ALL_GROUPS, **BIAS, **OWN, norm_topk_prob=False, rope_interleave=False),
    {"norm_topk_prob": True},
    {"rope_interleave": True},
    PLAIN,
)

# longcat_flash ----------------------------------------------------------------------------------------

_longcat = family(CASES, "longcat_flash", "LongcatFlashConfig")
_TWICE = {k: v for k, v in dims(kv=4).items() if k not in ("intermediate_size", "num_hidden_layers")}
_SHORTCUT = {"ffn_hidden_size": 88, "expert_ffn_hidden_size": 20, "num_layers": 2, "q_lora_rank": 24, "head_dim": 8}
_ZERO = {"n_routed_experts": 7, "zero_expert_num": 4, "moe_topk": 3, "routed_scaling_factor": 1.7}

_longcat(
    "longcat_flash",
    1,
    "two attentions and two MLPs a layer; experts as a shortcut, four of eleven return their input",
    _TWICE | _LATENT | _SHORTCUT | _ZERO | OWN,
    {"moe_topk": 2},
    {"routed_scaling_factor": 1.0},
    PLAIN,
    EPS,
)
_longcat(
    "longcat_flash_full",
    23,
    "no experts that return their input; biases of latents and of the output; yarn with a temperature",
    _TWICE | _LATENT | _SHORTCUT | _ZERO | BIAS | _ONE_SCALE | {"zero_expert_num": 0},
    {"routed_scaling_factor": 1.0},
    rope(3000.0, "yarn", **_SCALE),
)

# deepseek_v32 -----------------------------------------------------------------------------------------

_deepseek_v32 = family(CASES, "deepseek_v32", "DeepseekV32Config")
_INDEXED = {"index_topk": 20, "index_head_dim": 24, "index_n_heads": 12, "q_lora_rank": 24}

_deepseek_v32(
    "deepseek_v32",
    3,
    "an indexer selects 20 keys, fewer than the longer sequences have; halves rotate in it, pairs elsewhere; yarn",
    dims(kv=4, **_LATENT, **_MANY, **_LIMITED | {"first_k_dense_replace": 3}, **_INDEXED, **_ONE_SCALE),
    {"index_topk": 21},
    {"norm_topk_prob": False},
    {"routed_scaling_factor": 1.0},
    EPS,
)
