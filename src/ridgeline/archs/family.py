"""Code that all families share: reading the common fields, and the registry entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ridgeline.archs.config import REQUIRED, Config
from ridgeline.archs.names import LLAMA, Names
from ridgeline.archs.rope import FULL, SLIDING, stretched_context
from ridgeline.spec import (
    AnyLayer,
    Attention,
    Diffusion,
    ExpertGroups,
    GatedMLP,
    Layer,
    LayerEmbeddings,
    ModelSpec,
    Norm,
    RMSNorm,
    Rope,
)

# The note of a checkpoint with images whose language model is loaded.
WITHOUT_SIGHT = "only the language model of this checkpoint is loaded, without the encoder of images"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its config becomes a ModelSpec, and the names of its weights in a checkpoint.

    harmless: fields of its configs, besides the common ones, that change nothing in a forward pass. packings: values of
    `quant_method` that the loader can unpack. within: the config field that describes the language model, if that is
    one of several parts. note: message about the parts that are then left out. around: adds to the language model what
    the fields around its own say.
    """

    model_type: str
    spec: Callable[[Config], ModelSpec]
    names: Names = LLAMA
    harmless: tuple[str, ...] = ()
    packings: tuple[str, ...] = ()
    within: str | None = None
    note: str = ""
    around: Callable[[Config, ModelSpec], ModelSpec] | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def read(
        cls, c: Config, *, num_kv_heads: int | None = None, head_dim_default: int | None = None,
        null_kv: bool = True, null_head_dim: bool = False,
    ) -> Heads:  # fmt: skip
        """Read the sizes as most configs write them.

        num_kv_heads, head_dim_default: the class's defaults if `num_key_value_heads` or `head_dim` is absent; None
        means the number of query heads, and hidden_size / num_attention_heads. A null means the same if the class
        accepts one (null_kv, null_head_dim).
        """
        heads = c.get_size("num_attention_heads")
        head_dim = c.get_size("head_dim", head_dim_default, None if null_head_dim else REQUIRED)
        if head_dim is None:
            head_dim, rest = divmod(c.get_size("hidden_size"), heads)
            if rest:
                raise c.error(
                    "hidden_size", f"is not a multiple of num_attention_heads {heads}, and there is no head_dim"
                )
        kv_heads = c.get_size("num_key_value_heads", num_kv_heads or heads, heads if null_kv else REQUIRED)
        c.divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
        return cls(heads, kv_heads, head_dim)


def whole_heads(c: Config, heads: Heads) -> Heads:
    """Return the heads if they are as wide as the stream together. Raises ConfigError otherwise."""
    if heads.num_heads * heads.head_dim != (width := c.get_size("hidden_size")):
        raise c.error(
            "head_dim", f"is {heads.head_dim}, and {heads.num_heads} heads must have {width} numbers together"
        )
    return heads


def attention(heads: Heads, rope: Rope | None, **fields: object) -> Attention:
    """Return attention with the usual scale, 1/sqrt(head_dim), unless `fields` overrides it."""
    sizes = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
    return Attention(**{**sizes, "scale": heads.head_dim**-0.5, "rope": rope, **fields})


def rms_norm(c: Config, default: float = 1e-6, offset: float = 0.0) -> RMSNorm:
    return RMSNorm(c.get_eps("rms_norm_eps", default), offset)


def gated_mlp(c: Config, activation: str = "hidden_act", *, bias: bool = False) -> GatedMLP:
    return GatedMLP(c.get_size("intermediate_size"), c.get_activation(activation, "silu"), bias)


def pre_norm_layers(c: Config, mixer: Attention, norm: Norm, mlp: GatedMLP | None = None) -> tuple[Layer, ...]:
    """Return equal layers in Llama's arrangement."""
    return (Layer(mixer, mlp or gated_mlp(c), norm),) * c.get_layer_count()


def expert_groups(
    c: Config, experts: tuple[str, int], count: tuple[str, int], chosen: tuple[str, int],
    score: Literal["best", "best_two"],
) -> ExpertGroups | None:  # fmt: skip
    """Return the groups of experts, given as names and values of three fields; None for one group, which limits
    nothing.
    """
    c.divide(*experts, *count)
    if not 0 < chosen[1] <= count[1]:
        raise c.error(chosen[0], f"is {chosen[1]}; it must be at least 1 and at most {count[0]} {count[1]}")
    return ExpertGroups(count[1], chosen[1], score) if count[1] > 1 else None


def layer_windows(c: Config, default: Callable[[int], bool], window: int | None) -> list[int | None]:
    """Return the window of every layer (None: full attention), from `layer_types`; if that is absent or null,
    `default(i)` says whether layer i is local. window: the window of local layers. Raises ConfigError if a layer is
    local and there is no window.
    """
    count = c.get_layer_count()
    kinds = c.get_choices("layer_types", count, {FULL, SLIDING})
    local = [default(i) for i in range(count)] if kinds is None else [kind == SLIDING for kind in kinds]
    if any(local) and window is None:
        raise c.error("sliding_window", "is null or switched off, but some layers are sliding; give a window")
    return [window if is_local else None for is_local in local]


def decoder(
    c: Config, layers: tuple[AnyLayer, ...], norm: Norm, *, tied: bool = False, max_len: int | None = None,
    embedding_scale: float = 1.0, logit_scale: float = 1.0, logit_softcap: float | None = None,
    diffusion: Diffusion | None = None, layer_embeddings: LayerEmbeddings | None = None, head_bias: bool = False,
) -> ModelSpec:  # fmt: skip
    """Return the model around the layers. tied: the family's default for `tie_word_embeddings`."""
    rope = next((layer.mixer.rope for layer in layers if layer.mixer and layer.mixer.rope), None)
    if max_len is None:
        max_len = stretched_context(c, rope) if rope else c.get_size("max_position_embeddings")
    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_size("vocab_size"),
        hidden_size=c.get_size("hidden_size"),
        max_position_embeddings=max_len,
        layers=layers,
        norm=norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", tied),
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        diffusion=diffusion,
        layer_embeddings=layer_embeddings,
        head_bias=head_bias,
    )
