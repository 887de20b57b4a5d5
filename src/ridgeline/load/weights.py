"""A checkpoint's tensors to the weights of a ModelSpec, strictly: nothing missing, nothing left over."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ridgeline.archs import Names, Read
from ridgeline.errors import CheckpointError
from ridgeline.load.packed import Files
from ridgeline.load.safetensors import HostTensor
from ridgeline.ops.api import Array, Memory
from ridgeline.spec import ModelSpec, Weight
from ridgeline.spec.dtype import DTYPE_BYTES, DType

Progress = Callable[[int], None]  # called with the bytes of each weight that has arrived


class StoredWeights(Mapping[str, Array]):
    """Every weight of a spec by our name, read from a checkpoint onto the device each time that it is asked for.

    dtype: the type of matrices, None to keep the checkpoint's; vectors (norms, biases) are float32 always.
    A matrix that keeps its type and lies in one piece on a CPU is a view of the mapped file. progress: told of each
    weight when it is first read. Raises CheckpointError naming the tensors that are missing or unknown, and, as they
    are read, those of another shape.
    """

    def __init__(
        self, spec: ModelSpec, names: Names, files: Files, memory: Memory, dtype: DType | None, progress: Progress
    ) -> None:
        names = names.fitting(spec, {key.removeprefix(names.optional_prefix) for key in files})
        self._weights, self._reads = {w.name: w for w in spec.weights()}, names.reads(spec)
        self._keys = _resolve_keys(spec, names, self._reads, files)
        self._files, self._memory, self._dtype, self._progress = files, memory, dtype, progress
        self._fresh = set(self._weights)

    def __getitem__(self, name: str) -> Array:
        w = self._weights[name]
        host = _read(w, self._reads[name], self._keys, self._files)
        target = (self._dtype or host.dtype) if w.is_matrix else "float32"
        if target == "float16" and host.dtype != "float16":
            _check_range(w.name, host)
        found = self._memory.put(host.data, host.dtype, target)
        if isinstance(found, np.ndarray) and not np.may_share_memory(found, host.data):  # a copy
            for key in self._reads[name].keys:
                self._files.release(self._keys[key])
        if name in self._fresh:
            self._fresh.remove(name)
            self._progress(host.data.nbytes)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def load_weights(
    spec: ModelSpec, names: Names, files: Files, memory: Memory, dtype: DType | None, progress: Progress
) -> dict[str, Array]:
    """All of StoredWeights at once."""
    return dict(StoredWeights(spec, names, files, memory, dtype, progress))


class RandomWeights(Mapping[str, Array]):
    """Random weights of the right shapes (`--load-format dummy`), drawn each time that they are asked for: matrices
    N(0, 1/in), norms 1, biases 0, steps of a state space 1/20, so that its state remembers something.
    """

    def __init__(self, spec: ModelSpec, memory: Memory, dtype: DType, seed: int, progress: Progress) -> None:
        self._weights = {w.name: w for w in spec.weights()}
        self._memory, self._dtype, self._seed, self._progress = memory, dtype, seed, progress
        self._fresh = set(self._weights)

    def __getitem__(self, name: str) -> Array:
        w, memory = self._weights[name], self._memory
        if name in self._fresh:
            self._fresh.remove(name)
            self._progress(w.num_params * (DTYPE_BYTES[self._dtype] if w.is_matrix else 4))
        if w.is_matrix:
            own_seed = zlib.crc32(name.encode()) ^ self._seed
            return memory.random(w.shape, self._dtype, w.shape[-1] ** -0.5, own_seed)
        fill = 0.0 if name.endswith(".bias") else -3.0 if name.endswith(".log_dt") else 1.0
        return memory.put(np.full(w.shape, fill, np.float32), "float32", "float32")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _resolve_keys(spec: ModelSpec, names: Names, reads: dict[str, Read], files: Files) -> dict[str, str]:
    """Checkpoint names as the table spells them -> as the files do, after checking that the two sets agree."""
    wanted = {key for read in reads.values() for key in read.keys}
    found: dict[str, str] = {}
    for key in files:
        if (other := found.setdefault(key.removeprefix(names.optional_prefix), key)) != key:
            raise CheckpointError(f"the checkpoint holds both {other} and {key}, which are one weight")
    if missing := sorted(wanted - set(found)):
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}, which {spec.family} needs")
    unknown = sorted(found[k] for k in set(found) - wanted if not names.is_ignored(k, spec))
    unknown = [key for key in unknown if not _is_tied_head(key, spec, names, files, found)]
    if unknown:
        raise CheckpointError(f"the checkpoint holds {_some(unknown)}, which {spec.family} does not know")
    return found


def _is_tied_head(key: str, spec: ModelSpec, names: Names, files: Files, found: dict[str, str]) -> bool:
    """A head that is stored although it is tied to the embedding is harmless only if it is equal to it."""
    head, embed = (names.root.get(n) for n in ("head", "embed"))
    if not spec.tie_word_embeddings or key != found.get(f"{head}.weight"):
        return False
    a, b = files.read(key), files.read(found[f"{embed}.weight"])
    is_equal = a.dtype == b.dtype and np.array_equal(a.data, b.data)
    files.release(key)
    files.release(found[f"{embed}.weight"])
    if is_equal:
        return True
    raise CheckpointError(
        f"config.json ties the output head to the embedding, but the checkpoint's {key} differs from it; "
        'set "tie_word_embeddings": false to use it'
    )


def _read(weight: Weight, read: Read, keys: dict[str, str], files: Files) -> HostTensor:
    """One weight, as a view of the file where it lies there in one piece."""
    parts = [files.read(keys[key]) for key in read.keys]
    if len({p.dtype for p in parts}) > 1:
        raise CheckpointError(f"the experts of {weight.name} have different types in the checkpoint")
    stored = stored_shape(weight, read)
    for key, part in zip(read.keys, parts, strict=True):
        if part.data.shape != stored:
            raise CheckpointError(
                f"{keys[key]} has shape {list(part.data.shape)}, but config.json asks for {list(stored)}"
            )
    cut = [_cut(part.data, read, weight.shape) for part in parts]
    if not read.stacked:
        return HostTensor(cut[0], parts[0].dtype)
    stack = np.empty((len(cut), *cut[0].shape), cut[0].dtype)
    for of_expert, data, key in zip(stack, cut, read.keys, strict=True):
        of_expert[...] = data
        files.release(keys[key])
    return HostTensor(stack, parts[0].dtype)


def stored_shape(weight: Weight, read: Read) -> tuple[int, ...]:
    """The shape that each tensor of a read must have in the checkpoint."""
    shape = weight.shape[1:] if read.stacked else weight.shape
    if read.flat:
        shape = (shape[0] * shape[1], *shape[2:])
    if read.total_rows is not None:
        shape = (read.total_rows, *shape[1:])
    if read.every is not None:
        shape = (shape[0], read.every[1] * shape[1], *shape[2:])
    if read.expert_rows is not None:
        shape = (shape[0], read.expert_rows[2], *shape[2:])
    if any(read.axes):
        return (*(1,) * read.axes[0], *shape, *(1,) * read.axes[1])
    return (*shape[:-2], shape[-1], shape[-2]) if read.transpose else shape


def _cut(data: np.ndarray[Any, Any], read: Read, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return part_of(data, read).reshape(shape if not read.stacked else shape[1:])


def part_of(data: np.ndarray[Any, Any], read: Read) -> np.ndarray[Any, Any]:
    """The part of a stored tensor that a read takes: a view, in which a part of each head or group keeps that axis."""
    if read.transpose:
        data = data.swapaxes(-1, -2)
    if read.rows is not None:
        start, stop = read.rows
        return data[start:stop]
    if read.head_part is not None:
        index, count, head_dim = read.head_part
        return data.reshape(-1, count, head_dim, *data.shape[1:])[:, index]
    if read.group_rows is not None:
        groups, start, stop = read.group_rows
        return data.reshape(groups, -1, *data.shape[1:])[:, start:stop]
    if read.expert_rows is not None:
        start, stop, _ = read.expert_rows
        return data[:, start:stop]
    if read.every is not None:
        index, count = read.every
        return data[:, index::count]
    return data


def _check_range(name: str, host: HostTensor) -> None:
    """Raise CheckpointError if float16 cannot hold the values: they would become infinite in silence."""
    bits = host.data
    values = (bits.astype(np.uint32) << 16).view(np.float32) if host.dtype == "bfloat16" else bits
    limit = float(np.finfo(np.float16).max)
    if values.size and (largest := float(np.abs(values).max())) > limit:
        raise CheckpointError(f"{name} holds {largest:g}, float16 ends at {limit:g}; use --dtype bfloat16 or float32")


def _some(names: Iterable[str], limit: int = 5) -> str:
    """The first few of many names, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
