"""A model by what a user calls it: a published one's name, a folder, a config.json, a ModelSpec as JSON. No network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ridgeline.archs import packing_of, spec_from_config
from ridgeline.archs.llada import MODEL_TYPE, llama_of
from ridgeline.catalog.machines import nearest, read_data
from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec, from_json
from ridgeline.spec.dtype import DTYPE_NAMES, config_dtype
from ridgeline.spec.folders import read_json

BUILT_IN = ("pocket", "pocket-draft")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model to plan for. weights, experts: types that its matrices, and those of its experts, are published in.
    denoises: it does not write token by token (plan/denoise.py), and its spec is of a model that would.
    """

    name: str
    spec: ModelSpec
    weights: str
    experts: str
    denoises: bool = False


def find_writer(name: str) -> KnownModel:
    """As `find_model`, of what writes token by token. Raises RequestError for a diffusion model too."""
    found = find_model(name)
    if found.denoises:
        raise RequestError(
            f"{found.name} is a diffusion model, which only `ridgeline plan` knows: it has no decode steps"
        )
    return found


def find_model(name: str) -> KnownModel:
    """A folder or a file where there is one of that name, else a model that ships with Ridgeline, else a published one
    by its hub id or a short name of it, upper and lower case being one.

    Raises CheckpointError or ConfigError for a file that is no model, RequestError with the nearest names.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _read(path)
    if name in BUILT_IN:
        folder = files("ridgeline").joinpath("models", name)
        return from_config(name, json.loads(folder.joinpath("config.json").read_text(encoding="utf-8")))
    entry = _names().get(name.lower())
    if entry is None:
        meant = nearest(name.lower(), [*(n for n in _names() if "," not in n), *BUILT_IN], _names())
        raise RequestError(
            f"model {name!r} is neither a file nor known by name; {meant} "
            "(for another one, give the path of its config.json)"
        )
    return from_config(entry["name"], entry["config"])


def published_config(name: str) -> dict[str, Any] | None:
    """The config.json of a published model, by its hub id or a short name; None for another name."""
    entry = _names().get(name.lower())
    return None if entry is None else dict(entry["config"])


def published() -> Mapping[str, Mapping[str, Any]]:
    """The published models that the engine runs, by hub id: "params", the count that is known of it, "source", of that
    and of "config"."""
    return {entry["name"]: entry for entry in _entries() if entry["config"].get("model_type") != MODEL_TYPE}


def from_config(name: str, config: Mapping[str, Any]) -> KnownModel:
    """A parsed config.json. Raises ConfigError."""
    if config.get("model_type") == MODEL_TYPE:
        return replace(from_config(name, llama_of(config)), denoises=True)
    plain = config_dtype(config) if {"dtype", "torch_dtype"} & set(config) else "bfloat16"
    packing = packing_of(config) or plain
    return KnownModel(name, spec_from_config(config), plain if packing == "mxfp4" else packing, packing)


def _read(path: Path) -> KnownModel:
    file = path / "config.json" if path.is_dir() else path
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
    """Hub ids, what stands after their slash, and other names, in lower case. An id goes before a short name."""
    ids = {entry["name"].lower(): entry for entry in _entries()}
    short = {name.split("/")[-1]: entry for name, entry in ids.items()}
    others = {alias.lower(): entry for entry in _entries() for alias in entry["aliases"]}
    return {**{alias.split("/")[-1]: entry for alias, entry in others.items()}, **short, **others, **ids}
