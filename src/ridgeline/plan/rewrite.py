"""Rewrite a ModelSpec: what a model would be with other KV heads, windows, mixers or sizes.

Quality is not estimated here: a rewritten model has to be trained, or converted and then trained further. The planner
prices the results, and `compress/` makes their weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

from ridgeline.errors import RequestError
from ridgeline.spec import (
    AnyLayer,
    Attention,
    Blocks,
    GatedDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    MaskedDiffusion,
    ModelSpec,
    Norm,
    RMSNorm,
    Rope,
    SharedAttention,
    TaylorAttention,
    TokenMixer,
)
from ridgeline.spec.parts import Part, size_of, with_heads, with_size
from ridgeline.spec.sight import CAUSAL

Recurrent = Literal["mamba", "mamba2", "lightning", "delta", "taylor", "hedgehog"]
RECURRENT: tuple[Recurrent, ...] = ("mamba", "mamba2", "lightning", "delta", "taylor", "hedgehog")
LINEAR: tuple[Recurrent, ...] = ("taylor", "hedgehog")  # features of linear attention, the default first
FEATURES = 16  # numbers of a query and a key from which BASED makes its features (2402.18668, section 5)
PRUNABLE = ("mlp", "layers", "heads")


def with_kv_heads(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the model with `count` KV heads of the same size in every attention layer (arXiv:2305.13245)."""
    return _each_attention(spec, lambda own, _: replace(own, num_kv_heads=count))


def with_latents(
    spec: ModelSpec, latent: int, rope: int, ropes: Sequence[Rope] | None = None, norm: Norm | None = None
) -> ModelSpec:
    """Return the model with latent attention: latents of `latent` numbers plus `rope` rotary ones (MLA,
    arXiv:2405.04434).

    ropes: the rotation of each attention layer; None: as its keys were, with pairs side by side. norm: the norm of
    latents; None: the usual one.
    """

    def latents(own: Attention, index: int) -> LatentAttention:
        plain = replace(own.rope, dim=rope, scaling=None, interleaved=True, odd=False) if own.rope else None
        return LatentAttention(
            own.num_heads, latent, own.head_dim, rope, own.head_dim, (own.head_dim + rope) ** -0.5, norm or RMSNorm(),
            rope=plain if ropes is None else ropes[index], out_bias=own.out_bias,
        )  # fmt: skip

    return _each_attention(spec, latents)


def without_qk_norms(spec: ModelSpec) -> ModelSpec:
    """Return the model without norms of queries and keys."""
    return _each_attention(spec, lambda own, _: replace(own, qk_norm=None))


def with_blocks(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the model as a block diffusion model that predicts the next token, with any mask token (2503.09573).

    Raises RequestError for a model that cannot see blocks.
    """
    try:
        return spec.seeing(Blocks(size), MaskedDiffusion(spec.vocab_size - 1, predicts_next=True))
    except ValueError as e:
        raise RequestError(f"the model cannot have blocks of {size}: {e}") from None


def autoregressive(spec: ModelSpec) -> ModelSpec:
    """Return a diffusion model with the same weights whose tokens see only those before them."""
    return spec.seeing(CAUSAL, None)


def with_windows(spec: ModelSpec, window: int, local: int | None, whole: Collection[int] | None = None) -> ModelSpec:
    """Return the model with windows in `local` of every local + 1 attention layers; None: in all (2503.19786).

    whole: indices, among the attention layers, of those that get no window; None: the last of each local + 1.
    """

    def windowed(own: Attention, index: int) -> Attention:
        is_whole = index in whole if whole is not None else local is not None and index % (local + 1) == local
        return own if is_whole else replace(own, window=min(window, own.window or window))

    return _each_attention(spec, windowed)


def with_shared_keys(spec: ModelSpec, factor: int) -> ModelSpec:
    """Return the model in which `factor` successive layers with equal attention share keys and values (CLA,
    2405.12981).
    """
    own_keys = [i for i in range(len(spec.layers)) if spec.attention(i) and spec.state_layer(i) == i]
    equal = Counter(spec.attention(i) for i in own_keys)
    most = max(equal.values(), default=0)
    if factor > most > 1:
        raise RequestError(
            f"{factor} layers cannot share keys and values: {spec.family} has {most} with equal attention; use at most "
            f"{most}"
        )
    owners: dict[Attention, tuple[int, int]] = {}  # the latest owner, and the number of layers that use its keys
    layers = list(spec.layers)
    for i, layer in enumerate(layers):
        if (own := spec.attention(i)) and spec.state_layer(i) == i:
            owner, served = owners.get(own, (i, factor))
            if served == factor:
                owners[own] = (i, 1)
                continue
            owners[own] = (owner, served + 1)
            layers[i] = replace(layer, mixer=SharedAttention(owner, own))
    if not owners:
        raise RequestError(
            f"only layers with keys and values can share them, and the model, as changed so far, has {mixers_of(spec)}"
        )
    return _changed(spec, replace(spec, layers=tuple(layers)), "two layers with equal attention")


def mixers_of(spec: ModelSpec) -> str:
    """Return the kinds of mixers and the number of layers of each, for a message: `LatentAttention in 32 layers`."""
    names = Counter(layer.mixer.kind for layer in spec.layers if layer.mixer)
    return ", ".join(f"{kind} in {count} layer{'s' * (count > 1)}" for kind, count in names.items())


def with_recurrent(
    spec: ModelSpec, kind: Recurrent, many: int | None, whole: Collection[int] | None = None
) -> ModelSpec:
    """Return the model with recurrent mixers in `many` of every many + 1 attention layers; None: in all
    (arXiv:2403.19887).

    whole: indices, among the attention layers, of those that keep their attention; None: the last of each many + 1.
    """

    def mixer(own: Attention, index: int) -> TokenMixer:
        is_whole = index in whole if whole is not None else many is not None and index % (many + 1) == many
        return own if is_whole else recurrent_mixer(kind, spec.hidden_size, own)

    return _each_attention(spec, mixer)


def linear_features(value: str) -> tuple[Recurrent, str]:
    """Return the features that a value of `linear` names before a colon, or the default ones, and the rest of it."""
    first, found, rest = value.partition(":")
    kind = next((name for name in LINEAR if name == first.strip()), None)
    return (kind, rest) if kind and found else (LINEAR[0], value)


def recurrent_mixer(kind: Recurrent, hidden_size: int, own: Attention) -> TokenMixer:
    """Return a recurrent mixer. Mamba has the proportions of its paper (2312.00752). The others have the heads of the
    attention, as `ridgeline convert` makes them: Mamba-2 (2405.21060, 2408.15237), MiniMax-01 (2501.08313), Gated
    DeltaNet (2412.06464), BASED (2402.18668), Hedgehog (2402.04347).
    """
    if kind == "mamba":
        return Mamba(inner_size=2 * hidden_size, state_size=16, conv_size=4, dt_rank=-(-hidden_size // 16))
    if kind == "mamba2":
        heads, size = own.num_heads, own.head_dim
        return Mamba2(
            num_heads=heads, head_dim=size, state_size=size, num_groups=heads, conv_size=4, norm=RMSNorm()
        )  # fmt: skip
    if kind == "lightning":
        return LightningAttention(own.num_heads, own.head_dim, RMSNorm())
    if kind == "taylor":
        return TaylorAttention(own.num_heads, own.head_dim, min(FEATURES, own.head_dim))
    if kind == "hedgehog":
        return TaylorAttention(own.num_heads, own.head_dim, own.head_dim, "hedgehog")
    return GatedDelta(own.num_heads, own.num_heads, own.head_dim, own.head_dim, 4, RMSNorm())


def pruned(spec: ModelSpec, part: str, share: float) -> ModelSpec:
    """Return the model without a share of its layers, its heads, or the intermediate size of its MLPs and experts
    (2407.14679).

    If each query head has its own KV head, both are removed; grouped KV heads stay. Layers are removed from the middle:
    the first and the last layers change the residual stream most.
    """
    if part == "layers":
        keep = max(1, round(len(spec.layers) * (1 - share)))
        first, count = -(-keep // 2), len(spec.layers)
        return with_layers(spec, [*range(first), *range(count - (keep - first), count)])
    if part == "heads":
        return _each_attention(spec, lambda own, _: with_heads(own, _fewer_heads(own, share)))
    layers = spec.layers
    for name in ("mlp", "shared"):
        layers = tuple(_fewer(layer, name, share) for layer in layers)
    return _changed(spec, replace(spec, layers=layers), "MLPs")


def with_layers(spec: ModelSpec, kept: Sequence[int]) -> ModelSpec:
    """Return the model with these layers, given by their indices in order. Raises RequestError where layers share keys
    and values.
    """
    if any(spec.state_layer(i) != i for i in range(len(spec.layers))):
        raise RequestError("layers that share keys and values cannot be pruned here; prune mlp or heads")
    if any(spec.is_beside(i) for i in range(len(spec.layers))):
        raise RequestError("layers whose mixers run in parallel cannot be pruned; prune mlp or heads")
    return replace(spec, layers=tuple(spec.layers[i] for i in kept))


def with_width(spec: ModelSpec, width: int) -> ModelSpec:
    """Return the model with another hidden size, and every other size as it is."""
    try:
        return replace(spec, hidden_size=width)
    except ValueError as e:
        raise RequestError(str(e)) from None


def _fewer_heads(own: Attention, share: float) -> int:
    if own.query_group == 1:
        return _rounded(own.num_heads, share)
    return own.num_kv_heads * _rounded(own.query_group, share)


def _fewer(layer: AnyLayer, part: Part, share: float) -> AnyLayer:
    size = size_of(layer, part)
    return with_size(layer, part, _rounded(size, share)) if size else layer


def _rounded(size: int, share: float) -> int:
    return max(1, round(size * (1 - share)))


def _each_attention(spec: ModelSpec, change: Callable[[Attention, int], TokenMixer]) -> ModelSpec:
    """Apply `change` to every attention layer with KV heads. `change` gets the mixer and its index among these layers.

    Raises RequestError if there is no such layer, or if a layer cannot be changed.
    """
    try:
        return replace(spec, layers=tuple(_changed_layers(spec, change)))
    except RequestError:
        raise
    except ValueError as e:
        raise RequestError(str(e)) from None


def _changed_layers(spec: ModelSpec, change: Callable[[Attention, int], TokenMixer]) -> list[AnyLayer]:
    layers, index = list(spec.layers), 0
    for i, layer in enumerate(layers):
        if layer.mixer and (own := spec.attention(i)):
            layers[i] = replace(layer, mixer=layer.mixer.replaced_by(change(own, index)))
            index += 1
    if not index:
        raise RequestError(f"{spec.family} has no attention layer with KV heads: the model has {mixers_of(spec)}")
    return layers


def _changed(before: ModelSpec, after: ModelSpec, what: str) -> ModelSpec:
    if before == after:
        raise RequestError(f"{before.family} has no {what}")
    return after
