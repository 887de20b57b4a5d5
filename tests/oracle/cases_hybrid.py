"""Cases of the oracle: Mamba-2 among attention layers, with MLPs and experts beside them or as layers of their own."""

from __future__ import annotations

from oracle.case import BIAS, BIASES, EPS, OWN, PLAIN, TIED, VOCAB, WINDOW, Case, dims, family, rope

CASES: dict[str, Case] = {}

_bamba = family(CASES, "bamba", "BambaConfig")
_granitemoe = family(CASES, "granitemoe", "GraniteMoeConfig")
_granitemoeshared = family(CASES, "granitemoeshared", "GraniteMoeSharedConfig")
_granitemoehybrid = family(CASES, "granitemoehybrid", "GraniteMoeHybridConfig")
_falcon_h1 = family(CASES, "falcon_h1", "FalconH1Config")
_nemotron_h = family(CASES, "nemotron_h", "NemotronHConfig")
_lfm2_moe = family(CASES, "lfm2_moe", "Lfm2MoeConfig")
_recurrent_gemma = family(CASES, "recurrent_gemma", "RecurrentGemmaConfig")

_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3,
    "mamba_chunk_size": 32,
}  # fmt: skip
_STEPS = {"time_step_limit": [0.3, 1.5]}

# bamba ------------------------------------------------------------------------------------------------

_bamba(
    "bamba",
    5,
    "attention in layers 1 and 3 of 5, half of each head rotated; two groups; a filter of 3 tokens; limited steps",
    dims(layers=5, attn_layer_indices=[1, 3], **_MAMBA, **_STEPS, **OWN),
    {"time_step_limit": [0.0, 1.5]},
    {"time_step_limit": [0.3, 1e6]},
    EPS,
)
_bamba(
    "bamba_biases",
    7,
    "all biases but the filter's; one group of sixteen heads",
    dims(attn_layer_indices=[2], mlp_bias=True, mamba_proj_bias=True, mamba_conv_bias=False, **BIAS, **PLAIN)
    | _MAMBA
    | {"mamba_n_groups": 1, "mamba_n_heads": 16, "mamba_d_head": 8},
)

# falcon_h1 --------------------------------------------------------------------------------------------

_FALCON_H1 = {
    "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 12,
    "mamba_d_conv": 3, "mamba_chunk_size": 32, "head_dim": 24,
}  # fmt: skip
_FACTORS = {
    "lm_head_multiplier": 0.7, "embedding_multiplier": 1.6, "mlp_multipliers": [0.8, 0.6], "key_multiplier": 0.6,
    "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.3, "ssm_multipliers": [1.2, 0.9, 0.7, 1.4, 0.8],
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7,
}  # fmt: skip

_falcon_h1(
    "falcon_h1",
    2,
    "Mamba-2 beside attention in each of 4 layers; fourteen factors; no norm behind the state space; two groups",
    dims(**_FALCON_H1, **_FACTORS, **OWN),
    *({name: 1.0} for name in _FACTORS if not name.endswith("multipliers")),
    {"mlp_multipliers": [1.0, 0.6]},
    {"mlp_multipliers": [0.8, 1.0]},
    *({"ssm_multipliers": [1.1 if i == j else f for j, f in enumerate(_FACTORS["ssm_multipliers"])]} for i in range(5)),
    EPS,
)
_falcon_h1(
    "falcon_h1_norm",
    1,
    "a norm after the gate; all biases; limited steps; no factor on what goes into the mixers",
    dims(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True, projectors_bias=True, **BIASES, **OWN)
    | _FALCON_H1
    | _STEPS
    | {"key_multiplier": 0.6, "ssm_multipliers": [1.2, 0.9, 0.7, 1.4, 0.8], "mamba_d_ssm": None, "mamba_d_head": 16},
)

# granite ----------------------------------------------------------------------------------------------

_SCALES = {
    "embedding_multiplier": 2.5, "attention_multiplier": 0.35, "residual_multiplier": 0.6, "logits_scaling": 1.7,
}  # fmt: skip
_SCALED = (
    {"embedding_multiplier": 1.0}, {"attention_multiplier": 0.25}, {"residual_multiplier": 1.0},
    {"logits_scaling": 1.0},
)  # fmt: skip
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
_IN_TURN = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]

_granitemoe(
    "granitemoe", 2, "three of six experts; four multipliers", dims(**_SCALES, **OWN) | _EXPERTS, *_SCALED, PLAIN
)
_granitemoeshared(
    "granitemoeshared",
    4,
    "an MLP beside two of six experts; biases",
    dims(shared_intermediate_size=40, **_SCALES, **BIAS, **OWN) | _EXPERTS | {"num_experts_per_tok": 2},
    {"num_experts_per_tok": 3},
)
_granitemoehybrid(
    "granitemoehybrid",
    24,
    "attention without positions in layers 1 and 4 of 5; an MLP beside three of six experts; four multipliers",
    dims(layers=5, layer_types=_IN_TURN, shared_intermediate_size=40, **_MAMBA, **_STEPS, **_SCALES, **PLAIN)
    | _EXPERTS
    | {"position_embedding_type": "nope"},
    *_SCALED,
    {"position_embedding_type": "rope"},
    {"num_experts_per_tok": 2},
    {"time_step_limit": [0.0, 1.5]},
    EPS,
)
_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 56}
_granitemoehybrid(
    "granitemoehybrid_dense",
    2,
    "no experts; attention is rotated; biases but in the filter",
    dims(layer_types=_IN_TURN[:2] * 2, mamba_proj_bias=True, mamba_conv_bias=False, **_SCALES, **BIAS, **OWN)
    | _DENSE
    | _MAMBA
    | {"mamba_n_groups": 1, "position_embedding_type": "rope"},
    {"position_embedding_type": None},
    PLAIN,
)
_granitemoehybrid(
    "granitemoehybrid_tied",
    1,
    "attention alone, and no experts, tied, as published",
    dims(layer_types=["full_attention"] * 4, position_embedding_type="rope", **_MAMBA, **_SCALES, **PLAIN)
    | _DENSE
    | TIED,
    greedy_tokens=0,
)

# nemotron_h -------------------------------------------------------------------------------------------

_NEMOTRON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4, "head_dim": 24,
    "num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 12, "n_groups": 2,
    "conv_kernel": 3, "chunk_size": 32, "layer_norm_epsilon": 1e-2, "max_position_embeddings": 256,
    "time_step_min": 1e-30,  # a lower bound for the steps of a prompt in transformers, but not in the published code
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MANY = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "routed_scaling_factor": 1.7,
    "moe_shared_expert_intermediate_size": 36,
}  # fmt: skip
_FINER = {"layer_norm_epsilon": 1e-6}


def _layers(pattern: str) -> dict[str, list[str]]:
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return {"layers_block_type": [words[letter] for letter in pattern]}


_nemotron_h(
    "nemotron_h",
    1,
    "Mamba-2, MLP and attention layers in an order of their own, an MLP first and last",
    _NEMOTRON | _layers("-M*-M--M*-"),
    _FINER,
    {"mlp_hidden_act": "relu"},
)
_nemotron_h(
    "nemotron_h_biases",
    2,
    "biases of Mamba-2 and MLPs, none on the filter; another activation; one group",
    _NEMOTRON
    | _layers("M-M*-M")
    | {"use_bias": True, "use_conv_bias": False, "mlp_bias": True, "mlp_hidden_act": "silu", "n_groups": 1},
)
_nemotron_h(
    "nemotron_h_moe",
    23,
    "three of twelve experts from the best two of four groups; experts have no gate; one MLP for all",
    _NEMOTRON | _layers("ME*EM-E") | _MANY | {"n_group": 4, "topk_group": 2},
    {"num_experts_per_tok": 2},
    {"topk_group": 3},
    {"routed_scaling_factor": 1.0},
    {"norm_topk_prob": False},
)
_nemotron_h(
    "nemotron_h_latent",
    28,
    "experts over a shorter vector, chosen from all; their scores as they are; another activation",
    _NEMOTRON
    | _layers("ME*EM")
    | _MANY
    | {"moe_latent_size": 28, "norm_topk_prob": False, "routed_scaling_factor": 0.7, "mlp_hidden_act": "silu"},
    {"norm_topk_prob": True},
)

# lfm2_moe ---------------------------------------------------------------------------------------------

_LFM2 = {name: size for name, size in dims(layers=5).items() if name != "rms_norm_eps"} | {
    "norm_eps": 1e-2, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"], "num_experts": 7,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 1, "routed_scaling_factor": 1.4,
}  # fmt: skip

_lfm2_moe(
    "lfm2_moe",
    6,
    "a dense layer, then three of seven experts, chosen by biased scores",
    _LFM2 | OWN | {"conv_L_cache": 4},
    {"norm_eps": 1e-6},
    {"num_experts_per_tok": 2},
    {"routed_scaling_factor": 1.0},
)
_lfm2_moe(
    "lfm2_moe_plain",
    3,
    "no bias on the choice, scores as they are; biases in the convolutions",
    _LFM2 | {"conv_bias": True, "use_expert_bias": False, "norm_topk_prob": False},
    {"norm_topk_prob": True},
)

# recurrent_gemma --------------------------------------------------------------------------------------

_GRIFFIN = {"attention_window_size": WINDOW, "conv1d_width": 3, "logits_soft_cap": 4.0, "intermediate_size": 176}

_recurrent_gemma(
    "recurrent_gemma",
    2,
    "gated recurrent units wider than the stream, local attention in one layer of three; capped logits",
    dims(kv=1, layers=5, lru_width=96, **OWN, **TIED) | _GRIFFIN,
    {"attention_window_size": WINDOW + 1},
    {"logits_soft_cap": 30.0},
    {"hidden_activation": "silu"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 1.0}},
    EPS,
)
_recurrent_gemma(
    "recurrent_gemma_biases",
    2,
    "attention first, with two heads of keys and biases; a quarter of each head is rotated; a head of its own",
    dims(**BIAS, block_types=["attention", "recurrent"], **rope(3000.0, partial_rotary_factor=0.25))
    | _GRIFFIN
    | {"conv1d_width": 4, "hidden_activation": "relu"},
    {"logits_soft_cap": 30.0},
)
