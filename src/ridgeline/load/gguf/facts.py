"""Typed access to the metadata of a GGUF model, which records the keys that are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.header import GgufValue
from ridgeline.load.gguf.layout import GgufLayout

_REQUIRED: Final[Any] = object()
_MOST_LAYERS = 10_000
# Keys below the architecture that change no output: sizes that the tensors give, and how the file was made.
_HARMLESS = frozenset({"vocab_size", "tensor_data_layout"})


class Facts:
    """The metadata and the tensors of a model. Keys are given without the architecture's name before them.

    Raises CheckpointError, which names the key, for a value of a wrong type and a missing key without a default.
    """

    def __init__(self, layout: GgufLayout) -> None:
        self.name = layout.files[0].name
        self.tensors = layout.tensors
        self._metadata: Mapping[str, GgufValue] = layout.metadata
        architecture = layout.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise CheckpointError(f"{self.name}: general.architecture is missing; the file is not a model")
        self.architecture = architecture
        self._read: set[str] = set()
        if "token_embd.weight" not in self.tensors:
            what = "has only a vocabulary" if not self.tensors else "has no token_embd.weight"
            raise CheckpointError(f"{self.name} {what}, so it is not a language model; give a file with its weights")
        self.vocab_size = self.tensors["token_embd.weight"].shape[0]
        if (stated := self.number("vocab_size", self.vocab_size)) > self.vocab_size:
            raise self.error("vocab_size", f"is {stated}, but token_embd.weight has {self.vocab_size} rows")

    def number(self, key: str, default: int = _REQUIRED) -> int:
        """Return a whole number that is not negative. A list of equal numbers, one for each layer, counts as one."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(type(v) is int and v == value[0] for v in value):
            value = value[0]
        if type(value) is not int or value < 0:
            kind = "differs between layers" if isinstance(value, list) else f"is {value!r}"
            raise self.error(key, f"{kind}; it must be one whole number of at least 0")
        return value

    def real(self, key: str, default: float = _REQUIRED) -> float:
        """Return a finite number. A float of the file is given with its fewest decimal digits: 1e-06, not 9.99e-07."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(key, f"is {value!r}; it must be a finite number")
        return shortest(value) if key in self else float(value)

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}; it must be a text")
        return value

    def expect(self, key: str, wanted: object) -> None:
        """Raise CheckpointError unless the value is the only one that is supported, or absent."""
        value = self._get(key, wanted)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not type(wanted) or value != wanted:
            raise self.error(key, f"is {value!r}, which is not supported; it must be {wanted!r}")

    def skip(self, *keys: str) -> None:
        """Mark keys as read."""
        self._read.update(keys)

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._metadata

    def layer_types(self, layers: int, period: int) -> list[str]:
        """Return the kind of each layer: every `period`-th is full, the others are sliding, unless the file has its own
        pattern (a period, or whether each layer is sliding).
        """
        if layers > _MOST_LAYERS:
            raise self.error("block_count", f"is {layers}; the limit is {_MOST_LAYERS}")
        pattern = self._get("attention.sliding_window_pattern", period)
        if type(pattern) is int and pattern > 0:
            local = [(i + 1) % pattern != 0 for i in range(layers)] if pattern > 1 else [False] * layers
        elif isinstance(pattern, list) and len(pattern) == layers and all(v in (0, 1) for v in pattern):
            local = [bool(v) for v in pattern]
        else:
            raise self.error("attention.sliding_window_pattern", f"does not fit {layers} layers")
        return ["sliding_attention" if v else "full_attention" for v in local]

    def token(self, name: str) -> int | None:
        """Return the id of a special token, or None."""
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and type(value) is not int:
            raise CheckpointError(f"{self.name}: tokenizer.ggml.{name} is {value!r}; it must be a whole number")
        return value

    def finish(self) -> None:
        """Raise CheckpointError, which names them, for keys of the architecture that nobody has read."""
        prefix = f"{self.architecture}."
        keys = {key.removeprefix(prefix) for key in self._metadata if key.startswith(prefix)}
        if unread := sorted(keys - self._read - _HARMLESS):
            raise self.error(", ".join(unread), "is not understood; ignoring it could change the model's outputs")

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {self.architecture}.{key} {problem}")

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if value is _REQUIRED:
            raise self.error(key, "is missing; convert the model again")
        return value


def shortest(value: float) -> float:
    """Return the number with the fewest decimal digits that a float32 stores as this value."""
    return float(str(np.float32(value)))
