"""Techniques that are another ModelSpec: what a model would be with other keys and values, windows, mixers or sizes.

Nothing is said of quality here: a model of such a form has to be trained, or converted and healed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ridgeline.errors import RequestError
from ridgeline.spec import (
    AnyLayer,
    Attention,
    GatedDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    RMSNorm,
    SharedAttention,
    TokenMixer,
)

Recurrent = Literal["mamba", "mamba2", "lightning", "delta"]
RECURRENT: tuple[Recurrent, ...] = ("mamba", "mamba2", "lightning", "delta")
PRUNABLE = ("mlp", "layers", "heads")


def with_kv_heads(spec: ModelSpec, count: int) -> ModelSpec:
    """Attention with so many heads of keys and values, of the same size (arXiv:2305.13245)."""
    return _each_attention(spec, lambda own, _: replace(own, num_kv_heads=count))


def with_latents(spec: ModelSpec, latent: int, rope: int) -> ModelSpec:
    """Attention over latents of so many numbers, and so many rotated ones (MLA, arXiv:2405.04434)."""

    def latents(own: Attention, _: int) -> LatentAttention:
        rotated = replace(own.rope, dim=rope, scaling=None) if own.rope else None
        return LatentAttention(
            own.num_heads, latent, own.head_dim, rope, own.head_dim, own.scale, RMSNorm(), rope=rotated
        )  # fmt: skip

    return _each_attention(spec, latents)


def with_windows(spec: ModelSpec, window: int, local: int | None) -> ModelSpec:
    """Of each local + 1 layers with attention the first `local` see a window; None: all of them do (2503.19786)."""

    def windowed(own: Attention, position: int) -> Attention:
        if local is not None and position % (local + 1) == local:
            return own
        return replace(own, window=min(window, own.window or window))

    return _each_attention(spec, windowed)


def with_shared_keys(spec: ModelSpec, factor: int) -> ModelSpec:
    """Of each `factor` layers with the same attention the first has keys and values for all (CLA, 2405.12981)."""
    owners: dict[Attention, tuple[int, int]] = {}  # the last owner, and how many layers it serves
    layers = list(spec.layers)
    for i, layer in enumerate(layers):
        if (own := spec.attention(i)) and spec.state_layer(i) == i:
            owner, served = owners.get(own, (i, factor))
            if served == factor:
                owners[own] = (i, 1)
                continue
            owners[own] = (owner, served + 1)
            layers[i] = replace(layer, mixer=SharedAttention(owner, own))
    return _changed(spec, replace(spec, layers=tuple(layers)), "layers that could share keys and values")


def with_recurrent(spec: ModelSpec, kind: Recurrent, many: int | None) -> ModelSpec:
    """Of each many + 1 layers with attention the first `many` are recurrent; None: all of them (arXiv:2403.19887)."""

    def mixer(own: Attention, position: int) -> TokenMixer:
        return (
            own if many is not None and position % (many + 1) == many else recurrent_mixer(kind, spec.hidden_size, own)
        )

    return _each_attention(spec, mixer)


def recurrent_mixer(kind: Recurrent, width: int, own: Attention) -> TokenMixer:
    """In the proportions of the papers: Mamba 2312.00752, Mamba-2 2405.21060, MiniMax-01 2501.08313, Gated DeltaNet
    2412.06464.
    """
    if kind == "mamba":
        return Mamba(inner_size=2 * width, state_size=16, conv_size=4, dt_rank=-(-width // 16))
    if kind == "mamba2":
        return Mamba2(
            num_heads=2 * width // 64, head_dim=64, state_size=128, num_groups=1, conv_size=4, norm=RMSNorm()
        )  # fmt: skip
    if kind == "lightning":
        return LightningAttention(own.num_heads, own.head_dim, RMSNorm())
    return GatedDelta(own.num_heads, own.num_heads, own.head_dim, own.head_dim, 4, RMSNorm())


def pruned(spec: ModelSpec, part: str, share: float) -> ModelSpec:
    """Without a share of the MLPs' (and experts') inner size, of the layers, or of the heads (2407.14679).

    Heads go with their keys and values where each has its own, else without.
    """
    if part == "layers":
        return _fewer_layers(spec, share)
    if part == "heads":
        return _each_attention(spec, lambda own, _: _fewer_heads(own, share))
    layers: list[AnyLayer] = []
    for layer in spec.layers:
        mlp = layer.mlp
        if mlp:
            mlp = replace(mlp, intermediate_size=_rounded(mlp.intermediate_size, share))
            if mlp.shared:
                shared = replace(mlp.shared, intermediate_size=_rounded(mlp.shared.intermediate_size, share))
                mlp = replace(mlp, shared=shared)
            layers.append(replace(layer, mlp=mlp))
        else:
            layers.append(layer)
    return _changed(spec, replace(spec, layers=tuple(layers)), "MLPs")


def _fewer_layers(spec: ModelSpec, share: float) -> ModelSpec:
    """From the middle: the first and the last layers change the stream most."""
    if any(spec.state_layer(i) != i for i in range(len(spec.layers))):
        raise RequestError("layers that share keys and values are not pruned here; prune mlp or heads")
    keep = max(1, round(len(spec.layers) * (1 - share)))
    first = -(-keep // 2)
    return replace(spec, layers=spec.layers[:first] + spec.layers[len(spec.layers) - (keep - first) :])


def _fewer_heads(own: Attention, share: float) -> Attention:
    group = own.num_heads // own.num_kv_heads
    if group == 1:
        heads = max(1, round(own.num_heads * (1 - share)))
        return replace(own, num_heads=heads, num_kv_heads=heads)
    return replace(own, num_heads=own.num_kv_heads * max(1, round(group * (1 - share))))


def _rounded(size: int, share: float) -> int:
    return max(1, round(size * (1 - share)))


def _each_attention(spec: ModelSpec, change: Callable[[Attention, int], TokenMixer]) -> ModelSpec:
    """Every layer with softmax attention of heads, changed; `change` is told its position among these layers.

    Raises RequestError where there is none, or where a layer refuses.
    """
    try:
        return replace(spec, layers=tuple(_changed_layers(spec, change)))
    except RequestError:
        raise
    except ValueError as e:
        raise RequestError(str(e)) from None


def _changed_layers(spec: ModelSpec, change: Callable[[Attention, int], TokenMixer]) -> list[AnyLayer]:
    layers, position = list(spec.layers), 0
    for i, layer in enumerate(layers):
        if layer.mixer and (own := spec.attention(i)):
            layers[i] = replace(layer, mixer=layer.mixer.replaced_by(change(own, position)))
            position += 1
    if not position:
        raise RequestError(f"{spec.family} has no layer with heads of keys and values")
    return layers


def _changed(before: ModelSpec, after: ModelSpec, what: str) -> ModelSpec:
    if before == after:
        raise RequestError(f"{before.family} has no {what}")
    return after
