"""Cases of the oracle: Gemma 4, and the language models inside Gemmas that also see or hear."""

from __future__ import annotations

from typing import Any

from oracle.case import EPS, TIED, VOCAB, WIDER, WINDOW, Case, dims, family, rope, ropes

CASES: dict[str, Case] = {}

_text = family(CASES, "gemma4_text", "Gemma4TextConfig")
_whole = family(CASES, "gemma4", "Gemma4Config")
_whole3 = family(CASES, "gemma3", "Gemma3Config")

FULL, SLIDING = "full_attention", "sliding_attention"
_TURNED = ropes(rope(3000.0, "proportional", partial_rotary_factor=0.5), rope(700.0))
_SIZES = {"head_dim": 16, "global_head_dim": 24, "sliding_window": WINDOW, "final_logit_softcapping": 4.0}
_TYPES = {"layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]}
_TABLE = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 2 * VOCAB}
_NO_TABLE = {"hidden_size_per_layer_input": 0}
_SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20}

_text(
    "gemma4",
    179,
    "per-layer embeddings; the last two layers share keys and have wide MLPs; wide heads in global layers",
    dims(layers=6, **_SIZES, **_TYPES, **_TABLE, **_SHARED, **_TURNED),
    {"hidden_activation": "gelu"},
    {"final_logit_softcapping": None},
    ropes(rope(3000.0, "proportional", partial_rotary_factor=0.25), rope(700.0)),
    ropes(rope(3000.0, "proportional", partial_rotary_factor=0.5, factor=2.0), rope(700.0)),
    ropes(rope(3000.0), rope(700.0)),
    WIDER,
    EPS,
)
_text(
    "gemma4_keys",
    2,
    "values of global layers are their keys, of one head; attention biases; layer types by rule; no embeddings",
    dims(layers=7, **_SIZES, **_NO_TABLE, **_KEYS, attention_bias=True),
    WIDER,
    EPS,
)
_text(
    "gemma4_experts",
    19,
    "experts beside a dense MLP in every layer; values that are keys",
    dims(layers=4, **_SIZES, **_NO_TABLE, **_KEYS, **_EXPERTS, **_TURNED, layer_types=[SLIDING, FULL] * 2),
    {"top_k_experts": 2},
    {"hidden_activation": "gelu"},
    EPS,
)
_text(
    "gemma4_tied",
    6,
    "tied, with per-layer embeddings and shared keys that are values; bases of rotations by default",
    dims(layers=6, **_SIZES, **_TABLE, **_SHARED, **_KEYS, **_TYPES, **TIED),
    greedy_tokens=0,
)


def _inside(text: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"], **parts}


_whole(
    "gemma4_whole",
    179,
    "the language model of one that could see and hear",
    _inside(dims(layers=6, **_SIZES, **_TYPES, **_TABLE, **_SHARED, **_TURNED)),
)

# gemma3 -----------------------------------------------------------------------------------------------

_EYES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_whole3(
    "gemma3_whole",
    1,
    "the language model of one that also sees, whose files have names of their own",
    _inside(
        dims(layers=7, head_dim=24, query_pre_attn_scalar=40, sliding_window=WINDOW)
        | ropes(rope(20000.0, "linear", factor=4.0), rope(500.0)),
        vision_config=_EYES, mm_tokens_per_image=4,
    ),
)  # fmt: skip
