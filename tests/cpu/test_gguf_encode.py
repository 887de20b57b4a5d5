"""Quantizing into GGUF blocks: the same bytes as the `gguf` package, and errors not above llama.cpp's."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize as expected

from ridgeline.load.gguf.blocks import TYPES
from ridgeline.load.gguf.codes import dequantize
from ridgeline.load.gguf.encode import quantize

# The root of the mean squared error of llama.cpp's quantizer (ggml_quantize_chunk of llama-cpp-python 0.3.36) on the
# matrices of `matrix`.
LLAMA_CPP = {
    ("normal", "Q6_K"): 0.0177666, ("normal", "Q4_K"): 0.071426, ("laplace", "Q6_K"): 0.0306462,
    ("laplace", "Q4_K"): 0.119505, ("positive", "Q6_K"): 0.0177734, ("positive", "Q4_K"): 0.0424521,
    ("outliers", "Q6_K"): 0.0720573, ("outliers", "Q4_K"): 0.223718,
}  # fmt: skip


def matrix(name: str) -> np.ndarray:
    """A matrix [64, 1024] of random numbers; all are drawn from one generator, in this order."""
    r, shape = np.random.default_rng(0), (64, 1024)
    found = {"normal": r.normal(size=shape), "laplace": r.laplace(size=shape), "positive": np.abs(r.normal(size=shape))}
    found["outliers"] = r.normal(size=shape) * np.where(r.random(shape) < 0.01, 20, 1)
    return found[name].astype(np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0"])
def test_bytes_are_those_of_the_package(kind: str) -> None:
    x = np.concatenate([matrix("laplace")[:8], np.zeros((1, 1024), np.float32), matrix("normal")[:3] * 1e-6])
    x[2, ::2] = x[2, 1::2]  # equal largest numbers
    x[3] = np.abs(x[3])
    wanted = expected(x, GGMLQuantizationType[kind]).view(np.uint8)
    np.testing.assert_array_equal(quantize(TYPES[kind], x), wanted)
    stacked = quantize(TYPES[kind], x.reshape(3, 4, 1024))
    np.testing.assert_array_equal(stacked, wanted.reshape(3, 4, -1))


@pytest.mark.parametrize(("name", "kind"), LLAMA_CPP)
def test_k_quants_are_as_good_as_those_of_llama_cpp(name: str, kind: str) -> None:
    x = matrix(name)
    error = float(np.sqrt(np.mean((dequantize(TYPES[kind], quantize(TYPES[kind], x)) - x) ** 2, dtype=np.float64)))
    assert error <= 1.02 * LLAMA_CPP[name, kind]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 3e-3, 60000.0])
def test_constant_rows(kind: str, value: float) -> None:
    x = np.full((2, 256), value, np.float32)
    got = dequantize(TYPES[kind], quantize(TYPES[kind], x))
    assert np.isfinite(got).all() and np.abs(got - x).max() <= abs(value) / 16 + 1e-7


def test_what_cannot_be_quantized() -> None:
    x = np.ones((2, 256), np.float32)
    for bad in (np.nan, np.inf):
        x[1, 7] = bad
        with pytest.raises(ValueError, match="infinite or NaN"):
            quantize(TYPES["Q8_0"], x)
    for kind in ("F16", "Q8_0", "Q4_K", "Q6_K", "Q4_0"):
        with pytest.raises(ValueError, match="float16"):
            quantize(TYPES[kind], np.full((1, 256), 3e38, np.float32))
    with pytest.raises(ValueError, match="multiple of the 256"):
        quantize(TYPES["Q4_K"], np.ones((2, 128), np.float32))
    with pytest.raises(ValueError, match="Q3_K is not written"):
        quantize(TYPES["Q3_K"], np.ones((2, 256), np.float32))
