"""quantization_config: how a checkpoint's matrices are stored, where that is not as plain numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.errors import ConfigError

AT = "config.json: quantization_config"
# Which modules were left as they are shows in their tensors; scale_fmt says that all scales are powers of two;
# dequantize asks another library to do what is done here in any case.
_HARMLESS_FP8 = ("modules_to_not_convert", "scale_fmt")
_HARMLESS = ("quant_method", "modules_to_not_convert", "dequantize")


def packing_method(config: Mapping[str, Any], packings: Collection[str]) -> str | None:
    """The `quant_method`: "fp8", if it is in blocks, or one of `packings`; None where nothing is quantized.

    Raises ConfigError for any other quantization, by name, and for a field that is not understood.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    if weight_blocks(config):
        return "fp8"
    method = _method(raw)
    if not isinstance(raw, Mapping) or method not in packings:
        blocks = " without weight_block_size" if method == "fp8" else ""
        raise ConfigError(
            f"{AT} with quant_method {method!r} is not supported yet{blocks}; use the unquantized checkpoint"
        )
    Config(raw, f"{AT}.").finish(_HARMLESS)
    return str(method)


def weight_blocks(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale each, in matrices of fp8 numbers (DeepSeek-V3, arXiv:2412.19437,
    3.3); None where there are none. Raises ConfigError for blocks that are not read.
    """
    raw = config.get("quantization_config")
    if not isinstance(raw, Mapping) or _method(raw) != "fp8" or raw.get("weight_block_size") is None:
        return None
    c = Config(raw, f"{AT}.")
    c.expect("quant_method", "fp8")
    c.expect("fmt", "e4m3")
    c.expect("activation_scheme", "dynamic")  # others store scales of activations, which nothing here would use
    sizes = c.get_list("weight_block_size")
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise c.error("weight_block_size", f"is {sizes!r}; it must be two positive numbers, rows and columns")
    c.finish(_HARMLESS_FP8)
    return sizes[0], sizes[1]


def _method(raw: Any) -> Any:
    return raw.get("quant_method", "unnamed") if isinstance(raw, Mapping) else raw
