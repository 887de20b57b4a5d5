"""Rotary fields of config.json, in both spellings.

transformers 4 writes `rope_theta`, `rope_scaling` and `partial_rotary_factor` at the top level; transformers 5
writes one object, `rope_parameters`, or one per kind of layer. Both must give the same Rope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.errors import ConfigError
from ridgeline.spec import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

# Kinds of layers, as `layer_types` spells them.
FULL, SLIDING = "full_attention", "sliding_attention"


def read_rope(
    c: Config, head_dim: int, *, theta: float = 10_000.0, partial: float = 1.0, interleaved: bool = False,
    harmless: Collection[str] = (),
) -> Rope:  # fmt: skip
    """The one rotation of a model, whichever spelling its config uses.

    theta, partial: the family's defaults for `rope_theta` and `partial_rotary_factor`. harmless: fields of it that
    change nothing.
    """
    theta = c.get_float("rope_theta", theta)
    partial = c.get_float("partial_rotary_factor", partial)
    if c.has("rope_parameters") and c.has("rope_scaling"):
        raise ConfigError("config.json has both rope_parameters and rope_scaling; keep the one that is meant")
    old = c.sub("rope_scaling")
    return _rope(c, c.sub("rope_parameters") or old, head_dim, theta, partial, interleaved, harmless)


def read_ropes_by_kind(
    c: Config, head_dim: int, *, full_theta: float, sliding_theta: float, sliding_theta_field: str | None
) -> dict[str, Rope]:
    """The rotations of full and of sliding layers (Gemma 3, OLMo 3).

    In the old spelling `rope_theta` and `rope_scaling` speak of the full layers; the sliding ones are never
    scaled and take their base from `sliding_theta_field`, or from the family's default.
    """
    sub = c.sub("rope_parameters")
    if sub is None:
        full = _rope(c, c.sub("rope_scaling"), head_dim, c.get_float("rope_theta", full_theta), 1.0, False)
        local = c.get_float(sliding_theta_field, sliding_theta) if sliding_theta_field else sliding_theta
        return {FULL: full, SLIDING: Rope(head_dim, local)}
    ropes = {
        kind: _rope(c, sub.sub(kind), head_dim, default, 1.0, False)
        for kind, default in ((FULL, full_theta), (SLIDING, sliding_theta))
    }
    sub.finish(())
    return ropes


def stretched_context(c: Config, rope: Rope) -> int:
    """The longest context in tokens, where `max_position_embeddings` holds the length before stretching.

    True of linear, dynamic NTK and yarn scaling as Llama and Qwen configs use them; Llama 3 and LongRoPE configs
    already hold the final length.
    """
    length = c.get_int("max_position_embeddings")
    match rope.scaling:
        case LinearScaling(factor):
            return int(length * factor)
        case DynamicNTKScaling(factor, original) | YarnScaling(factor, original):
            return max(length, int(original * factor))
    return length


def _rope(
    c: Config, r: Config | None, head_dim: int, theta: float, partial: float, interleaved: bool,
    harmless: Collection[str] = (),
) -> Rope:  # fmt: skip
    scaling: RopeScaling | None = None
    if r is not None:
        theta = r.get_float("rope_theta", theta)
        partial = r.get_float("partial_rotary_factor", partial)
        kind = r.get_str("rope_type", None) or r.get_str("type", "default")
        r.raw("type")  # old files carry both spellings
        if kind not in _SCALINGS:
            raise r.error("rope_type", f"is {kind!r}; known are {', '.join(sorted(_SCALINGS))}")
        scaling = _SCALINGS[kind](c, r)
        r.finish(harmless)
    return Rope(int(head_dim * partial), theta, interleaved, scaling)


def _original(c: Config, r: Config) -> int:
    """The trained length: Phi-3 keeps it at the top level, and there it has priority."""
    inner = r.get_int("original_max_position_embeddings", None)
    outer = c.get_int("original_max_position_embeddings", None)
    return outer or inner or c.get_int("max_position_embeddings")


def _linear(c: Config, r: Config) -> RopeScaling:
    return LinearScaling(r.get_float("factor"))


def _dynamic(c: Config, r: Config) -> RopeScaling:
    r.raw("original_max_position_embeddings")  # written by some exporters, read by no implementation
    return DynamicNTKScaling(r.get_float("factor"), c.get_int("max_position_embeddings"))


def _llama3(c: Config, r: Config) -> RopeScaling:
    factors = (r.get_float("factor"), r.get_float("low_freq_factor"), r.get_float("high_freq_factor"))
    return Llama3Scaling(*factors, _original(c, r))


def yarn_temperature(factor: float, mscale: float) -> float:
    """By what scores grow with the length, as a factor on queries and on keys (arXiv:2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(c: Config, r: Config) -> RopeScaling:
    original = _original(c, r)
    factor = r.get_float("factor", None) or c.get_int("max_position_embeddings") / original
    mscale, mscale_all = r.get_float("mscale", None), r.get_float("mscale_all_dim", None)
    default = yarn_temperature(factor, 1.0)
    if mscale and mscale_all:
        default = yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all)
    return YarnScaling(
        factor, original,
        attention_factor=r.get_float("attention_factor", default),
        beta_fast=r.get_float("beta_fast", 32.0),
        beta_slow=r.get_float("beta_slow", 1.0),
        truncate=r.get_bool("truncate", True),
    )  # fmt: skip


def _longrope(c: Config, r: Config) -> RopeScaling:
    original = _original(c, r)
    factor = r.get_float("factor", None) or c.get_int("max_position_embeddings") / original
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        _floats(r, "short_factor"), _floats(r, "long_factor"), original, r.get_float("attention_factor", default)
    )


def _floats(r: Config, name: str) -> tuple[float, ...]:
    values: list[Any] = r.get_list(name)
    if not all(type(v) in (int, float) for v in values):
        raise r.error(name, "must be a list of numbers")
    return tuple(float(v) for v in values)


_SCALINGS: dict[str, Callable[[Config, Config], RopeScaling | None]] = {
    "default": lambda c, r: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # what early Phi-3 configs call it
}
