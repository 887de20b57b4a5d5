"""GPT-OSS: attention with sinks, local and global layers in turn, experts with biases and a clamped gate."""

from __future__ import annotations

import math

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, layer_windows, rms_norm
from ridgeline.archs.names import LLAMA, AllExperts
from ridgeline.archs.rope import read_rope
from ridgeline.spec import ClampedSwiGLU, Layer, ModelSpec, MoE, Rope, YarnScaling


def gpt_oss(c: Config) -> ModelSpec:
    """gpt-oss-20b and -120b (arXiv:2508.10925)."""
    heads, norm = Heads.read(c, num_kv_heads=8, head_dim_default=64), rms_norm(c, 1e-5)
    bias, rope = c.get_bool("attention_bias", True), _rope(c, heads.head_dim)
    c.expect("hidden_act", "silu")  # the gate's sigmoid, whose slope is swiglu_alpha
    experts = MoE(
        c.get_int("num_local_experts", 128), c.get_int("num_experts_per_tok", 4), c.get_int("intermediate_size"),
        ClampedSwiGLU(c.get_float("swiglu_alpha", 1.702), c.get_float("swiglu_limit", 7.0)),
        router_bias=True, bias=True,
    )  # fmt: skip
    layers = tuple(
        Layer(attention(heads, rope, window=window, qkv_bias=bias, out_bias=bias, sinks=True), experts, norm)
        for window in layer_windows(c, lambda i: i % 2 == 0, 128)
    )
    return decoder(c, layers, norm)


def _rope(c: Config, head_dim: int) -> Rope:
    """Where a config says nothing of the scaling, be it by a null, it is the published one."""
    if any([c.sub("rope_parameters"), c.sub("rope_scaling")]):
        return read_rope(c, head_dim, theta=150_000.0)
    return Rope(
        head_dim, c.get_float("rope_theta", 150_000.0),
        scaling=YarnScaling(32.0, 4096, attention_factor=0.1 * math.log(32.0) + 1.0, truncate=False),
    )  # fmt: skip


NAMES = LLAMA.with_parts(
    parts={
        "mixer": "self_attn",  # of the sinks
        "mlp.router": "mlp.router",
        "mlp.experts.gate": AllExperts("mlp.experts.gate_up_proj", 0, 2),
        "mlp.experts.up": AllExperts("mlp.experts.gate_up_proj", 1, 2),
        "mlp.experts.down": AllExperts("mlp.experts.down_proj"),
    }
)

FAMILIES = (
    # experts_per_token and initial_context_length repeat what other fields say; the published code reads those.
    Family("gpt_oss", gpt_oss, NAMES, harmless=("experts_per_token", "initial_context_length"), packings=("mxfp4",)),
)
