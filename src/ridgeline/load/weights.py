"""A checkpoint's tensors to the weights of a ModelSpec, strictly: nothing missing, nothing left over."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
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


def load_weights(
    spec: ModelSpec, names: Names, files: Files, memory: Memory, dtype: DType | None, progress: Progress
) -> dict[str, Array]:
    """Every weight of the spec, on the device, by our name.

    dtype: the type of matrices, None to keep the checkpoint's; vectors (norms, biases) are float32 always.
    A matrix that keeps its type and lies in one piece on a CPU stays a view of the mapped file.
    Raises CheckpointError naming the tensors that are missing, unknown or of another shape.
    """
    names = names.fitting(spec, {key.removeprefix(names.optional_prefix) for key in files})
    reads = names.reads(spec)
    keys = _resolve_keys(spec, names, reads, files)
    weights: dict[str, Array] = {}
    for w in spec.weights():
        host = _read(w, reads[w.name], keys, files)
        target = (dtype or host.dtype) if w.is_matrix else "float32"
        if target == "float16" and host.dtype != "float16":
            _check_range(w.name, host)
        weights[w.name] = memory.put(host.data, host.dtype, target)
        progress(host.data.nbytes)
    return weights


def random_weights(spec: ModelSpec, memory: Memory, dtype: DType, seed: int, progress: Progress) -> dict[str, Array]:
    """Random weights of the right shapes (`--load-format dummy`): matrices N(0, 1/in), norms 1, biases 0, steps of a
    state space 1/20, so that its state remembers something.
    """
    weights: dict[str, Array] = {}
    for w in spec.weights():
        if w.is_matrix:
            own_seed = zlib.crc32(w.name.encode()) ^ seed
            weights[w.name] = memory.random(w.shape, dtype, w.shape[-1] ** -0.5, own_seed)
        else:
            fill = 0.0 if w.name.endswith(".bias") else -3.0 if w.name.endswith(".log_dt") else 1.0
            weights[w.name] = memory.put(np.full(w.shape, fill, np.float32), "float32", "float32")
        progress(w.num_params * (DTYPE_BYTES[dtype] if w.is_matrix else 4))
    return weights


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
    if a.dtype == b.dtype and np.array_equal(a.data, b.data):
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
    return HostTensor(np.stack(cut) if read.stacked else cut[0], parts[0].dtype)


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
