"""Read the RoPE fields of config.json in both spellings, as transformers does.

transformers 4 writes `rope_theta`, `rope_scaling` and `partial_rotary_factor` at the top level; transformers 5 writes
one object, `rope_parameters`, or one per kind of layer. Both give the same Rope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ridgeline.archs.config import REQUIRED, Config
from ridgeline.spec import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

# Kinds of layers, as `layer_types` spells them.
FULL, SLIDING = "full_attention", "sliding_attention"
MROPE = ("mrope_section", "mrope_interleaved")  # for images; a text's three positions are equal, so they change nothing
PARTIAL: Final = "partial_rotary_factor"
MAX_GROWN: Final = 1 << 18  # most tokens with dynamic NTK, which needs separate angles for each length


@dataclass(frozen=True)
class Rotation:
    """The RoPE defaults of a family's class in transformers.

    theta: the base. partial: default share of a head that is rotated; None: whole heads are rotated, and the field is
    ignored unless there is a scaling. null_partial: meaning of a null at the top level; None: a null is an error.
    theta_field, partial_field: names at the top level; None: there is none. kinds: supported scalings by name. length:
    trained length, if the class has a default for it. parameters: `rope_parameters` if they are absent. harmless:
    fields that change nothing.
    """

    theta: float = 10_000.0
    partial: float | None = None
    null_partial: float | None = None
    theta_field: str | None = "rope_theta"
    partial_field: str | None = PARTIAL
    interleaved: bool = False
    kinds: Mapping[str, Callable[[_Fields], RopeScaling | None]] | None = None
    length: int | None = None
    parameters: Mapping[str, Any] | None = None
    harmless: Collection[str] = ()


@dataclass(frozen=True)
class _Fields:
    """The fields of a scaling. c: the whole config. r: the object that describes the rotation.

    outer: the object that contains one rotation per kind of layer; None if r is the only one.
    """

    c: Config
    r: Config
    outer: Config | None
    length: int | None

    @property
    def original(self) -> int:
        """Return the trained length. The top level has priority (Phi-3) unless each kind of layer has its rotation."""
        name = "original_max_position_embeddings"
        inner: int | None = self.r.get_size(name, None) if not self.r.is_null(name) else None
        if self.outer is None and (self.length is not None or self.c.present(name)):
            return self.c.get_size(name, REQUIRED if self.length is None else self.length)
        if self.r.is_null(name):
            raise self.r.error(name, "is null, which has no meaning here")
        return self.c.get_size("max_position_embeddings") if inner is None else inner

    def stretch(self, original: int) -> float:
        """Return `factor`; a null means the ratio of the longest to the trained length."""
        ratio = self.c.get_size("max_position_embeddings") / original
        return self.r.get_positive("factor", ratio, ratio)


def read_rope(c: Config, head_dim: int, rotation: Rotation = Rotation()) -> Rope:
    """Return the only rotation of a model, in either spelling; `rope_scaling` has priority over `rope_parameters`."""
    given, scaling = c.sub("rope_parameters"), c.sub("rope_scaling")
    if given is None and rotation.parameters is not None:
        given = c.inside("rope_parameters", rotation.parameters)
    r = scaling if scaling is not None and scaling.filled else given
    return _rope(c, r or c.inside("rope_parameters", {}), head_dim, rotation)


def read_ropes_by_kind(
    c: Config, head_dim: int, *, full_theta: float, sliding_theta: float, sliding_theta_field: str | None
) -> dict[str, Rope]:
    """Return the rotations of full and of sliding layers (Gemma 3, OLMo 3), as in transformers.

    Only the fields inside a kind's object in `rope_parameters` are used, plus `truncate` beside the kinds. In the old
    spelling `rope_theta` and `rope_scaling` describe the full layers; the sliding ones take their base from
    `sliding_theta_field` or from the family's default.
    """
    outer, old = c.sub("rope_parameters"), c.sub("rope_scaling")
    c.get_int("original_max_position_embeddings", None, None)  # not used: each kind of layer has its own
    fields = outer or c.inside("rope_parameters", {})
    given = {kind: fields.sub(kind) for kind in (FULL, SLIDING)}
    if old is not None:
        if outer is not None and given[FULL] is None:
            raise c.error("rope_scaling", f"is given, but rope_parameters has no {FULL} entry that it could change")
        given[FULL] = c.inside("rope_scaling", {"rope_type": "default", **fields.fields(FULL), **old.fields()})
    rotations = {FULL: Rotation(full_theta), SLIDING: Rotation(sliding_theta, theta_field=sliding_theta_field)}
    ropes = {
        kind: _rope(c, given[kind] or fields.inside(kind, {}), head_dim, rotation, fields)
        for kind, rotation in rotations.items()
    }
    fields.finish(_NAMES)
    return ropes


def read_ropes_of_layers(
    c: Config, head_dims: Mapping[str, int], defaults: Mapping[str, Mapping[str, Any]], *, whole: bool = False,
    harmless: Collection[str] = (), share: float | None = None,
) -> dict[str, Rope]:  # fmt: skip
    """Return the rotation of each kind of layer from `rope_parameters` alone, the new spelling (Gemma 4).

    head_dims: the size of a head by the kind of layer. defaults: `rope_parameters` if they are absent. whole: whether a
    share of a head is an error rather than ignored. harmless: fields, in a kind's object or beside the kinds, that
    change nothing. share: the default of the part of a head that rotates; None: see `whole`.
    """
    outer, ropes = c.sub("rope_parameters") or c.inside("rope_parameters", defaults), {}
    for kind, head_dim in head_dims.items():
        if (r := outer.sub(kind)) is None:
            raise outer.error(kind, "is missing, and layers are of this kind")
        r.get_positive("rope_theta")
        if r.raw("rope_type") in ("llama3", "yarn"):
            r.get_size("original_max_position_embeddings")
        kinds: Scalings = {**SCALINGS, "proportional": partial(_proportional, head_dim)}
        if whole and r.get_float(PARTIAL, 1.0) != 1.0:
            raise r.error(PARTIAL, f"is {r.raw(PARTIAL)}, but {c.model_type} rotates whole heads")
        rotation = Rotation(partial=share, theta_field=None, partial_field=None, kinds=kinds, harmless=harmless)
        ropes[kind] = _rope(c, r, head_dim, rotation, outer)
    outer.finish({FULL, SLIDING, *harmless})
    return ropes


def stretched_context(c: Config, rope: Rope) -> int:
    """Return the longest context in tokens, for configs whose `max_position_embeddings` is the length before scaling.

    This holds for linear, dynamic NTK and yarn scaling in Llama and Qwen configs; Llama 3 and LongRoPE configs already
    give the final length.
    """
    length = c.get_size("max_position_embeddings")
    match rope.scaling:
        case LinearScaling(factor):
            return max(1, int(length * factor))
        case DynamicNTKScaling(factor, original) | YarnScaling(factor, original):
            return max(length, int(original * factor))
    return length


def _rope(c: Config, r: Config, head_dim: int, rotation: Rotation, outer: Config | None = None) -> Rope:
    """Return the rotation that r describes, with the top level and the family's defaults for missing fields."""
    kinds = rotation.kinds or SCALINGS
    kind = r.get_str("rope_type") if r.present("rope_type") else r.get_str("type", "default")
    r.raw("type")  # old files contain both spellings
    if kind not in kinds:
        raise r.error("rope_type", f"is {kind!r:.100}; supported: {', '.join(sorted(kinds))}")
    scaling = kinds[kind](_Fields(c, r, outer, rotation.length))
    is_scaled = scaling is not None and not isinstance(scaling, ProportionalScaling)
    rope = _plain(c, r, head_dim, rotation, scaled=is_scaled)
    r.finish(rotation.harmless)
    if rope.odd and isinstance(scaling, YarnScaling):
        raise r.error(PARTIAL, f"rotates an odd number of the {head_dim} numbers of a head, which yarn cannot do")
    if rope.theta == 1.0 and isinstance(scaling, YarnScaling):
        raise r.error("rope_theta", "is 1, which yarn cannot scale")
    if rope.dim == 2 and isinstance(scaling, DynamicNTKScaling):
        raise c.error("head_dim", f"is {head_dim}, of which 2 numbers are rotated; dynamic scaling needs at least 4")
    return replace(rope, scaling=scaling)


def _plain(c: Config, r: Config, head_dim: int, rotation: Rotation, scaled: bool) -> Rope:
    """Return the base and the size of a rotation, without its scaling."""
    theta = rotation.theta
    if rotation.theta_field:
        theta = c.get_float(rotation.theta_field, theta, theta if r.present("rope_theta") else REQUIRED)
    theta = r.get_positive("rope_theta") if r.present("rope_theta") else theta
    if theta <= 0:
        raise c.error(str(rotation.theta_field), f"is {theta}; it must be positive")
    whole, null = rotation.partial is None, rotation.null_partial
    factor = 1.0 if rotation.partial is None else rotation.partial
    if rotation.partial_field:
        factor = c.get_float(rotation.partial_field, factor, 1.0 if whole else REQUIRED if null is None else null)
    factor = r.get_float(PARTIAL, factor)
    if whole and (not scaled or factor == 1.0):
        if head_dim % 2:
            raise c.error("head_dim", f"is {head_dim}; whole heads are rotated in pairs, so it must be even")
        return Rope(head_dim, theta, rotation.interleaved)
    if whole:
        raise r.error(PARTIAL, f"is {factor}, but {c.model_type} rotates whole heads")
    size = int(head_dim * factor)
    rotated = size + size % 2  # an odd size is rotated like the next even one, with the frequencies of the odd one
    if not 0 < rotated <= head_dim:
        raise r.error(PARTIAL, f"is {factor}, so {size} of {head_dim} numbers in a head would be rotated; change it")
    return Rope(rotated, theta, rotation.interleaved, odd=bool(size % 2))


def _linear(f: _Fields) -> RopeScaling:
    return LinearScaling(f.r.get_positive("factor"))


def _dynamic(f: _Fields) -> RopeScaling:
    f.r.raw("original_max_position_embeddings")  # some exporters write it, but no implementation reads it
    factor, original = f.r.get_positive("factor"), f.c.get_size("max_position_embeddings")
    if factor > 1 and factor * original > MAX_GROWN:
        raise f.r.error("factor", f"is {factor}, which extends {original} tokens beyond the limit of {MAX_GROWN}")
    return DynamicNTKScaling(factor, original)


def _llama3(f: _Fields) -> RopeScaling:
    factor, low, high = (f.r.get_positive(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return Llama3Scaling(factor, low, high, f.original)


def yarn_temperature(factor: float, mscale: float) -> float:
    """Return the factor on queries and keys that makes scores grow with the length (arXiv:2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(f: _Fields) -> RopeScaling:
    r, original = f.r, f.original
    if not r.present("factor"):
        raise r.error("factor", "is missing")
    factor = f.stretch(original)
    mscale, mscale_all = (r.get_float(name, None, None) for name in ("mscale", "mscale_all_dim"))
    default = yarn_temperature(factor, 1.0)
    if mscale and mscale_all:
        below = yarn_temperature(factor, mscale_all)
        if not below:
            raise r.error("mscale_all_dim", f"is {mscale_all}, which gives a temperature of zero")
        default = yarn_temperature(factor, mscale) / below
    fast, slow = (_rotations(r, name, default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    return YarnScaling(
        factor, original, attention_factor=r.get_float("attention_factor", default, default),
        beta_fast=fast, beta_slow=slow, truncate=_truncate(f),
    )  # fmt: skip


def _rotations(r: Config, name: str, default: float) -> float:
    """Return a number of full rotations; null and 0 mean the default."""
    value = r.get_float(name, default, default) or default
    if value < 0:
        raise r.error(name, f"is {value}; it must be positive")
    return value


def _truncate(f: _Fields) -> bool:
    """Return `truncate`; a null means false. With one rotation per kind of layer, the field beside the kinds counts."""
    if f.outer is None:
        return f.r.get_bool("truncate", True, null=False)
    f.r.get_bool("truncate", True, null=False)
    return f.outer.get_bool("truncate", True, null=False)


def _longrope(f: _Fields) -> RopeScaling:
    r, original = f.r, f.original
    factor = f.stretch(original)
    if original == 1 and factor > 1 and not r.fields().get("attention_factor"):
        raise r.error("original_max_position_embeddings", "is 1, from which no temperature can be computed")
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else 1.0
    return LongRopeScaling(
        _divisors(r, "short_factor"), _divisors(r, "long_factor"), original,
        r.get_float("attention_factor", default, default),
    )  # fmt: skip


def _longrope_of_phimoe(f: _Fields) -> RopeScaling:
    """Return Phi-3.5-MoE's scaling, which gives the factor on cosines and sines itself."""
    short, long = f.r.get_float("short_mscale"), f.r.get_float("long_mscale")
    if short != long:
        raise f.r.error("long_mscale", f"is {long}, and short_mscale is {short}; both must be equal")
    f.r.raw("attention_factor")  # not used
    name, original = "original_max_position_embeddings", f.original
    inner = f.r.get_size(name, original)
    if inner != original:
        raise f.c.error(name, f"is {original}, and inside the rotation it is {inner}; both must be equal")
    if original == 1:
        raise f.r.error(name, "is 1, from which no temperature can be computed")
    f.stretch(original)
    return LongRopeScaling(_divisors(f.r, "short_factor"), _divisors(f.r, "long_factor"), original, short)


def _proportional(head_dim: int, f: _Fields) -> RopeScaling:
    share = f.r.get_float(PARTIAL, 1.0)
    pairs = int(share * head_dim // 2)
    if not 0 <= pairs <= head_dim // 2:
        raise f.r.error(PARTIAL, f"is {share}; it must be from 0 to 1")
    return ProportionalScaling(pairs, f.r.get_positive("factor", 1.0))


def _divisors(r: Config, name: str) -> tuple[float, ...]:
    values: list[Any] = r.get_list(name)
    if not all(type(v) in (int, float) and v > 0 for v in values):
        raise r.error(name, "must be a list of positive numbers")
    return tuple(float(v) for v in values)


Scalings = Mapping[str, Callable[[_Fields], RopeScaling | None]]
SCALINGS: Final[Scalings] = {
    "default": lambda f: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
# Phi-3's classes support one scaling under three names.
PHI3_SCALINGS: Final = {"default": SCALINGS["default"], **dict.fromkeys(("longrope", "su", "yarn"), _longrope)}
PHIMOE_SCALINGS: Final = {
    "default": SCALINGS["default"],
    **dict.fromkeys(("longrope", "su"), _longrope_of_phimoe),
}
# All fields of a rotation.
_NAMES: Final = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor "
    "beta_fast beta_slow short_factor long_factor low_freq_factor high_freq_factor mscale mscale_all_dim "
    "truncate".split()
)
