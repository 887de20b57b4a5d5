"""Read the config of LLaDA (Nie et al., arXiv:2502.09992), a Llama with bidirectional attention.

Only `ridgeline plan` uses it: the matrices are a Llama's, but the engine does not run diffusion models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.archs.config import Config

# Llama's field -> the field in LLaDA's config.json.
FIELDS: Mapping[str, str] = {
    "hidden_size": "d_model", "intermediate_size": "mlp_hidden_size", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "vocab_size": "embedding_size",
    "max_position_embeddings": "max_sequence_length", "rms_norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "tie_word_embeddings": "weight_tying",
}  # fmt: skip
AS_LLAMA: Mapping[str, Any] = {
    "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True, "include_bias": False,
    "include_qkv_bias": False, "alibi": False, "attention_layer_norm": False, "input_emb_norm": False,
    "scale_logits": False,
}  # fmt: skip
MODEL_TYPE = "llada"


def llama_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the Llama with the same matrices. Raises ConfigError for a field that is missing
    or differs.
    """
    c = Config(config)
    for name, wanted in AS_LLAMA.items():
        c.expect(name, wanted)
    found = {name: config[own] for name, own in FIELDS.items() if own in config}
    missing = [own for name, own in FIELDS.items() if name not in found]
    if missing:
        raise c.error(missing[0], "is missing")
    return {"model_type": "llama", "hidden_act": "silu", "torch_dtype": config.get("torch_dtype", "bfloat16"), **found}
