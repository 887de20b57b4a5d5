"""Read the config of torchao checkpoints, as transformers writes it."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.quantization.scheme import TorchAo

# The header's metadata says how each matrix is stored.
HARMLESS = (
    "quant_method", "quant_type_kwargs", "modules_to_not_convert", "include_input_output_embeddings",
    "untie_embedding_weights",
)  # fmt: skip
# Configs under which no activation is rounded, or those of each token alone, in symmetric int8 or in fp8.
KNOWN = (
    "Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
    "Float8DynamicActivationFloat8WeightConfig",
)  # fmt: skip
EXACT = "activations are taken exactly where {} rounds them in another way than each token alone to int8 or fp8"


def read(c: Config) -> TorchAo:
    """Return the scheme. Raises ConfigError for a config without quant_type."""
    kinds = c.sub("quant_type")
    if kinds is None:  # a text in old files, whose weights are pickled
        raise c.error("quant_type", "is missing; it must be an object, as torchao 0.10 and later write it")
    default = kinds.sub("default")
    if default is None:
        raise kinds.error("default", "is missing; it must be the config of torchao")
    name = default.get_str("_type")
    c.finish(HARMLESS)
    return TorchAo(notes=() if name in KNOWN else (EXACT.format(name[:80]),), storage_name=_storage(name))


def _storage(name: str) -> str:
    """Return the format of most matrices, for plans, from the name of a config."""
    return "fp8" if "Float8" in name else "int4" if "Int4" in name or "Intx" in name else "int8"
