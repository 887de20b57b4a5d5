"""Put an adapter into a model's weights, and write the result as a checkpoint of the same family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.archs import Read
from ridgeline.compress.folder import whole_folder
from ridgeline.compress.write import copy_small_files, write_json
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.adapter import MAX_RANK, Adapter, find_adapter, read_adapter
from ridgeline.load.checkpoint import Checkpoint, open_checkpoint
from ridgeline.load.export import write_safetensors
from ridgeline.load.hub import find_model
from ridgeline.load.safetensors import SINGLE, HostTensor, TensorFiles, type_of_code
from ridgeline.load.weights import part_of
from ridgeline.ops.host.memory import dtype_of, widen

OnProgress = Callable[[str, int, int], None]
_WRITING, _READING = "writing", "reading back"


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Numbers of a merge. matrices: number of matrices with a term. replaced: number of weights that were replaced.
    rank: largest rank of a term. num_bytes: size of the result's weights.
    """

    matrices: int
    replaced: int
    rank: int
    num_bytes: int


def merge(model: str, adapter: str, out: str, on_progress: OnProgress = lambda what, done, total: None) -> MergeReport:
    """Write a model with an adapter in its weights into the folder `out`, and read it back.

    Sums are computed in float32 and rounded to the type in which the model stores the tensor. Raises RidgelineError for
    a model or an adapter that cannot be read or do not fit each other, and for a folder that exists; nothing is left on
    disk then.
    """
    checkpoint = open_checkpoint(find_model(model))
    if checkpoint.gguf is not None or checkpoint.quantization is not None:
        raise RequestError(f"{model} is not stored as floats; name the checkpoint from which it was made")
    files, names = TensorFiles(checkpoint.folder), checkpoint.family.names
    found = read_adapter(find_adapter(adapter), checkpoint.spec, names, MAX_RANK)
    _check_tied(checkpoint, found)
    merged = _Merged(checkpoint, files, found)
    with whole_folder(Path(out)) as folder:
        folder.mkdir()
        write_safetensors(folder / SINGLE, _Shown(merged, _WRITING, on_progress))
        write_json(folder / "config.json", checkpoint.config)
        copy_small_files(checkpoint.folder, folder)
        _read_back(folder, _Shown(merged, _READING, on_progress))
    return MergeReport(len(found.terms), len(found.replaced), found.rank, files.num_bytes())


def _check_tied(checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Raise RequestError for a change of an embedding that is also the output head."""
    changed = {*adapter.terms, *adapter.replaced}
    if checkpoint.spec.tie_word_embeddings and "embed.weight" in changed:
        raise RequestError(
            f"{adapter.folder.name} changes the embedding, which is also the model's output head "
            "(tie_word_embeddings); the adapter was trained for one of the two, so they cannot be merged"
        )


class _Merged(Mapping[str, HostTensor]):
    """The tensors of the checkpoint with the adapter in them, each computed when it is asked for.

    Raises RequestError for a term that adds to a bias that the model does not have.
    """

    def __init__(self, checkpoint: Checkpoint, files: TensorFiles, adapter: Adapter) -> None:
        names, spec = checkpoint.family.names, checkpoint.spec
        keys = {key.removeprefix(names.optional_prefix): key for key in files}
        reads = names.fitting(spec, set(keys)).reads(spec)
        self._files, self._adapter = files, adapter
        self._adds = {
            f"{name.removesuffix('.weight')}.bias": term.add
            for name, term in adapter.terms.items()
            if term.add is not None
        }
        if lacking := sorted(set(self._adds).difference(reads)):
            raise RequestError(
                f"{adapter.folder.name} adds to {lacking[0]} (lora_bias), which the model does not have; serve the "
                "adapter apart, or let peft merge it"
            )
        self._changes: dict[str, list[tuple[str, Read]]] = {}
        for name in {**adapter.terms, **adapter.replaced, **self._adds}:
            for key in reads[name].keys:
                if key not in keys:
                    raise CheckpointError(f"the checkpoint lacks {key}, which {spec.family} needs")
                self._changes.setdefault(keys[key], []).append((name, reads[name]))

    def __getitem__(self, key: str) -> HostTensor:
        if key not in self._changes:
            return HostTensor(self._files.array(key), type_of_code(self._files.info(key).dtype))
        host = self._files.read(key)
        data = host.data.view(dtype_of("bfloat16")) if host.dtype == "bfloat16" else host.data
        wide = widen(data).copy()
        for name, read in self._changes[key]:
            part = part_of(wide, read)
            part[...] = self._changed(name, part).reshape(part.shape)
        self._files.release(key)
        rounded = wide.astype(dtype_of(host.dtype))
        return HostTensor(rounded.view(np.uint16) if host.dtype == "bfloat16" else rounded, host.dtype)

    def _changed(self, name: str, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a weight of ours after the change, from the part of the tensor that holds it."""
        adapter = self._adapter
        if name in adapter.replaced:
            part = adapter.replaced[name]
        if name in self._adds:
            part = part + self._adds[name].reshape(part.shape)
        if (term := adapter.terms.get(name)) is None:
            return part
        if term.table:
            return term.merged(part.T).T
        return term.merged(part.reshape(-1, part.shape[-1]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return sum(1 for _ in self._files)


class _Shown(Mapping[str, HostTensor]):
    """Tensors that report the progress of a reader."""

    def __init__(self, tensors: _Merged, what: str, on_progress: OnProgress) -> None:
        self._tensors, self._what, self._on_progress, self._done = tensors, what, on_progress, 0

    def __getitem__(self, key: str) -> HostTensor:
        self._done += 1
        self._on_progress(self._what, self._done, (2 if self._what == _WRITING else 1) * len(self._tensors))
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _read_back(folder: Path, wanted: Mapping[str, HostTensor]) -> None:
    """Raise CheckpointError unless a folder has exactly these tensors, and finite numbers."""
    open_checkpoint(folder)
    files = TensorFiles(folder)
    for key, tensor in wanted.items():
        if not np.array_equal(files.array(key).reshape(-1).view(np.uint8), _bytes(tensor)):
            raise CheckpointError(f"{key} was not written as it was computed; check the disk and repeat the command")
        if tensor.dtype in ("float16", "float32") and not np.isfinite(tensor.data).all():
            raise CheckpointError(f"{key} has numbers beyond {tensor.dtype} after the merge")
        files.release(key)


def _bytes(tensor: HostTensor) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
