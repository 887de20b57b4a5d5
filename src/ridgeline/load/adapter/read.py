"""Read an adapter's tensors, and find the weights of a model that they change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ridgeline.archs import Names, Read
from ridgeline.errors import CheckpointError
from ridgeline.load.adapter.config import CONFIG, AdapterConfig, read_adapter_config
from ridgeline.load.adapter.terms import Floats, Term
from ridgeline.load.hub import find_model
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.weights import part_of, stored_shape
from ridgeline.spec import ModelSpec, Weight

DEFAULT_RANK = 16
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {
    "lora_A.weight": "down", "lora_B.weight": "up", "lora_B.bias": "add", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude", "lora_embedding_A": "down", "lora_embedding_B": "up",
}  # fmt: skip
_TABLES = ("lora_embedding_A", "lora_embedding_B")
_KEY = re.compile(rf"(?P<module>.+)\.(?P<part>{'|'.join(map(re.escape, _PARTS))})")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter for one model.

    terms: low-rank terms by the name of the matrix. replaced: whole weights by name: biases, and modules that were
    trained in full. folder: where it came from.
    """

    folder: Path
    config: AdapterConfig
    terms: Mapping[str, Term]
    replaced: Mapping[str, Floats]

    @property
    def rank(self) -> int:
        """Return the largest rank of a term; 0 if there is none."""
        return max((term.rank for term in self.terms.values()), default=0)


class _Target(NamedTuple):
    """A weight of ours that a tensor of a transformers model has, and how it is read from it."""

    weight: Weight
    read: Read


def find_adapter(name: str) -> Path:
    """Return the folder of an adapter: a local one, or one from the hub. Raises CheckpointError."""
    return find_model(name, files=(CONFIG, TENSORS))


def rank_of(sources: Mapping[str, str] | None, given: int | None) -> int:
    """Return the largest rank that is served: the given one, or that of adapters, by their folders or hub ids.

    Without either it is DEFAULT_RANK. Raises CheckpointError for a config that cannot be read.
    """
    if given is not None or not sources:
        return DEFAULT_RANK if given is None else given
    configs = [read_adapter_config(find_adapter(source)) for source in sources.values()]
    return max(int(rank) for config in configs for rank in (config.rank, *config.ranks.values()))


def read_adapter(folder: Path, spec: ModelSpec, names: Names, max_rank: int) -> Adapter:
    """Read an adapter for a model. max_rank: largest rank of a term that is served.

    Raises CheckpointError, which names the tensor or the field, for an adapter that does not fit the model, that has
    numbers besides finite ones, or that asks for something that is not served.
    """
    config = read_adapter_config(folder)
    if not (folder / TENSORS).exists():
        pickled = " (adapter_model.bin can run code when it is read: save the adapter again as safetensors)"
        raise CheckpointError(f"{folder} has no {TENSORS}{pickled if (folder / 'adapter_model.bin').exists() else ''}")
    files, targets = TensorFiles(folder, TENSORS), _targets(spec, names)
    modules: dict[str, dict[str, str]] = {}
    replaced: dict[str, Floats] = {}
    for key in files:
        if found := _KEY.fullmatch(key):
            modules.setdefault(_module(found["module"], names), {})[found["part"]] = key
        else:
            replaced |= _replacements(folder, files, key, targets, names)
    terms: dict[str, Term] = {}
    for module, parts in modules.items():
        terms |= _Module(folder, files, config, module, parts).terms(targets, max_rank)
    if not terms and not replaced:
        raise CheckpointError(f"{folder / TENSORS} has no tensors of an adapter")
    return Adapter(folder, config, terms, replaced)


def _module(name: str, names: Names) -> str:
    """Return the name of a module without the prefixes of peft and of the family's files."""
    return name.removeprefix(_PREFIX).removesuffix(".base_layer").removeprefix(names.optional_prefix)


def _targets(spec: ModelSpec, names: Names) -> dict[str, list[_Target]]:
    """Return the weights that each tensor of the model has, by its name in any layout of the family's files."""
    weights, found = {w.name: w for w in spec.weights()}, dict[str, list[_Target]]()
    for layout in _layouts(names):
        own: dict[str, list[_Target]] = {}
        for name, read in layout.reads(spec).items():
            for key in read.keys:
                own.setdefault(key, []).append(_Target(weights[name], read))
        for key, targets in own.items():
            found.setdefault(key, targets)
    return found


def _layouts(names: Names) -> Iterator[Names]:
    yield names
    yield from names.others
    yield names.bare()


def _replacements(
    folder: Path, files: TensorFiles, key: str, targets: Mapping[str, list[_Target]], names: Names
) -> dict[str, Floats]:
    """Return the weights that a whole tensor of the adapter replaces."""
    module, _, kind = key.rpartition(".")
    name = f"{_module(module, names)}.{kind}"
    if name not in targets:
        raise _unknown(folder, key, targets)
    found: dict[str, Floats] = {}
    for weight, read in targets[name]:
        if read.stacked:
            raise CheckpointError(f"{folder.name}: {key} belongs to experts, which no adapter may change here")
        if files.info(key).shape != (wanted := stored_shape(weight, read)):
            raise _shape(folder, files, key, wanted)
        found[weight.name] = np.ascontiguousarray(part_of(_floats(folder, files, key), read)).reshape(weight.shape)
    return found


class _Module:
    """The tensors of one module of the adapter."""

    def __init__(
        self, folder: Path, files: TensorFiles, config: AdapterConfig, module: str, parts: Mapping[str, str]
    ) -> None:
        self._folder, self._files, self._config, self._module = folder, files, config, module
        self._is_table = any(part in _TABLES for part in parts)
        self._keys = {_PARTS[part]: key for part, key in parts.items()}

    def terms(self, targets: Mapping[str, list[_Target]], max_rank: int) -> dict[str, Term]:
        """Return the terms of the matrices that the module consists of."""
        some = next(iter(self._keys.values()))
        own = targets.get(f"{self._module}.weight")
        if own is None:
            raise _unknown(self._folder, some, targets)
        for name in ("down", "up"):
            if name not in self._keys:
                raise self._wrong(some, f"has no lora_{'A' if name == 'down' else 'B'} beside it")
        if self._config.dora != ("magnitude" in self._keys):
            raise self._wrong(some, "has magnitudes, or lacks them, against use_dora in the config")
        shape, rank = self._shape(own), self._rank(max_rank)
        self._expect("down", (rank, shape[1]))
        self._expect("up", (shape[0], rank))
        scale = np.float32(self._config.scale_of(self._module))
        down, up = self._read("down"), self._read("up") * scale
        add = self._vector("add", shape[0])
        magnitude = self._vector("magnitude", shape[0])
        if self._is_table:
            return {own[0].weight.name: Term(down, up, None, magnitude, table=True)}
        return {
            weight.name: Term(
                down, _rows(up, read, weight), None if add is None else _rows(add * scale, read, weight),
                None if magnitude is None else _rows(magnitude, read, weight),
            )
            for weight, read in own
        }  # fmt: skip

    def _shape(self, own: list[_Target]) -> tuple[int, int]:
        """Return the rows and columns of the module's matrix W [out, in]."""
        weight, read = own[0]
        plain = replace(read, transpose=False)
        shape = stored_shape(weight, plain)
        if len(shape) != 2 or read.stacked or read.every or read.expert_rows:
            kind = "experts" if ".experts." in weight.name else "more than one matrix"
            raise self._wrong(self._module, f"has {kind}, which no adapter may change here; let peft merge it")
        if self._is_table != (weight.name.endswith("embed.weight")):
            raise self._wrong(self._module, "has tensors of an embedding, and the model another kind of module")
        return (shape[1], shape[0]) if self._is_table else (shape[0], shape[1])

    def _rank(self, max_rank: int) -> int:
        rank, key = self._config.rank_of(self._module), self._keys["down"]
        found = self._files.info(key).shape
        if len(found) != 2 or found[0] != rank:
            raise self._wrong(key, f"has shape {list(found)}, but the config says rank {rank}")
        if rank > max_rank:
            raise self._wrong(key, f"has rank {rank}; the limit (--max-lora-rank) is {max_rank}")
        return rank

    def _expect(self, part: str, shape: tuple[int, ...]) -> None:
        if self._files.info(self._keys[part]).shape != shape:
            raise _shape(self._folder, self._files, self._keys[part], shape)

    def _vector(self, part: str, size: int) -> Floats | None:
        if part not in self._keys:
            return None
        if int(np.prod(self._files.info(self._keys[part]).shape)) != size:
            raise _shape(self._folder, self._files, self._keys[part], (size,))
        return self._read(part).reshape(size)

    def _read(self, part: str) -> Floats:
        return _floats(self._folder, self._files, self._keys[part])

    def _wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._folder.name}: {key} {why}")


def _rows(array: Floats, read: Read, weight: Weight) -> Floats:
    """Return the part of an array [all rows, ...] that belongs to a weight of ours."""
    part = part_of(array, replace(read, transpose=False))
    return np.ascontiguousarray(part.reshape(-1, *array.shape[1:]))


def _floats(folder: Path, files: TensorFiles, key: str) -> Floats:
    """Return a tensor in float32. Raises CheckpointError if a number is not finite."""
    host = files.read(key)
    found: Floats = _bfloat16(host.data) if host.dtype == "bfloat16" else host.data.astype(np.float32)
    if not np.isfinite(found).all():
        raise CheckpointError(f"{folder.name}: {key} has numbers that are not finite (NaN or infinity)")
    return found


def _bfloat16(bits: np.ndarray[Any, Any]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _unknown(folder: Path, key: str, targets: Mapping[str, Any]) -> CheckpointError:
    some = ", ".join([name.removesuffix(".weight") for name in targets if name.endswith(".weight")][1:4])
    return CheckpointError(
        f"{folder.name}: {key} changes a module that the model does not have; its modules are {some} ..."
    )


def _shape(folder: Path, files: TensorFiles, key: str, wanted: tuple[int, ...]) -> CheckpointError:
    found = list(files.info(key).shape)
    return CheckpointError(
        f"{folder.name}: {key} has shape {found}, but the model's {list(wanted)}; the adapter is of another model"
    )
