"""GPT-OSS: attention with sinks, alternating local and global layers, experts with biases and a clamped gate."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, layer_windows, rms_norm
from ridgeline.archs.names import LLAMA, AllExperts
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import ClampedSwiGLU, Layer, ModelSpec, MoE

# The published scaling, used if rope_parameters is absent or null.
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def gpt_oss(c: Config) -> ModelSpec:
    """gpt-oss-20b and -120b (arXiv:2508.10925)."""
    heads = Heads.read(c, num_kv_heads=8, head_dim_default=64, null_kv=False)
    norm, bias = rms_norm(c, 1e-5), c.get_bool("attention_bias", True)
    rope = read_rope(c, heads.head_dim, Rotation(150_000.0, parameters=YARN))
    c.expect("hidden_act", "silu", null=False)  # the gate uses a sigmoid with slope swiglu_alpha
    experts = MoE(
        c.get_size("num_local_experts", 128), c.get_size("num_experts_per_tok", 4), c.get_size("intermediate_size"),
        ClampedSwiGLU(c.get_float("swiglu_alpha", 1.702), c.get_positive("swiglu_limit", 7.0)),
        router_bias=True, bias=True,
    )  # fmt: skip
    layers = tuple(
        Layer(attention(heads, rope, window=window, qkv_bias=bias, out_bias=bias, sinks=True), experts, norm)
        for window in layer_windows(c, lambda i: i % 2 == 0, c.get_size("sliding_window", 128, None))
    )
    return decoder(c, layers, norm)


NAMES = LLAMA.with_parts(
    parts={
        "mixer": "self_attn",  # for the sinks
        "mlp.router": "mlp.router",
        "mlp.experts.gate": AllExperts("mlp.experts.gate_up_proj", 0, 2),
        "mlp.experts.up": AllExperts("mlp.experts.gate_up_proj", 1, 2),
        "mlp.experts.down": AllExperts("mlp.experts.down_proj"),
    }
)

FAMILIES = (
    # experts_per_token and initial_context_length repeat other fields, which the published code reads.
    Family("gpt_oss", gpt_oss, NAMES, harmless=("experts_per_token", "initial_context_length"), packings=("mxfp4",)),
)
