"""Facts about models, as data. Standard library only: importing this never imports a tensor library."""

from ridgeline.spec.activation import Activation
from ridgeline.spec.codec import from_json, to_json
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.mixers import (
    MLP,
    Attention,
    ChannelMixer,
    ClampedSwiGLU,
    ExpertGroups,
    GatedMLP,
    MoE,
    SharedAttention,
    TokenMixer,
    Ungated,
)
from ridgeline.spec.model import AnyLayer, Layer, ModelSpec, ParallelLayer
from ridgeline.spec.norm import LayerNorm, Norm, RMSNorm
from ridgeline.spec.pattern import Dilated, FirstTokens, Pattern, Strided
from ridgeline.spec.recurrent import Mamba, Mamba2, RecurrentMixer, ShortConvolution, TaylorAttention
from ridgeline.spec.rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from ridgeline.spec.state import ALL, State
from ridgeline.spec.weight import Weight, linear

__all__ = [
    "ALL",
    "MLP",
    "Activation",
    "AnyLayer",
    "Attention",
    "ChannelMixer",
    "ClampedSwiGLU",
    "Dilated",
    "DynamicNTKScaling",
    "ExpertGroups",
    "FirstTokens",
    "GatedMLP",
    "LatentAttention",
    "Layer",
    "LayerNorm",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mamba",
    "Mamba2",
    "MoE",
    "ModelSpec",
    "Norm",
    "ParallelLayer",
    "Pattern",
    "RMSNorm",
    "RecurrentMixer",
    "Rope",
    "RopeScaling",
    "SharedAttention",
    "ShortConvolution",
    "State",
    "Strided",
    "TaylorAttention",
    "TokenMixer",
    "Ungated",
    "Weight",
    "YarnScaling",
    "from_json",
    "linear",
    "to_json",
]
