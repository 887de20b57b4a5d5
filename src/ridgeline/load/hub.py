"""Find a model's folder: a local one, a built-in one, or one from the Hugging Face hub, through the hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.paths import is_gguf, only_gguf

# The files of a model folder that are read. Pickled weights are never downloaded.
CONFIG_FILES = ("config.json",)
SMALL_FILES = (
    *CONFIG_FILES,
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates/*",
    "modules.json",
    "*sentence_*.json",
    "*_Pooling/config.json",
    "*_Dense/*",
)
HEAD_FILES = ("model.safetensors", "medusa_lm_head.safetensors")  # a head has all of its weights in one file
MODEL_FILES = (*SMALL_FILES, "model*.safetensors", "model.safetensors.index.json")
# Models that ship with Ridgeline, by name.
BUILT_IN = {name: Path(__file__).parents[1] / "models" / name for name in ("pocket", "pocket-draft")}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_model(model: str, *, revision: str | None = None, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """Return the folder of a model: one that ships with Ridgeline, a local folder, or a download from the hub.

    For a GGUF model it is the file: the given one, or the only one in a folder without safetensors.

    A local folder with a built-in model's name is written ./NAME.

    Downloads show progress, can be resumed, and go to the hub's cache; HF_HUB_OFFLINE, HF_HOME and HF_TOKEN work as
    usual. files: patterns of the files to download. Raises CheckpointError if there is no such model.
    """
    model = str(model)
    if model in BUILT_IN:
        if revision is not None:
            raise CheckpointError(
                f"{model} ships with Ridgeline; leave out --revision {revision}, which is for hub ids"
            )
        return BUILT_IN[model]
    try:
        path = Path(model).expanduser()
        is_dir, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError):  # too long a name, an unknown home folder, a NUL character
        model = model if len(model) <= 80 else f"{model[:80]}..."
        raise CheckpointError(f"no such folder: {model}") from None
    if not model:
        raise CheckpointError("the model's name is empty; give a folder or a hub id")
    if revision is not None and (is_dir or exists):
        raise CheckpointError(f"{model} is a local folder; leave out --revision {revision}, which is for hub ids")
    if is_dir:
        return only_gguf(path) or path
    if exists and path.name == "config.json":
        return path.parent
    if exists and is_gguf(path):
        return path
    if exists:
        raise CheckpointError(f"{model} is a file; give a model's folder, a GGUF file or a hub id")
    if path.is_absolute() or model.startswith((".", "~")) or not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"no such folder: {model}")
    return _download(model, revision, files)


def _download(model: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = model if revision is None else f"{model} at revision {revision}"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{wanted} is not a local folder and not in the hub's cache, and the hub cannot be reached"
        ) from None
    # The hub's client, its network library (which differs by version) and a proxy that answers instead of the hub each
    # raise their own errors, without a common base class.
    except Exception as e:
        first_line = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(f"{wanted} is not a local folder, and the hub says: {first_line}") from None
