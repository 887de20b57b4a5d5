"""Find a model by what a user calls it: a published name, a folder, a config.json, or a ModelSpec as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ridgeline.archs import quantization_of, spec_from_config
from ridgeline.catalog.machines import nearest, read_data
from ridgeline.errors import RequestError
from ridgeline.spec import Causal, ModelSpec, WholeSequence, from_json
from ridgeline.spec.dtype import DTYPE_NAMES, DType, config_dtype
from ridgeline.spec.folders import existing, read_json
from ridgeline.spec.quant import AS_STORED, Format, FormatTable

BUILT_IN = ("pocket", "pocket-draft")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model to plan for.

    weights, experts: published types of its matrices and of its experts' matrices. denoises: whether it is a diffusion
    model that sees whole sequences (plan/denoise.py); its spec then describes the autoregressive model of the same
    shape. formats: matrices that the files of a checkpoint have as codes. dtypes: types of its other matrices, by name;
    empty where nobody read the files. dequantized: formats of the matrices that the files have as codes, and that
    become floats, by name.
    """

    name: str
    spec: ModelSpec
    weights: str
    experts: str
    denoises: bool = False
    formats: FormatTable = AS_STORED
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    dequantized: Mapping[str, Format] = field(default_factory=dict)


def built_in_folder(name: str) -> Path | None:
    """Return the folder of a model that ships with Ridgeline; None for any other name, or if it is in an archive."""
    folder = files("ridgeline").joinpath("models", name)
    return folder if name in BUILT_IN and isinstance(folder, Path) else None


def find_writer(name: str) -> KnownModel:
    """Find a model as `find_model` does, but raise RequestError for one that sees whole sequences."""
    return checked_writer(find_model(name))


def checked_writer(found: KnownModel) -> KnownModel:
    """Return a model. Raises RequestError for one that sees whole sequences."""
    if found.denoises:
        raise RequestError(
            f"{found.name} is a diffusion model, which has no decode steps; `ridgeline plan` predicts its passes"
        )
    return found


def find_model(name: str) -> KnownModel:
    """Return the model of a folder or file; if there is none, a model that ships with Ridgeline or a published one, by
    its hub id or short name in any case.

    Raises CheckpointError or ConfigError for a file that is not a model, and RequestError with the nearest names.
    """
    if (path := existing(name)) is not None:
        return _read(path)
    if name in BUILT_IN:
        folder = files("ridgeline").joinpath("models", name)
        return from_config(name, json.loads(folder.joinpath("config.json").read_text(encoding="utf-8")))
    entry = _names().get(name.lower())
    if entry is None:
        meant = nearest(name.lower()[:100], [*(n for n in _names() if "," not in n), *BUILT_IN], _names())
        raise RequestError(
            f"unknown model {name!r:.100}: there is no such file or published name; {meant} "
            "(for any other model, give the path of its config.json)"
        )
    return from_config(entry["name"], entry["config"])


def published_config(name: str) -> dict[str, Any] | None:
    """Return the config.json of a published model, by its hub id or a short name; None for an unknown name."""
    entry = _names().get(name.lower())
    return None if entry is None else dict(entry["config"])


def published() -> Mapping[str, Mapping[str, Any]]:
    """Return the published models, by hub id: "params" is the published count, "source" says where it and "config" come
    from.
    """
    return {entry["name"]: entry for entry in _entries()}


def from_config(name: str, config: Mapping[str, Any]) -> KnownModel:
    """Return the model of a parsed config.json. Raises ConfigError."""
    plain = config_dtype(config) if {"dtype", "torch_dtype"} & set(config) else "bfloat16"
    scheme = quantization_of(config)
    stored = (scheme.storage if scheme else "") or plain
    spec = spec_from_config(config)
    denoises = isinstance(spec.sight, WholeSequence) and not spec.encoder
    spec = spec.seeing(Causal(), None) if denoises else spec
    return KnownModel(name, spec, plain if stored == "mxfp4" else stored, stored, denoises)


def _read(path: Path) -> KnownModel:
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".gguf":
        raise RequestError(
            f"{path} is a GGUF file, whose header is not read here; give the config.json of the original model"
        )
    value = read_json(file)
    if "layers" not in value:
        return from_config(str(path), value)
    dtype = DTYPE_NAMES["bfloat16"]
    return KnownModel(str(path), from_json(value), dtype, dtype)


@cache
def _entries() -> tuple[Mapping[str, Any], ...]:
    return tuple(read_data("models.json"))


@cache
def _names() -> Mapping[str, Mapping[str, Any]]:
    """Map lower-case names to entries: hub ids, their parts after the slash, and aliases. A hub id wins over a short
    name.
    """
    ids = {entry["name"].lower(): entry for entry in _entries()}
    short = {name.split("/")[-1]: entry for name, entry in ids.items()}
    others = {alias.lower(): entry for entry in _entries() for alias in entry["aliases"]}
    return {**{alias.split("/")[-1]: entry for alias, entry in others.items()}, **short, **others, **ids}
