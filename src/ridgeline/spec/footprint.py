"""Count the bytes of a model's weights by the format of its matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ridgeline.spec.dtype import DTYPE_BYTES, DType
from ridgeline.spec.encoder import LABEL_MATRICES, TYPE_TABLE
from ridgeline.spec.heads import HeadSpec
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.per_layer import TABLE
from ridgeline.spec.quant import PLAIN, Format, FormatTable, coded_bytes, has_layout, packed_bytes
from ridgeline.spec.weight import Weight

# Matrices without a kernel for products: tables whose rows are looked up, and the head of an encoder.
TABLES = ("embed.weight", "position_embed.weight", TABLE, TYPE_TABLE, *LABEL_MATRICES)


class Footprint(NamedTuple):
    """Bytes of weights. products: matrices that activations are multiplied with. rest: weights that stay as stored."""

    products: int
    rest: int

    @property
    def total(self) -> int:
        return self.products + self.rest


def footprint(
    spec: ModelSpec | HeadSpec, formats: FormatTable, dtype: DType, *, packs: bool,
    dtypes: Mapping[str, DType] = MappingProxyType({}),
) -> Footprint:  # fmt: skip
    """Return the bytes of the weights of a model or a head in memory.

    dtype: type of the matrices in the checkpoint. packs: whether kernels copy matrices into a layout of their own.
    dtypes: types of matrices that have another one, by name.
    """
    paired = _paired(spec) if packs else frozenset()
    if packs and isinstance(spec, ModelSpec):
        dtypes = packed_types(spec, formats, dtype, dtypes)
    products = rest = 0
    for weight in spec.weights():
        is_product = weight.is_matrix and weight.name not in TABLES and (len(weight.shape) == 2 or _is_expert(weight))
        if is_product:
            own_type = dtypes.get(weight.name, dtype)
            products += _matrix(weight, formats, own_type, packs, weight.name in paired)
        elif (own := (formats.by_name or {}).get(weight.name)) is not None and own.is_lossy:
            rest += 0 if packs and rows_of_head(weight, spec, own) else coded_bytes(own, *weight.shape)
        else:
            rest += weight.num_params * (DTYPE_BYTES[dtypes.get(weight.name, dtype)] if weight.is_matrix else 4)
    has_head = isinstance(spec, ModelSpec) and not spec.encoder
    if spec.tie_word_embeddings and has_head and (packs or formats.is_lossy):
        head = Weight("head.weight", (spec.vocab_size, spec.hidden_size))
        products += _matrix(head, formats, dtypes.get(TABLES[0], dtype), packs, False)
    return Footprint(products + (_absorbed(spec, dtype, dtypes) if packs else 0), rest)


def packed_types(
    spec: ModelSpec, formats: FormatTable, dtype: DType, dtypes: Mapping[str, DType]
) -> Mapping[str, DType]:
    """Return `dtypes` as kernels have them: matrices of different types that are packed as one become float32."""
    if all(kind == dtype for kind in dtypes.values()):
        return dtypes
    out = dict(dtypes)
    for names, is_split in _packed_as_one(spec):
        own = {name: formats.of(weight) for name, weight in names.items()}
        plain = [name for name, format in own.items() if not format.is_lossy]
        if len(plain) < len(own) and not is_split:
            continue  # codes are not packed with floats
        if len({dtypes.get(name, dtype) for name in plain}) > 1:
            out |= dict.fromkeys(plain, "float32")
    return out


def _packed_as_one(spec: ModelSpec) -> Iterator[tuple[dict[str, Weight], bool]]:
    """Yield matrices by name that kernels pack as one, and whether those of one format are packed if others differ."""
    every = {weight.name: weight for weight in spec.weights()}
    for i, layer in enumerate(spec.layers):
        groups: list[tuple[list[str], bool]] = []
        if m := layer.mixer:
            groups.append(([f"mixer.{name}" for name in m.inputs], m.is_recurrent or m.keeps_latents))
        if layer.mlp:
            groups += [([f"mlp.{part}gate", f"mlp.{part}up"], False) for part in layer.mlp.gated_parts]
            groups.append((["mlp.router", "mlp.shared_gate"], True))
        for names, is_split in groups:
            keys = [f"layers.{i}.{name}.weight" for name in names]
            yield {key: every[key] for key in keys if key in every}, is_split


def rows_of_head(weight: Weight, spec: ModelSpec | HeadSpec, own: Format) -> bool:
    """Return whether kernels look the rows of a matrix up in the head, so that it takes no memory of its own.

    They do for the embedding of a model that ties it to the head, if the checkpoint has it as codes.
    """
    return weight.name == TABLES[0] and spec.tie_word_embeddings and own.is_lossy and has_layout(own)


def one_matrix(weight: Weight, spec: ModelSpec, formats: FormatTable, dtype: DType) -> int:
    """Return the bytes of one matrix, or of all experts of a weight, with the kernels of device cpu.

    dtype: its type if it is not rounded. A matrix of each head counts as it is stored.
    """
    own = formats.stored(weight)
    if own is not None and rows_of_head(weight, spec, own):
        return 0
    if weight.name in TABLES or not (len(weight.shape) == 2 or _is_expert(weight)):
        is_coded = own is not None and own.is_lossy and len(weight.shape) == 2
        return coded_bytes(own, *weight.shape) if own and is_coded else weight.num_params * DTYPE_BYTES[dtype]
    return _matrix(weight, formats, dtype, True, weight.name in _paired(spec))


def _is_expert(weight: Weight) -> bool:
    return ".experts." in weight.name


def _matrix(weight: Weight, formats: FormatTable, dtype: DType, packs: bool, is_paired: bool) -> int:
    own = formats.of(weight)
    rows, columns = weight.shape[-2:]
    count = weight.shape[0] if _is_expert(weight) else 1
    if packs and has_layout(own):
        size = packed_bytes(own, dtype, rows, columns, paired=is_paired)
        return count * (size // 2 if is_paired else size)
    return count * (coded_bytes(own, rows, columns) if own.is_lossy else rows * columns * DTYPE_BYTES[dtype])


def _paired(spec: ModelSpec | HeadSpec) -> frozenset[str]:
    """Return the names of the matrices that kernels interleave: a gate, and the matrix that it is multiplied with."""
    parts = ((i, part) for i, layer in enumerate(spec.layers) if layer.mlp for part in layer.mlp.gated_parts)
    return frozenset(f"layers.{i}.mlp.{part}{name}.weight" for i, part in parts for name in ("gate", "up"))


def _absorbed(spec: ModelSpec | HeadSpec, dtype: DType, dtypes: Mapping[str, DType]) -> int:
    """Return the bytes of the two packed matrices of each head of latent attention: to latents, and from latents."""
    total = 0
    for i, layer in enumerate(spec.layers):
        if isinstance(m := layer.mixer, LatentAttention):
            own = dtypes.get(f"layers.{i}.mixer.kv_b.weight", dtype)
            into = packed_bytes(PLAIN, own, m.kv_lora_rank, m.qk_nope_head_dim)
            total += m.num_heads * (into + packed_bytes(PLAIN, own, m.v_head_dim, m.kv_lora_rank))
    return total
