"""Load a checkpoint's tensors as the weights of a ModelSpec, strictly: no tensor may be missing or left over."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.archs import Names, Read
from ridgeline.errors import CheckpointError
from ridgeline.load.kv_scales import layer_scales
from ridgeline.load.packed import Files
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.share import columns_of, numbers_of, rows_of
from ridgeline.load.stored import Stored, cut_format, cut_rows, dequantized
from ridgeline.ops.api import Array, Memory, QuantizedMatrix, QuantizedStack
from ridgeline.spec import ModelSpec, Weight
from ridgeline.spec.dtype import DTYPE_BYTES, DTYPE_NAMES, DType
from ridgeline.spec.quant import Activations, Format, FormatTable, coded_bytes, format_of
from ridgeline.spec.share import WHOLE, Share, shares
from ridgeline.spec.storage import KVScales

Progress = Callable[[int], None]  # called with the bytes of each weight that has been read


class StoredWeights(Mapping[str, Array]):
    """Every weight of a spec by our name. Each access reads it from the checkpoint onto the device.

    Matrices that the checkpoint stores as codes are QuantizedMatrix, or QuantizedStack for experts. A weight that is
    not multiplied as one matrix (kv_b of latent attention) is dequantized, and so is one whose format is not kept.
    `formats` has the format of each matrix that stays codes, `dequantized` the format of each that does not.

    dtype: type of the matrices of floats, None for the checkpoint's own; vectors (norms, biases) are always float32. On
    a CPU, a contiguous matrix that keeps its type is a view of the mapped file. progress: called when a weight is read
    for the first time. activations: how inputs of matrices in codes are taken; None: as the checkpoint says. keeps:
    whether the device multiplies with codes of a format. part: the part of `spec` whose weights these are, for a rank
    that reads its own rows only. Raises
    CheckpointError, which names the tensors, for missing and unknown ones, for codes of wrong shapes and, when they are
    read, for floats of wrong shapes; and RequestError for activations that the codes do not allow.
    """

    def __init__(
        self, spec: ModelSpec, names: Names, files: Files, memory: Memory, dtype: DType | None, progress: Progress,
        activations: Activations | None = None, keeps: Callable[[Format], bool] = lambda format: True,
        part: ModelSpec | None = None,
    ) -> None:  # fmt: skip
        names = names.fitting(spec, {key.removeprefix(names.optional_prefix) for key in files})
        self._spec, self._names = spec, names
        self._shares: Mapping[str, Share] = shares(spec, part) if part is not None else {}
        self._shapes = {w.name: w.shape for w in (part or spec).weights()}
        self._weights, self._reads = {w.name: w for w in spec.weights()}, names.reads(spec)
        self._keys = _resolve_keys(spec, names, self._reads, files)
        self._files, self._memory, self._dtype, self._progress = files, memory, dtype, progress
        self._fresh = set(self._weights)
        self._activations, self._keeps = activations, keeps
        self._coded = {w.name: found for w in self._weights.values() if (found := self._codes_of(w)) is not None}
        self.formats = self._format_table(spec)

    def __getitem__(self, name: str) -> Array:
        w = self._weights[name]
        if name in self._coded:
            return self._quantized(w, self._coded[name])
        host = _read(w, self._reads[name], self._keys, self._files, self._share(name), self._names.described)
        target = (self._dtype or host.dtype) if w.is_matrix else "float32"
        if target == "float16" and host.dtype != "float16":
            _check_range(w.name, host)
        found = self._memory.put(host.data, host.dtype, target)
        if isinstance(found, np.ndarray) and not np.may_share_memory(found, host.data):  # it was copied
            for key in self._reads[name].keys:
                self._files.release(self._keys[key])
        self._report(name, host.data.nbytes)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def kv_scales(self) -> Mapping[int, KVScales]:
        """Return the scales of an fp8 KV cache's keys and values, by layer. Raises CheckpointError for invalid ones."""
        names, spec = self._names, self._spec

        def is_ignored(key: str) -> bool:
            return names.is_ignored(key.removeprefix(names.optional_prefix), spec)

        return layer_scales(spec, self._files.kv_scales, is_ignored)

    @property
    def dtypes(self) -> Mapping[str, DType]:
        """Return the type of each matrix of floats after it was read, by name."""
        found: dict[str, DType] = {}
        for w in self._weights.values():
            if w.is_matrix and w.name not in (self.formats.by_name or {}):
                if self._dtype is not None:
                    found[w.name] = self._dtype
                elif w.name in self.dequantized:
                    found[w.name] = float_type(self.dequantized[w.name])
                elif name := DTYPE_NAMES.get(self._files.dtype(self._keys[self._reads[w.name].keys[0]])):
                    found[w.name] = name
        return found

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors as they are read."""
        return self._files.num_bytes()

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of the tensors that are views of the files."""
        return self._files.mapped_bytes()

    def _report(self, name: str, num_bytes: int) -> None:
        if name in self._fresh:
            self._fresh.remove(name)
            self._progress(num_bytes)

    def _codes_of(self, w: Weight) -> list[Stored] | None:
        """Return the stored matrices of a weight, or None for floats. Raises CheckpointError for wrong shapes."""
        read, stored = self._reads[w.name], self._files.stored
        keys = [self._keys[key] for key in read.keys]
        found = [stored[key] for key in keys if key in stored]
        if not found:
            return None
        if len(found) < len(keys) or any(other.format != found[0].format for other in found):
            raise CheckpointError(f"the experts of {w.name} have different types in the checkpoint")
        wanted = stored_shape(w, replace(read, transpose=False))  # codes are always [out, in]
        for key, one in zip(keys, found, strict=True):
            if one.shape != wanted:
                raise CheckpointError(
                    f"{key} has codes for shape {list(one.shape)}, but config.json requires {list(wanted)}"
                )
        return found

    def _format_table(self, spec: ModelSpec) -> FormatTable:
        """Return the format of each matrix, from headers alone."""
        by_name: dict[str, Format] = {}
        self.dequantized: dict[str, Format] = {}
        for name, found in self._coded.items():
            w = self._weights[name]
            cut = cut_format(found[0].format, self._rows(w, found[0].shape))
            own = format_of(cut.name, self._activations)
            is_looked_up = name == "embed.weight" and not spec.tie_word_embeddings
            stays = _is_one_matrix(w) and (is_looked_up or self._keeps(own))
            (by_name if stays else self.dequantized)[name] = own
        if spec.tie_word_embeddings and "embed.weight" in by_name:
            by_name["head.weight"] = by_name["embed.weight"]
        return FormatTable(by_name=by_name or None)

    def _quantized(self, w: Weight, found: list[Stored]) -> Array:
        """Read a weight that is stored as codes."""
        read, share = self._reads[w.name], self._share(w.name)
        rows = self._rows(w, found[0].shape)
        count = 1 if read.stacked or len(found[0].shape) == 2 else found[0].shape[0]
        matrices: list[QuantizedMatrix] = []
        for key, stored in zip(read.keys, found, strict=True):
            own = (cut_rows(stored.read(i), rows) for i in range(count))
            has_columns = share.axis == -1 and w.name not in self.dequantized
            matrices.extend(columns_of(w.name, self._taken(m), share) if has_columns else m for m in own)
            self._files.release(self._keys[key])
        self._report(w.name, sum(coded_bytes(m.format, m.shape[0], m.shape[1]) for m in matrices))
        if w.name in self.dequantized:
            wide = np.concatenate([dequantized(m) for m in matrices])
            if share.axis == -1 or not _is_one_matrix(w):
                wide = numbers_of(wide.reshape(w.shape), share)
            wide = wide.reshape(self._shapes[w.name])
            return self._memory.put(wide, "float32", self._dtype or float_type(self.dequantized[w.name]))
        device = [self._memory.quantized(self._taken(m)) for m in matrices]
        return QuantizedStack(device) if len(w.shape) == 3 else device[0]

    def _share(self, name: str) -> Share:
        return self._shares.get(name, WHOLE)

    def _rows(self, w: Weight, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return the rows of a stored matrix that this rank's part of a weight consists of, in order."""
        rows = _rows(w, self._reads[w.name], shape)
        return rows_of(rows, self._share(w.name)) if _is_one_matrix(w) else rows

    def _taken(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Return a matrix whose input is taken as the user wants it."""
        if self._activations is None:
            return matrix
        keeps = matrix.format.activations == self._activations
        format = format_of(matrix.format.name, self._activations)
        return replace(matrix, format=format, input_scale=matrix.input_scale if keeps else None)


def float_type(format: Format) -> DType:
    """Return the type that holds each number of a matrix after it was dequantized, to within one rounding of float32.

    A scale of MXFP4 is a power of two, so that each number is a bfloat16 number.
    """
    return "bfloat16" if replace(format, activations="exact") == format_of("fp4-32") else "float32"


def _is_one_matrix(w: Weight) -> bool:
    """Return whether a weight is one matrix, or experts: others are not multiplied as one."""
    return len(w.shape) == 2 or ".experts." in w.name


def _rows(w: Weight, read: Read, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the rows of a stored matrix [out, in], or of each of a stack, that a weight consists of, in order.

    Raises CheckpointError for a read that does not take whole rows.
    """
    if any(read.axes):
        raise CheckpointError(f"{w.name} is stored as codes, which a weight with other axes cannot be")
    rows = np.arange(shape[-2]).reshape(*(1,) * (len(shape) - 2), -1, 1)
    return part_of(rows, replace(read, transpose=False)).reshape(-1)


def load_weights(
    spec: ModelSpec, names: Names, files: Files, memory: Memory, dtype: DType | None, progress: Progress
) -> dict[str, Array]:
    """Return all weights of StoredWeights in memory."""
    return dict(StoredWeights(spec, names, files, memory, dtype, progress))


class RandomWeights(Mapping[str, Array]):
    """Random weights of the right shapes (`--load-format dummy`), drawn again at each access.

    Matrices are N(0, 1/in), norms 1, biases 0, and the steps of a state space 1/20, so that its state is not lost at
    once. part: the part of `spec` whose weights these are: cut out of those of the whole model.
    """

    def __init__(
        self, spec: ModelSpec, memory: Memory, dtype: DType, seed: int, progress: Progress,
        part: ModelSpec | None = None,
    ) -> None:  # fmt: skip
        self._weights = {w.name: w for w in spec.weights()}
        self._shares: Mapping[str, Share] = shares(spec, part) if part is not None else {}
        self._memory, self._dtype, self._seed, self._progress = memory, dtype, seed, progress
        self._fresh = set(self._weights)

    def __getitem__(self, name: str) -> Array:
        w, memory, share = self._weights[name], self._memory, self._shares.get(name, WHOLE)
        if name in self._fresh:
            self._fresh.remove(name)
            self._progress(w.num_params * (DTYPE_BYTES[self._dtype] if w.is_matrix else 4))
        if w.is_matrix:
            own_seed = zlib.crc32(name.encode()) ^ self._seed
            whole = memory.random(w.shape, self._dtype, w.shape[-1] ** -0.5, own_seed)
            return whole if share is WHOLE else numbers_of(whole, share)
        fill = 0.0 if name.endswith(".bias") else -3.0 if name.endswith(".log_dt") else 1.0
        return memory.put(numbers_of(np.full(w.shape, fill, np.float32), share), "float32", "float32")

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _resolve_keys(spec: ModelSpec, names: Names, reads: dict[str, Read], files: Files) -> dict[str, str]:
    """Map checkpoint names as the table spells them to those in the files. Raises CheckpointError unless the sets
    agree.
    """
    wanted = {key for read in reads.values() for key in read.keys}
    found: dict[str, str] = {}
    for key in files:
        if (other := found.setdefault(key.removeprefix(names.optional_prefix), key)) != key:
            raise CheckpointError(f"the checkpoint has both {other} and {key}, which are the same weight")
    if missing := sorted(wanted - set(found)):
        remedy = ""
        if names.described:
            ours = next(name for name, read in reads.items() if missing[0] in read.keys)
            remedy = f"; correct the name of {ours} in names"
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}, which {spec.family} needs{remedy}")
    unknown = sorted(found[k] for k in set(found) - wanted if not names.is_ignored(k, spec))
    unknown = [key for key in unknown if not _is_tied_head(key, spec, names, files, found)]
    if unknown:
        remedy = "; name its weights in names, or list it under ignore there" if names.described else ""
        raise CheckpointError(f"the checkpoint has {_some(unknown)}, which a {spec.family} model does not have{remedy}")
    return found


def _is_tied_head(key: str, spec: ModelSpec, names: Names, files: Files, found: dict[str, str]) -> bool:
    """Return whether a tensor is the output head of a tied model. Raises CheckpointError if it differs from the
    embedding.
    """
    head, embed = (names.root.get(n) for n in ("head", "embed"))
    if not spec.tie_word_embeddings or key != found.get(f"{head}.weight"):
        return False
    if key in files.stored or found[f"{embed}.weight"] in files.stored:
        raise CheckpointError(
            f"config.json ties the output head to the embedding, but the checkpoint stores {key} as codes of its own; "
            'set "tie_word_embeddings": false to use it'
        )
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


def _read(weight: Weight, read: Read, keys: dict[str, str], files: Files, share: Share, described: bool) -> HostTensor:
    """Read a rank's share of one weight; it is a view of the file if it is contiguous there. described: whether a user
    gave its name.
    """
    parts = [files.read(keys[key]) for key in read.keys]
    if len({p.dtype for p in parts}) > 1:
        raise CheckpointError(f"the experts of {weight.name} have different types in the checkpoint")
    stored = stored_shape(weight, read)
    for key, part in zip(read.keys, parts, strict=True):
        if part.data.shape != stored:
            remedy = f" for {weight.name}; correct the sizes in spec, or names" if described else ""
            raise CheckpointError(
                f"{keys[key]} has shape {list(part.data.shape)}, but config.json requires {list(stored)}{remedy}"
            )
    cut = [numbers_of(_cut(part.data, read, weight.shape), share) for part in parts]
    if not read.stacked:
        return HostTensor(cut[0], parts[0].dtype)
    stack = np.empty((len(cut), *cut[0].shape), cut[0].dtype)
    for target, data, key in zip(stack, cut, read.keys, strict=True):
        target[...] = data
        files.release(keys[key])
    return HostTensor(stack, parts[0].dtype)


def stored_shape(weight: Weight, read: Read) -> tuple[int, ...]:
    """Return the shape that each tensor of a read must have in the checkpoint."""
    shape = weight.shape[1:] if read.stacked else weight.shape
    if read.flat:
        shape = (shape[0] * shape[1], *shape[2:])
    if read.blocks is not None:
        shape = (shape[0] * shape[2], shape[1])
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
    """Return a view of the part of a stored tensor that a read takes. Parts of heads or groups keep that axis."""
    if read.blocks is not None:
        return data.reshape(read.blocks, -1, data.shape[-1]).swapaxes(-1, -2)
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
    """Raise CheckpointError if float16 cannot hold the values, which would silently become infinite."""
    bits = host.data
    values = (bits.astype(np.uint32) << 16).view(np.float32) if host.dtype == "bfloat16" else bits
    limit = float(np.finfo(np.float16).max)
    if values.size and (largest := float(np.abs(values).max())) > limit:
        raise CheckpointError(
            f"{name} contains {largest:g}, but float16 only reaches {limit:g}; use --dtype bfloat16 or float32"
        )


def _some(names: Iterable[str], limit: int = 5) -> str:
    """Return the first few names, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
