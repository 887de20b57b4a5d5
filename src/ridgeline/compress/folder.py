"""Write a changed model as a folder that is complete or absent, read it back, and compare logits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.archs.edit import described, said_by_family
from ridgeline.compress.changed import ChangedWeights
from ridgeline.compress.write import copy_small_files, write_json
from ridgeline.errors import RequestError
from ridgeline.evals.scores import logit_blocks
from ridgeline.evals.windows import Batch
from ridgeline.load.export import checkpoint_tensors, write_safetensors
from ridgeline.load.packed import open_tensors
from ridgeline.load.safetensors import HostTensor
from ridgeline.nn import PassingModel
from ridgeline.ops.host.memory import dtype_of
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.spec.dtype import DTYPE_NAMES, DType
from ridgeline.spec.parts import unchanging_part

Format = Literal["auto", "family", "ridgeline"]
READ_BACK = 1e-4  # largest difference of logits of what was computed and what was read, as a share of the largest one
READ_BACK_TOKENS = 256


def open_original(model: str, threads: int | None) -> LoadedModel:
    """Open a model that is not quantized, of which no layer stays in memory. Raises RidgelineError."""
    original = pass_model(model, LoadOptions(device="cpu", threads=threads))
    checkpoint = original.checkpoint
    if part := unchanging_part(original.spec):
        raise RequestError(f"{model} has {part}, which no change of an architecture knows how to keep yet")
    if checkpoint.gguf is not None:
        raise RequestError(f"{model} is a GGUF file; name the checkpoint from which it was made")
    if checkpoint.config.get("quantization_config") or original.model.formats.by_name:
        raise RequestError(f"{model} is quantized; name the checkpoint from which it was made")
    return original


def stored_types(loaded: LoadedModel) -> dict[str, DType]:
    """Return the type in which the checkpoint stores each weight, by our name. Raises RequestError for codes."""
    files, names = open_tensors(loaded.checkpoint), loaded.checkpoint.family.names
    keys = {key.removeprefix(names.optional_prefix): key for key in files}
    reads = names.fitting(loaded.spec, set(keys)).reads(loaded.spec)
    found = {name: DTYPE_NAMES.get(files.dtype(keys[read.keys[0]])) for name, read in reads.items()}
    if unknown := [name for name, kind in found.items() if kind is None]:
        raise RequestError(f"{unknown[0]} is not stored as floats; name the checkpoint from which it was made")
    return {name: kind for name, kind in found.items() if kind is not None}


def changed_model(original: LoadedModel, weights: ChangedWeights) -> LoadedModel:
    """Return the new model, which computes the weights of each layer when it is needed."""
    spec, table = weights.spec, original.table
    longest = min(original.max_model_len, spec.max_position_embeddings)
    return replace(original, model=PassingModel(spec, weights, table, longest), max_model_len=longest)


def config_for(original: LoadedModel, weights: ChangedWeights, format: Format) -> tuple[dict[str, Any], Any, str]:
    """Return the config of the result, the names of its weights, and a note about its format.

    Raises RequestError if a family's config is asked for and none can say the sizes.
    """
    kept = list(weights.kept)
    checkpoint = original.checkpoint
    config, reason = said_by_family(checkpoint.config, weights.spec, kept)
    if config is not None and format != "ridgeline":
        keys = {key.removeprefix(checkpoint.family.names.optional_prefix) for key in open_tensors(checkpoint)}
        return config, checkpoint.family.names.fitting(original.spec, keys), ""
    config, names = described(weights.spec)
    kind = config["model_type"]
    if format == "family" and kind == OUR_MODEL_TYPE:
        raise RequestError(f"format (--format) family: {reason}; take --format ridgeline, or uniform sizes")
    return config, names, f"{reason}; the folder has a {kind} config" if reason and format == "auto" else ""


def write_folder(
    folder: Path, original: LoadedModel, weights: ChangedWeights, config: Mapping[str, Any], names: Any
) -> None:
    """Write config, weights, tokenizer and what else the original's folder has. The result is in memory once."""
    spec = weights.spec
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", checkpoint_tensors(spec, names, _Tensors(weights)))
    own = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
    kept = {name: original.checkpoint.config[name] for name in own if name in original.checkpoint.config}
    write_json(folder / "config.json", {**kept, **config})
    copy_small_files(original.checkpoint.folder, folder)


class _Tensors(Mapping[str, HostTensor]):
    """The weights of a changed model in the types of the checkpoint, each computed when it is asked for."""

    def __init__(self, weights: ChangedWeights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> HostTensor:
        kind = self._weights.type_of(name)
        array = np.asarray(self._weights[name]).astype(dtype_of(kind), copy=False)
        return HostTensor(array.view(np.uint16) if kind == "bfloat16" else array, kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def read_back(folder: Path, made: LoadedModel, ids: Sequence[int]) -> float:
    """Return by how much the logits of the folder differ from those of the new model, as a share of the largest one.

    Raises RequestError if it is more than READ_BACK.
    """
    few = list(ids)[:READ_BACK_TOKENS]
    batch = Batch([few], np.arange(len(few)), np.zeros(len(few), np.int64))
    threads = made.table.driver.threads if made.table.driver else None
    read = pass_model(str(folder), LoadOptions(device="cpu", threads=threads))
    own, back = (np.concatenate(list(logit_blocks(model, batch))) for model in (made, read))
    off = float(np.abs(own - back).max() / max(float(np.abs(own).max()), 1e-30))
    if not off <= READ_BACK:
        raise RequestError(
            f"what was written does not compute what was made: logits differ by {off:.2g} of the largest one; report "
            "this, and take --format ridgeline"
        )
    return off


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield the path of a hidden folder beside `target` that becomes `target` at the end, or is removed on any error or
    interruption. Raises RequestError for a target that exists or cannot be written.
    """
    hidden = target.with_name(f".{target.name[:200]}.{uuid4().hex[:8]}.partial")
    created: list[Path] = []
    try:
        if target.is_symlink() or target.exists():
            raise RequestError(f"{target} exists; name another folder with --out, or remove it")
        for parent in reversed(target.parents):
            if not parent.exists():
                parent.mkdir()
                created.insert(0, parent)
        hidden.mkdir()
        hidden.rmdir()  # it can be made, which a long run should know before its end
        yield hidden
        hidden.rename(target)
    except BrokenPipeError:  # of the progress
        _remove(hidden, created)
        raise
    except OSError as e:
        _remove(hidden, created)
        remedy = "free some space and repeat the command" if e.errno in (ENOSPC, EDQUOT) else (
            "name another folder with --out"
        )  # fmt: skip
        raise RequestError(f"cannot write {target}: {e.strerror or e}; {remedy}") from None
    except BaseException:
        _remove(hidden, created)
        raise


def _remove(hidden: Path, created: Sequence[Path]) -> None:
    shutil.rmtree(hidden, ignore_errors=True)
    for parent in created:
        try:
            parent.rmdir()
        except OSError:  # something else is in it
            return
