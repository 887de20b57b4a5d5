"""SDAR: Qwen 3 as a block diffusion model."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, decoder, rms_norm
from ridgeline.archs.llama import qwen3_attention, qwen_layers
from ridgeline.spec import Blocks, MaskedDiffusion, ModelSpec


def sdar(c: Config) -> ModelSpec:
    """SDAR, dense: the layers of Qwen 3 see blocks, and logits are for the token at the same position (2510.06303)."""
    norm, heads = rms_norm(c), Heads.read(c, num_kv_heads=32, head_dim_default=128)
    mixer = replace(qwen3_attention(c, norm, heads), sight=Blocks(c.get_size("block_size")))
    mask = MaskedDiffusion(c.get_int("mask_token_id"))
    return decoder(c, qwen_layers(c, mixer, norm), norm, diffusion=mask)


# Switches of the training code, and the names of its kernels.
FAMILIES = (
    Family(
        "sdar", sdar,
        harmless=(
            "attn_implementation", "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint",
            "use_deepep",
        ),
    ),
)  # fmt: skip
