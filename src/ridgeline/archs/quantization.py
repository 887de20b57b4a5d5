"""Read quantization_config, which says how a checkpoint stores its matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.errors import ConfigError

AT = "config.json: quantization_config"
# modules_to_not_convert is not needed, since the tensors show which modules are quantized; scale_fmt only says that
# scales are powers of two; dequantize asks transformers to do what the loader does anyway.
_HARMLESS_FP8 = ("modules_to_not_convert", "scale_fmt")
_HARMLESS = ("quant_method", "modules_to_not_convert", "dequantize")


def packing_method(config: Mapping[str, Any], packings: Collection[str]) -> str | None:
    """Return the `quant_method`: "fp8" for blocks of fp8, or one of `packings`; None if nothing is quantized.

    Raises ConfigError, which names it, for any other quantization, and for unknown fields.
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
            f"{AT} with quant_method {method!r:.100} is not supported yet{blocks}; use the unquantized checkpoint"
        )
    Config(raw, f"{AT}.").finish(_HARMLESS)
    return str(method)


def weight_blocks(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of the blocks that share a scale, for matrices in fp8 (DeepSeek-V3, arXiv:2412.19437,
    3.3); None if there are none. Raises ConfigError for unsupported blocks.
    """
    raw = config.get("quantization_config")
    if not isinstance(raw, Mapping) or _method(raw) != "fp8" or raw.get("weight_block_size") is None:
        return None
    c = Config(raw, f"{AT}.")
    c.expect("quant_method", "fp8")
    c.expect("fmt", "e4m3")
    c.expect("activation_scheme", "dynamic")  # static schemes store scales of activations, which are not supported
    sizes = c.get_list("weight_block_size")
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise c.error("weight_block_size", f"is {sizes!r:.100}; it must be two positive numbers, rows and columns")
    c.finish(_HARMLESS_FP8)
    return sizes[0], sizes[1]


def _method(raw: Any) -> Any:
    return raw.get("quant_method", "unnamed") if isinstance(raw, Mapping) else raw
