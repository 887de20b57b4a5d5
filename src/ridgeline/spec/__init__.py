"""Facts about models, as data. Standard library only: importing this never imports a tensor library."""

from ridgeline.spec.activation import Activation
from ridgeline.spec.attention import Attention, SharedAttention
from ridgeline.spec.codec import from_json, to_json
from ridgeline.spec.convolution import GatedConvolution, ShortConvolution
from ridgeline.spec.delta import DeltaMixer, GatedDelta, KimiDelta
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.lightning import LightningAttention
from ridgeline.spec.mamba import Mamba, Mamba2
from ridgeline.spec.mixers import ChannelMixer, TokenMixer
from ridgeline.spec.mlp import MLP, ClampedSwiGLU, ExpertGroups, GatedMLP, MoE, Ungated
from ridgeline.spec.model import AnyLayer, DeepNormLayer, Layer, ModelSpec, ParallelLayer
from ridgeline.spec.norm import LayerNorm, Norm, RMSNorm
from ridgeline.spec.pattern import Dilated, FirstTokens, Pattern, Strided
from ridgeline.spec.recurrent import RecurrentMixer
from ridgeline.spec.regimes import Regimes
from ridgeline.spec.rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from ridgeline.spec.s4 import S4, S4D
from ridgeline.spec.state import ALL, State
from ridgeline.spec.taylor import TaylorAttention
from ridgeline.spec.weight import Weight, linear

__all__ = [
    "ALL",
    "MLP",
    "S4",
    "S4D",
    "Activation",
    "AnyLayer",
    "Attention",
    "ChannelMixer",
    "ClampedSwiGLU",
    "DeepNormLayer",
    "DeltaMixer",
    "Dilated",
    "DynamicNTKScaling",
    "ExpertGroups",
    "FirstTokens",
    "GatedConvolution",
    "GatedDelta",
    "GatedMLP",
    "KimiDelta",
    "LatentAttention",
    "Layer",
    "LayerNorm",
    "LightningAttention",
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
    "Regimes",
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
