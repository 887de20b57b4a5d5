"""Define how many bytes a stored number takes, and in which type products are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil
from types import MappingProxyType

from ridgeline.catalog.machines import nearest
from ridgeline.errors import RequestError
from ridgeline.spec import Weight
from ridgeline.spec.dtype import DTYPE_NAMES, DType
from ridgeline.spec.footprint import footprint
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.heads import HeadSpec
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.quant import FORMATS, PLAIN, FormatTable, format_of
from ridgeline.spec.schemes import scheme_of
from ridgeline.spec.storage import default_storage
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
    scale_bits: float = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix, scales included."""
        scales = 0 if self.group is None else rows * ceil(columns / (self.group or columns))
        return ceil((rows * columns * self.bits + scales * self.scale_bits) / 8)


FLOATS: Mapping[str, Storage] = MappingProxyType({
    "float32": Storage(32), "bfloat16": Storage(16), "float16": Storage(16), "fp8": Storage(8),
    "mxfp4": Storage(4, 32, 8),
})  # fmt: skip
# If the rates of a type were not measured, those of the next wider type are used.
_WIDER: Mapping[str, str] = MappingProxyType({
    "mxfp4": "int4", "int2": "int3", "int3": "int4", "int4": "int8", "int5": "int8", "int6": "int8", "iq4": "int4",
    "fp4": "int4", "nf4": "int4", "int8": "bfloat16", "fp8": "bfloat16", "float16": "bfloat16", "bfloat16": "float32",
})  # fmt: skip
# Modules whose matrices are not rounded: embedding tables, and matrices whose results decide how others are used.
KEPT_WIDE = DECIDING | {"embed", "position_embed"}
SPELLINGS: Mapping[str, str] = MappingProxyType({
    "fp32": "float32", "float": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16",
    "half": "float16", "fp4": "mxfp4", "float8": "fp8",
})  # fmt: skip


@cache
def storage_of(name: str) -> Storage:
    """Return how a type is stored: one of FLOATS, or a format of weights. Raises RequestError for an unknown name."""
    if name in FLOATS:
        return FLOATS[name]
    format = format_of(name)
    return Storage(format.bits, format.group, format.group_bits)


def wider_storage(name: str) -> str | None:
    """Return the type whose rates stand for those of `name`, if the latter were not measured; None for the widest."""
    if not is_storage(name):  # an operation without stored numbers
        return None
    return _WIDER.get(name) if name in _WIDER or name in FLOATS else format_of(name).numbers


def is_storage(name: str) -> bool:
    """Return whether `name` is a type of stored numbers."""
    try:
        storage_of(name)
    except RequestError:
        return False
    return name != "auto"


def storage_type(name: str) -> str:
    """Return the name of a type from any of its spellings; a scheme such as `gptq-int3` has the type of its format.

    Raises RequestError with the nearest names.
    """
    found = SPELLINGS.get(name.lower(), name.lower())
    if (scheme := scheme_of(found)) is not None:
        return scheme[1].name
    if not is_storage(found):
        known = [*FLOATS, *(name for name in FORMATS if name != "auto"), *SPELLINGS]
        raise RequestError(f"type {name!r} is not known; {nearest(found, known)}")
    return found


def may_be_rounded(weight: Weight) -> bool:
    """Return whether `weight` may be stored in 8 bits or fewer: a matrix that is multiplied, not in KEPT_WIDE."""
    is_product = len(weight.shape) == 2 or "experts." in weight.name
    return is_product and weight.name.split(".")[-2] not in KEPT_WIDE


def products_type(hardware: HardwareSpec, weights: str, activations: str) -> str:
    """Return the type that products with weights of a type are computed in.

    On a CPU, and on a GPU that was calibrated for this engine, our kernels round the activations of each token to int8
    if weights have 8 bits or fewer (docs/kernels.md). On other machines, fp8 weights are multiplied with fp8
    activations if there is a unit for that. Otherwise it is the type of the activations.
    """
    has_our_kernels = hardware.kind == "cpu" or hardware.is_measured
    if has_our_kernels and weights not in FLOATS and format_of(weights).activations in ("int8", "outliers"):
        return "int8"
    has_unit = weights == "fp8" and hardware.unit("fp8") == "fp8" and not hardware.is_measured
    return "fp8" if has_unit else activations


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of weight matrices, of rows of state (keys, values, latents) and of activations.

    experts: type of the matrices of experts. Default: None, the same as `weights`. products: type that products with
    weights are computed in. Default: None, the type of the activations. wide: type of the matrices that are never
    rounded, where `weights` is narrower. matrices: types of matrices that have another one, by name; a name without its
    layer counts for all layers. is_state_chosen: whether the user chose the type of state; otherwise it changes with
    the weights where the engine's default does. Raises RequestError for an unknown type.
    """

    weights: str = "bfloat16"
    state: str = "bfloat16"
    activations: str = "bfloat16"
    experts: str | None = None
    products: str | None = None
    wide: str = "bfloat16"
    matrices: tuple[tuple[str, str], ...] = ()
    is_state_chosen: bool = True

    def __post_init__(self) -> None:
        own = {kind for _, kind in self.matrices}
        for name in (self.weights, self.state, self.activations, self.experts, self.products, self.wide, *own):
            if name is not None and not is_storage(name):
                known = [*FLOATS, *(name for name in FORMATS if name != "auto")]
                raise RequestError(f"type {name!r} is not known; known are {', '.join(known)}")

    @property
    def compute(self) -> str:
        """Return the type of the operands of products with weights."""
        return self.products or self.activations

    def stored_type(self, weight: Weight) -> str:
        """Return the type that a matrix is stored in: `wide` if a narrower type would round a matrix of KEPT_WIDE."""
        if (own := _types(self.matrices).get(weight.name)) is not None:
            return own
        kind = self.experts or self.weights if "experts." in weight.name else self.weights
        return kind if storage_of(kind).bits >= 16 or may_be_rounded(weight) else self.wide

    def weight_bytes(self, weight: Weight) -> int:
        """Return the bytes of a weight as it is stored, scales included."""
        if not weight.is_matrix:
            return weight.num_params * FLOAT_BYTES
        columns = weight.shape[-1]
        return storage_of(self.stored_type(weight)).num_bytes(weight.num_params // columns, columns)

    def state_bytes(self, elements: int, row: int, *, snapshot: bool) -> int:
        """Return the bytes of `elements` numbers of state. row: numbers that share a scale, if the type has scales."""
        if snapshot:
            return elements * FLOAT_BYTES
        return storage_of(self.state).num_bytes(elements // row, row) if elements else 0

    def activation_bytes(self, elements: float) -> float:
        """Return the bytes of `elements` numbers of activations."""
        return elements * storage_of(self.activations).bits / 8


def default_precision(
    hardware: HardwareSpec, weights: str, experts: str, *, state: str | None = None, activations: str | None = None
) -> Precision:
    """Return the precision of a model that is published with these types of weights and experts.

    Activations are by default float32 on a CPU, where our kernels compute in float32, and otherwise have the type of
    the weights, or bfloat16 if weights have 8 bits or fewer. State has by default the type that the engine chooses on a
    CPU, and otherwise that of the activations.
    """
    if activations is None:
        activations = "float32" if hardware.kind == "cpu" else wide_type(weights)
    is_state_chosen = state is not None
    if state is None:
        state = default_storage(weights).dtype if hardware.kind == "cpu" else wide_type(activations)
    products = products_type(hardware, weights, activations)
    own = None if experts == weights else experts
    return Precision(weights, state, activations, own, products, is_state_chosen=is_state_chosen)


def cpu_precision(weights: str, state: str, hardware: HardwareSpec) -> Precision:
    """Return the precision of device cpu: activations in float32, products with rounded weights in int8."""
    return Precision(weights, state, "float32", None, products_type(hardware, weights, "float32"))


@cache
def _types(matrices: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(matrices)


def stored_as(
    precision: Precision, spec: ModelSpec, formats: FormatTable, dtype: str, dtypes: Mapping[str, str]
) -> Precision:
    """Return a precision with the type of each matrix of a model.

    The type of most of them is `weights`. dtype: type of matrices that are not codes; dtypes: types of those that have
    another one, by name. Operations of equal layers are counted with the type that most of these layers have.
    """
    main = formats.main
    found = replace(precision, weights=main.name if main.is_lossy else dtype, experts=None, wide=dtype, matrices=())
    own: dict[str, str] = {}
    kinds: dict[Weight, Counter[str]] = {}  # by the matrix under its name without the layer
    for weight in (*spec.weights(), _head(spec)):
        if weight.is_matrix:
            kind = type_of(weight, formats, dtype, dtypes)
            if weight.name.startswith("layers."):
                inside = Weight(weight.name.split(".", 3)[3], weight.shape)
                kinds.setdefault(inside, Counter())[kind] += 1
            if kind != found.stored_type(weight):
                own[weight.name] = kind
    common = {inside: count.most_common(1)[0][0] for inside, count in kinds.items()}
    own |= {inside.name: kind for inside, kind in common.items() if kind != found.stored_type(inside)}
    return replace(found, matrices=tuple(sorted(own.items())))


def type_of(weight: Weight, formats: FormatTable, dtype: str, dtypes: Mapping[str, str]) -> str:
    """Return the name of the type in which a model's matrix is in memory; see `stored_as`."""
    format = formats.stored(weight) or PLAIN
    if format.is_lossy:
        return format.name
    is_tied_head = weight.name == "head.weight" and weight.name not in dtypes
    return dtypes.get("embed.weight" if is_tied_head else weight.name, dtype)


def wide_type(weights: str, default: str = "bfloat16") -> str:
    """Return a type of weights if it has 16 bits or more, otherwise `default`."""
    return weights if storage_of(weights).bits >= 16 else default


def _head(spec: ModelSpec) -> Weight:
    return Weight("head.weight", (spec.vocab_size, spec.hidden_size), "out")


@lru_cache(64)  # a search plans hundreds of settings of one model
def packed_bytes(spec: ModelSpec | HeadSpec, precision: Precision) -> int:
    """Return the bytes of the weights of a model or a head as the kernels of device cpu allocate them.

    Types that no kernel and no scheme has (mxfp4) are dequantized to bfloat16.
    """
    tied = (_head(spec),) if isinstance(spec, ModelSpec) else ()
    kinds = {w.name: precision.stored_type(w) for w in (*spec.weights(), *tied) if w.is_matrix}
    floats: dict[str, DType] = {
        name: DTYPE_NAMES.get(kind, "bfloat16")
        for name, kind in kinds.items() if kind in DTYPE_NAMES or kind == "mxfp4"
    }  # fmt: skip
    formats = FormatTable(by_name={name: format_of(kind) for name, kind in kinds.items() if name not in floats})
    return footprint(spec, formats, "bfloat16", packs=True, dtypes=floats).total
