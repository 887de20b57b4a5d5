"""Cases of the oracle: stacks of attention and MLPs, Mixtral's and Qwen's experts among them."""

from __future__ import annotations

from typing import Any

from oracle.case import (
    BIAS,
    BIASES,
    EPS,
    IN_TURN,
    NO_WINDOW,
    ODD,
    OWN,
    PLAIN,
    TIED,
    UNUSED,
    USE_WINDOW,
    VOCAB,
    WIDER,
    WIN,
    WINDOW,
    YARN,
    Case,
    dims,
    family,
    rope,
    ropes,
)

CASES: dict[str, Case] = {}

_llama = family(CASES, "llama", "LlamaConfig")
_mistral = family(CASES, "mistral", "MistralConfig")
_mixtral = family(CASES, "mixtral", "MixtralConfig")
_qwen2 = family(CASES, "qwen2", "Qwen2Config")
_qwen3 = family(CASES, "qwen3", "Qwen3Config")
_qwen3_moe = family(CASES, "qwen3_moe", "Qwen3MoeConfig")
_smollm3 = family(CASES, "smollm3", "SmolLM3Config")
_gemma2 = family(CASES, "gemma2", "Gemma2Config")
_gemma3_text = family(CASES, "gemma3_text", "Gemma3TextConfig")
_phi3 = family(CASES, "phi3", "Phi3Config")
_olmo2 = family(CASES, "olmo2", "Olmo2Config")
_olmo3 = family(CASES, "olmo3", "Olmo3Config")
_glm = family(CASES, "glm", "GlmConfig")
_glm4 = family(CASES, "glm4", "Glm4Config")
_granite = family(CASES, "granite", "GraniteConfig")
_gpt2 = family(CASES, "gpt2", "GPT2Config")
_gpt_neox = family(CASES, "gpt_neox", "GPTNeoXConfig")


def _neox_dims(**more: Any) -> dict[str, Any]:
    """Return the dimensions of GPT-NeoX, which has neither grouped heads nor RMS norms."""
    sizes = dims(96, layer_norm_eps=1e-2, **more)
    return {key: value for key, value in sizes.items() if key not in ("num_key_value_heads", "rms_norm_eps")}


def _gpt2_dims(**more: Any) -> dict[str, Any]:
    """Return the dimensions of GPT-2, which has its own names for all of them."""
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
    rest = {"layer_norm_epsilon": 1e-2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    return sizes | rest | more


# llama ------------------------------------------------------------------------------------------------

_LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = rope(kind="dynamic", factor=4.0)
_RAMP = {"beta_fast": 5.0, "beta_slow": 0.5, "mscale": 1.4, "mscale_all_dim": 0.6, "truncate": False}
_RAMP_TOGGLES = [{"truncate": True}, {"beta_fast": 32.0}, {"beta_slow": 1.0}, {"mscale": 1.0}]

_llama("llama", 6, "plain multi-head attention", dims(kv=4), EPS)
_llama("llama_gqa", 7, "three query heads to a key/value head", dims(96, 6, 2, **rope(700.0)), EPS, PLAIN)
_llama("llama_head_dim", 15, "head_dim 24, not 64 / 4; one key/value head", dims(kv=1, head_dim=24))
_llama("llama_biases", 30, "a bias on all seven projections", dims(**BIASES))
_llama("llama_tied", 1, "no lm_head in the file", dims(**TIED), greedy_tokens=0)
_llama("llama_linear", 4, "every frequency over 4", dims(**rope(kind="linear", factor=4.0)), PLAIN)
_llama("llama_dynamic", 1, "dynamic NTK within its length changes nothing", dims(**_DYNAMIC))
_llama(
    "llama_dynamic_long",
    4,
    "dynamic NTK: a prompt past the trained length turns as its length says",
    dims(**_DYNAMIC) | {"max_position_embeddings": 64},
    PLAIN,
    max_model_len=100,
    lengths=(1, 64, 65, 100),
    greedy_tokens=0,
)
_llama(
    "llama_llama3",
    4,
    "llama3 scaling: kept, smoothed and divided frequencies all occur",
    dims(**rope(kind="llama3", low_freq_factor=1.0, **_LLAMA3)),
    PLAIN,
    rope(kind="llama3", low_freq_factor=2.0, **_LLAMA3),
)
_llama(
    "llama_yarn",
    14,
    "YaRN with all defaults: the attention factor follows from the factor",
    dims(**rope(kind="yarn", **YARN)),
    PLAIN,
    rope(kind="yarn", attention_factor=1.0, **YARN),
)
_llama(
    "llama_yarn_mscale",
    2,
    "YaRN with betas, mscale, mscale_all_dim and an untruncated ramp",
    dims(head_dim=24, **rope(3000.0, "yarn", **YARN, **_RAMP)),
    *(rope(3000.0, "yarn", **(YARN | _RAMP | change)) for change in _RAMP_TOGGLES),
)

# mistral, mixtral -------------------------------------------------------------------------------------

_MISTRAL = dims(head_dim=24, **WIN, **OWN)
_FIVE = {"num_local_experts": 5, "num_experts_per_tok": 2}
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 3}

_mistral("mistral", 18, "a window on every layer; head_dim", _MISTRAL, NO_WINDOW, WIDER, EPS, PLAIN)
_mistral("mistral_full", 1, "window null, as in v0.3", dims(**NO_WINDOW))
_mixtral(
    "mixtral",
    6,
    "five experts, two per token, weights always renormalized",
    dims(**NO_WINDOW, **_FIVE, **OWN),
    {"num_experts_per_tok": 3},
    {"num_experts_per_tok": 1},
    EPS,
    PLAIN,
)
_mixtral(
    "mixtral_window",
    14,
    "a window; head_dim; three of four experts",
    dims(head_dim=24, **WIN, **_FOUR),
    NO_WINDOW,
    WIDER,
)

# qwen -------------------------------------------------------------------------------------------------

_SIX = {"head_dim": 24, "num_experts": 6, "moe_intermediate_size": 40}
_NORM = {"num_experts_per_tok": 3, "norm_topk_prob": True}
_MIXED = {"num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3]}

_qwen2("qwen2", 6, "biases on q, k, v; a window that is not used", dims(**OWN, **WIN), EPS, PLAIN)
_qwen2("qwen2_tied", 1, "tied, as in the small ones", dims(**TIED), greedy_tokens=0)
_qwen2(
    "qwen2_window",
    2,
    "two full layers, then windowed ones",
    dims(layers=5, max_window_layers=2, **USE_WINDOW),
    WIDER,
    UNUSED,
    {"max_window_layers": 3},
)
_qwen3("qwen3", 2, "a norm of q and of k per head; no biases", dims(head_dim=24, **OWN), EPS, PLAIN)
_qwen3(
    "qwen3_window",
    2,
    "attention biases; two full layers, then windowed ones",
    dims(head_dim=24, max_window_layers=2, **BIAS, **USE_WINDOW),
    WIDER,
    {"max_window_layers": 1},
)
_qwen3_moe(
    "qwen3_moe",
    2,
    "experts on every layer, weights renormalized",
    dims(**_SIX, **_NORM, **OWN),
    {"norm_topk_prob": False},
    {"num_experts_per_tok": 2},
    EPS,
    PLAIN,
)
_qwen3_moe(
    "qwen3_moe_mixed",
    2,
    "experts on layers 1 and 5 only, weights not renormalized; attention biases",
    dims(layers=6, **_SIX, **_MIXED, **BIAS),
    {"norm_topk_prob": True},
    {"num_experts_per_tok": 1},
)
_qwen3_moe(
    "qwen3_moe_window",
    10,
    "the window holds on every layer: this family reads no max_window_layers",
    dims(**_SIX, **_NORM, **USE_WINDOW),
    WIDER,
    UNUSED,
)

# smollm3 ----------------------------------------------------------------------------------------------

_NOPE = {"no_rope_layers": [1, 0, 1, 1, 0]}

_smollm3(
    "smollm3", 6, "the fourth layer has no rotation", dims(layers=5, **OWN), {"no_rope_layer_interval": 3}, EPS, PLAIN
)
_smollm3(
    "smollm3_window",
    1,
    "a list of layers without rotation, which are the windowed ones; all biases",
    dims(layers=5, **_NOPE, **USE_WINDOW, **BIASES),
    WIDER,
    UNUSED,
    {"no_rope_layers": [0, 1, 1, 1, 0]},
)

# gemma ------------------------------------------------------------------------------------------------

_QUERY = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": WINDOW}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
_UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_INSIDE = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
_GEMMA = ({"hidden_activation": "gelu"}, {"query_pre_attn_scalar": 24}, WIDER, EPS)
_GLOBAL, _LOCAL = rope(20000.0, "linear", factor=4.0), rope(500.0)

_gemma2(
    "gemma2",
    3,
    "both softcaps, an attention scale of its own, windowed and full layers in turn",
    dims(**_QUERY, **_CAPS, **OWN),
    *({key: None} for key in _CAPS),
    *_GEMMA,
    PLAIN,
)
_gemma2(
    "gemma2_uncapped",
    2,
    "both softcaps null; attention biases; layer types in an order of their own",
    dims(**_QUERY, **_UNCAPPED, **_INSIDE, **BIAS),
    IN_TURN,
)
_gemma2("gemma2_tied", 1, "tied, default softcaps, as published", dims(**_QUERY, **TIED), greedy_tokens=0)
_gemma3_text(
    "gemma3",
    1,
    "five windowed layers to one full; a base of the rotation for each kind, the full one also scaled",
    dims(layers=7, **_QUERY, **ropes(_GLOBAL, _LOCAL)),
    *_GEMMA,
    ropes(rope(20000.0), _LOCAL),
    ropes(_GLOBAL, rope(20000.0)),
    ropes(rope(500.0, "linear", factor=4.0), _LOCAL),
)
_gemma3_text(
    "gemma3_tied",
    1,
    "tied; default bases 1e6 and 1e4; attention biases; a final softcap",
    dims(layers=6, final_logit_softcapping=4.0, **_QUERY, **BIAS, **TIED),
    {"final_logit_softcapping": None},
    greedy_tokens=0,
)

# phi3 -------------------------------------------------------------------------------------------------

_SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 1.9]  # 24 * 0.75 / 2 values
_LONG = [1.1, 1.4, 1.9, 2.5, 3.1, 3.8, 4.6, 5.5, 6.5]
_FACTORS = {"partial_rotary_factor": 0.75, "short_factor": _SHORT, "long_factor": _LONG}
_ORIGINAL = 48
_LONGROPE = dims(96, original_max_position_embeddings=_ORIGINAL, **rope(kind="longrope", **_FACTORS))
_UNSCALED = rope(kind="longrope", attention_factor=1.0, **_FACTORS)

_phi3("phi3", 5, "fused qkv_proj and gate_up_proj", dims(kv=4), EPS)
_phi3(
    "phi3_partial",
    2,
    "the first 18 of 24 dimensions rotate; a window; grouped heads",
    dims(96, **WIN, **rope(3000.0, partial_rotary_factor=0.75)),
    NO_WINDOW,
    WIDER,
    OWN,
    rope(partial_rotary_factor=0.75),
)
_phi3(
    "phi3_longrope",
    9,
    "LongRoPE: short factors up to the original length, long ones for every longer sequence",
    _LONGROPE | {"max_position_embeddings": 160},
    _UNSCALED,
    rope(kind="longrope", **(_FACTORS | {"short_factor": _LONG})),
    rope(kind="longrope", **(_FACTORS | {"long_factor": _SHORT})),
    max_model_len=160,
    lengths=(1, 33, _ORIGINAL, _ORIGINAL + 1, 110),
)

# olmo -------------------------------------------------------------------------------------------------

_BASE = rope(500000.0)  # in transformers 5, both kinds get the one base of the old spelling
_STRETCH = {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 1.0, "beta_slow": 0.25}
_OLMO_YARN = rope(500000.0, "yarn", attention_factor=1.3, **_STRETCH)
_OLMO_OTHERS = [{"attention_factor": 1.0}, {"beta_fast": 32.0}, {"beta_slow": 1.0}]

_olmo2(
    "olmo2",
    11,
    "norms after attention and MLP; one norm over all of q and one over all of k",
    dims(96, 6, 2, **OWN),
    EPS,
    PLAIN,
)
_olmo2("olmo2_bias", 15, "all four attention biases", dims(kv=4, **BIAS))
_olmo3(
    "olmo3",
    1,
    "three windowed layers to one full, which alone has YaRN",
    dims(96, layers=5, **WIN, **ropes(_OLMO_YARN, _BASE)),
    ropes(_BASE, _BASE),
    ropes(_OLMO_YARN, _OLMO_YARN),
    *(ropes({"rope_parameters": _OLMO_YARN["rope_parameters"] | other}, _BASE) for other in _OLMO_OTHERS),
    WIDER,
    EPS,
)
_olmo3("olmo3_plain", 1, "no scaling; layer types in an order of their own", dims(**WIN, **ODD), IN_TURN)

# glm, granite -----------------------------------------------------------------------------------------

_HALF = rope(3000.0, partial_rotary_factor=0.5)
_PLAIN_HALF = rope(partial_rotary_factor=0.5)
_QUARTER = rope(partial_rotary_factor=0.25)
_OUTER = {"embedding_multiplier": 1.7, "logits_scaling": 1.6}
_INNER = {"residual_multiplier": 0.6, "attention_multiplier": 0.11}

_glm(
    "glm",
    1,
    "12 of 24 dimensions rotate, in neighboring pairs; biases on q, k, v; fused gate_up_proj",
    dims(head_dim=24, **BIAS, **_HALF),
    EPS,
    _PLAIN_HALF,
    rope(3000.0, partial_rotary_factor=1.0),
)
_glm(
    "glm_no_bias",
    5,
    "no biases; only 4 of 16 dimensions rotate",
    dims(head_dim=16, attention_bias=False, **_QUARTER),
    _PLAIN_HALF,
)
_glm4(
    "glm4",
    5,
    "as glm, with a further norm after attention and after the MLP; one key/value head",
    dims(kv=1, head_dim=24, **BIAS, **_HALF),
    EPS,
    _PLAIN_HALF,
)
_granite(
    "granite",
    4,
    "all four multipliers; the attention one is not 1/sqrt(head_dim)",
    dims(**OWN, **_OUTER, **_INNER),
    *({key: 0.25 if key == "attention_multiplier" else 1.0} for key in _OUTER | _INNER),
    EPS,
    PLAIN,
)
_granite(
    "granite_bias_tied",
    1,
    "tied, as published; all biases",
    dims(**BIASES, **TIED, **_OUTER, **_INNER),
    greedy_tokens=0,
)

# gpt --------------------------------------------------------------------------------------------------

_INVERSE = {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80}

_gpt2(
    "gpt2",
    5,
    "learned positions; matrices stored [in, out]; untied, which no published one is",
    _gpt2_dims(),
    {"layer_norm_epsilon": 1e-5},
    {"activation_function": "gelu"},
)
_gpt2(
    "gpt2_scaled",
    39,
    "attention also over layer + 1; an inner width of its own",
    _gpt2_dims(**_INVERSE),
    {"scale_attn_by_inverse_layer_idx": False},
)
_gpt2("gpt2_tied", 1, "tied, as published", _gpt2_dims(**TIED), greedy_tokens=0)
_gpt_neox(
    "gpt_neox",
    12,
    "attention and MLP read the same input; q, k, v interleaved by head; 6 of 24 dimensions rotate",
    _neox_dims(**rope(3000.0, partial_rotary_factor=0.25)),
    {"use_parallel_residual": False},
    {"layer_norm_eps": 1e-5},
    {"hidden_act": "gelu_new"},
    _QUARTER,
    _HALF,
)
_gpt_neox(
    "gpt_neox_odd",
    1,
    "a rotary size of 7, which is rotated as 8 at the frequencies of 7",
    _neox_dims(**rope(3000.0, partial_rotary_factor=0.3)),
    _QUARTER,
    greedy_tokens=0,
)
_gpt_neox(
    "gpt_neox_sequential",
    36,
    "attention, then MLP; whole heads rotate; no attention biases",
    _neox_dims(use_parallel_residual=False, attention_bias=False, **rope(partial_rotary_factor=1.0)),
    {"use_parallel_residual": True},
)
