"""Read the config of bitsandbytes checkpoints: LLM.int8() (arXiv:2208.07339) and nf4 (arXiv:2305.14314)."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.quantization.scheme import BnbInt8, BnbNf4, Quantization
from ridgeline.spec.quant import OUTLIER

# The tensors show which modules are quantized and in which shapes; products are computed in float32.
HARMLESS = (
    "quant_method", "_load_in_4bit", "_load_in_8bit", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload",
    "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type", "llm_int8_threshold",
)  # fmt: skip


def read(c: Config) -> Quantization:
    """Return the scheme. Raises ConfigError for fp4, and for a threshold of outliers other than 6 and 0."""
    in_8, in_4 = c.get_bool("load_in_8bit", False), c.get_bool("load_in_4bit", False)
    if in_8 == in_4:
        raise c.error("load_in_8bit", f"is {in_8} and load_in_4bit is {in_4}; one of them must be true")
    c.expect("llm_int8_has_fp16_weight", False)
    c.expect("bnb_4bit_quant_storage", "uint8")
    if in_4:
        if c.raw("bnb_4bit_quant_type") != "nf4":
            raise c.error("bnb_4bit_quant_type", f"is {c.raw('bnb_4bit_quant_type')!r}; only nf4 is read")
        c.finish(HARMLESS)
        return BnbNf4()
    threshold = c.get_float("llm_int8_threshold", OUTLIER)
    if threshold not in (0.0, OUTLIER):
        raise c.error("llm_int8_threshold", f"is {threshold:g}; only {OUTLIER:g}, or 0 for no outliers, are supported")
    c.finish(HARMLESS)
    return BnbInt8(activations="outliers" if threshold else "int8")
