"""A model folder's small files: config.json and generation_config.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.archs import Family, family_of, spec_from_config
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.spec import ModelSpec

# generation_config.json: fields that are applied, and fields that ask for nothing while they hold this value.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a model before its weights are read.

    sampling_defaults: fields of generation_config.json that are sampling parameters (SAMPLING_FIELDS).
    """

    folder: Path
    config: Mapping[str, Any]
    spec: ModelSpec
    family: Family
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sampling_defaults: Mapping[str, float]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configs of a local folder. Raises CheckpointError or ConfigError, one line each."""
    config = read_json(folder / "config.json")
    spec = spec_from_config(config)
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    return Checkpoint(
        folder, config, spec, family_of(config),
        eos_token_ids=_token_ids(generation, config, "eos_token_id", spec.vocab_size),
        bos_token_id=next(iter(_token_ids(generation, config, "bos_token_id", spec.vocab_size)), None),
        sampling_defaults=_sampling_defaults(generation),
    )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is unreadable: {e}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _token_ids(generation: Mapping[str, Any], config: Mapping[str, Any], name: str, vocab: int) -> tuple[int, ...]:
    """One id or a list of them; generation_config.json speaks first."""
    value = generation.get(name, config.get(name))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{name} is {value!r}, not a token id or a list of them")
    # Ids past the vocabulary can never be produced: some configs carry such leftovers.
    return tuple(i for i in ids if 0 <= i < vocab)


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name in SAMPLING_FIELDS:
        value = generation.get(name)
        if value is None:
            continue
        if type(value) not in ((int,) if name == "top_k" else (int, float)) or not abs(value) <= sys.float_info.max:
            raise ConfigError(f"generation_config.json: {name} is {value!r}, not a number that it can be")
        out[name] = value
    return out
