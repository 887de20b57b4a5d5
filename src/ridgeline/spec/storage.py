"""Define how keys, values and latents are stored; the sizes of pages and all counts of memory derive from it.

The states of recurrent layers are kept in the type in which the device computes, float32 or float64, because every step
would round them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, get_args

from ridgeline.spec.model import ModelSpec
from ridgeline.spec.state import State

StateDType = Literal["float64", "float32", "bfloat16", "float16", "int8", "fp8"]
_BYTES: Final[Mapping[StateDType, int]] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1,
}  # fmt: skip
# Scales of a layer in fp8: of keys and of values. Latents use the first one.
KVScales = tuple[float, float]
UNSCALED: Final[KVScales] = (1.0, 1.0)
SCALE_BYTES = 4  # a float32
ALIGNMENT = 4  # bytes: every array of a page begins on a multiple


@dataclass(frozen=True, slots=True)
class Storage:
    """Elements of `dtype`.

    int8: each head of a token also has a scale, its largest magnitude over 127; numbers are rounded to the nearest
    multiple of it. The scale is stored in the row, in one int8 element for each of
    its bytes.

    fp8: a number over its scale is rounded to e4m3; beyond 448 it becomes 448. Keys of a layer share one scale, and so
    do its values: they belong to the model (`nn.Model`), not to the rows.
    """

    dtype: StateDType

    @property
    def element_bytes(self) -> int:
        return _BYTES[self.dtype]

    @property
    def is_exact(self) -> bool:
        """Return whether every number is stored as it was computed."""
        return self.dtype == "float32"

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape (heads, elements) of a token's part, scales included."""
        return (*shape[:-1], shape[-1] + SCALE_BYTES) if self.dtype == "int8" else shape

    def part_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a part of this shape for one token."""
        return prod(self.stored(shape)) * self.element_bytes


EXACT: Final = Storage("float32")
SNAPSHOTS: Final[Mapping[int, Storage]] = {4: EXACT, 8: Storage("float64")}  # by the bytes of a computed number
HALVES: Final = Storage("float16")
# The choices for keys, values and latents.
STORAGES: Final[Mapping[str, Storage]] = {name: Storage(name) for name in get_args(StateDType) if name != "float64"}


def default_storage(weights: str) -> Storage:
    """Return how keys, values and latents are stored unless the user says otherwise.

    weights: the name of the type or the format of most matrices. float16 has 11 bits of mantissa, and bfloat16 has 8.
    """
    return EXACT if weights == "float32" else HALVES


def storage_of(state: State, storage: Storage) -> Storage:
    """Return how a layer's state is stored if keys and values are stored as `storage`."""
    return EXACT if state.snapshot else storage


def num_row_layers(spec: ModelSpec) -> int:
    """Return the number of layers that keep a row for each token."""
    states = (layer.mixer.state() for layer in spec.layers if layer.mixer)
    return sum(bool(s.elements) and not s.snapshot for s in states)


def has_rows(spec: ModelSpec) -> bool:
    """Return whether any layer keeps a row for each token."""
    return num_row_layers(spec) > 0


def state_bytes(state: State, storage: Storage, num_tokens: int) -> int:
    """Return the bytes that a sequence of `num_tokens` tokens keeps in a layer, without empty slots of pages."""
    one = sum(storage_of(state, storage).part_bytes(shape) for shape in state.parts)
    return one * state.rows_at(num_tokens)
