"""What every family shares: reading the common fields, and the registry entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.archs.config import Config
from ridgeline.archs.names import LLAMA, Names
from ridgeline.archs.rope import FULL, SLIDING, stretched_context
from ridgeline.spec import AnyLayer, Attention, GatedMLP, Layer, ModelSpec, Norm, RMSNorm, Rope


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: config -> ModelSpec, and where its weights lie in a checkpoint.

    harmless: fields of its configs, besides the common ones, that change nothing in a forward pass. packings: ways
    (`quant_method`) to pack matrices in its checkpoints that the loader unpacks. within: the field of its configs that
    describes the language model, where that is one part of several; note: what is left out then.
    """

    model_type: str
    spec: Callable[[Config], ModelSpec]
    names: Names = LLAMA
    harmless: tuple[str, ...] = ()
    packings: tuple[str, ...] = ()
    within: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, c: Config, *, num_kv_heads: int | None = None, head_dim_default: int | None = None) -> Heads:
        """As most configs write them. num_kv_heads, head_dim_default: what the family's class means by leaving
        `num_key_value_heads` or `head_dim` out; None is as many as queries, and the width over the heads. A null
        means the latter everywhere.
        """
        heads = c.get_int("num_attention_heads")
        head_dim = c.get_int("head_dim", None)
        if head_dim is None and not c.present("head_dim"):
            head_dim = head_dim_default
        if head_dim is None:
            head_dim, rest = divmod(c.get_int("hidden_size"), heads)
            if rest:
                raise c.error(
                    "hidden_size",
                    f"is not a multiple of num_attention_heads {heads}, and head_dim is missing",
                )
        absent = not c.present("num_key_value_heads")
        kv_default = num_kv_heads if absent and num_kv_heads is not None else heads
        return cls(heads, c.get_int("num_key_value_heads", kv_default), head_dim)


def attention(heads: Heads, rope: Rope | None, **fields: object) -> Attention:
    """Attention with the usual scale, 1/sqrt(head_dim), unless `fields` says otherwise."""
    sizes = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
    return Attention(**{**sizes, "scale": heads.head_dim**-0.5, "rope": rope, **fields})


def rms_norm(c: Config, default: float = 1e-6, offset: float = 0.0) -> RMSNorm:
    return RMSNorm(c.get_float("rms_norm_eps", default), offset)


def gated_mlp(c: Config, activation: str = "hidden_act", *, bias: bool = False) -> GatedMLP:
    return GatedMLP(c.get_int("intermediate_size"), c.get_activation(activation, "silu"), bias)


def pre_norm_layers(c: Config, mixer: Attention, norm: Norm, mlp: GatedMLP | None = None) -> tuple[Layer, ...]:
    """The Llama arrangement, all layers equal."""
    return (Layer(mixer, mlp or gated_mlp(c), norm),) * c.get_layer_count()


def layer_windows(c: Config, default: Callable[[int], bool], window_default: int | None = None) -> list[int | None]:
    """The window of every layer (None: full), from `layer_types` or, where absent, from `default(i)`: is it local?"""
    window = c.get_int("sliding_window", window_default)
    count = c.get_layer_count()
    kinds = c.get_list("layer_types", None)
    if kinds is None:
        local = [default(i) for i in range(count)]
    else:
        if len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
            raise c.error("layer_types", f"must hold {count} entries, each {FULL!r} or {SLIDING!r}")
        local = [kind == SLIDING for kind in kinds]
    if any(local) and window is None:
        raise c.error("sliding_window", "is missing, but some layers are sliding")
    return [window if is_local else None for is_local in local]


def decoder(
    c: Config, layers: tuple[AnyLayer, ...], norm: Norm, *, tied: bool = False, max_len: int | None = None,
    embedding_scale: float = 1.0, logit_scale: float = 1.0, logit_softcap: float | None = None,
) -> ModelSpec:  # fmt: skip
    """The model around the layers; `tied` is the family's default for `tie_word_embeddings`."""
    rope = next((layer.mixer.rope for layer in layers if layer.mixer and layer.mixer.rope), None)
    if max_len is None:
        max_len = stretched_context(c, rope) if rope else c.get_int("max_position_embeddings")
    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_int("vocab_size"),
        hidden_size=c.get_int("hidden_size"),
        max_position_embeddings=max_len,
        layers=layers,
        norm=norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", tied),
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
