"""Cases of the oracle: Falcon, Persimmon, and families whose scores fall with the distance of a key (ALiBi)."""

from __future__ import annotations

from typing import Any

from oracle.case import OWN, PLAIN, TIED, VOCAB, Case, dims, family, rope

CASES: dict[str, Case] = {}
_EPSILON = {"layer_norm_epsilon": 1e-5}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}


def _dims(**more: Any) -> dict[str, Any]:
    """Return the dimensions of Falcon."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6}
    return {**sizes, "layer_norm_epsilon": 1e-2, "max_position_embeddings": 256, **_TOKENS, **more}


_falcon = family(CASES, "falcon", "FalconConfig")
_persimmon = family(CASES, "persimmon", "PersimmonConfig")
_bloom = family(CASES, "bloom", "BloomConfig")
_mpt = family(CASES, "mpt", "MptConfig")

_falcon(
    "falcon", 2, "as 7B: one head of keys and values, one norm before parallel branches; an inner width of its own",
    _dims(ffn_hidden_size=88, **OWN), _EPSILON, PLAIN, {"activation": "relu"},
)  # fmt: skip
_falcon(
    "falcon_grouped", 7, "as 40B: two heads of keys and values in one matrix, two norms; biases",
    _dims(new_decoder_architecture=True, num_kv_heads=2, bias=True, **OWN), _EPSILON, PLAIN,
)  # fmt: skip
_falcon(
    "falcon_heads", 1, "one branch after the other, a key for each head", _dims(multi_query=False, parallel_attn=False),
    _EPSILON,
)  # fmt: skip
_falcon(
    "falcon_tied", 1, "as Falcon 2: two heads of keys and values, one norm; tied",
    _dims(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1) | TIED, greedy_tokens=0,
)  # fmt: skip
_persimmon(
    "persimmon", 11, "layer norms of heads, squared ReLU, half of each head rotates",
    {k: v for k, v in dims(layer_norm_eps=1e-2, **rope(3000.0, partial_rotary_factor=0.5)).items()
     if k not in ("rms_norm_eps", "num_key_value_heads")},
    {"layer_norm_eps": 1e-5}, {"hidden_act": "gelu"}, rope(3000.0, partial_rotary_factor=0.25),
)  # fmt: skip
_BLOOM = {"vocab_size": VOCAB, "hidden_size": 96, "n_layer": 4, "n_head": 6, "layer_norm_epsilon": 1e-2, **_TOKENS}
_bloom("bloom", 2, "slopes of six heads in place of positions; a norm of the embeddings", _BLOOM, _EPSILON)
_bloom("bloom_tied", 1, "tied, as published; slopes of four heads", _BLOOM | TIED | {"n_head": 4}, greedy_tokens=0)
_MPT = {"vocab_size": VOCAB, "d_model": 96, "n_layers": 4, "n_heads": 6, "max_seq_len": 256, **_TOKENS}
_mpt(
    "mpt", 1, "slopes of six heads, a scale of its own, no biases",
    {**_MPT, "layer_norm_epsilon": 1e-2, "attn_config": {"softmax_scale": 0.3}},
    _EPSILON, {"attn_config": {"softmax_scale": None}},
)  # fmt: skip
