"""Every way to store a matrix fulfills `apply(x) ~= x @ dequantize().T + bias`, within its stated bound."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.problems import STORED
from ridgeline.ops import OpsTable, open_table
from ridgeline.ops.host.backend import NumpyBackend
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.quant import StoredLinear, bound, store
from ridgeline.spec.quant import FORMATS, NUMBERS, PLAIN, Format, format_of

SIZES = st.sampled_from([1, 63, 100, 257])
TABLES = {
    "cpu": open_table("cpu"),
    "numpy": OpsTable(NumpyMemory(), (NumpyBackend(),)),
    "reference": open_table("reference"),
}
# The formats of FORMATS, and others: each kind of numbers, group, offset and activations occurs.
NAMES = [
    *FORMATS, "int8-exact", "int8-asym", "int8-32", "int8-outliers", "int6", "int5-16-asym", "int4-row", "int4-exact",
    "int4-128-asym-exact", "int3-128-asym", "int2-asym", "fp8-fp8", "fp8-tensor", "fp8-64x128", "int4-fp8",
    "int4-asym-bf16", "int8-bf16", "fp8-bf16",
]  # fmt: skip
ROUNDED = {name: format_of(name) for name in NAMES if format_of(name).is_lossy}
WAYS = {**{name: format_of(name) for name in NAMES}, "plain-bf16": format_of("auto", "bf16")}


def problem(tokens: int, n_in: int, n_out: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, weight and bias with magnitudes over `spread` powers of two, so that the sums round and cancel."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 2.0 ** rng.uniform(-spread, 0, shape)).astype(np.float32)

    return draw(tokens, n_in), draw(n_out, n_in), draw(n_out)


def build(weight: np.ndarray, bias: np.ndarray | None, dtype: str, table: OpsTable, format: Format) -> StoredLinear:
    put = table.memory.put
    stored = put(weight, "float32", dtype)
    linear = store(stored, None if bias is None else put(bias, "float32", "float32"), table, format)
    linear.prepare()
    return linear


def numpy_of(array: Any) -> np.ndarray:
    """Convert to numpy without `memory.get`, which would round a result that is not float32."""
    return array.detach().numpy() if isinstance(array, torch.Tensor) else array


@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize("device", TABLES)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    tokens=SIZES,
    n_in=SIZES,
    n_out=SIZES,
    bias=st.booleans(),
    spread=st.sampled_from([0.0, 8.0]),
    dtype=st.sampled_from(list(STORED)),
    seed=st.integers(0, 9),
)
def test_apply_is_within_its_bound(
    device: str, scheme: str, dtype: str, tokens: int, n_in: int, n_out: int, bias: bool, spread: float, seed: int
) -> None:
    x, weight, b = problem(tokens, n_in, n_out, spread, seed)
    table, format = TABLES[device], WAYS[scheme]
    linear = build(weight, b if bias else None, dtype, table, format)
    got, w = numpy_of(linear.apply(table.memory.put(x, "float32", "float32"))), numpy_of(linear.dequantize())
    assert got.dtype == w.dtype == np.float32
    wide, matrix, extra = x.astype(np.float64), w.astype(np.float64), b.astype(np.float64) * bias
    error = np.abs(got - (wide @ matrix.T + extra))
    allowed = bound(wide, matrix, extra, format)
    assert (error <= allowed).all(), f"error is {np.max(error / allowed):.2f} of what the bound allows"


@pytest.mark.parametrize("scheme", [name for name, f in ROUNDED.items() if f.activations == "int8"])
def test_products_of_rounded_tokens_have_the_same_bits_everywhere(scheme: str) -> None:
    """Sums over groups are whole numbers, and the groups of a row are added in ascending order on every device."""
    for tokens, n_in, n_out in ((1, 257, 63), (63, 100, 257), (3, 1400, 63)):  # 1,400 products go beyond 2^24
        x, weight, bias = problem(tokens, n_in, n_out, 8.0, 1)
        x[0], weight[0] = 1, 1
        found = [
            numpy_of(build(weight, bias, "float32", t, ROUNDED[scheme]).apply(t.memory.put(x, "float32", "float32")))
            for t in TABLES.values()
        ]
        assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("scheme", WAYS)
def test_the_bound_is_not_too_large(scheme: str) -> None:
    """With exact activations the bound grows with the sum's length, and a sum in half precision (2^-11) would not pass.
    Where tokens are rounded to int8, tokens of 6 bits would not pass; where they are rounded to fp8, those of 2 bits of
    mantissa would not, and where they are rounded to bf16, those of 6 bits of it would not."""
    format = WAYS[scheme]

    def share(n: int) -> float:
        one = np.ones((1, n))
        return float(bound(one, one, np.zeros(1), format)[0, 0]) / n

    bounds = [share(n) for n in (1, 63, 257)]
    if format.activations == "exact":
        assert 0 < bounds[0] < bounds[1] < bounds[2] < 2.0**-12
    else:
        half = {"fp8": 2.0**-4, "bf16": 2.0**-8}.get(format.activations, 0.5 / 127)
        assert all(half < found < 1.02 * half for found in bounds)


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("dtype", STORED)
def test_plain_keeps_the_matrix(dtype: str, device: str) -> None:
    """The conversion to float32 is exact: the matrix of the plain scheme is the stored one,
    rounded once to its type.
    """
    _, weight, _ = problem(1, 63, 100, 8.0, 0)
    linear = build(weight, None, dtype, TABLES[device], PLAIN)
    rounded = torch.from_numpy(weight).to(getattr(torch, dtype)).float()
    assert np.array_equal(numpy_of(linear.dequantize()), rounded.numpy())


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize("spread", [0.0, 8.0, 60.0])
def test_rounding_is_to_the_nearest_and_the_same_everywhere(scheme: str, spread: float, dtype: str) -> None:
    """Each number is within half a step of the stored one, with a margin for float16 scales, which are rounded and may
    underflow. The kernels, numpy and torch give the same matrix, to the bit.
    """
    _, weight, _ = problem(1, 257, 63, spread, 3)
    weight[5], weight[6, 100:] = 0.0, 1e-30
    format = ROUNDED[scheme]
    found = [numpy_of(build(weight, None, dtype, table, format).dequantize()) for table in TABLES.values()]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    stored = weight.astype(STORED[dtype]).astype(np.float64)
    group = format.group or weight.shape[1]
    for start in range(0, weight.shape[1], group):
        some = slice(start, start + group)
        assert (np.abs(found[0][:, some] - stored[:, some]) <= half_step(format, stored[:, some])).all()


def half_step(format: Format, part: np.ndarray) -> np.ndarray:
    """Return the largest distance of each number of a group from the nearest number that its codes can express."""
    numbers = NUMBERS[format.numbers]
    peak = np.abs(part).max(1, keepdims=True)
    if format.rows != 1:
        for start in range(0, len(part), format.rows or len(part)):
            some = slice(start, start + (format.rows or len(part)))
            peak[some] = peak[some].max()
    if numbers.levels:  # a mantissa of 3 bits; below the smallest normal number steps are equal
        return np.abs(part) * (2.0**-4 + 2.0**-20) + peak / 448 * 2.0**-10 * (1 + 2.0**-10) + 2.0**-100
    steps, least = numbers.steps, 2.0**-100
    if format.offsets == "zero_points":  # both ends lose half a step where the zero point is rounded
        peak = np.maximum(part.max(1, keepdims=True), 0) - np.minimum(part.min(1, keepdims=True), 0)
        steps, least = (numbers.high - numbers.low) / 2, 2.0**-98
    if format.scale_bits == 32:
        return peak / steps * (0.5 + 2.0**-15) + least
    codes = numbers.high - numbers.low
    return peak / steps * (0.5 + codes * 2.0**-11) + codes * 2.0**-25 + least


@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize("device", TABLES)
def test_a_token_that_is_not_finite_is_alone_in_that(device: str, scheme: str) -> None:
    x, weight, bias = problem(63, 100, 63, 0.0, 0)
    table = TABLES[device]
    linear = build(weight, bias, "float32", table, ROUNDED[scheme])
    clean = numpy_of(linear.apply(table.memory.put(x, "float32", "float32")))
    x[7, 3], x[20, 99] = np.inf, np.nan
    got = numpy_of(linear.apply(table.memory.put(x, "float32", "float32")))
    assert not np.isfinite(got[[7, 20]]).any()
    others = [i for i in range(63) if i not in (7, 20)]
    assert np.array_equal(got[others], clean[others])


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("device", TABLES)
def test_activations_in_bf16_are_the_nearest_numbers(device: str, dtype: str) -> None:
    """A product with the identity shows them. Ties go to even, infinities and NaN stay, the largest floats become
    infinite, and denormal numbers are rounded to multiples of 2^-133; dot products of bf16 take them as zeros."""
    table = TABLES[device]
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, (63, 100), np.uint32)
    bits[1] = bits[1] & 0xFFFF0000 | 0x8000  # ties
    bits[2] = bits[2] & 0x807FFFFF  # denormal
    bits[3] = bits[3] & 0x80000000 | 0x7F7F8000  # rounds to 2^128
    x = bits.view(np.float32)
    x[:4] = np.where(np.isfinite(x[:4]), x[:4], 1)
    # In a row of its own each: a product with an infinity is NaN for every other column.
    x[4:] = np.where(np.isfinite(x[4:]), x[4:], 1)
    x[4], x[5] = 0, 0
    x[4, 7], x[5, 7] = np.inf, np.nan
    linear = build(np.eye(100, dtype=np.float32), None, dtype, table, WAYS["plain-bf16"])
    got = numpy_of(linear.apply(table.memory.put(x, "float32", "float32")))
    wanted = torch.from_numpy(x).bfloat16().float().numpy()
    kernels: Any = sys.modules.get("ridgeline._kernels")  # None where they were not built
    if (device, dtype) == ("cpu", "bfloat16") and kernels and not kernels.dots_refusal():
        wanted[np.abs(wanted) < 2.0**-126] = 0.0
    finite = np.isfinite(wanted).all(1)
    assert finite.sum() > 30 and np.array_equal(got[finite], wanted[finite])
    assert np.isposinf(wanted[3]).any() and not np.isfinite(got[3]).any()
    assert got[4, 7] == np.inf and np.isnan(got[5, 7])


@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
def test_a_matrix_that_is_not_finite_is_refused(device: str, scheme: str, worst: float) -> None:
    weight = np.ones((40, 50), np.float32)
    weight[33, 49] = worst
    with pytest.raises(ValueError, match="a weight is not finite, or too large for "):
        build(weight, None, "float32", TABLES[device], ROUNDED[scheme])


@pytest.mark.parametrize("device", TABLES)
def test_four_bits_end_where_the_scale_does(device: str) -> None:
    weight = np.full((3, 40), 7.5 * 65504, np.float32)
    build(weight, None, "float32", TABLES[device], FORMATS["int4"])
    with pytest.raises(ValueError, match="too large for int4"):
        build(weight * 1.1, None, "float32", TABLES[device], FORMATS["int4"])
