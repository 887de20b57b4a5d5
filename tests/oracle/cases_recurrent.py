"""Cases of the oracle: state spaces, short convolutions, and models that combine them with attention."""

from __future__ import annotations

from oracle.case import EPS, OWN, PLAIN, TIED, VOCAB, Case, dims, family

CASES: dict[str, Case] = {}

_mamba = family(CASES, "mamba", "MambaConfig")
_falcon_mamba = family(CASES, "falcon_mamba", "FalconMambaConfig")
_mamba2 = family(CASES, "mamba2", "Mamba2Config")
_jamba = family(CASES, "jamba", "JambaConfig")
_lfm2 = family(CASES, "lfm2", "Lfm2Config")

# state space models -----------------------------------------------------------------------------------

_SSM = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "layer_norm_epsilon": 1e-2, "state_size": 8,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEADS = {"num_heads": 6, "head_dim": 16, "n_groups": 2, "expand": 2}
_FINER = {"layer_norm_epsilon": 1e-6}

_mamba(
    "mamba",
    17,
    "a filter of 3 tokens; steps of rank 5",
    _SSM | {"conv_kernel": 3, "time_step_rank": 5, "layer_norm_epsilon": 3e-2},
    _FINER,
)
_mamba(
    "mamba_biases",
    2,
    "biases on the projections, none on the filter; three channels to one; gelu",
    _SSM | {"use_bias": True, "use_conv_bias": False, "expand": 3, "hidden_act": "gelu"},
    {"hidden_act": "silu"},
)
_mamba("mamba_tied", 1, "tied, as published; the default rank", _SSM | TIED, greedy_tokens=0)
_falcon_mamba(
    "falcon_mamba", 2, "norms of dt, B and C", _SSM | {"mixer_rms_eps": 1e-1}, {"mixer_rms_eps": 1e-6}, _FINER
)
_mamba2(
    "mamba2",
    4,
    "two groups of three heads; a filter of 3 tokens; steps between two limits",
    _SSM | _HEADS | {"conv_kernel": 3, "time_step_limit": [0.3, 1.5], "chunk_size": 32},
    {"time_step_limit": [0.0, 1.5]},
    {"time_step_limit": [0.3, 1e6]},
    _FINER,
)
_mamba2(
    "mamba2_biases",
    4,
    "biases on the projections, none on the filter; one group; relu",
    _SSM | _HEADS | {"n_groups": 1, "use_bias": True, "use_conv_bias": False, "hidden_act": "relu", "chunk_size": 32},
    {"hidden_act": "silu"},
)

# jamba ------------------------------------------------------------------------------------------------

_PERIODS = {
    "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
    "num_experts": 5,
}  # fmt: skip
_STATES = {"mamba_d_state": 8, "mamba_d_conv": 3, "mamba_dt_rank": 5, "mamba_expand": 2}

_jamba(
    "jamba",
    1,
    "attention in layers 1 and 4 of 5, five experts, three per token, in layers 0, 2 and 4",
    dims(48, layers=5, num_experts_per_tok=3, **_PERIODS, **_STATES),
    {"num_experts_per_tok": 1},
    EPS,
)
_jamba(
    "jamba_biases",
    1,
    "biases on the projections, none on the filter; one expert, which is an MLP",
    dims(48, kv=4, mamba_proj_bias=True, mamba_conv_bias=False, **(_PERIODS | {"num_experts": 1})),
    greedy_tokens=0,  # transformers requests the scores of a router that does not exist
)

# lfm2 -------------------------------------------------------------------------------------------------

_LFM2 = {name: size for name, size in dims(layers=5).items() if name != "rms_norm_eps"} | {
    "norm_eps": 1e-2, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "block_multiple_of": 8,
}  # fmt: skip

_lfm2("lfm2", 1, "attention in layers 2 and 4 of 5", _LFM2 | OWN | {"conv_L_cache": 4}, {"norm_eps": 1e-6}, PLAIN)
_lfm2(
    "lfm2_biases",
    5,
    "biases in the convolutions; an MLP of just the given size",
    _LFM2 | {"conv_bias": True, "block_auto_adjust_ff_dim": False},
)
