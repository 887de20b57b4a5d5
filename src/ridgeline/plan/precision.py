"""How many bytes a number takes where it is stored, and in which type products are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from ridgeline.errors import RequestError
from ridgeline.spec import Weight

FLOAT_BYTES = 4  # vectors (norms, biases) and recurrent state are float32 whatever else is chosen


@dataclass(frozen=True, slots=True)
class Storage:
    """bits: of an element. group: elements of a row that share a scale of `scale_bits`; 0 is the whole row."""

    bits: int
    group: int | None = None
    scale_bits: int = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Of a matrix, scales included."""
        scales = 0 if self.group is None else rows * ceil(columns / (self.group or columns))
        return ceil((rows * columns * self.bits + scales * self.scale_bits) / 8)


STORAGE: Mapping[str, Storage] = MappingProxyType({
    "float32": Storage(32), "bfloat16": Storage(16), "float16": Storage(16), "fp8": Storage(8),
    "int8": Storage(8, 0, 32), "int4": Storage(4, 128, 16), "int3": Storage(3, 128, 16), "mxfp4": Storage(4, 32, 8),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of weight matrices, of rows of state (keys, values, latents) and of activations.

    Products are computed in the activations' type, unless both operands are int8, or both fp8.
    Raises RequestError for a type that is not known.
    """

    weights: str = "bfloat16"
    state: str = "bfloat16"
    activations: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in (self.weights, self.state, self.activations):
            if name not in STORAGE:
                raise RequestError(f"type {name!r} is not known; known are {', '.join(STORAGE)}")

    @property
    def compute(self) -> str:
        return self.activations

    def weight_bytes(self, weight: Weight) -> int:
        """As stored, scales included."""
        if not weight.is_matrix:
            return weight.num_params * FLOAT_BYTES
        columns = weight.shape[-1]
        return STORAGE[self.weights].num_bytes(weight.num_params // columns, columns)

    def state_bytes(self, elements: int, row: int, *, snapshot: bool) -> int:
        """Of so many numbers of state in rows of `row` that share a scale, where the type has any."""
        if snapshot:
            return elements * FLOAT_BYTES
        return STORAGE[self.state].num_bytes(elements // row, row) if elements else 0

    def activation_bytes(self, elements: float) -> float:
        return elements * STORAGE[self.activations].bits / 8
