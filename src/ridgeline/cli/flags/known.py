"""Find the model of a command that loads nothing: a published one, or a checkpoint whose headers are read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ridgeline.catalog.models import KnownModel
    from ridgeline.cost.precision import Precision
    from ridgeline.errors import RequestError
    from ridgeline.load.checkpoint import Checkpoint
    from ridgeline.plan.speculation import Draft
    from ridgeline.spec.dtype import DType
    from ridgeline.spec.hardware import HardwareSpec
    from ridgeline.spec.quant import Activations, Format, FormatTable
    from ridgeline.spec.storage import KVScales


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """The matrices of a quantized checkpoint as the kernels of device cpu have them.

    formats: formats of the matrices that stay codes. dequantized: the format of each one that becomes floats, since no
    kernel multiplies with its codes. dtypes: types of all matrices of floats. kv_scales: scales of keys and values in
    fp8, by layer.
    """

    formats: FormatTable
    dequantized: Mapping[str, Format] = field(default_factory=dict)
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)


def find_known(name: str, *, on_cpu: bool = True) -> KnownModel:
    """Return the model that `catalog.models.find_model` finds, with the formats that the files of a checkpoint have.

    The config of a hub id that is not in the catalog is read from the hub, or from its cache. on_cpu: whether matrices
    without a kernel of device cpu count as floats. Raises RequestError for an unknown name, and CheckpointError for
    files that are not read.
    """
    from ridgeline.catalog.models import KnownModel, find_model
    from ridgeline.errors import RequestError
    from ridgeline.spec.dtype import config_dtype
    from ridgeline.spec.quant import FormatTable

    checkpoint = quantized_checkpoint(name)
    if checkpoint is None:
        try:
            return find_model(name)
        except RequestError as e:
            if not HUB_ID.fullmatch(name):
                raise
            return _from_hub(name, e)
    dtype, stored = config_dtype(checkpoint.config), stored_matrices(checkpoint)
    codes = {**(stored.formats.by_name or {}), **({} if on_cpu else stored.dequantized)}
    return KnownModel(
        name, checkpoint.spec, dtype, dtype, False, FormatTable(by_name=codes or None), stored.dtypes,
        stored.dequantized if on_cpu else {},
    )  # fmt: skip


def _from_hub(name: str, unknown: RequestError) -> KnownModel:
    """Return the model of a hub id, from its config.json alone. unknown: the error if there is no such config."""
    from ridgeline.catalog.models import from_config
    from ridgeline.errors import CheckpointError, RequestError
    from ridgeline.load.hub import CONFIG_FILES
    from ridgeline.load.hub import find_model as download
    from ridgeline.spec.folders import read_json

    try:
        folder = download(name, files=CONFIG_FILES)
    except CheckpointError as e:
        why = str(e).split(", and ", 1)[-1]
        raise RequestError(f"{unknown}; {why}") from None
    return from_config(name, read_json(folder / "config.json"))


def find_known_writer(name: str, *, on_cpu: bool = True) -> KnownModel:
    """Find a model as `find_known` does, but raise RequestError for a diffusion model."""
    from ridgeline.catalog.models import checked_writer

    return checked_writer(find_known(name, on_cpu=on_cpu))


def find_draft(name: str) -> Draft:
    """Find a draft model, or the head in a folder, with the acceptance that its card has.

    Raises RequestError for an unknown name, and CheckpointError or ConfigError for files that are not read.
    """
    from ridgeline.catalog.models import built_in_folder
    from ridgeline.plan.speculation import Draft
    from ridgeline.spec.cards import measured_acceptance
    from ridgeline.spec.folders import existing

    path = existing(name)
    folder = built_in_folder(name) if path is None else path if path.is_dir() else None
    acceptance = measured_acceptance(folder) if folder is not None else ()
    if path is not None and path.is_dir():  # numpy is not imported for published models
        from ridgeline.load.heads import is_head, read_head

        if is_head(path):
            return Draft(name, read_head(path).spec, acceptance)
    return Draft(name, find_known_writer(name).spec, acceptance)


def precision_of(
    known: KnownModel, machine: HardwareSpec, *, weights: str | None = None, state: str | None = None,
    activations: str | None = None,
) -> Precision:  # fmt: skip
    """Return the types of a model on a machine.

    weights: the user's type or scheme, instead of that of the checkpoint; a scheme leaves the head as it is stored.
    """
    from ridgeline.cost.precision import default_precision, products_type, storage_type, stored_as, wide_type
    from ridgeline.spec.schemes import scheme_of
    from ridgeline.spec.storage import default_storage

    kind = storage_type(weights) if weights else None
    published = published_type(known, machine)
    is_state_chosen = state is not None
    if state is None and kind is None and machine.kind == "cpu":
        state = default_storage(known.formats.with_others(known.dequantized).type_of_most(known.weights)).dtype
    found = default_precision(
        machine, kind or published, kind or (published if known.experts == known.weights else known.experts),
        state=state, activations=activations,
    )  # fmt: skip
    found = replace(found, wide=wide_type(published), is_state_chosen=is_state_chosen)
    if weights and scheme_of(weights.lower()):
        return replace(found, matrices=(("head.weight", found.wide),))
    if kind is not None or not (known.formats.by_name or known.dtypes):
        return found
    found = stored_as(found, known.spec, known.formats, known.weights, known.dtypes)
    return replace(found, products=products_type(machine, found.weights, found.activations))


def published_type(known: KnownModel, machine: HardwareSpec) -> str:
    """Return the type of a model's weights on a machine, unless the user chooses one.

    It is the published type. On a GPU or TPU of the catalog, weights that are published in float32 are bfloat16, as
    engines for such machines load them.
    """
    is_wide = known.weights == "float32" and machine.kind != "cpu" and not machine.is_measured
    return "bfloat16" if is_wide else known.weights


def quantized_checkpoint(name: str) -> Checkpoint | None:
    """Return the checkpoint of a folder or file on this machine whose matrices are codes; None for any other model."""
    from ridgeline.spec.folders import existing

    path = existing(name)
    if path is None or not _has_codes(path):  # numpy is not imported for other models
        return None
    from ridgeline.load.checkpoint import open_checkpoint
    from ridgeline.load.hub import find_model

    return open_checkpoint(find_model(str(path)))


def _has_codes(path: Path) -> bool:
    """Return whether a file or folder is a GGUF model, or has weights and says that they are quantized."""
    from ridgeline.archs.quantization import SIDE_FILES
    from ridgeline.spec.folders import read_json

    if path.is_file():
        return path.suffix == ".gguf"
    if not any(path.glob("*.safetensors")):
        return any(path.glob("*.gguf"))
    is_named = any((path / file).exists() for file in SIDE_FILES)
    return is_named or read_json(path / "config.json").get("quantization_config") is not None


def stored_matrices(
    checkpoint: Checkpoint, dtype: DType | None = None, activations: Activations | None = None
) -> StoredMatrices:
    """Read the headers of a quantized checkpoint. dtype, activations: the user's choice, or None."""
    from ridgeline.load.packed import open_tensors
    from ridgeline.load.weights import StoredWeights
    from ridgeline.ops.host.memory import NumpyMemory
    from ridgeline.spec.quant import has_layout

    found = StoredWeights(
        checkpoint.spec, checkpoint.family.names, open_tensors(checkpoint), NumpyMemory(), dtype, lambda done: None,
        activations, has_layout,
    )  # fmt: skip
    return StoredMatrices(found.formats, found.dequantized, found.dtypes, found.kv_scales)


def local_gpu() -> dict[str, str] | None:
    """Return the facts about this machine's GPU; None without one, and then without the time to import numpy."""
    from ridgeline.system import gpu_driver

    if not gpu_driver():
        return None
    from ridgeline.ops.devices import first_gpu

    return first_gpu()
