"""Give a checkpoint another description: a folder with links to its files, and a `--spec` file as its config.json."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ridgeline.archs import OUR_MODEL_TYPE, spec_from_config
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.load.gguf.paths import is_gguf
from ridgeline.load.hub import MODEL_FILES, find_model
from ridgeline.spec.folders import cache_folder, read_json

CONFIG = "config.json"
# Fields of the checkpoint's own config.json that say nothing about the layers; those of the file have priority.
KEPT = (
    "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "is_matryoshka",
    "matryoshka_dimensions",
)  # fmt: skip


def described(
    model: str, file: str | Path, *, revision: str | None = None, files: tuple[str, ...] = MODEL_FILES
) -> Path:
    """Return a folder that has the files of a model, as links, and the description in `file` as its config.json.

    The folder is in the cache, and a later call with the same model and description returns it again. files: patterns
    of what is downloaded from the hub. Raises CheckpointError for a file or model that cannot be read, and ConfigError,
    which names the file, for a description that is wrong.
    """
    path = Path(file).expanduser()
    config = _read(path)
    folder = find_model(model, revision=revision, files=files)
    if is_gguf(folder):
        raise CheckpointError(f"{folder} is a GGUF file, which describes itself; leave out spec (--spec)")
    if (folder / CONFIG).exists():
        own = read_json(folder / CONFIG)
        config = {**{name: own[name] for name in KEPT if name in own}, **config}
    return _folder_of(folder.resolve(), config)


def with_description(model: str, revision: str | None, spec: str | None) -> tuple[str, str | None]:
    """Return the model and the revision to load: those given, or the folder of `described` for a file `spec`."""
    return (model, revision) if spec is None else (str(described(model, spec, revision=revision)), None)


def _read(path: Path) -> dict[str, Any]:
    """Return the config in a file, which describes a model."""
    if not path.exists():
        raise CheckpointError(f"there is no file {path}; spec (--spec) is the path of a JSON file")
    config = {"model_type": OUR_MODEL_TYPE, **read_json(path)}
    try:
        spec_from_config(config)
    except ConfigError as e:
        raise ConfigError(f"{path.name}: {str(e).removeprefix('config.json: ')}") from None
    return config


def _folder_of(folder: Path, config: Mapping[str, Any]) -> Path:
    """Return the folder of links, which is made if it does not exist."""
    text = json.dumps(config)
    entries = sorted(entry.name for entry in folder.iterdir() if entry.name != CONFIG)
    key = blake2b(json.dumps([str(folder), entries, text]).encode(), digest_size=8).hexdigest()
    target = cache_folder() / "described" / key / folder.name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            for name in entries:
                (hidden / name).symlink_to(folder / name)
            (hidden / CONFIG).write_text(text, encoding="utf-8")
            hidden.chmod(0o755)
            hidden.rename(target)  # fails if another process was faster, because its folder is not empty
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except OSError as e:
        if target.is_dir():
            return target
        raise CheckpointError(
            f"{target.parent} cannot hold links to {folder}: {e.strerror or e}; set XDG_CACHE_HOME to a folder that can"
        ) from None
    return target
