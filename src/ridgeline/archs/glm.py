"""GLM-4 in its two published layouts: the first half of each head is rotated, in neighboring pairs."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, rms_norm
from ridgeline.archs.names import FUSED_GATE_UP, LLAMA
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import Attention, Layer, ModelSpec

EPS = 1.5625e-7


def _attention(c: Config) -> Attention:
    heads = Heads.read(c, num_kv_heads=2, head_dim_default=128, null_kv=False)
    rope = read_rope(c, heads.head_dim, Rotation(partial=0.5, null_partial=1.0, interleaved=True))
    return attention(heads, rope, qkv_bias=c.get_bool("attention_bias", True))


def glm(c: Config) -> ModelSpec:
    """GLM-4-9B (arXiv:2406.12793)."""
    norm = rms_norm(c, EPS)
    return decoder(c, (Layer(_attention(c), gated_mlp(c), norm),) * c.get_layer_count(), norm)


def glm4(c: Config) -> ModelSpec:
    """GLM-4-0414: a second norm after each branch."""
    norm = rms_norm(c, EPS)
    return decoder(c, (Layer(_attention(c), gated_mlp(c), norm, norm),) * c.get_layer_count(), norm)


GLM_NAMES = LLAMA.with_parts(parts=FUSED_GATE_UP)
GLM4_NAMES = GLM_NAMES.with_parts(
    parts={"mixer_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
)

FAMILIES = (Family("glm", glm, GLM_NAMES), Family("glm4", glm4, GLM4_NAMES))
