"""Read quantization_config, which says how a checkpoint stores its matrices: one file for each method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.archs.quantization import awq, bitsandbytes, compressed, fp8, gptq, torchao
from ridgeline.archs.quantization.scheme import (
    AT,
    INTEGERS,
    Awq,
    BnbInt8,
    BnbNf4,
    CompressedTensors,
    Floats,
    Fp8,
    Fp8Blocks,
    Gptq,
    GptqRule,
    Group,
    ModelOptNvfp4,
    Mxfp4,
    Quantization,
    TorchAo,
)
from ridgeline.errors import ConfigError

__all__ = [
    "INTEGERS", "SIDE_FILES", "Awq", "BnbInt8", "BnbNf4", "CompressedTensors", "Floats", "Fp8", "Fp8Blocks", "Gptq",
    "GptqRule", "Group", "ModelOptNvfp4", "Mxfp4", "Quantization", "TorchAo",
    "read_quantization",
]  # fmt: skip


def _mxfp4(c: Config) -> Mxfp4:
    # The tensors show what is packed; dequantize asks transformers to do what the loader does anyway.
    c.finish(("quant_method", "modules_to_not_convert", "dequantize"))
    return Mxfp4()


# quant_method -> a function that reads its fields. Those of FAMILY_OWN depend on a family's names of tensors.
METHODS: Mapping[str, Callable[[Config], Quantization]] = {
    "awq": awq.read, "gptq": gptq.read, "compressed-tensors": compressed.read, "bitsandbytes": bitsandbytes.read,
    "fp8": fp8.read, "fbgemm_fp8": fp8.read_fbgemm, "modelopt": fp8.read_modelopt, "mxfp4": _mxfp4,
    "torchao": torchao.read,
}  # fmt: skip
FAMILY_OWN = ("mxfp4",)


def read_quantization(config: Mapping[str, Any], packings: Collection[str]) -> Quantization | None:
    """Return the scheme that a parsed config.json describes, or None if nothing is quantized.

    packings: methods of FAMILY_OWN that the family's loader can unpack. Raises ConfigError, which names it, for an
    unknown method, an unsupported value, and an unknown field.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    method = raw.get("quant_method", "unnamed") if isinstance(raw, Mapping) else raw
    if not isinstance(raw, Mapping) or not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(f"{AT} with quant_method {str(method)[:80]!r} is not supported; supported: {known}")
    if method in FAMILY_OWN and method not in packings:
        raise ConfigError(
            f"{AT} with quant_method {method!r} is not supported for {config.get('model_type')!r}; open a checkpoint "
            "of this model in another format"
        )
    return METHODS[method](Config(raw, f"{AT}.", str(config.get("model_type"))))


def _modelopt_file(raw: Mapping[str, Any]) -> dict[str, Any]:
    c = Config(raw, "hf_quant_config.json: ")
    inside = c.sub("quantization")
    if inside is None:
        raise c.error("quantization", "is missing")
    c.finish(("producer",))
    return {**inside.fields(), "quant_method": "modelopt"}


def _gptq_file(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "gptq", **raw}


def _awq_file(raw: Mapping[str, Any]) -> dict[str, Any]:
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    return {"quant_method": "awq", **{names.get(name, name): value for name, value in raw.items()}}


# Files beside config.json in which some tools write a quantization_config -> a function that returns it.
SIDE_FILES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "hf_quant_config.json": _modelopt_file, "quantize_config.json": _gptq_file, "quant_config.json": _awq_file,
}  # fmt: skip
