"""Gemma 4: wide heads in global layers, keys as values, layers that share keys, per-layer embeddings, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, rms_norm
from ridgeline.archs.gemma import NAMES
from ridgeline.archs.names import ExpertPart, Names, Tensor
from ridgeline.archs.rope import FULL, SLIDING, read_ropes_of_layers
from ridgeline.spec import (
    Attention,
    ChannelMixer,
    EmbeddingBranch,
    GatedMLP,
    Layer,
    LayerEmbeddings,
    ModelSpec,
    MoE,
    PairedMLP,
    RMSNorm,
    Rope,
    SharedAttention,
    TokenMixer,
)

_ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kind of each layer, the heads of each kind, and their rotations."""

    layers: list[str]
    heads: Mapping[str, Heads]
    ropes: Mapping[str, Rope]

    @classmethod
    def read(cls, c: Config, *, keys_are_values: bool) -> Kinds:
        """Read the fields. keys_are_values: whether global layers may have another number of KV heads."""
        layers = _layer_kinds(c)
        heads = {kind: _heads_of(c, layers, kind, keys_are_values) for kind in dict.fromkeys(layers)}
        return cls(layers, heads, read_ropes_of_layers(c, {kind: h.head_dim for kind, h in heads.items()}, _ROPES))

    def source(self, index: int, num_own: int) -> int | None:
        """Return the layer whose keys and values layer `index` reads; None for its own.

        num_own: layers that have their own. The others read those of the last of them that is of the same kind.
        """
        if index < num_own:
            return None
        return max((i for i in range(num_own) if self.layers[i] == self.layers[index]), default=index)


def _layer_kinds(c: Config) -> list[str]:
    """Return the kind of each layer: every sixth one is global by default, and the last one always is."""
    count = c.get_layer_count()
    kinds = c.get_choices("layer_types", count, {FULL, SLIDING})
    kinds = kinds or [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    return [*kinds[:-1], FULL]


def _heads_of(c: Config, layers: list[str], kind: str, keys_are_values: bool) -> Heads:
    """Return the heads of all layers of one kind: from `per_layer_config`, or from the fields of global layers."""
    common = Heads.read(c, num_kv_heads=4, head_dim_default=256, null_kv=False)
    dim, kv_heads = c.get_size("global_head_dim", 512), c.get_size("num_global_key_value_heads", None, None)
    own = _overrides(c, len(layers))
    if own is None:
        if kind == SLIDING:
            return common
        found = {(dim, kv_heads if kv_heads and keys_are_values else common.num_kv_heads)}
    else:
        found = {own.get(i, (common.head_dim, common.num_kv_heads)) for i, other in enumerate(layers) if other == kind}
    if len(found) > 1:
        raise c.error("per_layer_config", f"gives layers of kind {kind} different heads, which is not supported")
    ((dim, kv),) = found
    c.divide("num_attention_heads", common.num_heads, "num_key_value_heads", kv)
    return Heads(common.num_heads, kv, dim)


def _overrides(c: Config, count: int) -> dict[int, tuple[int, int]] | None:
    """Return the size of a head and the number of KV heads of layers that `per_layer_config` names; None without it."""
    if (each := c.sub("per_layer_config")) is None:
        return None
    common, found = Heads.read(c, num_kv_heads=4, head_dim_default=256, null_kv=False), {}
    for name in each.fields():
        own = each.sub(name)
        if not name.isdecimal() or int(name) >= count or own is None:
            raise each.error(name, f"is not one of the {count} layers with fields of its own")
        found[int(name)] = (
            own.get_size("head_dim", common.head_dim), own.get_size("num_key_value_heads", common.num_kv_heads)
        )  # fmt: skip
        own.finish(())
    return found


def gemma4(c: Config) -> ModelSpec:
    """Gemma 4, from E2B with per-layer embeddings to 31B, and 26B-A4B with experts."""
    c.expect("expert_intermediate_size")
    norm = rms_norm(c)
    return _model(c, norm, _mlps(c, norm), *_embeddings(c, norm))


def gemma4_unified(c: Config) -> ModelSpec:
    """Gemma 4 12B, which needs no encoders of images and sound: neither per-layer embeddings nor experts."""
    c.assume({"sliding_window": 1024})
    return _model(c, rms_norm(c), _dense(c), None, None)


def _model(
    c: Config, norm: RMSNorm, mlps: tuple[ChannelMixer, ChannelMixer], branch: EmbeddingBranch | None,
    embeddings: LayerEmbeddings | None,
) -> ModelSpec:  # fmt: skip
    """Return the model. mlps: two, as `_dense` returns them."""
    c.expect("use_bidirectional_attention", "vision")  # images see themselves whole; a text does not
    shared = c.get_bool("attention_k_eq_v", False)
    kinds = Kinds.read(c, keys_are_values=shared)
    count, num_shared = len(kinds.layers), c.get_int("num_kv_shared_layers", 0)
    if not 0 <= num_shared < count:
        raise c.error("num_kv_shared_layers", f"is {num_shared}; it must be from 0 to {count - 1}, fewer than layers")
    sources = [kinds.source(i, count - num_shared) for i in range(count)]
    mixers = mixers_of(c, kinds, norm, shared)
    layers = tuple(
        Layer(
            mixers[kind] if source is None else _shared(c, i, source, mixers[kind]), mlps[source is not None],
            norm, norm, embedded=branch, out_scale=True,
        )
        for i, (kind, source) in enumerate(zip(kinds.layers, sources, strict=True))
    )  # fmt: skip
    return decoder(
        c, layers, norm, tied=True, max_len=c.get_size("max_position_embeddings"),
        embedding_scale=c.get_size("hidden_size") ** 0.5,
        logit_softcap=c.get_positive("final_logit_softcapping", None, None), layer_embeddings=embeddings,
    )  # fmt: skip


def _shared(c: Config, index: int, source: int, own: Attention) -> TokenMixer:
    if source == index:
        raise c.error("num_kv_shared_layers", f"leaves no keys and values that layer {index} can share; lower it")
    return SharedAttention(source, own)


def mixers_of(c: Config, kinds: Kinds, norm: RMSNorm, shared: bool) -> dict[str, Attention]:
    """Return the attention of each kind of layer. shared: whether the values of global layers are their keys."""
    bias, window = c.get_bool("attention_bias", False), c.get_size("sliding_window", 512)
    return {
        kind: attention(
            heads, kinds.ropes[kind], qkv_bias=bias, out_bias=bias, scale=1.0, qk_norm=norm, value_eps=norm.eps,
            window=window if kind == SLIDING else None, values_are_keys=shared and kind == FULL,
        )
        for kind, heads in kinds.heads.items()
    }  # fmt: skip


def _dense(c: Config) -> tuple[GatedMLP, GatedMLP]:
    """Return the MLP of layers with keys and values of their own, and that of layers that share them."""
    size, activation = c.get_size("intermediate_size"), c.get_activation("hidden_activation", "gelu_pytorch_tanh")
    double = 2 if c.get_bool("use_double_wide_mlp", False) else 1
    return GatedMLP(size, activation), GatedMLP(size * double, activation)


def _mlps(c: Config, norm: RMSNorm) -> tuple[ChannelMixer, ChannelMixer]:
    """Return the MLPs of `_dense`, beside experts if the model has them."""
    dense, activation = _dense(c), c.get_activation("hidden_activation", "gelu_pytorch_tanh")
    names = "num_experts", "top_k_experts", "moe_intermediate_size"
    if not c.get_bool("enable_moe_block", False):
        for name in names:
            c.get_int(name, None, None)
        return dense
    experts, chosen, inner = (c.get_size(name) for name in names)
    moe = MoE(experts, chosen, inner, activation, expert_scale=True)
    return PairedMLP(dense[0], moe, norm), PairedMLP(dense[1], moe, norm)


def _embeddings(c: Config, norm: RMSNorm) -> tuple[EmbeddingBranch | None, LayerEmbeddings | None]:
    """Return the branch of each layer that reads embeddings of its own, and those embeddings; None without them."""
    size, rows = c.get_int("hidden_size_per_layer_input", 256), c.get_size("vocab_size_per_layer_input", 262_144)
    if not size:
        return None, None
    if size < 0:
        raise c.error("hidden_size_per_layer_input", f"is {size}; it must not be negative")
    if rows < c.get_size("vocab_size"):
        raise c.error("vocab_size_per_layer_input", f"is {rows}, fewer than vocab_size: some tokens would have no row")
    activation = c.get_activation("hidden_activation", "gelu_pytorch_tanh")
    return EmbeddingBranch(size, activation), LayerEmbeddings(size, rows, norm)


_GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
_OWN = {
    "embedded.gate": "per_layer_input_gate",
    "embedded.out": "per_layer_projection",
    "embedded_post_norm": "post_per_layer_input_norm",
    "scale": Tensor("layer_scalar"),
    **{f"mlp.dense.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    "mlp.dense_post_norm": "post_feedforward_layernorm_1",
    "mlp.router": "router.proj",
    "mlp.router_norm": Tensor("router.scale"),
    "mlp.expert_scale": Tensor("router.per_expert_scale"),
    **{name: ExpertPart("experts.gate_up_proj", _GATE_UP) for name in _GATE_UP},
    "mlp.experts.down": ExpertPart("experts.down_proj", ("mlp.experts.down",)),
    "mlp.experts_norm": "pre_feedforward_layernorm_2",
    "mlp.experts_post_norm": "post_feedforward_layernorm_2",
}


def names_under(prefix: str) -> Names:
    """Return the names of a checkpoint whose language model is under `prefix`."""
    root = {
        "embed": "embed_tokens", "norm": "norm", "layer_embed": "embed_tokens_per_layer",
        "layer_embed_project": "per_layer_model_projection", "layer_embed_norm": "per_layer_projection_norm",
    }  # fmt: skip
    # Layers that share keys and values have matrices for their own in some files; nothing reads them.
    unread = r"\.layers\.{shared}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."
    return NAMES.with_parts(
        root={**{ours: f"{prefix}.{theirs}" for ours, theirs in root.items()}, "head": "lm_head"},
        layer=f"{prefix}.layers.{{i}}.", parts=_OWN,
        ignore=(*NAMES.ignore, unread, r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\."),
    )  # fmt: skip


INSIDE = names_under("model.language_model")
_NOTE = "only the language model of this checkpoint is loaded, without the encoders of images and sound"
# Ids of tokens that stand for images and sound, and settings of their encoders.
_WHOLE = (
    "vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id", "boi_token_id",
    "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image",
)  # fmt: skip
FAMILIES = (
    Family("gemma4_text", gemma4, names_under("model")),
    Family("gemma4", gemma4, INSIDE, _WHOLE, within="text_config", note=_NOTE),
    Family("gemma4_unified_text", gemma4_unified, names_under("model")),
    Family("gemma4_unified", gemma4_unified, INSIDE, _WHOLE, within="text_config", note=_NOTE),
)
