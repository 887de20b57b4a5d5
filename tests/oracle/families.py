"""The cases of the oracle: tiny random models of every family, described as plain data.

A case is what transformers needs to build the model (a config class and its keyword arguments) and what a
comparison needs to be fair: how long sequences may be, and how far greedy decoding may go.  The values are
chosen so that each field that a family reads is away from its default and from any value that makes a
mistake invisible (a window is shorter than the sequences, a rotary part is smaller than a head, an
attention scale is not 1/sqrt(head_dim), an epsilon is large enough to matter).  `toggles` makes that claim
testable: each one is a change of config, on the same weights, that has to change the logits.

`python -m oracle.families`, with tests/ on the path, prints a table of what the oracle measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCAB = 257  # no power of two and no multiple of anything: a padded vocabulary shows at once
WINDOW = 24  # shorter than the two longer test sequences, and than prompt plus greedy tokens
SPECIAL_TOKENS = (0, 1, 2)  # pad, bos, eos of every case; no prompt holds one


@dataclass(frozen=True)
class Case:
    """One tiny model and the ground on which it may be compared.

    `seed` draws weights and prompts.  It was chosen so that greedy decoding in float64 keeps the best token
    ahead of the second by more than 1e-3, never emits a special token, and does not fall into a short loop.

    `max_model_len` is the length to load the model with.  It matters where the rotary frequencies depend on
    the length: transformers switches them by the length of the *current* sequence, whereas an engine with a
    KV cache has to fix them once.  So the two agree only inside one regime, and `lengths`,
    `greedy_prompt_length` and `greedy_tokens` stay inside it.  `greedy_tokens` 0 means: no greedy comparison.
    """

    model_type: str
    config_class: str
    kwargs: dict[str, Any]
    notes: str
    seed: int = 1
    max_model_len: int = 256
    lengths: tuple[int, ...] = (1, 7, 33, 100)
    greedy_prompt_length: int = 24
    greedy_tokens: int = 64
    toggles: tuple[dict[str, Any], ...] = field(default=())

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding; the classes disagree on the default, so cases say it."""
        return bool(self.kwargs["tie_word_embeddings"])


def prompts(case: Case) -> list[list[int]]:
    """Token sequences of the case's lengths, for the comparison of logits."""
    rng = np.random.default_rng([case.seed, 1])
    return [rng.integers(3, VOCAB, size=n).tolist() for n in case.lengths]


def greedy_prompt(case: Case) -> list[int]:
    """The prompt from which greedy decoding starts."""
    rng = np.random.default_rng([case.seed, 2])
    return rng.integers(3, VOCAB, size=case.greedy_prompt_length).tolist()


def _dims(hidden: int = 64, heads: int = 4, kv: int = 2, layers: int = 4, **more: Any) -> dict[str, Any]:
    """The dimensions that most config classes name alike."""
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 88, "num_hidden_layers": layers}
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rest = {"rms_norm_eps": 1e-2, "tie_word_embeddings": False, **tokens}
    return sizes | heads_ | rest | more


def _neox_dims(**more: Any) -> dict[str, Any]:
    """The dimensions of GPT-NeoX, which has neither grouped heads nor RMS norms."""
    dims = _dims(96, layer_norm_eps=1e-2, **more)
    return {key: value for key, value in dims.items() if key not in ("num_key_value_heads", "rms_norm_eps")}


def _gpt2_dims(**more: Any) -> dict[str, Any]:
    """The dimensions of GPT-2, which has names of its own for all of them."""
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
    rest = {"layer_norm_epsilon": 1e-2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    return sizes | rest | more


def _rope(theta: float = 10000.0, kind: str = "default", **more: Any) -> dict[str, Any]:
    """One rotation for all layers, as a config argument."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def _ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """A rotation for the full layers and one for the windowed ones, as a config argument."""
    both = {"full_attention": full["rope_parameters"], "sliding_attention": sliding["rope_parameters"]}
    return {"rope_parameters": both}


CASES: dict[str, Case] = {}


def _family(model_type: str, config_class: str) -> Callable[..., None]:
    """What registers cases of one family: a name, a seed, notes, config arguments, then the toggles."""

    def add(name: str, seed: int, notes: str, kwargs: dict[str, Any], *toggles: dict[str, Any], **more: Any) -> None:
        CASES[name] = Case(model_type, config_class, kwargs, notes, seed, toggles=toggles, **more)

    return add


_llama = _family("llama", "LlamaConfig")
_mistral = _family("mistral", "MistralConfig")
_mixtral = _family("mixtral", "MixtralConfig")
_qwen2 = _family("qwen2", "Qwen2Config")
_qwen3 = _family("qwen3", "Qwen3Config")
_qwen3_moe = _family("qwen3_moe", "Qwen3MoeConfig")
_smollm3 = _family("smollm3", "SmolLM3Config")
_gemma2 = _family("gemma2", "Gemma2Config")
_gemma3_text = _family("gemma3_text", "Gemma3TextConfig")
_phi3 = _family("phi3", "Phi3Config")
_olmo2 = _family("olmo2", "Olmo2Config")
_olmo3 = _family("olmo3", "Olmo3Config")
_glm = _family("glm", "GlmConfig")
_glm4 = _family("glm4", "Glm4Config")
_granite = _family("granite", "GraniteConfig")
_gpt_oss = _family("gpt_oss", "GptOssConfig")
_deepseek_v2 = _family("deepseek_v2", "DeepseekV2Config")
_deepseek_v3 = _family("deepseek_v3", "DeepseekV3Config")
_gpt2 = _family("gpt2", "GPT2Config")
_gpt_neox = _family("gpt_neox", "GPTNeoXConfig")

EPS = {"rms_norm_eps": 1e-6}
TIED = {"tie_word_embeddings": True}
WIN = {"sliding_window": WINDOW}
NO_WINDOW = {"sliding_window": None}
WIDER = {"sliding_window": WINDOW + 1}  # an off-by-one in the mask has to show
USE_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW}
UNUSED = {"use_sliding_window": False}
BIAS = {"attention_bias": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
PLAIN = _rope()
OWN = _rope(3000.0)  # a base of the rotation that is nobody's default

_mamba = _family("mamba", "MambaConfig")
_falcon_mamba = _family("falcon_mamba", "FalconMambaConfig")
_mamba2 = _family("mamba2", "Mamba2Config")

_jamba = _family("jamba", "JambaConfig")
_lfm2 = _family("lfm2", "Lfm2Config")

# llama ------------------------------------------------------------------------------------------------

_LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = _rope(kind="dynamic", factor=4.0)
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_RAMP = {"beta_fast": 5.0, "beta_slow": 0.5, "mscale": 1.4, "mscale_all_dim": 0.6, "truncate": False}
_RAMP_TOGGLES = [{"truncate": True}, {"beta_fast": 32.0}, {"beta_slow": 1.0}, {"mscale": 1.0}]

_llama("llama", 6, "plain multi-head attention", _dims(kv=4), EPS)
_llama("llama_gqa", 7, "three query heads to a key/value head", _dims(96, 6, 2, **_rope(700.0)), EPS, PLAIN)
_llama("llama_head_dim", 15, "head_dim 24, not 64 / 4; one key/value head", _dims(kv=1, head_dim=24))
_llama("llama_biases", 30, "a bias on all seven projections", _dims(**BIASES))
_llama("llama_tied", 1, "no lm_head in the file", _dims(**TIED), greedy_tokens=0)
_llama("llama_linear", 4, "every frequency over 4", _dims(**_rope(kind="linear", factor=4.0)), PLAIN)
_llama("llama_dynamic", 1, "dynamic NTK within its length changes nothing", _dims(**_DYNAMIC))
_llama(
    "llama_dynamic_long",
    4,
    "dynamic NTK past its length: only sequences of exactly max_model_len compare",
    _dims(**_DYNAMIC) | {"max_position_embeddings": 64},
    PLAIN,
    max_model_len=100,
    lengths=(100, 100),
    greedy_tokens=0,
)
_llama(
    "llama_llama3",
    4,
    "llama3 scaling: kept, smoothed and divided frequencies all occur",
    _dims(**_rope(kind="llama3", low_freq_factor=1.0, **_LLAMA3)),
    PLAIN,
    _rope(kind="llama3", low_freq_factor=2.0, **_LLAMA3),
)
_llama(
    "llama_yarn",
    14,
    "YaRN with all defaults: the attention factor follows from the factor",
    _dims(**_rope(kind="yarn", **_YARN)),
    PLAIN,
    _rope(kind="yarn", attention_factor=1.0, **_YARN),
)
_llama(
    "llama_yarn_mscale",
    2,
    "YaRN with betas, mscale, mscale_all_dim and an untruncated ramp",
    _dims(head_dim=24, **_rope(3000.0, "yarn", **_YARN, **_RAMP)),
    *(_rope(3000.0, "yarn", **(_YARN | _RAMP | change)) for change in _RAMP_TOGGLES),
)

# mistral, mixtral -------------------------------------------------------------------------------------

_MISTRAL = _dims(head_dim=24, **WIN, **OWN)
_FIVE = {"num_local_experts": 5, "num_experts_per_tok": 2}
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 3}

_mistral("mistral", 18, "a window on every layer; head_dim", _MISTRAL, NO_WINDOW, WIDER, EPS, PLAIN)
_mistral("mistral_full", 1, "window null, as in v0.3", _dims(**NO_WINDOW))
_mixtral(
    "mixtral",
    6,
    "five experts, two per token, weights always renormalised",
    _dims(**NO_WINDOW, **_FIVE, **OWN),
    {"num_experts_per_tok": 3},
    {"num_experts_per_tok": 1},
    EPS,
    PLAIN,
)
_mixtral(
    "mixtral_window",
    14,
    "a window; head_dim; three of four experts",
    _dims(head_dim=24, **WIN, **_FOUR),
    NO_WINDOW,
    WIDER,
)

# qwen -------------------------------------------------------------------------------------------------

_SIX = {"head_dim": 24, "num_experts": 6, "moe_intermediate_size": 40}
_NORM = {"num_experts_per_tok": 3, "norm_topk_prob": True}
_MIXED = {"num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3]}

_qwen2("qwen2", 6, "biases on q, k, v; a window that is not used", _dims(**OWN, **WIN), EPS, PLAIN)
_qwen2("qwen2_tied", 1, "tied, as in the small ones", _dims(**TIED), greedy_tokens=0)
_qwen2(
    "qwen2_window",
    2,
    "two full layers, then windowed ones",
    _dims(layers=5, max_window_layers=2, **USE_WINDOW),
    WIDER,
    UNUSED,
    {"max_window_layers": 3},
)
_qwen3("qwen3", 2, "a norm of q and of k per head; no biases", _dims(head_dim=24, **OWN), EPS, PLAIN)
_qwen3(
    "qwen3_window",
    2,
    "attention biases; two full layers, then windowed ones",
    _dims(head_dim=24, max_window_layers=2, **BIAS, **USE_WINDOW),
    WIDER,
    {"max_window_layers": 1},
)
_qwen3_moe(
    "qwen3_moe",
    2,
    "experts on every layer, weights renormalised",
    _dims(**_SIX, **_NORM, **OWN),
    {"norm_topk_prob": False},
    {"num_experts_per_tok": 2},
    EPS,
    PLAIN,
)
_qwen3_moe(
    "qwen3_moe_mixed",
    2,
    "experts on layers 1 and 5 only, weights not renormalised; attention biases",
    _dims(layers=6, **_SIX, **_MIXED, **BIAS),
    {"norm_topk_prob": True},
    {"num_experts_per_tok": 1},
)
_qwen3_moe(
    "qwen3_moe_window",
    10,
    "the window holds on every layer: this family reads no max_window_layers",
    _dims(**_SIX, **_NORM, **USE_WINDOW),
    WIDER,
    UNUSED,
)

# smollm3 ----------------------------------------------------------------------------------------------

_NOPE = {"no_rope_layers": [1, 0, 1, 1, 0]}

_smollm3(
    "smollm3", 6, "the fourth layer has no rotation", _dims(layers=5, **OWN), {"no_rope_layer_interval": 3}, EPS, PLAIN
)
_smollm3(
    "smollm3_window",
    1,
    "a list of layers without rotation, which are the windowed ones; all biases",
    _dims(layers=5, **_NOPE, **USE_WINDOW, **BIASES),
    WIDER,
    UNUSED,
    {"no_rope_layers": [0, 1, 1, 1, 0]},
)

# gemma ------------------------------------------------------------------------------------------------

_QUERY = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": WINDOW}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
_UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_INSIDE = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
_IN_TURN = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
_GEMMA = ({"hidden_activation": "gelu"}, {"query_pre_attn_scalar": 24}, WIDER, EPS)
_GLOBAL, _LOCAL = _rope(20000.0, "linear", factor=4.0), _rope(500.0)

_gemma2(
    "gemma2",
    3,
    "both softcaps, an attention scale of its own, windowed and full layers in turn",
    _dims(**_QUERY, **_CAPS, **OWN),
    *({key: None} for key in _CAPS),
    *_GEMMA,
    PLAIN,
)
_gemma2(
    "gemma2_uncapped",
    2,
    "both softcaps null; attention biases; layer types in an order of their own",
    _dims(**_QUERY, **_UNCAPPED, **_INSIDE, **BIAS),
    _IN_TURN,
)
_gemma2("gemma2_tied", 1, "tied, default softcaps, as published", _dims(**_QUERY, **TIED), greedy_tokens=0)
_gemma3_text(
    "gemma3",
    1,
    "five windowed layers to one full; a base of the rotation for each kind, the full one also scaled",
    _dims(layers=7, **_QUERY, **_ropes(_GLOBAL, _LOCAL)),
    *_GEMMA,
    _ropes(_rope(20000.0), _LOCAL),
    _ropes(_GLOBAL, _rope(20000.0)),
    _ropes(_rope(500.0, "linear", factor=4.0), _LOCAL),
)
_gemma3_text(
    "gemma3_tied",
    1,
    "tied; default bases 1e6 and 1e4; attention biases; a final softcap",
    _dims(layers=6, final_logit_softcapping=4.0, **_QUERY, **BIAS, **TIED),
    {"final_logit_softcapping": None},
    greedy_tokens=0,
)

# phi3 -------------------------------------------------------------------------------------------------

_SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 1.9]  # 24 * 0.75 / 2 of them
_LONG = [1.1, 1.4, 1.9, 2.5, 3.1, 3.8, 4.6, 5.5, 6.5]
_FACTORS = {"partial_rotary_factor": 0.75, "short_factor": _SHORT, "long_factor": _LONG}
_ORIGINAL = 96
_LONGROPE = _dims(96, original_max_position_embeddings=_ORIGINAL, **_rope(kind="longrope", **_FACTORS))
_UNSCALED = _rope(kind="longrope", attention_factor=1.0, **_FACTORS)

_phi3("phi3", 5, "fused qkv_proj and gate_up_proj", _dims(kv=4), EPS)
_phi3(
    "phi3_partial",
    2,
    "the first 18 of 24 dimensions rotate; a window; grouped heads",
    _dims(96, **WIN, **_rope(3000.0, partial_rotary_factor=0.75)),
    NO_WINDOW,
    WIDER,
    OWN,
    _rope(partial_rotary_factor=0.75),
)
_phi3(
    "phi3_longrope_short",
    3,
    "LongRoPE within the original length: short factors, but the attention factor of the long context",
    _LONGROPE,
    _UNSCALED,
    _rope(kind="longrope", **(_FACTORS | {"short_factor": _LONG})),
    max_model_len=_ORIGINAL,
    lengths=(1, 33, _ORIGINAL),
)
_phi3(
    "phi3_longrope_long",
    35,
    "LongRoPE past the original length: long factors, for every sequence that is longer",
    _LONGROPE,
    _UNSCALED,
    _rope(kind="longrope", **(_FACTORS | {"long_factor": _SHORT})),
    lengths=(_ORIGINAL + 1, 130),
    greedy_prompt_length=100,
)

# olmo -------------------------------------------------------------------------------------------------

_BASE = _rope(500000.0)  # the one base that the old spelling carries through transformers 5 for both kinds
_STRETCH = {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 1.0, "beta_slow": 0.25}
_OLMO_YARN = _rope(500000.0, "yarn", attention_factor=1.3, **_STRETCH)
_OLMO_OTHERS = [{"attention_factor": 1.0}, {"beta_fast": 32.0}, {"beta_slow": 1.0}]
_ODD = {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}

_olmo2(
    "olmo2",
    11,
    "norms after attention and MLP; one norm over all of q and one over all of k",
    _dims(96, 6, 2, **OWN),
    EPS,
    PLAIN,
)
_olmo2("olmo2_bias", 15, "all four attention biases", _dims(kv=4, **BIAS))
_olmo3(
    "olmo3",
    1,
    "three windowed layers to one full, which alone has YaRN",
    _dims(96, layers=5, **WIN, **_ropes(_OLMO_YARN, _BASE)),
    _ropes(_BASE, _BASE),
    _ropes(_OLMO_YARN, _OLMO_YARN),
    *(_ropes({"rope_parameters": _OLMO_YARN["rope_parameters"] | other}, _BASE) for other in _OLMO_OTHERS),
    WIDER,
    EPS,
)
_olmo3("olmo3_plain", 1, "no scaling; layer types in an order of their own", _dims(**WIN, **_ODD), _IN_TURN)

# glm, granite -----------------------------------------------------------------------------------------

_HALF = _rope(3000.0, partial_rotary_factor=0.5)
_PLAIN_HALF = _rope(partial_rotary_factor=0.5)
_QUARTER = _rope(partial_rotary_factor=0.25)
_OUTER = {"embedding_multiplier": 1.7, "logits_scaling": 1.6}
_INNER = {"residual_multiplier": 0.6, "attention_multiplier": 0.11}

_glm(
    "glm",
    1,
    "12 of 24 dimensions rotate, in neighbouring pairs; biases on q, k, v; fused gate_up_proj",
    _dims(head_dim=24, **BIAS, **_HALF),
    EPS,
    _PLAIN_HALF,
    _rope(3000.0, partial_rotary_factor=1.0),
)
_glm(
    "glm_no_bias",
    5,
    "no biases; only 4 of 16 dimensions rotate",
    _dims(head_dim=16, attention_bias=False, **_QUARTER),
    _PLAIN_HALF,
)
_glm4(
    "glm4",
    5,
    "as glm, with a further norm after attention and after the MLP; one key/value head",
    _dims(kv=1, head_dim=24, **BIAS, **_HALF),
    EPS,
    _PLAIN_HALF,
)
_granite(
    "granite",
    4,
    "all four multipliers; the attention one is not 1/sqrt(head_dim)",
    _dims(**OWN, **_OUTER, **_INNER),
    *({key: 0.25 if key == "attention_multiplier" else 1.0} for key in _OUTER | _INNER),
    EPS,
    PLAIN,
)
_granite(
    "granite_bias_tied",
    1,
    "tied, as published; all biases",
    _dims(**BIASES, **TIED, **_OUTER, **_INNER),
    greedy_tokens=0,
)

# gpt_oss ----------------------------------------------------------------------------------------------

_CLAMP = {"swiglu_alpha": 1.3, "swiglu_limit": 1.5, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24}
_UNCUT = {"beta_fast": 5.0, "beta_slow": 0.5, "truncate": False}
_OSS_YARN = _rope(3000.0, "yarn", **_YARN, **_UNCUT)

_gpt_oss(
    "gpt_oss",
    1,
    "sinks; windowed and full layers in turn; six experts with biases, a clamped gate; an untruncated YaRN",
    _dims(**_CLAMP, **WIN, **_OSS_YARN),
    {"swiglu_alpha": 1.702},
    {"swiglu_limit": 7.0},
    {"num_experts_per_tok": 2},
    _rope(3000.0, "yarn", **_YARN, **(_UNCUT | {"truncate": True})),
    WIDER,
    EPS,
)
_gpt_oss(
    "gpt_oss_plain",
    5,
    "no scaling, no biases of attention; layer types in an order of their own; two of six experts",
    _dims(**(_CLAMP | {"num_experts_per_tok": 2, "swiglu_limit": 2.0}), **WIN, **_ODD, **OWN)
    | {"attention_bias": False},
    _IN_TURN,
    PLAIN,
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
    _neox_dims(**_rope(3000.0, partial_rotary_factor=0.25)),
    {"use_parallel_residual": False},
    {"layer_norm_eps": 1e-5},
    {"hidden_act": "gelu_new"},
    _QUARTER,
    _HALF,
)
_gpt_neox(
    "gpt_neox_sequential",
    36,
    "attention, then MLP; whole heads rotate; no attention biases",
    _neox_dims(use_parallel_residual=False, attention_bias=False, **_rope(partial_rotary_factor=1.0)),
    {"use_parallel_residual": True},
)

# deepseek ---------------------------------------------------------------------------------------------

_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_MANY = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 20}
_LIMITED = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
_V2 = {"topk_method": "group_limited_greedy", "q_lora_rank": 24, "attention_bias": True, "mlp_bias": True}
_PLAIN_CHOICE = {"topk_method": "greedy", "q_lora_rank": None, "first_k_dense_replace": 2}
_ALL_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "n_shared_experts": 1, "q_lora_rank": None}
_SCALE = {**_YARN, "beta_fast": 5.0, "beta_slow": 0.5}
_TWO_SCALES = _rope(3000.0, "yarn", **_SCALE, mscale=1.4, mscale_all_dim=0.6)
_ONE_SCALE = _rope(3000.0, "yarn", **_SCALE, mscale=0.707, mscale_all_dim=0.707)

_deepseek_v2(
    "deepseek_v2",
    1,
    "compressed queries; experts of the best two of four groups; yarn with two temperatures; all biases",
    _dims(kv=4, **_LATENT, **_MANY, **_LIMITED, **_V2, **_TWO_SCALES),
    {"topk_method": "greedy"},
    {"topk_group": 3},
    {"num_experts_per_tok": 2},
    {"routed_scaling_factor": 1.0},
    _ONE_SCALE,
    _rope(3000.0, "yarn", **_SCALE, mscale=1.4),
    _rope(3000.0),
    EPS,
)
_deepseek_v2(
    "deepseek_v2_lite",
    2,
    "as V2-Lite: queries not compressed, experts from everywhere, one temperature",
    _dims(kv=4, **_LATENT, **_MANY, **_PLAIN_CHOICE, **_ONE_SCALE),
    {"num_experts_per_tok": 2},
    {"routed_scaling_factor": 1.7},
    _rope(3000.0, "yarn", **_SCALE),
)
_deepseek_v3(
    "deepseek_v3",
    6,
    "sigmoid scores, a bias on the choice, groups by their two best; compressed queries; yarn",
    _dims(kv=4, **_LATENT, **_MANY, **_LIMITED, q_lora_rank=24, **_ONE_SCALE),
    {"norm_topk_prob": False},
    {"topk_group": 3},
    {"n_group": 6},
    {"rope_interleave": False},
    {"routed_scaling_factor": 1.0},
    _rope(3000.0, "yarn", **_SCALE),
    EPS,
)
_deepseek_v3(
    "deepseek_v3_plain",
    1,
    "one group; weights not renormalised; halves rotate; no scaling; all biases",
    _dims(kv=4, **_LATENT, **_MANY | _ALL_GROUPS, **BIAS, **OWN, norm_topk_prob=False, rope_interleave=False),
    {"norm_topk_prob": True},
    {"rope_interleave": True},
    PLAIN,
)


if __name__ == "__main__":
    from oracle.build import print_table

    print_table(CASES)

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
    _dims(48, layers=5, num_experts_per_tok=3, **_PERIODS, **_STATES),
    {"num_experts_per_tok": 1},
    EPS,
)
_jamba(
    "jamba_biases",
    1,
    "biases on the projections, none on the filter; one expert, which is an MLP",
    _dims(48, kv=4, mamba_proj_bias=True, mamba_conv_bias=False, **(_PERIODS | {"num_experts": 1})),
    greedy_tokens=0,  # transformers asks for the scores of a router that is not there
)

# lfm2 -------------------------------------------------------------------------------------------------

_LFM2 = {name: size for name, size in _dims(layers=5).items() if name != "rms_norm_eps"} | {
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
