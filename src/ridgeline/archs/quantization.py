"""quantization_config: how a checkpoint's matrices are stored, where that is not as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.errors import ConfigError

# Which modules were left as they are shows in their tensors; scale_fmt says that all scales are powers of two.
_HARMLESS = ("modules_to_not_convert", "scale_fmt")


def weight_blocks(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale each, in matrices of fp8 numbers (DeepSeek-V3, arXiv:2412.19437,
    3.3); None where nothing is quantised. Raises ConfigError for any other quantisation, by name.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    method = raw.get("quant_method", "unnamed") if isinstance(raw, Mapping) else raw
    if not isinstance(raw, Mapping) or method != "fp8" or raw.get("weight_block_size") is None:
        blocks = " without weight_block_size" if method == "fp8" else ""
        raise ConfigError(
            f"config.json: quantization_config with quant_method {method!r} is not supported yet{blocks}; "
            "use the unquantised checkpoint"
        )
    c = Config(raw, "config.json: quantization_config.")
    c.expect("quant_method", "fp8")
    c.expect("fmt", "e4m3")
    c.expect("activation_scheme", "dynamic")  # others store scales of activations, which nothing here would use
    sizes = c.get_list("weight_block_size")
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise c.error("weight_block_size", f"is {sizes!r}; it must be two positive numbers, rows and columns")
    c.finish(_HARMLESS)
    return sizes[0], sizes[1]
