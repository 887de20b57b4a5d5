"""Open a GGUF file as a model: its config, its spec, and where its tensors are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.archs import spec_from_config
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.load.gguf.architectures import ARCHITECTURES, Architecture
from ridgeline.load.gguf.config import config_of
from ridgeline.load.gguf.facts import Facts, shortest
from ridgeline.load.gguf.files import GGUFFiles
from ridgeline.load.gguf.layout import GgufLayout, read_layout
from ridgeline.spec import Attention, ModelSpec

# Our sampling parameters that a file may recommend -> their names there.
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "repetition_penalty": "penalty_repeat"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file that was opened. config: its config.json. sampling: recommended parameters. notes: for the user."""

    layout: GgufLayout
    architecture: Architecture
    config: Mapping[str, Any]
    spec: ModelSpec
    sampling: Mapping[str, float]
    notes: tuple[str, ...]

    def tensors(self) -> GGUFFiles:
        """Return a reader of the tensors."""
        mixers = [layer.mixer for layer in self.spec.layers if isinstance(layer.mixer, Attention)]
        heads = (mixers[0].num_heads, mixers[0].num_kv_heads) if mixers else (1, 1)
        return GGUFFiles(self.layout, self.architecture, *heads)


def open_gguf(path: Path) -> GgufModel:
    """Read everything but the weights of a GGUF model. path: the file, or the first of its parts.

    Raises CheckpointError for a damaged file and for a model that is not supported, and ConfigError for a description
    that contradicts itself.
    """
    layout = read_layout(path)
    facts = Facts(layout)
    config = config_of(facts)
    try:
        spec = spec_from_config(config)
    except ConfigError as e:
        raise ConfigError(f"{path.name}: {str(e).removeprefix('config.json: ')}") from None
    return GgufModel(layout, ARCHITECTURES[facts.architecture], config, spec, _sampling(layout), ())


def _sampling(layout: GgufLayout) -> dict[str, float]:
    """Return the sampling parameters that the file recommends."""
    found: dict[str, float] = {}
    for ours, key in SAMPLING.items():
        value = layout.metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise CheckpointError(f"{layout.files[0].name}: general.sampling.{key} is {value!r}; it must be a number")
        found[ours] = value if isinstance(value, int) else shortest(value)
    return found
