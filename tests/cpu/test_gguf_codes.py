"""Blocks of GGUF tensors: the same bits as the `gguf` package, as values and as codes with scales."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize as expected

from ridgeline.load.gguf.blocks import OTHERS, TYPES, BlockType
from ridgeline.load.gguf.codes import dequantize, gather, spread, unpack
from ridgeline.load.gguf.stored import matrix_of
from ridgeline.load.stored import dequantized

QUANTIZED = [t for t in TYPES.values() if not t.is_float]
BLOCKS = 400


def random_blocks(kind: BlockType, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of random bytes whose values are finite, and what the package makes of them."""
    blocks = np.random.default_rng(seed).integers(0, 256, (BLOCKS, kind.size), np.uint8)
    with np.errstate(all="ignore"):
        values = expected(blocks, GGMLQuantizationType[kind.name])
    finite = np.isfinite(values).all(axis=1)
    if kind.name == "MXFP4":
        finite &= blocks[:, 0] <= 252
    return blocks[finite], values[finite]


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda t: t.name)
def test_types_are_those_of_the_package(kind: BlockType) -> None:
    assert GGMLQuantizationType[kind.name].value == kind.number
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]] == (kind.weights, kind.size)
    assert kind.is_float or kind.weights % kind.group == 0


def test_other_types_have_the_names_of_the_package() -> None:
    assert {GGMLQuantizationType(number).name for number in OTHERS} == set(OTHERS.values())


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda t: t.name)
def test_values_have_the_same_bits(kind: BlockType) -> None:
    blocks, values = random_blocks(kind)
    assert len(blocks) > BLOCKS / 2
    rows = len(blocks) // 3
    blocks, values = blocks[: 3 * rows].reshape(rows, -1), values[: 3 * rows].reshape(rows, -1)
    np.testing.assert_array_equal(dequantize(kind, blocks).view(np.uint32), values.view(np.uint32))
    stacked = dequantize(kind, blocks[:6].reshape(2, 3, -1))
    np.testing.assert_array_equal(stacked, values[:6].reshape(2, 3, -1))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda t: t.name)
def test_codes_scales_and_minima_give_the_values(kind: BlockType) -> None:
    blocks, values = random_blocks(kind)
    rows = blocks[: len(blocks) // 2 * 2].reshape(-1, 2 * kind.size)
    matrix = unpack(kind, rows)
    assert matrix.codes.dtype == np.int8 and matrix.codes.shape == (len(rows), 2 * kind.weights)
    assert (matrix.codes.min(), matrix.codes.max()) == kind.codes
    assert matrix.group == kind.group and matrix.scales.shape == (len(rows), 2 * kind.weights // kind.group)
    assert (matrix.minima is not None) == kind.has_minima
    product = np.repeat(matrix.scales, kind.group, axis=1) * matrix.codes.astype(np.float32)
    if matrix.minima is not None:
        product = product - np.repeat(matrix.minima, kind.group, axis=1)
    assert product.dtype == np.float32
    wanted = values[: 2 * len(rows)].reshape(product.shape)
    np.testing.assert_array_equal(product.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda t: t.name)
def test_matrices_of_codes_have_the_values(kind: BlockType) -> None:
    """Whole numbers, factors of groups and minimums are those of the file, so that nothing is rounded."""
    blocks, values = random_blocks(kind)
    rows = blocks[: len(blocks) // 2 * 2].reshape(-1, 2 * kind.size)
    matrix = matrix_of(kind, unpack(kind, rows))
    np.testing.assert_array_equal(dequantized(matrix), values[: 2 * len(rows)].reshape(len(rows), -1))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda t: t.name)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite(kind: BlockType, bad: float) -> None:
    blocks, _ = random_blocks(kind)
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind.name, (0, 2) if kind.has_minima else (0,))
    for start in at:
        damaged = blocks.copy()
        damaged[1, start : start + 2] = (
            255 if kind.name == "MXFP4" else np.frombuffer(np.float16(bad).tobytes(), np.uint8)
        )
        for read in (dequantize, unpack):
            with pytest.raises(ValueError, match="infinite or NaN"):
                read(kind, damaged)


@pytest.mark.parametrize(("width", "bits"), [(16, 4), (32, 2), (32, 1), (1, 2), (64, 4), (8, 4)])
def test_gather_undoes_spread(width: int, bits: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, (5, 2 * width), np.uint8)
    fields = spread(data, width, bits)
    assert fields.max() < 2**bits
    np.testing.assert_array_equal(gather(fields, width, bits), data)
