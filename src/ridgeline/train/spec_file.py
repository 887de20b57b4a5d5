"""Read a model description from a JSON file, as the config.json that the trained model will have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.archs import spec_from_config
from ridgeline.archs.write import config_of
from ridgeline.errors import ConfigError
from ridgeline.spec import from_json
from ridgeline.spec.folders import read_json


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a file that holds either a config.json (it has a model_type) or a ModelSpec from
    `spec.to_json`.

    Raises CheckpointError for a file that cannot be read, and ConfigError for one that does not describe a model.
    """
    value = read_json(path)
    try:
        if "model_type" not in value:
            return config_of(from_json(value))
        spec_from_config(value)
    except ConfigError as e:
        raise ConfigError(f"{path.name}: {str(e).removeprefix('config.json: ')}") from None
    return value
