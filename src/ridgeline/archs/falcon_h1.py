"""Falcon-H1: each layer has Mamba-2 and attention in parallel, then an MLP, with factors on most of their parts."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from ridgeline.archs.bamba import NAMES as BAMBA
from ridgeline.archs.bamba import mamba2_mixer
from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, rms_norm
from ridgeline.archs.names import Names
from ridgeline.archs.rope import read_rope
from ridgeline.spec import GatedMLP, Layer, Mamba2, ModelSpec

NAMES: Names = BAMBA.with_parts(sublayers=2)
HARMLESS = ("mamba_chunk_size", "num_logits_to_keep", "layer_types", "layers_block_type", "mamba_use_mlp",
            "attn_layer_indices", "mlp_expansion_factor")  # fmt: skip


def falcon_h1(c: Config) -> ModelSpec:
    """Falcon-H1 (arXiv:2507.22448). One of its layers is two of ours: Mamba-2, and attention beside it with the MLP.

    The factor on attention's input multiplies queries, keys and values, so it is a part of two factors: the square is
    in that of the scores, and the number itself in that of the result.
    """
    norm, heads = rms_norm(c, 1e-5), Heads.read(c, num_kv_heads=8)
    bias, into = c.get_bool("attention_bias", False), _factor(c, "attention_in_multiplier")
    if bias and into != 1.0:
        raise c.error("attention_in_multiplier", f"is {into}; supported: 1 with attention_bias, which it leaves out")
    full = attention(
        heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias,
        scale=heads.head_dim**-0.5 * into * into * _factor(c, "key_multiplier"),
    )  # fmt: skip
    gate, down = _factors(c, "mlp_multipliers", 2)
    mlp = GatedMLP(
        c.get_size("intermediate_size"), c.get_activation("hidden_act", "silu"), c.get_bool("mlp_bias", False), gate
    )
    mamba = Layer(_mamba(c), None, norm, residual_scale=_factor(c, "ssm_out_multiplier"))
    out = into * _factor(c, "attention_out_multiplier")
    beside = Layer(full, mlp, norm, residual_scale=out, mlp_scale=down, beside=True)
    return decoder(
        c, (mamba, beside) * c.get_layer_count(), norm, embedding_scale=_factor(c, "embedding_multiplier"),
        logit_scale=_factor(c, "lm_head_multiplier"),
    )  # fmt: skip


def _mamba(c: Config) -> Mamba2:
    """Return Mamba-2, whose norm is optional and whose inputs are multiplied by factors."""
    norm = rms_norm(c, 1e-5) if c.get_bool("mamba_rms_norm", False, False) else None
    first = c.get_bool("mamba_norm_before_gate", True, False)
    if norm and first:
        raise c.error("mamba_norm_before_gate", "is true; supported: false with mamba_rms_norm, a norm after the gate")
    inner = c.get_size("mamba_d_ssm", 1024, c.get_size("mamba_expand", 2) * c.get_size("hidden_size"))
    own = mamba2_mixer(c, norm, inner)
    into, scales = _factor(c, "ssm_in_multiplier"), _factors(c, "ssm_multipliers", 5)
    if own.bias and into != 1.0:
        raise c.error("ssm_in_multiplier", f"is {into}; supported: 1 with mamba_proj_bias, which it leaves out")
    z, x, b, d, dt = (into * scale for scale in scales)
    return replace(own, out_bias=c.get_bool("projectors_bias", False, False), input_scales=(z, x, b, d, dt))


def _factor(c: Config, name: str) -> float:
    return c.get_float(name, 1.0)


def _factors(c: Config, name: str, count: int) -> list[float]:
    """Return a list of factors; 1 where the config has none."""
    factors = c.get_list(name, [1.0] * count, [1.0] * count)
    if len(factors) != count or not all(type(x) in (int, float) and isfinite(x) for x in factors):
        raise c.error(name, f"is {factors!r:.100}; it must be a list of {count} numbers")
    return [float(x) for x in factors]


FAMILIES = (Family("falcon_h1", falcon_h1, NAMES, HARMLESS),)
