"""Cases of the oracle: families that differ from others of the oracle in few fields."""

from __future__ import annotations

from oracle.case import (
    BIAS,
    BIASES,
    EPS,
    IN_TURN,
    NO_WINDOW,
    OWN,
    PLAIN,
    TIED,
    USE_WINDOW,
    WIDER,
    WIN,
    Case,
    dims,
    family,
    rope,
)

CASES: dict[str, Case] = {}

_arcee = family(CASES, "arcee", "ArceeConfig")
_ernie4_5 = family(CASES, "ernie4_5", "Ernie4_5Config")
_exaone4 = family(CASES, "exaone4", "Exaone4Config")
_gemma = family(CASES, "gemma", "GemmaConfig")
_helium = family(CASES, "helium", "HeliumConfig")
_olmoe = family(CASES, "olmoe", "OlmoeConfig")
_qwen2_moe = family(CASES, "qwen2_moe", "Qwen2MoeConfig")
_seed_oss = family(CASES, "seed_oss", "SeedOssConfig")
_starcoder2 = family(CASES, "starcoder2", "Starcoder2Config")

_gemma(
    "gemma",
    2,
    "norms stored as weight - 1; scaled embeddings",
    dims(head_dim=24, **OWN, **BIAS),
    EPS,
    PLAIN,
    {"hidden_act": "silu"},
)
_gemma("gemma_tied", 1, "no lm_head in the file", dims(head_dim=24, **TIED), greedy_tokens=0)
_arcee(
    "arcee",
    1,
    "MLPs without a gate, with squared ReLU; biases",
    dims(**OWN, **BIASES),
    EPS,
    PLAIN,
    {"hidden_act": "gelu"},
)
_seed_oss(
    "seed_oss", 1, "biases on q, k, v and the MLP, none on o", dims(head_dim=24, mlp_bias=True, **OWN), EPS, PLAIN
)
_seed_oss("seed_oss_out", 1, "a bias on o alone", dims(head_dim=24, attention_bias=False, attention_out_bias=True))
_helium("helium", 1, "neighboring numbers rotate together; biases", dims(head_dim=16, **OWN, **BIASES), EPS, PLAIN)
_ernie4_5(
    "ernie4_5",
    1,
    "neighboring numbers rotate together; a bias on all seven projections",
    dims(head_dim=24, use_bias=True, **OWN),
    EPS,
    PLAIN,
)
_starcoder2(
    "starcoder2", 1, "layer norms, plain MLPs, all biases, a window",
    {k: v for k, v in dims(norm_epsilon=1e-2, **OWN, **WIN).items() if k != "rms_norm_eps"},
    {"norm_epsilon": 1e-5}, {"hidden_act": "gelu"}, PLAIN, WIDER, NO_WINDOW,
)  # fmt: skip
_exaone4(
    "exaone4", 1, "norms after each branch; two local layers, and two without positions",
    dims(**OWN, **WIN, **IN_TURN), EPS, PLAIN, WIDER,
)  # fmt: skip
_exaone4(
    "exaone4_full",
    1,
    "no window: all layers rotate",
    dims(**NO_WINDOW, layer_types=["full_attention"] * 4, **OWN),
    PLAIN,
)

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_SHARED = {"shared_expert_intermediate_size": 56}
_qwen2_moe(
    "qwen2_moe", 2, "experts on every layer, and a shared one with a gate",
    dims(**_EXPERTS, **_SHARED, **OWN), {"norm_topk_prob": True}, {"num_experts_per_tok": 2}, EPS, PLAIN,
)  # fmt: skip
_qwen2_moe(
    "qwen2_moe_mixed", 4, "dense layers between; a window on the first and the third layer; no biases",
    dims(layers=4, decoder_sparse_step=2, qkv_bias=False, **_EXPERTS, **_SHARED, **USE_WINDOW), WIDER,
)  # fmt: skip
_olmoe(
    "olmoe", 1, "norms over all of q and of k; weights of experts not renormalized",
    dims(96, 6, 2, num_experts=6, num_experts_per_tok=3, **OWN), {"norm_topk_prob": True}, EPS, PLAIN,
)  # fmt: skip

_dots1 = family(CASES, "dots1", "Dots1Config")
_glm4_moe = family(CASES, "glm4_moe", "Glm4MoeConfig")
_minimax_m2 = family(CASES, "minimax_m2", "MiniMaxM2Config")

_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2}
_SCALED = {"routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
_GROUPED = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}

_glm4_moe(
    "glm4_moe", 1, "one dense layer, two shared experts; half of each head rotates; biases on q, k, v",
    dims(head_dim=24, **rope(3000.0, partial_rotary_factor=0.5), **_ROUTED, **_SCALED, **BIAS),
    {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, EPS,
)  # fmt: skip
_glm4_moe(
    "glm4_moe_groups",
    20,
    "experts from two of four groups; norms of heads",
    dims(use_qk_norm=True, **(_ROUTED | _GROUPED)),
    EPS,
)
_dots1(
    "dots1", 2, "norms of heads; windows from the third layer on; weights of experts not renormalized",
    dims(**_ROUTED, **_SCALED, **OWN, **WIN, max_window_layers=2), {"norm_topk_prob": True}, WIDER, EPS, PLAIN,
)  # fmt: skip
_minimax_m2(
    "minimax_m2", 25, "norms over all of q and of k; a third of each head rotates",
    dims(
        96, 6, 2, head_dim=24, num_local_experts=6, num_experts_per_tok=3, **rope(3000.0, partial_rotary_factor=0.34)
    ), EPS,
)  # fmt: skip
