"""Specs of recurrent models that no class of transformers has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ridgeline.spec import (
    S4,
    S4D,
    AnyLayer,
    Attention,
    DeepNormLayer,
    GatedConvolution,
    GatedMLP,
    Layer,
    LightningAttention,
    ModelSpec,
    RMSNorm,
    ShortConvolution,
    TaylorAttention,
)


def specs(
    model: Callable[[Sequence[AnyLayer], str], ModelSpec], full: Attention, mlp: GatedMLP, norm: RMSNorm
) -> dict[str, ModelSpec]:
    """Return the models by name, all with the hidden size of `full`."""
    width, local = 64, replace(full, window=64)

    def deep(mixer: Attention | LightningAttention) -> AnyLayer:
        return DeepNormLayer(mixer, mlp, norm, 1.3, 0.8, 0.9, 1.2)

    lightning = LightningAttention(num_heads=3, head_dim=20, norm=RMSNorm(0.1))
    convolution, taylor = GatedConvolution(96, 3), TaylorAttention(num_heads=4, head_dim=16, feature_dim=8)
    hedgehog = replace(taylor, feature_dim=12, features="hedgehog")
    based = [Layer(mixer, mlp, norm) for mixer in (convolution, taylor, convolution, local)]
    state_spaces = (S4(width, 10), local, S4D(width, 6, "silu", bias=False), S4(width, 4, "relu"))
    return {
        "s4": model([Layer(mixer, mlp, norm) for mixer in state_spaces], "s4"),
        "s4d_alone": model([Layer(S4D(width, 16), None, norm)] * 4, "s4d"),
        "lightning": model(
            [
                deep(replace(lightning, slope_scale=0.5)),
                deep(full),
                Layer(replace(lightning, slope_scale=0.0, activation="gelu"), mlp, norm),
                deep(lightning),
            ],
            "lightning",
        ),
        "based": model(based, "based"),
        "hedgehog": model([Layer(m, mlp, norm) for m in (hedgehog, local, hedgehog)], "hedgehog"),
        "taylor": model(
            [
                Layer(taylor, mlp, norm),
                Layer(ShortConvolution(48, 4, bias=True), None, norm),
                Layer(replace(convolution, activation="gelu", bias=False, conv_bias=True), mlp, norm),
            ],
            "taylor",
        ),
    }
