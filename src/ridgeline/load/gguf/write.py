"""Write a GGUF model: our weights under llama.cpp's names, in chosen types, in a file that is complete or absent."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ridgeline.archs import Names, Read, spec_from_config
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.load.gguf.architectures import ARCHITECTURES, Architecture
from ridgeline.load.gguf.blocks import TYPES, BlockType
from ridgeline.load.gguf.describe import ignored_by_llama_cpp, metadata_of, rope_tensors
from ridgeline.load.gguf.encode import quantize
from ridgeline.load.gguf.files import paired
from ridgeline.load.gguf.layout import ALIGNMENT
from ridgeline.load.gguf.model import SAMPLING, open_gguf
from ridgeline.load.gguf.paths import SUFFIX
from ridgeline.load.gguf.vocab_write import vocab_fields
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.load.weights import part_of, stored_shape
from ridgeline.spec import Attention, ModelSpec, Weight

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10
_CLOSE = 1e-6  # relative distance of equal numbers: metadata holds float32
# The number that `general.file_type` has for a file whose matrices are mostly of a type.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 15, "Q6_K": 18, "BF16": 32}
# llama-quantize takes these instead if rows are not a multiple of 256, and floats if they are not one of 32.
_SHORTER = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
_FLOAT = "F16"


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """A matrix whose rows are blocks already. kind: name of the type. rows: uint8 [..., row bytes]."""

    kind: str
    rows: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A tensor to write. sources: our weights that it contains, each with its index in stacked experts."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    sources: tuple[tuple[Weight, Read, int], ...]


def choose_types(config: Mapping[str, Any], kind: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the type of each matrix by our name, and notes about other types than `kind`.

    As in llama-quantize, routers stay F32, the embedding of a tied model and the head become Q6_K in a Q4_K file, and
    rows that 256 does not divide take Q5_0 instead of Q4_K and Q8_0 instead of Q6_K, or F16 if 32 does not divide them.
    Raises ConfigError for an unknown type.
    """
    if kind not in _FILE_TYPES:
        raise ConfigError(f"{kind!r} is not a type that can be written; take one of {', '.join(_FILE_TYPES)}")
    spec = spec_from_config(config)
    types: dict[str, str] = {}
    others: dict[tuple[str, str, int], list[str]] = {}
    for w in spec.weights():
        if not w.is_matrix or w.name.endswith(("mlp.router.weight", "mixer.conv.weight", "position_embed.weight")):
            continue
        is_head = w.name == ("embed.weight" if spec.tie_word_embeddings else "head.weight")
        wanted = "Q6_K" if kind == "Q4_K" and is_head else kind
        fitting = wanted
        if w.shape[-1] % TYPES[fitting].weights:
            fitting = _SHORTER.get(fitting, _FLOAT)
            fitting = fitting if w.shape[-1] % TYPES[fitting].weights == 0 else _FLOAT
            others.setdefault((fitting, wanted, w.shape[-1]), []).append(w.name)
        types[w.name] = fitting
    return types, tuple(_note(*key, names) for key, names in others.items())


def _note(fitting: str, wanted: str, columns: int, names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"{names[0]}{more} stored as {fitting}, because {wanted} cannot hold rows of {columns}"


def write_gguf(
    path: Path, config: Mapping[str, Any], weights: Mapping[str, HostTensor | EncodedRows], tokenizer: Tokenizer | None,
    types: Mapping[str, str], sampling: Mapping[str, float] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Write a model as a GGUF file, and return notes for the user.

    config: its config.json. weights: all weights of the spec by our names, in float32, float16 or bfloat16, or as rows
    of blocks in their type; each is read once. tokenizer: None leaves it out. types: type of each matrix by our name
    (`choose_types`); all others, and all vectors, are F32. Weights that share a tensor need one type. sampling:
    recommended sampling parameters.

    The file is written under another name first, read back, and renamed if its description gives the same model. Raises
    ConfigError if the format cannot hold the model, and CheckpointError for weights that the type cannot hold.
    """
    spec = spec_from_config(config)
    architecture, fields = metadata_of(config, spec)
    known = ARCHITECTURES[architecture]
    plans, extra = _plans(spec, known.names, types), rope_tensors(spec)
    kinds = [p.type.name for p in plans if len(p.shape) > 1]
    general: dict[str, Any] = {
        "general.architecture": architecture, "general.type": "model", "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES.get(max(set(kinds), key=kinds.count), 0), "general.alignment": ALIGNMENT,
    }  # fmt: skip
    vocab, notes = vocab_fields(tokenizer, spec.vocab_size, config)
    recommended = {f"general.sampling.{SAMPLING[k]}": v for k, v in (sampling or {}).items() if k in SAMPLING}
    described = {f"{architecture}.{key}": value for key, value in fields.items()}
    metadata = {**general, **recommended, **described, **vocab}
    partial = path.with_name(f".{path.name.removesuffix(SUFFIX)}.partial{SUFFIX}")
    try:
        with partial.open("wb") as file:
            file.write(_header(metadata, plans, extra))
            for values in extra.values():
                _write_padded(file, values.astype("<f4"))
            for plan in plans:
                _write_padded(file, _encoded(plan, weights, spec, known))
            file.flush()
            os.fsync(file.fileno())
        _check_same(spec, partial, path)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return (*notes, *ignored_by_llama_cpp(architecture, fields))


def _plans(spec: ModelSpec, names: Names, types: Mapping[str, str]) -> list[_Plan]:
    """Return the tensors of the file. Raises ConfigError if its weights have two types, or rows do not fit."""
    reads, found = names.reads(spec), dict[str, list[tuple[Weight, Read, int]]]()
    for w in spec.weights():
        for i, key in enumerate(reads[w.name].keys):
            found.setdefault(key, []).append((w, reads[w.name], i))
    plans = []
    for name, sources in found.items():
        kinds = {types.get(w.name, "F32") if w.is_matrix else "F32" for w, _, _ in sources}
        if len(kinds) > 1:
            raise ConfigError(f"{name} contains several matrices, which need one type, not {', '.join(sorted(kinds))}")
        kind, shape = TYPES[kinds.pop()], stored_shape(*sources[0][:2])
        if name.endswith("ssm_conv1d.weight"):
            shape = (shape[0], shape[-1])
        try:
            kind.row_bytes(shape[-1])
        except ValueError as e:
            raise ConfigError(f"{name} cannot be {kind.name}: its {e}") from None
        plans.append(_Plan(name, kind, shape, tuple(sources)))
    return plans


def _encoded(
    plan: _Plan, weights: Mapping[str, HostTensor | EncodedRows], spec: ModelSpec, architecture: Architecture
) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor."""
    given = [weights[weight.name] for weight, _, _ in plan.sources]
    change = architecture.change(plan.name)
    if isinstance(given[0], EncodedRows):
        blocks = _joined_rows(plan, given)
        return _paired(blocks, plan, spec) if change == "pairs" else blocks
    full = np.empty(stored_shape(*plan.sources[0][:2]), np.float32)
    for (_, read, i), tensor in zip(plan.sources, given, strict=True):
        assert isinstance(tensor, HostTensor)
        values = to_float(tensor)
        target = part_of(full, read)
        target[...] = (values[i] if read.stacked else values).reshape(target.shape)
    if change == "norm":
        full += np.float32(architecture.norm_offset)
    elif change == "decay":
        full = -np.exp(full)
    elif change == "pairs":
        full = _paired(full, plan, spec)
    try:
        return quantize(plan.type, full.reshape(plan.shape))
    except ValueError as e:
        raise CheckpointError(f"{plan.name} cannot be written as {plan.type.name}: it {e}") from None


def _joined_rows(plan: _Plan, given: list[Any]) -> np.ndarray[Any, Any]:
    """Return the rows of matrices that are blocks already as one tensor."""
    if other := [e for e in given if not isinstance(e, EncodedRows) or e.kind != plan.type.name]:
        raise ConfigError(f"{plan.name} contains a matrix that is not {plan.type.name}: {type(other[0]).__name__}")
    full = np.empty((*stored_shape(*plan.sources[0][:2])[:-1], plan.type.row_bytes(plan.shape[-1])), np.uint8)
    for (_, read, i), encoded in zip(plan.sources, given, strict=True):
        target = part_of(full, read)
        target[...] = (encoded.rows[i] if read.stacked else encoded.rows).reshape(target.shape)
    return full


def _paired(rows: np.ndarray[Any, Any], plan: _Plan, spec: ModelSpec) -> np.ndarray[Any, Any]:
    """Return the rows of q or k as llama.cpp has them."""
    mixer = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention))
    return paired(rows, mixer.num_heads if ".attn_q." in plan.name else mixer.num_kv_heads)


def to_float(tensor: HostTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a tensor as float32."""
    if tensor.dtype == "bfloat16":
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    return tensor.data.astype(np.float32, copy=False)


def _header(metadata: Mapping[str, Any], plans: list[_Plan], extra: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Return everything before the tensors, padded."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(plans) + len(extra), len(metadata))]
    for key, value in metadata.items():
        kind, raw = _value(value)
        parts += [_text(key), struct.pack("<I", kind), raw]
    offset = 0
    for name, shape, type_ in _tensors(plans, extra):
        parts += [_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_.number, offset)]
        size = math.prod(shape[:-1]) * type_.row_bytes(shape[-1])
        offset += size + -size % ALIGNMENT
    raw = b"".join(parts)
    return raw + bytes(-len(raw) % ALIGNMENT)


def _tensors(
    plans: list[_Plan], extra: Mapping[str, np.ndarray[Any, Any]]
) -> Iterator[tuple[str, tuple[int, ...], BlockType]]:
    yield from ((name, values.shape, TYPES["F32"]) for name, values in extra.items())
    yield from ((plan.name, plan.shape, plan.type) for plan in plans)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """Return the type and the bytes of a value. Whole numbers are unsigned, in lists signed, as llama.cpp has them."""
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return (_U32, struct.pack("<I", value)) if value < 1 << 32 else (_U64, struct.pack("<Q", value))
    if isinstance(value, float):
        return _F32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _text(value)
    kinds = {bool: (_BOOL, "?"), int: (_I32, "i"), float: (_F32, "f")}
    if isinstance(value[0], str):
        return _ARRAY, struct.pack("<IQ", _STRING, len(value)) + b"".join(map(_text, value))
    kind, code = kinds[type(value[0])]
    return _ARRAY, struct.pack(f"<IQ{len(value)}{code}", kind, len(value), *value)


def _write_padded(file: IO[bytes], data: np.ndarray[Any, Any]) -> None:
    file.write(np.ascontiguousarray(data).data)
    file.write(bytes(-data.nbytes % ALIGNMENT))


def _check_same(spec: ModelSpec, partial: Path, path: Path) -> None:
    """Raise ConfigError, which names it, for a part of the model that the written file describes otherwise."""
    try:
        difference = _difference(spec, open_gguf(partial).spec, "")
    except (CheckpointError, ConfigError) as e:
        difference = str(e).removeprefix(f"{partial.name}: ")
    if difference:
        raise ConfigError(
            f"{path.name} is not written, because llama.cpp's format cannot hold this model: {difference}"
        )


def _difference(a: Any, b: Any, at: str) -> str:
    """Return the first difference of two specs; "" if they are equal up to the precision of float32."""
    if hasattr(a, "__dataclass_fields__") and type(a) is type(b):
        for name in a.__dataclass_fields__:
            if name != "family" and (text := _difference(getattr(a, name), getattr(b, name), f"{at}.{name}")):
                return text
        return ""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        pairs = (_difference(x, y, f"{at}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((text for text in pairs if text), "")
    is_close = isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=_CLOSE)
    return "" if a == b or is_close else f"{at.removeprefix('.')} is {a!r}, but would be {b!r}"
