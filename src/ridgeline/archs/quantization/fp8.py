"""Read the configs of checkpoints in fp8: blocks (DeepSeek-V3), AutoFP8, FBGEMM, and NVIDIA ModelOpt."""

from __future__ import annotations

from typing import Any

from ridgeline.archs.config import Config
from ridgeline.archs.quantization.compressed import check_kv
from ridgeline.archs.quantization.scheme import Floats, Fp8, Fp8Blocks, ModelOptNvfp4, Quantization, get_texts
from ridgeline.spec.quant import LARGEST_GROUP

# The tensors show which modules are quantized; scale_fmt only says that scales are powers of two.
HARMLESS = ("quant_method", "modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
_MODELOPT = frozenset(
    "quant_method producer exclude_modules ignore kv_cache_quant_algo group_size has_zero_point "
    "pre_quant_scale config_groups quantized_layers".split()
)
BOUND = "the upper bound of activations (activation_scale_ub) is not applied: each token has its own scale"
BLOCKS = "activations are taken exactly: products with activations in fp8 by group are not computed"
FP4 = "activations are taken exactly: products with activations in fp4 are not computed"


def read(c: Config) -> Quantization:
    """Return the scheme of `quant_method: fp8`: blocks if there is a weight_block_size, else scales by tensor or row.

    Raises ConfigError for other types than e4m3, and for unsupported blocks.
    """
    c.expect("fmt", "e4m3")
    sizes: Any = c.get_list("weight_block_size", None, None)
    if sizes is None:
        scheme = c.get_str("activation_scheme")
        if scheme not in ("static", "dynamic"):
            raise c.error("activation_scheme", f"is {scheme!r}; it must be static or dynamic")
        c.expect("kv_cache_scheme", "static", "dynamic")
        c.finish(HARMLESS)
        return Fp8(has_fp8_cache=c.raw("kv_cache_scheme") is not None, static_input=scheme == "static")
    c.expect("activation_scheme", "dynamic")  # blocks with scales of activations are not published
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= LARGEST_GROUP for n in sizes):
        raise c.error("weight_block_size", f"is {sizes!r}; it must be two positive numbers, rows and columns")
    c.finish(HARMLESS)
    return Fp8Blocks(notes=(BLOCKS,), blocks=(sizes[0], sizes[1]))


def read_fbgemm(c: Config) -> Fp8:
    """Return the scheme of `quant_method: fbgemm_fp8`: a scale for each row, activations rounded by token."""
    c.get_float("activation_scale_ub", 0.0, 0.0)
    c.finish(HARMLESS)
    return Fp8(notes=(BOUND,), bound=True)


def read_modelopt(c: Config) -> Quantization:
    """Return the scheme of ModelOpt, from config.json or from the part `quantization` of hf_quant_config.json."""
    algorithm = c.raw("quant_algo") if c.is_null("quant_algo") else c.get_str("quant_algo")
    if c.present("exclude_modules"):
        get_texts(c, "exclude_modules")
    c.expect("has_zero_point", False)
    c.expect("pre_quant_scale", False)
    c.expect("kv_cache_quant_algo", "FP8")
    kv = c.sub("kv_cache_scheme")
    if kv is not None:
        check_kv(kv)
    has_fp8_cache = kv is not None or c.raw("kv_cache_quant_algo") is not None
    c.finish(_MODELOPT)
    if algorithm is None:
        return Floats(has_fp8_cache=has_fp8_cache)
    if algorithm == "FP8":
        return Fp8(has_fp8_cache=has_fp8_cache, static_input=True)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return Fp8(has_fp8_cache=has_fp8_cache)
    if algorithm == "NVFP4":
        return ModelOptNvfp4((FP4,), has_fp8_cache)
    raise c.error("quant_algo", f"is {algorithm!r}; FP8, FP8_PER_CHANNEL_PER_TOKEN and NVFP4 are read")
