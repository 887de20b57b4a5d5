"""Ministral 3, and Mistral's models that also see: queries grow with their position."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import WITHOUT_SIGHT, Family, Heads, attention, decoder, pre_norm_layers, rms_norm
from ridgeline.archs.llama import mistral
from ridgeline.archs.names import LLAMA
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import ModelSpec, QueryGrowth

# The published rotation, used if rope_parameters is absent or null.
YARN = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
GROWTH, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def ministral3(c: Config) -> ModelSpec:
    """Ministral 3 3B, 8B and 14B: the language model alone."""
    heads, norm = Heads.read(c, num_kv_heads=8, head_dim_default=128, null_kv=False), rms_norm(c, 1e-5)
    rope = read_rope(c, heads.head_dim, Rotation(parameters=YARN, harmless=(GROWTH, LENGTH, "max_position_embeddings")))
    old, new = c.sub("rope_scaling"), c.sub("rope_parameters")
    fields = old if old is not None and old.filled else new or c.inside("rope_parameters", YARN)
    growth = QueryGrowth(fields.get_float(GROWTH), fields.get_size(LENGTH))
    window = c.get_size("sliding_window", None, None)
    mixer = attention(heads, rope, window=window, growth=growth if growth.beta else None)
    return decoder(c, pre_norm_layers(c, mixer, norm), norm)


def mistral3(c: Config) -> ModelSpec:
    """Mistral Small 3.1 and 3.2, and Ministral 3 as published: the language model inside."""
    return ministral3(c) if c.model_type == "ministral3" else mistral(c)


INSIDE = LLAMA.within_sight()
_WHOLE = (
    "vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size",
)  # fmt: skip
FAMILIES = (
    Family("ministral3", ministral3),
    Family("mistral3", mistral3, INSIDE, _WHOLE, within="text_config", note=WITHOUT_SIGHT),
)
