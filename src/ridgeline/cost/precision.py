"""Define how many bytes a stored number takes, and in which type products are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from ridgeline.catalog.machines import nearest
from ridgeline.errors import RequestError
from ridgeline.spec import Weight
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.weight import DECIDING

FLOAT_BYTES = 4  # vectors (norms, biases) and recurrent state are float32 whatever else is chosen


@dataclass(frozen=True, slots=True)
class Storage:
    """A type of stored numbers.

    bits: size of an element. group: elements of a row that share a scale of `scale_bits`; 0 is the whole row, None
    means that there are no scales.
    """

    bits: int
    group: int | None = None
    scale_bits: int = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix, scales included."""
        scales = 0 if self.group is None else rows * ceil(columns / (self.group or columns))
        return ceil((rows * columns * self.bits + scales * self.scale_bits) / 8)


STORAGE: Mapping[str, Storage] = MappingProxyType({
    "float32": Storage(32), "bfloat16": Storage(16), "float16": Storage(16), "fp8": Storage(8),
    "int8": Storage(8, 0, 32), "int4": Storage(4, 32, 16), "int4-128": Storage(4, 128, 16), "int3": Storage(3, 128, 16),
    "mxfp4": Storage(4, 32, 8),
})  # fmt: skip
# If the rates of a type were not measured, those of the next wider type are used.
WIDER_STORAGE: Mapping[str, str] = MappingProxyType({
    "mxfp4": "int4", "int3": "int4", "int4-128": "int4", "int4": "int8", "int8": "bfloat16", "fp8": "bfloat16",
    "float16": "bfloat16", "bfloat16": "float32",
})  # fmt: skip
# Modules whose matrices are not rounded: embedding tables, and matrices whose results decide how others are used.
KEPT_WIDE = DECIDING | {"embed", "position_embed"}
SPELLINGS: Mapping[str, str] = MappingProxyType({
    "fp32": "float32", "float": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16",
    "half": "float16", "fp4": "mxfp4", "float8": "fp8",
})  # fmt: skip


def storage_type(name: str) -> str:
    """Return the name of a type from any of its spellings. Raises RequestError with the nearest names."""
    found = SPELLINGS.get(name.lower(), name.lower())
    if found not in STORAGE:
        raise RequestError(f"type {name!r} is not known; {nearest(found, [*STORAGE, *SPELLINGS])}")
    return found


def may_be_rounded(weight: Weight) -> bool:
    """Return whether `weight` may be stored in 8 bits or fewer: a matrix that is multiplied, not in KEPT_WIDE."""
    is_product = len(weight.shape) == 2 or "experts." in weight.name
    return is_product and weight.name.split(".")[-2] not in KEPT_WIDE


def products_type(hardware: HardwareSpec, weights: str, activations: str) -> str:
    """Return the type that products with weights of a type are computed in.

    On a CPU, our kernels round the activations of each token to int8 if weights have 8 bits or fewer (docs/kernels.md).
    On other machines, fp8 weights are multiplied with fp8 activations if there is a unit for that. Otherwise it is the
    type of the activations.
    """
    if hardware.kind == "cpu" and weights in ("int8", "int4", "int4-128", "int3"):
        return "int8"
    return "fp8" if weights == "fp8" and hardware.unit("fp8") == "fp8" else activations


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of weight matrices, of rows of state (keys, values, latents) and of activations.

    experts: type of the matrices of experts. Default: None, the same as `weights`. products: type that products with
    weights are computed in. Default: None, the type of the activations. Raises RequestError for an unknown type.
    """

    weights: str = "bfloat16"
    state: str = "bfloat16"
    activations: str = "bfloat16"
    experts: str | None = None
    products: str | None = None

    def __post_init__(self) -> None:
        for name in (self.weights, self.state, self.activations, self.experts, self.products):
            if name is not None and name not in STORAGE:
                raise RequestError(f"type {name!r} is not known; known are {', '.join(STORAGE)}")

    @property
    def compute(self) -> str:
        """Type of the operands of products with weights."""
        return self.products or self.activations

    def stored_type(self, weight: Weight) -> str:
        """Return the type that a matrix is stored in: bfloat16 if a narrower type would round a matrix of KEPT_WIDE."""
        kind = self.experts or self.weights if "experts." in weight.name else self.weights
        return kind if STORAGE[kind].bits >= 16 or may_be_rounded(weight) else "bfloat16"

    def weight_bytes(self, weight: Weight) -> int:
        """Return the bytes of a weight as it is stored, scales included."""
        if not weight.is_matrix:
            return weight.num_params * FLOAT_BYTES
        columns = weight.shape[-1]
        return STORAGE[self.stored_type(weight)].num_bytes(weight.num_params // columns, columns)

    def state_bytes(self, elements: int, row: int, *, snapshot: bool) -> int:
        """Return the bytes of `elements` numbers of state. row: numbers that share a scale, if the type has scales."""
        if snapshot:
            return elements * FLOAT_BYTES
        return STORAGE[self.state].num_bytes(elements // row, row) if elements else 0

    def activation_bytes(self, elements: float) -> float:
        """Return the bytes of `elements` numbers of activations."""
        return elements * STORAGE[self.activations].bits / 8


def default_precision(
    hardware: HardwareSpec, weights: str, experts: str, *, state: str | None = None, activations: str | None = None
) -> Precision:
    """Return the precision of a model that is published with these types of weights and experts.

    Activations are by default float32 on a CPU, where our kernels compute in float32, and otherwise have the type of
    the weights, or bfloat16 if weights have 8 bits or fewer. State has by default the type of the activations.
    """
    if activations is None:
        wide = weights if weights in ("float32", "bfloat16", "float16") else "bfloat16"
        activations = "float32" if hardware.kind == "cpu" else wide
    if state is None:
        state = activations if STORAGE[activations].bits >= 16 else "bfloat16"
    products = products_type(hardware, weights, activations)
    return Precision(weights, state, activations, None if experts == weights else experts, products)


def cpu_precision(weights: str, state: str, hardware: HardwareSpec) -> Precision:
    """Return the precision of device cpu: activations in float32, products with rounded weights in int8."""
    return Precision(weights, state, "float32", None, products_type(hardware, weights, "float32"))
