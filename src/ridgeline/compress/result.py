"""A quantized model: the codes of finished parts on disk, and everything else from the original checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ridgeline.compress.calibrate import rounded
from ridgeline.compress.choose import Chosen
from ridgeline.compress.gguf import Others
from ridgeline.compress.grid import Floats
from ridgeline.compress.inputs import MatrixKey
from ridgeline.compress.layers import Part
from ridgeline.compress.partial import Partial
from ridgeline.load.gguf.pack import pack_matrix
from ridgeline.load.gguf.write import EncodedRows
from ridgeline.load.safetensors import HostTensor
from ridgeline.nn import PassingModel
from ridgeline.ops.arrays import QuantizedMatrix, QuantizedStack
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec.quant import Format


class Quantized:
    """The weights of a quantized model, by name. Each access reads them again, so that few are in memory.

    Args:
        original: the model that was quantized.
        formats: the format of every matrix that was rounded, by name.
        types: for a GGUF file, the type of each of its matrices, by name.
    """

    def __init__(
        self, original: LoadedModel, parts: list[Part], partial: Partial, formats: Mapping[str, Format],
        types: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.original, self.formats, self.types = original, formats, types
        self._others = Others(partial.folder, types)
        self._partial = partial
        self._part = {w.name: part for part in parts for w in part.weights}
        self._last: tuple[Part, Chosen] | None = None

    def part(self, name: str) -> Chosen:
        """Return the result of the part to which a weight belongs."""
        part = self._part[name]
        if self._last is None or self._last[0] is not part:
            self._last = part, self._partial.load(part)
        return self._last[1]

    def codes(self, name: str) -> QuantizedMatrix | QuantizedStack:
        """Return a matrix that was rounded."""
        found = self.part(name).codes
        if (key := MatrixKey(name)) in found:
            return found[key]
        return QuantizedStack([found[key] for key in sorted(k for k in found if k.name == name)])

    def floats(self, name: str) -> Any:
        """Return a weight as floats: as the checkpoint has it, as it was changed, or the numbers of its codes."""
        if name in self.formats:
            found = self.part(name)
            if (key := MatrixKey(name)) in found.codes:
                return found.numbers(key)
            return np.stack([found.numbers(key) for key in sorted(k for k in found.codes if k.name == name)])
        kept = self._kept(name)
        return self._others.floats(name, kept) if name in self._others else kept

    def encoded(self, name: str) -> EncodedRows | HostTensor:
        """Return a weight as a GGUF file has it."""
        if name in self.formats:
            found = self.codes(name)
            if isinstance(found, QuantizedMatrix):
                return EncodedRows(self.types[name], pack_matrix(found))
            return EncodedRows(self.types[name], np.stack([pack_matrix(found[e]) for e in range(found.shape[0])]))
        kept = self._kept(name)
        if name in self._others:
            return self._others.rows(name, kept)
        return HostTensor(np.asarray(kept, np.float32), "float32")

    def _kept(self, name: str) -> Any:
        """Return a weight that stays floats, as the checkpoint has it or as it was changed."""
        changed = self.part(name).changed.get(name) if name in self._part else None
        return self.original.model.weights[name] if changed is None else changed

    def changed(self) -> dict[str, Floats]:
        """Return the weights that stay floats and are not as they were."""
        return {name: w for part in dict.fromkeys(self._part.values()) for name, w in self._load(part).changed.items()}

    def _load(self, part: Part) -> Chosen:
        return self.part(part.weights[0].name)

    def model(self, *, exact: bool = False) -> LoadedModel:
        """Return the quantized model, which builds each layer when it is needed.

        exact: whether products take exact activations, whatever the formats say.
        """
        spec, table, weights = self.original.spec, self.original.table, _Weights(self, exact)
        return replace(self.original, model=PassingModel(spec, weights, table, self.original.max_model_len))


class _Weights(Mapping[str, Any]):
    """The weights with which a quantized model is computed."""

    def __init__(self, quantized: Quantized, exact: bool) -> None:
        self._quantized, self._exact = quantized, exact
        self._names = tuple(quantized.original.model.weights)

    def __getitem__(self, name: str) -> Any:
        if name in self._quantized.formats and not self._exact:
            part = self._quantized._part[name]
            return rounded(part, self._quantized.part(name))[name]
        return self._quantized.floats(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
