"""Facts about models, as data. Standard library only: importing this never imports a tensor library."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.spec.activation import XIELU, Activation
    from ridgeline.spec.attention import Attention, QueryGrowth, SharedAttention
    from ridgeline.spec.codec import from_json, to_json
    from ridgeline.spec.convolution import GatedConvolution, ShortConvolution
    from ridgeline.spec.delta import DeltaMixer, GatedDelta, KimiDelta
    from ridgeline.spec.diffusion import CanvasDiffusion, Diffusion, MaskedDiffusion
    from ridgeline.spec.encoder import Encoder, LabelHead
    from ridgeline.spec.indexed import IndexedAttention, Indexer
    from ridgeline.spec.latent import LatentAttention
    from ridgeline.spec.lightning import LightningAttention
    from ridgeline.spec.lru import GatedLRU
    from ridgeline.spec.mamba import Mamba, Mamba2
    from ridgeline.spec.mixers import ChannelMixer, TokenMixer
    from ridgeline.spec.mlp import (
        MLP,
        ClampedSwiGLU,
        ExpertGroups,
        GatedMLP,
        IdentityExperts,
        MoE,
        SparseMixer,
        Ungated,
    )
    from ridgeline.spec.model import AnyLayer, DeepNormLayer, Layer, ModelSpec, ParallelLayer
    from ridgeline.spec.norm import LayerNorm, Norm, RMSNorm
    from ridgeline.spec.paired import PairedMLP
    from ridgeline.spec.pattern import Chunked, Dilated, FirstTokens, Pattern, Strided
    from ridgeline.spec.per_layer import EmbeddingBranch, LayerEmbeddings
    from ridgeline.spec.recurrent import RecurrentMixer
    from ridgeline.spec.regimes import Regimes
    from ridgeline.spec.rope import (
        DynamicNTKScaling,
        LinearScaling,
        Llama3Scaling,
        LongRopeScaling,
        ProportionalScaling,
        Rope,
        RopeScaling,
        YarnScaling,
    )
    from ridgeline.spec.s4 import S4, S4D
    from ridgeline.spec.shortcut import ShortcutMLP
    from ridgeline.spec.sight import Blocks, Causal, Sight, WholeSequence
    from ridgeline.spec.state import ALL, State
    from ridgeline.spec.taylor import TaylorAttention
    from ridgeline.spec.weight import Weight, linear

__all__ = [
    "ALL",
    "MLP",
    "S4",
    "S4D",
    "XIELU",
    "Activation",
    "AnyLayer",
    "Attention",
    "Blocks",
    "CanvasDiffusion",
    "Causal",
    "ChannelMixer",
    "Chunked",
    "ClampedSwiGLU",
    "DeepNormLayer",
    "DeltaMixer",
    "Diffusion",
    "Dilated",
    "DynamicNTKScaling",
    "EmbeddingBranch",
    "Encoder",
    "ExpertGroups",
    "FirstTokens",
    "GatedConvolution",
    "GatedDelta",
    "GatedLRU",
    "GatedMLP",
    "HeadTransform",
    "IdentityExperts",
    "IndexedAttention",
    "Indexer",
    "KimiDelta",
    "LabelHead",
    "LatentAttention",
    "Layer",
    "LayerEmbeddings",
    "LayerNorm",
    "LightningAttention",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mamba",
    "Mamba2",
    "MaskedDiffusion",
    "MoE",
    "ModelSpec",
    "Norm",
    "PairedMLP",
    "ParallelLayer",
    "Pattern",
    "ProportionalScaling",
    "QueryGrowth",
    "RMSNorm",
    "RecurrentMixer",
    "Regimes",
    "Rope",
    "RopeScaling",
    "SharedAttention",
    "ShortConvolution",
    "ShortcutMLP",
    "Sight",
    "SparseMixer",
    "State",
    "Strided",
    "TaylorAttention",
    "TokenMixer",
    "Ungated",
    "Weight",
    "WholeSequence",
    "YarnScaling",
    "from_json",
    "linear",
    "to_json",
]

# The names of each module, which is imported at the first use of one: the command line needs only a few of them.
_HOMES = {
    "activation": ("XIELU", "Activation"),
    "attention": ("Attention", "QueryGrowth", "SharedAttention"),
    "codec": ("from_json", "to_json"),
    "convolution": ("GatedConvolution", "ShortConvolution"),
    "delta": ("DeltaMixer", "GatedDelta", "KimiDelta"),
    "diffusion": ("CanvasDiffusion", "Diffusion", "MaskedDiffusion"),
    "encoder": ("Encoder", "LabelHead"),
    "indexed": ("IndexedAttention", "Indexer"),
    "latent": ("LatentAttention",),
    "lightning": ("LightningAttention",),
    "lru": ("GatedLRU",),
    "mamba": ("Mamba", "Mamba2"),
    "mixers": ("ChannelMixer", "TokenMixer"),
    "mlp": ("MLP", "ClampedSwiGLU", "ExpertGroups", "GatedMLP", "IdentityExperts", "MoE", "SparseMixer", "Ungated"),
    "model": ("AnyLayer", "DeepNormLayer", "Layer", "ModelSpec", "ParallelLayer"),
    "norm": ("LayerNorm", "Norm", "RMSNorm"),
    "paired": ("PairedMLP",),
    "pattern": ("Chunked", "Dilated", "FirstTokens", "Pattern", "Strided"),
    "per_layer": ("EmbeddingBranch", "LayerEmbeddings"),
    "recurrent": ("RecurrentMixer",),
    "regimes": ("Regimes",),
    "rope": (
        "DynamicNTKScaling",
        "LinearScaling",
        "Llama3Scaling",
        "LongRopeScaling",
        "ProportionalScaling",
        "Rope",
        "RopeScaling",
        "YarnScaling",
    ),
    "s4": ("S4", "S4D"),
    "shortcut": ("ShortcutMLP",),
    "sight": ("Blocks", "Causal", "Sight", "WholeSequence"),
    "state": ("ALL", "State"),
    "taylor": ("TaylorAttention",),
    "transform": ("HeadTransform",),
    "weight": ("Weight", "linear"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
