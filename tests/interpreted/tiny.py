"""Tiny models of every kind of layer that has kernels for GPUs, as data: two layers each, or one."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ridgeline.spec import (
    MLP,
    S4,
    S4D,
    AnyLayer,
    Attention,
    ChannelMixer,
    ClampedSwiGLU,
    ExpertGroups,
    FirstTokens,
    GatedConvolution,
    GatedDelta,
    GatedMLP,
    KimiDelta,
    LatentAttention,
    Layer,
    LayerNorm,
    LightningAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    MoE,
    ParallelLayer,
    RMSNorm,
    Rope,
    SharedAttention,
    ShortConvolution,
    TaylorAttention,
    TokenMixer,
)

VOCABULARY, WIDTH, LENGTH = 200, 64, 96
NORM, SMALL = RMSNorm(1e-2), RMSNorm(0.1)
FULL = Attention(4, 2, 16, 0.25, rope=Rope(16, 3000.0))
LOCAL = replace(FULL, window=6)
LATENT = LatentAttention(3, 32, 16, 8, 16, 0.2, SMALL, rope=Rope(8, 3000.0))
SWIGLU, EXPERTS = GatedMLP(64), MoE(5, 2, 32)
SHARED = MoE(6, 2, 32, scores="sigmoid", choice_bias=True, scale=1.5, groups=ExpertGroups(3, 2, "best_two"),
             shared=GatedMLP(32), shared_gate=True)  # fmt: skip
MAMBA2 = Mamba2(4, 16, 8, 2, 4, SMALL, bias=True)


class Tiny(NamedTuple):
    """A model: its layers, the format of its weights, the type of its pages.

    off: how far a log probability may be from that of the definition in float64. A number beside a tie
    of bfloat16 may be rounded the other way in pages, and alone makes log probabilities up to 6e-4 wrong: where that
    happens, the model has pages in float32.
    """

    layers: tuple[AnyLayer, ...]
    weights: str = "auto"
    pages: str = "bfloat16"
    off: float = 1e-4

    def spec(self) -> ModelSpec:
        return ModelSpec("tiny", VOCABULARY, WIDTH, 256, self.layers, NORM)


def pair(
    first: TokenMixer,
    second: TokenMixer,
    mlp: ChannelMixer | None = SWIGLU,
    other: ChannelMixer | None = SWIGLU,
    pages: str = "bfloat16",
) -> Tiny:
    """Return a model of two layers with their own mixers and MLPs; pages as in Tiny."""
    return Tiny((Layer(first, mlp, NORM), Layer(second, other, NORM)), pages=pages)


def one(mixer: TokenMixer, mlp: ChannelMixer = SWIGLU, weights: str = "auto", pages: str = "bfloat16") -> Tiny:
    """Return a model of one layer; weights and pages as in Tiny."""
    return Tiny((Layer(mixer, mlp, NORM),), weights, pages)


MODELS = {
    "norms of heads and gates": pair(replace(FULL, qk_norm=SMALL), replace(FULL, out_gate=True, qkv_bias=True)),
    "windows, sinks and soft caps": pair(replace(LOCAL, sinks=True), replace(FULL, softcap=3.0, sinks=True)),
    "first tokens, and keys of another layer": pair(
        replace(LOCAL, pattern=FirstTokens(3)), SharedAttention(0, replace(LOCAL, num_heads=2, window=4))
    ),
    "layer norms and parallel layers": Tiny((
        ParallelLayer(FULL, MLP(48, "gelu", bias=True), LayerNorm(1e-2)),
        Layer(replace(FULL, out_bias=True), MLP(48, "relu", bias=True), LayerNorm(1e-2), LayerNorm(1e-2), 0.7),
    )),
    "latents": pair(replace(LATENT, q_lora_rank=24), LATENT, other=SHARED),
    "experts": pair(FULL, LOCAL, EXPERTS, replace(EXPERTS, activation=ClampedSwiGLU(1.7, 7.0), bias=True), "float32"),
    "mamba": one(Mamba(48, 8, 4, 5)),
    "mamba beside attention": pair(Mamba(48, 8, 4, 5), replace(FULL, rope=None)),
    "mamba2 and experts": one(MAMBA2, SHARED),
    "mamba2 beside experts": pair(MAMBA2, LOCAL, None, SHARED),
    "mamba2 and attention in parallel": Tiny((
        Layer(replace(MAMBA2, norm=None, input_scales=(1.2, 0.9, 0.7, 1.4, 0.8)), None, NORM, residual_scale=0.7),
        Layer(FULL, SWIGLU, NORM, beside=True, mlp_scale=0.6),
    )),
    "gated delta": one(GatedDelta(4, 2, 8, 16, 4, SMALL)),
    "gated delta beside attention": pair(
        GatedDelta(4, 2, 8, 16, 4, SMALL), replace(FULL, qk_norm=SMALL, out_gate=True), pages="float32"
    ),
    "kimi delta": one(KimiDelta(3, 16, 4, 12, SMALL)),
    "kimi delta and latents": pair(KimiDelta(3, 16, 4, 12, SMALL), replace(LATENT, rope=None)),
    "lightning": one(LightningAttention(3, 16, SMALL)),
    "lightning beside attention": pair(LightningAttention(3, 16, SMALL), FULL, pages="float32"),
    "short convolutions": pair(ShortConvolution(48, 3), GatedConvolution(48, 4)),
    "state spaces": pair(S4(WIDTH, 16), S4D(WIDTH, 8), None),
    "based": one(TaylorAttention(3, 16, 8)),
    "based beside attention": pair(TaylorAttention(3, 16, 8), LOCAL),
    "int8, int8 pages": one(FULL, weights="int8", pages="int8"),
    "fp8, fp8 pages": one(FULL, weights="fp8", pages="fp8"),
    "int4, latents in int8": one(LATENT, EXPERTS, weights="int4", pages="int8"),
    "int4 with zero points, latents in fp8": one(LATENT, weights="int4-32-asym-exact", pages="fp8"),
    "int3, float16 pages": one(MAMBA2, weights="int3"),
    "int4 with bf16 tokens, float32 pages": one(FULL, weights="int4-32-bf16", pages="float32"),
}  # fmt: skip
