"""Cases of the oracle: families with layer norms, most of them with parallel branches or learned positions."""

from __future__ import annotations

from typing import Any

from oracle.case import (
    BIAS,
    OWN,
    TIED,
    VOCAB,
    WIDER,
    WIN,
    WINDOW,
    Case,
    dims,
    family,
    rope,
)

CASES: dict[str, Case] = {}
_EPS = {"layer_norm_eps": 1e-5}
_EPSILON = {"layer_norm_epsilon": 1e-5}


def _dims(**more: Any) -> dict[str, Any]:
    """Return the dimensions of a family with layer norms."""
    sizes = dims(layer_norm_eps=1e-2, **more)
    return {key: value for key, value in sizes.items() if key != "rms_norm_eps"}


def _gpt_dims(**more: Any) -> dict[str, Any]:
    """Return the dimensions with GPT-2's names."""
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}
    rest = {"layer_norm_epsilon": 1e-2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    return sizes | rest | more


_cohere = family(CASES, "cohere", "CohereConfig")
_cohere2 = family(CASES, "cohere2", "Cohere2Config")
_phi = family(CASES, "phi", "PhiConfig")
_stablelm = family(CASES, "stablelm", "StableLmConfig")
_gptj = family(CASES, "gptj", "GPTJConfig")
_codegen = family(CASES, "codegen", "CodeGenConfig")
_gpt_bigcode = family(CASES, "gpt_bigcode", "GPTBigCodeConfig")
_opt = family(CASES, "opt", "OPTConfig")
_gpt_neo = family(CASES, "gpt_neo", "GPTNeoConfig")

_cohere(
    "cohere", 3, "one norm without a bias before parallel branches; neighboring numbers rotate together; biases",
    _dims(logit_scale=0.7, **OWN, **BIAS), _EPS, {"logit_scale": 0.0625}, {"hidden_act": "gelu"}, rope(),
)  # fmt: skip
_cohere("cohere_tied", 1, "no lm_head in the file", _dims(logit_scale=0.7, **OWN, **TIED), greedy_tokens=0)
_cohere2(
    "cohere2", 5, "three local layers, and a global one without positions",
    _dims(logit_scale=0.7, **OWN, **WIN), _EPS, {"logit_scale": 0.0625}, WIDER, rope(),
)  # fmt: skip
_phi(
    "phi", 2, "one norm before parallel branches; biases everywhere, the head included; half of each head rotates",
    _dims(**rope(3000.0, partial_rotary_factor=0.5)), _EPS, {"hidden_act": "gelu"},
    rope(3000.0, partial_rotary_factor=0.25),
)  # fmt: skip
_phi("phi_norms", 1, "layer norms of heads", _dims(qk_layernorm=True, **rope(3000.0, partial_rotary_factor=0.4)), _EPS)
_stablelm(
    "stablelm", 1, "layer norms; a quarter of each head rotates; biases on q, k, v",
    _dims(use_qkv_bias=True, **rope(3000.0, partial_rotary_factor=0.25)), _EPS, {"hidden_act": "gelu"},
    rope(3000.0, partial_rotary_factor=0.5),
)  # fmt: skip
_stablelm(
    "stablelm_parallel", 1, "one norm before parallel branches",
    _dims(use_parallel_residual=True, **rope(3000.0, partial_rotary_factor=0.5)), _EPS,
)  # fmt: skip
_gptj(
    "gptj", 4, "half of each head rotates in neighboring pairs; biases on the MLP and on the head",
    _gpt_dims(rotary_dim=8, n_inner=88), _EPSILON, {"activation_function": "gelu"}, {"rotary_dim": 16},
)  # fmt: skip
_codegen(
    "codegen", 4, "q, v and k in four parts of one matrix",
    _gpt_dims(rotary_dim=4, n_head=8, n_ctx=256), _EPSILON, {"activation_function": "gelu"}, {"rotary_dim": 8},
)  # fmt: skip
_gpt_bigcode(
    "gpt_bigcode", 5, "one head of keys and values; learned positions; an inner width of its own",
    _gpt_dims(n_inner=88), _EPSILON, {"activation_function": "gelu"}, {"scale_attn_weights": False},
)  # fmt: skip
_gpt_bigcode("gpt_bigcode_tied", 1, "tied, as published", _gpt_dims(**TIED), greedy_tokens=0)
_OPT = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 88}
_OPT_REST = {"max_position_embeddings": 256, "tie_word_embeddings": False, "word_embed_proj_dim": 64}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_opt(
    "opt", 4, "learned positions from the third row on; ReLU", {**_OPT, **_OPT_REST, **_TOKENS},
    {"activation_function": "gelu"},
)  # fmt: skip
_opt("opt_tied", 1, "tied, as published; no biases", {**_OPT, **_OPT_REST, **TIED, "enable_bias": False},
     greedy_tokens=0)  # fmt: skip
_NEO = {"vocab_size": VOCAB, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 256}
_NEO_REST = {
    "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "attention_types": [[["local", "global"], 2]], "window_size": WINDOW,
}  # fmt: skip
_gpt_neo(
    "gpt_neo", 1, "scores that are not scaled; every second layer has a window",
    {**_NEO, **_NEO_REST, "intermediate_size": 88}, _EPSILON, {"activation_function": "gelu"},
    {"window_size": WINDOW + 1}, {"attention_types": [[["global", "local"], 2]]},
)  # fmt: skip
