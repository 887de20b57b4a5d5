"""The parts of a layer whose sizes can change, and a layer with other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from ridgeline.errors import RequestError
from ridgeline.spec.attention import Attention, SharedAttention
from ridgeline.spec.indexed import IndexedAttention
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.mamba import Mamba, Mamba2
from ridgeline.spec.mixers import TokenMixer
from ridgeline.spec.mlp import DenseWithExperts, MoE
from ridgeline.spec.model import AnyLayer, ModelSpec

# Parts of a layer whose sizes can change: neurons of its MLP or of each expert, neurons of the MLP beside experts,
# experts, query heads, KV heads with their query heads, and heads (Mamba: channels) of a state space.
Part = Literal["mlp", "shared", "experts", "heads", "kv_heads", "state"]
PARTS: tuple[Part, ...] = ("mlp", "shared", "experts", "heads", "kv_heads", "state")


def size_of(layer: AnyLayer, part: Part) -> int:
    """Return the size of a part of a layer; 0 if the layer has no such part."""
    if isinstance(layer.mlp, DenseWithExperts) and part in ("mlp", "shared", "experts"):
        return 0  # its two parts do not change yet
    if part in ("mlp", "shared", "experts"):
        mlp: Any = layer.mlp if part != "shared" or not layer.mlp else layer.mlp.shared
        return 0 if mlp is None else int(mlp.num_experts if part == "experts" else mlp.intermediate_size)
    mixer = _own(layer)
    match mixer:
        case Attention():
            return {"heads": mixer.num_heads, "kv_heads": mixer.num_kv_heads}.get(part, 0)
        case LatentAttention():
            return mixer.num_heads if part == "heads" else 0
        case Mamba2():
            return mixer.num_heads if part == "state" else 0
        case Mamba():
            return mixer.inner_size if part == "state" else 0
    return 0


def with_size(layer: AnyLayer, part: Part, size: int) -> AnyLayer:
    """Return a layer that has the part with another size. Fewer KV heads have fewer query heads, and where each query
    head has its own KV head, fewer query heads have fewer KV heads. Raises RequestError for a size that is impossible.
    """
    mixer, mlp = layer.mixer, layer.mlp
    try:
        if part == "mlp" and mlp is not None and not isinstance(mlp, DenseWithExperts):
            return replace(layer, mlp=replace(mlp, intermediate_size=size))
        if isinstance(mlp, MoE) and part == "experts":
            return replace(layer, mlp=replace(mlp, num_experts=size))
        if isinstance(mlp, MoE) and part == "shared" and mlp.shared is not None:
            return replace(layer, mlp=replace(mlp, shared=replace(mlp.shared, intermediate_size=size)))
        if mixer is not None and part in ("heads", "kv_heads", "state"):
            return replace(layer, mixer=_resized(mixer, part, size))
    except ValueError as e:
        raise RequestError(str(e)) from None
    raise RequestError(f"a layer has no part {part!r}")


def _resized(mixer: TokenMixer, part: str, size: int) -> TokenMixer:
    match mixer:
        case SharedAttention() if part == "heads":
            return mixer.replaced_by(with_heads(mixer.attention, size))
        case Attention() if part == "kv_heads":
            return replace(mixer, num_kv_heads=size, num_heads=size * mixer.query_group)
        case Attention() if part == "heads":
            return with_heads(mixer, size)
        case LatentAttention() if part == "heads":
            return replace(mixer, num_heads=size)
        case Mamba2() if part == "state":
            return replace(mixer, num_heads=size)
        case Mamba() if part == "state":
            return replace(mixer, inner_size=size)
    raise ValueError(f"{mixer.kind} has no part {part!r} whose size can change")


def with_heads(own: Attention, heads: int) -> Attention:
    """Return attention with this many query heads, and as many KV heads where each query head has its own."""
    if own.query_group == 1:
        return replace(own, num_heads=heads, num_kv_heads=heads)
    return replace(own, num_heads=heads)


def attention_of(layer: AnyLayer) -> Attention | None:
    """Return the softmax attention of a layer, over its own or shared keys and values; None without it."""
    own = _own(layer)
    return own if isinstance(own, Attention) else None


def groups_of(layer: AnyLayer, part: Part) -> int:
    """Return the number of groups of a part that must stay equally large."""
    mixer = _own(layer)
    if part == "experts" and isinstance(layer.mlp, MoE) and layer.mlp.groups:
        return layer.mlp.groups.count
    if part == "state" and isinstance(mixer, Mamba2):
        return mixer.num_groups
    if part == "heads" and isinstance(mixer, Attention) and mixer.query_group > 1:
        return mixer.num_kv_heads
    return 1


def unchanging_part(spec: ModelSpec) -> str | None:
    """Return the part of a model because of which it cannot be pruned or converted; None without such a part."""
    if spec.layer_embeddings:
        return "embeddings of the tokens for each layer"
    if any(own.values_are_keys or own.value_eps is not None for own in spec.attentions(shared=False)):
        return "values that are keys, or that have a norm"
    if spec.sinusoids:
        return "positions that follow from the hidden size"
    if any(isinstance(layer.mixer, IndexedAttention) for layer in spec.layers):
        return "keys that an indexer selects"
    if spec.embed_norm:
        return "a norm of the embeddings"
    if spec.head_transform:
        return "a transform before the output head"
    if any(spec.is_beside(i) for i in range(len(spec.layers))):
        return "mixers in parallel"
    if any(own.alibi is not None for own in spec.attentions(shared=True)):
        return "slopes of heads (alibi), which follow from the number of heads"
    beside = any(isinstance(layer.mlp, DenseWithExperts) for layer in spec.layers)
    return "experts beside a dense MLP" if beside else None


def _own(layer: AnyLayer) -> TokenMixer | None:
    return layer.mixer.attention if isinstance(layer.mixer, SharedAttention) else layer.mixer
