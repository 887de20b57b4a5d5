"""Find the models that commands plan for: also GGUF files, which the catalog does not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.catalog.models import KnownModel
    from ridgeline.load.weights import StoredWeights
    from ridgeline.spec import ModelSpec
    from ridgeline.spec.quant import FormatTable


def planned_model(name: str) -> KnownModel:
    """Return the model of a name, as `catalog.models.find_model` does, or of a GGUF file with the types in it.

    Raises CheckpointError, ConfigError or RequestError.
    """
    from dataclasses import replace

    from ridgeline.catalog.models import find_model, from_config
    from ridgeline.spec.folders import existing

    path = existing(name)
    if path is None or path.suffix != ".gguf":
        return find_model(name)
    from ridgeline.load.checkpoint import read_config

    known = from_config(name, dict(read_config(path)))
    formats = stored_formats(name, known.spec)
    if not formats.by_name:
        return known
    experts = [format.name for weight, format in formats.by_name.items() if ".experts." in weight]
    return replace(known, weights=formats.main.name, experts=experts[0] if experts else formats.main.name)


def planned_writer(name: str) -> KnownModel:
    """Return the model as `planned_model` does. Raises RequestError for a diffusion model."""
    from ridgeline.catalog.models import find_writer

    found = planned_model(name)
    return find_writer(name) if found.denoises else found


def stored_formats(model: str, spec: ModelSpec) -> FormatTable:
    """Return the formats of the matrices that a checkpoint on this machine stores as codes."""
    from ridgeline.spec.quant import AS_STORED

    stored = stored_weights(model, spec)
    return AS_STORED if stored is None else stored.formats


def stored_weights(model: str, spec: ModelSpec) -> StoredWeights | None:
    """Return the weights of a quantized checkpoint on this machine, of which only headers and scales of a KV cache are
    read; None for others.
    """
    from ridgeline.load.checkpoint import open_checkpoint
    from ridgeline.load.hub import find_model
    from ridgeline.load.packed import open_tensors
    from ridgeline.load.weights import StoredWeights
    from ridgeline.ops.host.memory import NumpyMemory
    from ridgeline.spec.folders import existing

    if existing(model) is None:
        return None
    checkpoint = open_checkpoint(find_model(model))
    is_quantized = checkpoint.quantization is not None and any(checkpoint.folder.glob("*.safetensors"))
    if not is_quantized and checkpoint.gguf is None:
        return None
    files = open_tensors(checkpoint)
    return StoredWeights(spec, checkpoint.family.names, files, NumpyMemory(), None, lambda done: None)
