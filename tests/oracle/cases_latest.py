"""Cases of the oracle: relatives of Gemma 4, Qwen3.5, Command R and GPT-2, and families with parts of their own."""

from __future__ import annotations

from oracle.case import (
    BIAS,
    EPS,
    IN_TURN,
    ODD,
    OWN,
    PLAIN,
    TIED,
    VOCAB,
    WIDER,
    WIN,
    WINDOW,
    Case,
    dims,
    family,
    rope,
    ropes,
)

CASES: dict[str, Case] = {}

_unified_text = family(CASES, "gemma4_unified_text", "Gemma4UnifiedTextConfig")
_unified = family(CASES, "gemma4_unified", "Gemma4UnifiedConfig")
_sw3 = family(CASES, "gpt-sw3", "GPT2Config")
_lara = family(CASES, "lara_mini", "LaraMiniConfig")
_llama4_text = family(CASES, "llama4_text", "Llama4TextConfig")
_llama4 = family(CASES, "llama4", "Llama4Config")
_xglm = family(CASES, "xglm", "XGLMConfig")
_compass = family(CASES, "cohere_compass_text", "CohereCompassTextConfig")

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# gemma4_unified ---------------------------------------------------------------------------------------

_SIZES = {"head_dim": 16, "global_head_dim": 24, "sliding_window": WINDOW, "final_logit_softcapping": 4.0}
_TURNED = ropes(rope(3000.0, "proportional", partial_rotary_factor=0.5), rope(700.0))
_SHARED = {"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "layer_types": [SLIDING, FULL, SLIDING, FULL, FULL]}
_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_unified_text(
    "gemma4_unified", 18, "no embeddings for each layer; values of global layers are their keys; shared keys",
    dims(layers=5, **_SIZES, **_SHARED, **_KEYS, **_TURNED),
    {"hidden_activation": "gelu"}, {"final_logit_softcapping": None}, ropes(rope(3000.0), rope(700.0)), WIDER, EPS,
)  # fmt: skip
_unified(
    "gemma4_unified_whole", 18, "the language model of one that could see and hear",
    {"text_config": dims(layers=5, **_SIZES, **_SHARED, **_KEYS, **_TURNED), "tie_word_embeddings": False},
)  # fmt: skip

# gpt-sw3 ----------------------------------------------------------------------------------------------

_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256, "n_inner": 88,
    "layer_norm_epsilon": 1e-2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_sw3(
    "gpt_sw3", 1, "GPT-2 under another name",
    {**_GPT2, "model_type": "gpt-sw3", "tie_word_embeddings": False, "activation_function": "gelu"},
    {"layer_norm_epsilon": 1e-5}, {"activation_function": "relu"}, {"scale_attn_weights": False},
)  # fmt: skip

# lara_mini --------------------------------------------------------------------------------------------

_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3, "head_dim": 24,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_lara(
    "lara_mini", 3, "delta layers, local layers that rotate, a global one without positions; a shared expert; biases",
    {
        k: v
        for k, v in dims(
            layers=5, shared_expert_intermediate_size=28, **_DELTA, **_EXPERTS, **OWN, **WIN, **BIAS
        ).items()
        if k != "intermediate_size"
    },
    EPS, PLAIN, WIDER, {"norm_topk_prob": False}, {"num_experts_per_tok": 2},
    {"layer_types": [LINEAR, FULL, LINEAR, SLIDING, SLIDING]},
)  # fmt: skip

# cohere_compass_text ----------------------------------------------------------------------------------

_LAYER_NORM = {"layer_norm_eps": 1e-2}


def _without_rms(**more: object) -> dict[str, object]:
    return {k: v for k, v in dims(**_LAYER_NORM, **more).items() if k != "rms_norm_eps"}


_compass(
    "cohere_compass", 2, "parallel branches; local layers rotate, global ones have no positions; scaled logits; biases",
    _without_rms(
        logit_scale=0.4, rope_parameters={SLIDING: rope(3000.0)["rope_parameters"], FULL: None}, **WIN, **IN_TURN,
        **BIAS
    ),
    {"layer_norm_eps": 1e-5}, WIDER, ODD, {"logit_scale": None},
    {"rope_parameters": {SLIDING: rope()["rope_parameters"], FULL: None}}, {"hidden_act": "gelu"},
)  # fmt: skip
_compass(
    "cohere_compass_tied", 2, "no lm_head in the file; all layers are global and rotate",
    _without_rms(rope_parameters={FULL: rope(3000.0)["rope_parameters"]}, **TIED), greedy_tokens=0,
)  # fmt: skip

# llama4 -----------------------------------------------------------------------------------------------

_SPARSE = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 72}
_CHUNKS = {"attention_chunk_size": WINDOW, "floor_scale": 16, "attn_scale": 0.4}
_llama4_text(
    "llama4", 1, "chunks of keys, a layer without positions whose queries grow; experts in every second layer; biases",
    dims(head_dim=24, interleave_moe_layer_step=2, **_SPARSE, **_CHUNKS, **OWN, **BIAS),
    EPS, PLAIN, {"attention_chunk_size": WINDOW + 1}, {"floor_scale": 17}, {"attn_temperature_tuning": False},
    {"use_qk_norm": False}, {"no_rope_layers": [1, 0, 1, 1]}, {"num_experts_per_tok": 1}, {"hidden_act": "gelu"},
)  # fmt: skip
_llama4_text(
    "llama4_lists", 3, "experts, positions and chunks of layers from lists; queries do not grow; no norms of heads",
    dims(
        head_dim=24, moe_layers=[0, 3], no_rope_layers=[1, 1, 0, 1], attn_temperature_tuning=False, use_qk_norm=False,
        layer_types=["full_attention", "chunked_attention", "chunked_attention", "full_attention"], **_SPARSE, **_CHUNKS
    ), {"attention_chunk_size": WINDOW + 1}, {"num_experts_per_tok": 1}, EPS,
)  # fmt: skip
_EYES = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip
_llama4(
    "llama4_whole", 1, "the language model of one that also sees, whose files have names of their own",
    {
        "text_config": dims(head_dim=24, interleave_moe_layer_step=2, **_SPARSE, **_CHUNKS, **OWN, **BIAS),
        "tie_word_embeddings": False, "vision_config": _EYES,
    },
)  # fmt: skip

# xglm -------------------------------------------------------------------------------------------------

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _xglm_dims(**more: object) -> dict[str, object]:
    return {
        "vocab_size": VOCAB, "d_model": 64, "ffn_dim": 88, "num_layers": 4, "attention_heads": 4,
        "max_position_embeddings": 256, "tie_word_embeddings": False, **_TOKENS, **more,
    }  # fmt: skip


_xglm(
    "xglm", 15, "sines and cosines of positions, which the file does not hold; scaled embeddings; untied",
    _xglm_dims(), {"activation_function": "relu"}, {"scale_embedding": False},
)  # fmt: skip
_xglm("xglm_tied", 1, "tied, as published; embeddings are not scaled", _xglm_dims(scale_embedding=False, **TIED),
      greedy_tokens=0)  # fmt: skip
