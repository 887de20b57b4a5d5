"""Names of element types, as users and configs spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}

# `half` and `float` are vLLM's other names.
DTYPE_NAMES: Final[Mapping[str, DType]] = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}


def config_dtype(config: Mapping[str, object]) -> DType:
    """Return the type of the weights in config.json; float32 if it names none or an unknown one."""
    stored = config.get("dtype", config.get("torch_dtype"))
    return DTYPE_NAMES.get(str(stored), "float32")
