"""One small file per group of families: a checkpoint's config.json to a ModelSpec, its weight names to ours.

A forward pass cannot be written here: this package imports `spec` and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.archs import (
    bamba,
    deepseek,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    jamba,
    kimi,
    lfm2,
    llama,
    mamba,
    minimax,
    moe,
    nemotron,
    olmo,
    qwen_next,
)
from ridgeline.archs.config import HARMLESS, Config
from ridgeline.archs.family import Family
from ridgeline.archs.names import OURS, Names, Read
from ridgeline.archs.quantization import packing_method, weight_blocks
from ridgeline.errors import ConfigError
from ridgeline.spec import ModelSpec, from_json

MODULES = (
    llama, gemma, olmo, glm, gpt, moe, gpt_oss, deepseek, mamba, jamba, lfm2, minimax, qwen_next, kimi, bamba, granite,
    nemotron,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {family.model_type: family for module in MODULES for family in module.FAMILIES}
OUR_MODEL_TYPE = "ridgeline"

__all__ = [
    "FAMILIES",
    "OUR_MODEL_TYPE",
    "Family",
    "Names",
    "Read",
    "family_of",
    "packing_of",
    "spec_from_config",
    "weight_blocks",
]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json. Raises ConfigError, listing the known ones, if there is none."""
    model_type = config.get("model_type")
    if model_type == OUR_MODEL_TYPE:
        return Family(OUR_MODEL_TYPE, lambda c: from_json(c.raw("spec")), OURS)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        named = f"model_type {model_type!r}" if model_type is not None else "a missing model_type"
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"config.json: {named} is not a known architecture; known are {known}")
    return FAMILIES[model_type]


def packing_of(config: Mapping[str, Any]) -> str | None:
    """How the checkpoint packs some of its matrices: "fp8" (see `weight_blocks`), in any family, or one of its family's
    `packings`; None where it does not.

    Raises ConfigError for a packing that its family's loader cannot unpack, or a field of it that is not understood.
    """
    return packing_method(config, family_of(config).packings)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec that a parsed config.json describes.

    Raises ConfigError for an unknown architecture, a missing or ill-typed field, a value that is not supported,
    weights quantized in a way that is not read, and any field that nobody read (but for those listed as harmless).
    """
    family = family_of(config)
    packing_of(config)
    reader = Config(config)
    reader.raw("quantization_config")
    try:
        spec = family.spec(reader) if family.within is None else _part(reader, family, family.within)
    except ValueError as e:  # a part refused its fields
        raise ConfigError(f"config.json: {e}") from None
    except ArithmeticError as e:
        raise ConfigError(f"config.json: its numbers do not fit together: {e}") from None
    reader.finish(HARMLESS | set(family.harmless))
    return spec


def _part(c: Config, family: Family, name: str) -> ModelSpec:
    """The language model of a config that describes more."""
    text = c.sub(name)
    if text is None:
        raise c.error(name, "is missing")
    spec = replace(family.spec(text), family=family.model_type)
    text.finish(HARMLESS | set(family.harmless))
    tied = c.get_bool("tie_word_embeddings", spec.tie_word_embeddings)
    if tied == spec.tie_word_embeddings:
        return spec
    if text.present("tie_word_embeddings"):
        raise c.error("tie_word_embeddings", f"is {tied}, but that of {name} is {not tied}; make them one")
    return replace(spec, tie_word_embeddings=tied)
