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

StateDType = Literal["float64", "float32", "bfloat16", "float16", "int8"]
_BYTES: Final[Mapping[StateDType, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4  # a float32
ALIGNMENT = 4  # bytes: every array of a page begins on a multiple


@dataclass(frozen=True, slots=True)
class Storage:
    """Elements of `dtype`.

    int8: each head of a token also has a scale, its largest magnitude over 127; numbers are rounded to the nearest
    multiple of it. The scale is stored in the row, in one int8 element for each of
    its bytes.
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
# The choices for keys, values and latents.
STORAGES: Final[Mapping[str, Storage]] = {name: Storage(name) for name in get_args(StateDType) if name != "float64"}


def storage_of(state: State, storage: Storage) -> Storage:
    """Return how a layer's state is stored if keys and values are stored as `storage`."""
    return EXACT if state.snapshot else storage


def has_rows(spec: ModelSpec) -> bool:
    """Return whether any layer keeps a row for each token."""
    return any(s.elements and not s.snapshot for s in (layer.mixer.state() for layer in spec.layers if layer.mixer))


def state_bytes(state: State, storage: Storage, num_tokens: int) -> int:
    """Return the bytes that a sequence of `num_tokens` tokens keeps in a layer, without empty slots of pages."""
    one = sum(storage_of(state, storage).part_bytes(shape) for shape in state.parts)
    return one * state.rows_at(num_tokens)
