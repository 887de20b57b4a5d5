"""What every family shares: reading the common fields, and the registry entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ridgeline.archs.config import REQUIRED, Config
from ridgeline.archs.names import LLAMA, Names
from ridgeline.archs.rope import FULL, SLIDING, stretched_context
from ridgeline.spec import AnyLayer, Attention, ExpertGroups, GatedMLP, Layer, ModelSpec, Norm, RMSNorm, Rope


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
    def read(
        cls, c: Config, *, num_kv_heads: int | None = None, head_dim_default: int | None = None,
        null_kv: bool = True, null_head_dim: bool = False,
    ) -> Heads:  # fmt: skip
        """As most configs write them. num_kv_heads, head_dim_default: what the family's class means by leaving
        `num_key_value_heads` or `head_dim` out; None is as many as queries, and the width over the heads, which is what
        a null means where the class takes one (null_kv, null_head_dim).
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


def attention(heads: Heads, rope: Rope | None, **fields: object) -> Attention:
    """Attention with the usual scale, 1/sqrt(head_dim), unless `fields` says otherwise."""
    sizes = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
    return Attention(**{**sizes, "scale": heads.head_dim**-0.5, "rope": rope, **fields})


def rms_norm(c: Config, default: float = 1e-6, offset: float = 0.0) -> RMSNorm:
    return RMSNorm(c.get_eps("rms_norm_eps", default), offset)


def gated_mlp(c: Config, activation: str = "hidden_act", *, bias: bool = False) -> GatedMLP:
    return GatedMLP(c.get_size("intermediate_size"), c.get_activation(activation, "silu"), bias)


def pre_norm_layers(c: Config, mixer: Attention, norm: Norm, mlp: GatedMLP | None = None) -> tuple[Layer, ...]:
    """The Llama arrangement, all layers equal."""
    return (Layer(mixer, mlp or gated_mlp(c), norm),) * c.get_layer_count()


def expert_groups(
    c: Config, experts: tuple[str, int], count: tuple[str, int], chosen: tuple[str, int],
    score: Literal["best", "best_two"],
) -> ExpertGroups | None:  # fmt: skip
    """Groups of experts, from the names and the values of three fields; None for one group, which limits nothing."""
    c.divide(*experts, *count)
    if not 0 < chosen[1] <= count[1]:
        raise c.error(chosen[0], f"is {chosen[1]}; it must be at least 1 and at most {count[0]} {count[1]}")
    return ExpertGroups(count[1], chosen[1], score) if count[1] > 1 else None


def layer_windows(c: Config, default: Callable[[int], bool], window: int | None) -> list[int | None]:
    """The window of every layer (None: full), from `layer_types` or, where that is absent or null, from `default(i)`:
    is it local? window: of the local layers. Raises ConfigError if there are some and there is none."""
    count = c.get_layer_count()
    kinds = c.get_choices("layer_types", count, {FULL, SLIDING})
    local = [default(i) for i in range(count)] if kinds is None else [kind == SLIDING for kind in kinds]
    if any(local) and window is None:
        raise c.error("sliding_window", "is null or switched off, but some layers are sliding")
    return [window if is_local else None for is_local in local]


def decoder(
    c: Config, layers: tuple[AnyLayer, ...], norm: Norm, *, tied: bool = False, max_len: int | None = None,
    embedding_scale: float = 1.0, logit_scale: float = 1.0, logit_softcap: float | None = None,
) -> ModelSpec:  # fmt: skip
    """The model around the layers; `tied` is the family's default for `tie_word_embeddings`."""
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
    )
