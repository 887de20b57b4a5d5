"""One small file per group of families: it converts a config.json to a ModelSpec and maps the checkpoint's weight
names.

A forward pass cannot be written here, because this package imports nothing but `spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.archs import (
    bamba,
    beam,
    bert,
    bloom,
    cohere,
    dbrx,
    deepseek,
    dense,
    diffusion_gemma,
    falcon,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    gptj,
    granite,
    hunyuan,
    jamba,
    kimi,
    laguna,
    lfm2,
    llada,
    llada2,
    llama,
    llama4,
    longcat,
    mamba,
    minimax,
    ministral3,
    modernbert,
    moe,
    nemotron,
    olmo,
    opt,
    phi,
    plain,
    qwen_next,
    recurrent_gemma,
    routed,
    sdar,
    windowed,
)
from ridgeline.archs.config import HARMLESS, Config
from ridgeline.archs.family import Family
from ridgeline.archs.names import OURS, Names, Read
from ridgeline.archs.quantization import Quantization, read_quantization
from ridgeline.archs.table import check_table, table_from_json
from ridgeline.errors import ConfigError
from ridgeline.spec import ModelSpec, from_json

MODULES = (
    llama, dense, gemma, gemma4, olmo, glm, gpt, moe, gpt_oss, deepseek, mamba, jamba, lfm2, minimax, qwen_next, kimi,
    bamba, granite, nemotron, sdar, llada2, llada, diffusion_gemma, routed, cohere, phi, gptj, opt,
    falcon, falcon_h1, bloom, windowed, hunyuan, ministral3, plain,
    llama4, longcat, dbrx, laguna, beam, modernbert, recurrent_gemma,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {family.model_type: family for module in MODULES for family in module.FAMILIES}
ENCODERS: Mapping[str, Family] = {family.model_type: family for module in (bert,) for family in module.FAMILIES}
OUR_MODEL_TYPE = "ridgeline"

__all__ = [
    "ENCODERS",
    "FAMILIES",
    "OUR_MODEL_TYPE",
    "Family",
    "Names",
    "Read",
    "family_of",
    "quantization_of",
    "spec_from_config",
]


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a parsed config.json. Raises ConfigError, which names similar ones, for any other."""
    model_type = config.get("model_type")
    if model_type == OUR_MODEL_TYPE:
        table = config.get("names")
        return Family(OUR_MODEL_TYPE, _own_spec, OURS if table is None else table_from_json(table))
    served = {**FAMILIES, **ENCODERS}
    if not isinstance(model_type, str) or model_type not in served:
        from difflib import get_close_matches  # needed for an error alone

        named = f"model_type {model_type!r:.100}" if model_type is not None else "a missing model_type"
        close = get_close_matches(f"{model_type:.100}", sorted(served)) if isinstance(model_type, str) else []
        similar = f"similar: {', '.join(close)}; " if close else ""
        raise ConfigError(
            f"config.json: {named} is not a supported architecture; {similar}docs/models.md lists all {len(served)}"
        )
    return served[model_type]


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the checkpoint stores its matrices; None if nothing is quantized.

    Raises ConfigError for a method that is not supported, and for unknown fields of it.
    """
    return read_quantization(config, family_of(config).packings)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec that a parsed config.json describes.

    Raises ConfigError for an unknown architecture, a missing field or one of the wrong type, a value that is not
    supported, an unsupported quantization, and for any field that was not read and is not listed as harmless.
    """
    family = family_of(config)
    quantization_of(config)
    reader = Config(config)
    reader.raw("quantization_config")
    try:
        spec = family.spec(reader) if family.within is None else _part(reader, family, family.within)
    except ValueError as e:  # raised by the spec's classes
        raise ConfigError(f"config.json: {e}") from None
    except ArithmeticError as e:
        raise ConfigError(f"config.json: its numbers contradict each other: {e}") from None
    reader.finish(HARMLESS | set(family.harmless))
    return spec


def _own_spec(c: Config) -> ModelSpec:
    """Return the spec of a config of our own, whose table of names must fit it."""
    spec, table = from_json(c.raw("spec")), c.raw("names")
    if table is not None:
        check_table(table_from_json(table), spec)
    return spec


def _part(c: Config, family: Family, name: str) -> ModelSpec:
    """Return the language model of a config that describes several parts."""
    text = c.sub(name)
    if text is None:
        raise c.error(name, "is missing")
    spec = replace(family.spec(text), family=family.model_type)
    text.finish(HARMLESS | set(family.harmless))
    if family.around is not None:
        spec = family.around(c, spec)
    tied = c.get_bool("tie_word_embeddings", spec.tie_word_embeddings)
    if tied == spec.tie_word_embeddings:
        return spec
    if text.present("tie_word_embeddings"):
        raise c.error("tie_word_embeddings", f"is {tied}, but in {name} it is {not tied}; make both equal")
    return replace(spec, tie_word_embeddings=tied)
