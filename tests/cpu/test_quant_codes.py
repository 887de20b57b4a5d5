"""Matrices of given codes and scales: they are never converted to floats, and give the bits of
matrices rounded here.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cpu.instruction_sets import OTHERS, fingerprint_under
from oracle.ours import SPECS, random_weights
from ridgeline.errors import CheckpointError
from ridgeline.nn import Model
from ridgeline.ops import OpsTable, api, open_table
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.ops.host.backend import NumpyBackend
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.quant import bound, store
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.quant import FORMATS, NUMBERS, Format, FormatTable, code_range, format_of, packed_bytes

TABLES = {
    "cpu": open_table("cpu"),
    "numpy": OpsTable(NumpyMemory(), (NumpyBackend(),)),
    "reference": open_table("reference"),
}
ROUNDED = {name: FORMATS[name] for name in ("int8", "int4", "int4-128")}
# These are hashes of codes and scales, computed before schemes were found by name.
DIGESTS = {"int8": "adb27d3a8454d4f0", "int4": "994a48f52c0150cc", "int4-128": "19c77a5d4f7745a2"}


def drawn(rows: int = 45, columns: int = 300) -> np.ndarray:
    rng = np.random.default_rng(7)
    weight = rng.integers(-(2**20), 2**20, (rows, columns)).astype(np.float32)
    weight *= np.exp2(rng.integers(-30, 0, (rows, columns))).astype(np.float32) * np.float32(2.0**-20)
    weight[3] = 0
    return weight


def tokens(columns: int = 300) -> np.ndarray:
    return np.random.default_rng(8).normal(size=(5, columns)).astype(np.float32)


def coded(format: Format, weight: np.ndarray) -> QuantizedMatrix:
    return NumpyBackend().primitive(api.QUANTIZE, format)(weight)


def on(table: OpsTable, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix with its arrays on a device."""
    return table.memory.quantized(matrix)


def products(table: OpsTable, matrix: Any, format: Format, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    linear = store(matrix, None, table, format)
    linear.prepare()
    return np.asarray(linear.apply(table.memory.put(x, "float32", "float32"))), np.asarray(linear.dequantize())


@pytest.mark.parametrize("scheme", ROUNDED)
def test_rounding_gives_the_codes_that_it_always_gave(scheme: str) -> None:
    found = coded(ROUNDED[scheme], drawn())
    digest = hashlib.sha256(np.asarray(found.codes).tobytes() + np.asarray(found.scales).tobytes()).hexdigest()
    assert digest.startswith(DIGESTS[scheme])


@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize("device", TABLES)
def test_codes_make_the_matrix_that_floats_make(device: str, scheme: str) -> None:
    table, format, weight, x = TABLES[device], ROUNDED[scheme], drawn(), tokens()
    wanted = products(table, table.memory.put(weight, "float32", "float32"), format, x)
    found = products(table, on(table, coded(format, weight)), FORMATS["auto"], x)
    assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("columns", [1, 33, 127, 300])
@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize("device", TABLES)
def test_zero_points_and_a_permutation_are_part_of_the_matrix(device: str, scheme: str, columns: int) -> None:
    """Compare with the formula in float64, for codes that no rounding of ours would give."""
    rng, table = np.random.default_rng(columns), TABLES[device]
    format = replace(ROUNDED[scheme], offsets="zero_points")
    low, high = (-8, 8) if format.bits == 4 else (-127, 128)
    groups = format.num_groups(columns)
    codes = rng.integers(low, high, (37, columns)).astype(np.int8)
    zero_points = rng.integers(low, high, (37, groups)).astype(np.int8)
    scales = rng.uniform(0.01, 1, (37, groups)).astype(np.float16).astype(np.float32)
    permutation, x = rng.permutation(columns), tokens(columns)
    matrix = on(table, QuantizedMatrix(format, codes, scales, zero_points, permutation))
    group = np.arange(columns) // (format.group or columns)
    wanted = np.empty((37, columns))
    wanted[:, permutation] = (codes.astype(float) - zero_points[:, group]) * scales[:, group]
    linear = store(matrix, None, table, format)
    linear.prepare()
    dense = np.asarray(linear.dequantize())
    assert np.array_equal(dense, wanted.astype(np.float32))
    got = np.asarray(linear.apply(table.memory.put(x, "float32", "float32")))
    exact = x.astype(np.float64) @ wanted.T
    assert (np.abs(got - exact) <= bound(x.astype(np.float64), wanted, np.zeros(37), format)).all()


BLOCKS = ["int4-32of256-min-exact", "int5-32of256-min-exact", "int6-16of256-exact"]  # Q4_K, Q5_K, Q6_K
WHOLE_SUMS = [
    "int8", "int8-asym", "int8-32", "int8-64x128", "int4-asym", "int4-128", "int4-row", "int4-256-asym", "int3",
    "int3-128-asym", "int2", "int2-asym", "int5", "int6-asym", *(name.replace("-exact", "") for name in BLOCKS),
]  # fmt: skip
EXACT = [
    "int8-exact", "int8-32-min-exact", "int4-asym-exact", "int4-64x128-asym-exact", "int3-exact", "int2-128-exact",
    "fp8", "fp8-tensor", "fp8-64x128", "fp8-32", "int5-exact", "int6-asym-exact", "int4-min-exact", *BLOCKS,
    "int8-32-min-bf16", "int3-bf16", "fp8-bf16", "int6-16of256-bf16",
]  # fmt: skip


def drawn_codes(format: Format, columns: int, rng: Any, *, permuted: bool = False) -> QuantizedMatrix:
    """A matrix of 70 rows with all codes, zero points and scales of float16 that its format can have."""
    numbers, groups = NUMBERS[format.numbers], (70, format.num_scales(columns))
    is_lower = format.offsets == "minimums"
    low, high = code_range(format) if not numbers.levels else (0, 0)
    codes = rng.integers(low, high + 1, (70, columns)).astype(np.uint8 if is_lower else np.int8)
    if numbers.levels:
        codes = rng.integers(0, 256, (70, columns)).astype(np.uint8)
        codes[codes & 127 == 127] = 0
    half = rng.uniform(0, 1, groups).astype(np.float16).astype(np.float32)
    zeros = rng.integers(numbers.low, numbers.high + 1, groups).astype(np.int8)
    factors, min_factors = _factors(format, columns, is_lower, rng)
    return QuantizedMatrix(
        format, codes, half if format.scale_bits == 16 else half / np.float32(3),
        zeros if format.offsets == "zero_points" else None, rng.permutation(columns) if permuted else None,
        -half if is_lower else None, factors=factors, min_factors=min_factors,
    )  # fmt: skip


def _factors(format: Format, columns: int, is_lower: bool, rng: Any) -> list[Any]:
    """All factors that groups of a block can have: six bits where there are minimums, otherwise eight."""
    if not format.block:
        return [None, None]
    shape, low, high = (70, format.num_groups(columns)), 0 if is_lower else -128, 64 if is_lower else 128
    found = [rng.integers(low, high, shape).astype(np.int8) for _ in range(2)]
    return found if is_lower else [found[0], None]


@pytest.mark.parametrize("columns", [1, 63, 100, 257])
@pytest.mark.parametrize("name", [*WHOLE_SUMS, *EXACT])
def test_kernels_have_the_bits_of_their_definition(name: str, columns: int) -> None:
    """Where sums are of whole numbers a product has the bits of numpy's. With exact activations it has those of a
    product with the dequantized matrix in float32, with activations in bf16 those of one with tokens that were rounded
    before; fp8 with a scale for each row multiplies the sum with it."""
    format, rng = format_of(name), np.random.default_rng(columns)
    columns = -(-columns // format.block) * format.block if format.block else columns
    matrix: Any = drawn_codes(format, columns, rng, permuted=True)
    linear, wanted = (store(matrix, None, TABLES[device], format) for device in ("cpu", "numpy"))
    linear.prepare()
    wanted.prepare()
    dense: Any = linear.dequantize()
    assert np.array_equal(dense, np.asarray(wanted.dequantize()))
    assert linear.apply._matrix.nbytes == packed_bytes(format, "float32", 70, columns)  # type: ignore[attr-defined]
    is_exact, factor = format.activations in ("exact", "bf16"), np.float32(1)
    if is_exact:
        plain = np.ascontiguousarray(dense[:, matrix.permutation])
        if format.numbers == "fp8" and not format.group:
            plain, factor = np.array(NUMBERS["fp8"].levels, np.float32)[matrix.codes], matrix.scales[:, 0]
        wanted = store(plain, None, TABLES["cpu"], FORMATS["auto"])
        wanted.prepare()
    for count in (1, 3, 9, 63):
        x = rng.normal(size=(count, columns)).astype(np.float32)
        given: Any = np.ascontiguousarray(x[:, matrix.permutation]) if is_exact else x
        if format.activations == "bf16":
            given = given.astype(bfloat16).astype(np.float32)
        assert np.array_equal(np.asarray(linear.apply(x)), np.asarray(wanted.apply(given)) * factor)


@pytest.mark.parametrize("name", WHOLE_SUMS)
def test_kernels_take_a_given_scale_and_a_factor(name: str) -> None:
    """A scale for the input clamps larger activations; a power of two makes small scales float16 numbers."""
    columns = 256 if format_of(name).block else 100
    matrix: Any = drawn_codes(format_of(name), columns, np.random.default_rng(4))
    for other in (replace(matrix, input_scale=0.01), replace(matrix, scales=matrix.scales * np.float32(2.0**-30))):
        found = [products(TABLES[device], other, other.format, tokens(columns))[0] for device in ("cpu", "numpy")]
        assert np.array_equal(*found)


def test_kernels_serve_scales_that_a_power_of_two_makes_float16() -> None:
    rng, backend = np.random.default_rng(3), open_table("cpu")
    matrix = drawn_codes(format_of("int4"), 100, rng)
    brain = (matrix.scales.view(np.uint32) & 0xFFFF0000).view(np.float32) * np.float32(2.0**-40)
    odd = np.where(np.arange(4) == 1, np.float32(1 + 2.0**-12), matrix.scales)
    for scales, refused in ((brain, False), (odd, True), (brain * np.float32(2.0**-80), False)):
        products(backend, replace(matrix, scales=scales), matrix.format, tokens(100))
        reasons = [reason for choice in backend.choices() for _, reason in choice.refusals]
        assert any("no float16 numbers" in reason for reason in reasons) == refused
        backend = open_table("cpu")


@pytest.mark.parametrize("activations", ["exact", "bf16", "int8", "outliers", "fp8"])
@pytest.mark.parametrize("device", TABLES)
def test_products_of_minimums_levels_and_given_scales(device: str, activations: str) -> None:
    """Compare with the formula in float64. A given scale for the input rounds a token that needs no larger one."""
    rng, table, columns = np.random.default_rng(5), TABLES[device], 100
    x = tokens(columns)
    x[2, 7], x[2, 9] = 40.0, -8.0
    codes = rng.integers(0, 16, (37, columns)).astype(np.uint8)
    scales, minimums = (rng.uniform(0.01, 1, (37, 4)).astype(np.float32) for _ in range(2))
    at = np.arange(columns) // 32
    format = format_of(f"int4-min-{activations}")
    shifted = QuantizedMatrix(format, codes, scales, minimums=minimums)
    wanted = codes * scales[:, at].astype(np.float64) - minimums[:, at]
    agree(table, shifted, x, wanted, minimums[:, at].astype(np.float64))
    given = replace(shifted, input_scale=0.5)
    agree(table, given, x, wanted, minimums[:, at].astype(np.float64))
    if activations in ("exact", "bf16", "fp8"):
        index = rng.integers(0, 16, (37, columns)).astype(np.uint8)
        for numbers in ("nf4", "fp4", "iq4"):
            format = format_of(f"{numbers}-32-{activations}")
            wanted = np.array(NUMBERS[format.numbers].levels)[index] * scales[:, at].astype(np.float64)
            agree(table, QuantizedMatrix(format, index, scales), x, wanted)


def agree(table: OpsTable, matrix: QuantizedMatrix, x: np.ndarray, wanted: np.ndarray, minimums: Any = None) -> None:
    """Assert that a matrix and its product are what the formula says, within the stated bound."""
    got, dense = products(table, on(table, matrix), FORMATS["auto"], x)
    assert np.abs(dense - wanted).max() < 1e-5 * np.abs(wanted).max()
    wide = x.astype(np.float64)
    allowed = bound(wide, dense.astype(np.float64), np.zeros(37), matrix.format, minimums, matrix.input_scale)
    assert (np.abs(got - wide @ dense.astype(np.float64).T) <= allowed).all()


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize(("part", "value"), [("scale", np.nan), ("scale", np.inf), ("code", -9)])
def test_codes_that_a_format_cannot_have_are_refused(device: str, scheme: str, part: str, value: float) -> None:
    if part == "code" and scheme == "int8":
        pytest.skip("each byte is a code of int8")
    matrix = coded(ROUNDED[scheme], drawn())
    (matrix.scales if part == "scale" else matrix.codes)[40, 0] = value  # type: ignore[index]
    table = TABLES[device]
    with pytest.raises(ValueError, match="a code or a scale is outside of the range of int"):
        store(on(table, matrix), None, table, matrix.format).prepare()


@pytest.mark.parametrize("device", TABLES)
def test_parts_that_do_not_fit_the_codes_are_refused(device: str) -> None:
    format, table = ROUNDED["int4"], TABLES[device]
    codes, scales = np.zeros((3, 40), np.int8), np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match=r"scales of 3 x 40 codes in int4: \(3, 1\), not \(3, 2\)"):
        QuantizedMatrix(format, codes, scales[:, :1])
    with pytest.raises(ValueError, match="zero points of 3 x 40 codes in int4-asym"):
        QuantizedMatrix(FORMATS["int4-asym"], codes, scales, np.zeros((2, 2), np.int8))
    with pytest.raises(ValueError, match="a matrix in int4 has zero points"):
        QuantizedMatrix(format, codes, scales, np.zeros((3, 2), np.int8))
    with pytest.raises(ValueError, match=r"permutation of 3 x 40 codes in int4: \(39,\), not \(40,\)"):
        QuantizedMatrix(format, codes, scales, None, np.arange(39))
    twice = QuantizedMatrix(format, codes, scales, None, np.array([0, *range(39)]))
    with pytest.raises(ValueError, match="the permutation of a matrix in int4 does not contain each column once"):
        store(on(table, twice), None, table, format).prepare()


def test_codes_of_another_format_are_refused() -> None:
    matrix = coded(ROUNDED["int4"], drawn())
    with pytest.raises(ValueError, match="codes are int4, and the matrix is to be stored as int8"):
        type(store(matrix, None, TABLES["cpu"], matrix.format))(matrix, None, TABLES["cpu"], ROUNDED["int8"])


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_model_of_codes_equals_a_rounded_one(device: str, scheme: str) -> None:
    """The cpu fuses its attention and MLP, both for codes alone and for codes mixed with floats."""
    spec, table, format = SPECS["cla2"], open_table(device), ROUNDED[scheme]
    plain = random_weights(spec)
    matrices = {w.name for w in spec.weights() if w.name.startswith("layers.") and w.may_be_rounded}
    some = {name for name in matrices if not name.endswith("k.weight")}  # q and v are codes, k is floats
    put = {name: table.memory.put(x, "float32", "float32") for name, x in plain.items()}
    mixed = {name: on(table, coded(format, plain[name])) if name in some else put[name] for name in put}
    step = DenseStep.build([[1, 2, 3, 4], [5, 6]], table.memory)
    found = [np.asarray(Model(spec, weights, table, 64, FormatTable(format))(step)) for weights in (put, mixed)]
    assert np.array_equal(*found)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["int8", "int4-asym", "fp8"])
def test_an_embedding_of_codes_is_looked_up(device: str, name: str) -> None:
    """The table is tied to the head, which multiplies with the same codes."""
    spec = replace(SPECS["cla2"], tie_word_embeddings=True)
    table, format, plain = open_table(device), format_of(f"{name}-exact"), random_weights(spec)
    codes = coded(format, plain["embed.weight"])
    dense = NumpyBackend().primitive(api.DEQUANTIZE, format)(codes)
    put = {n: table.memory.put(x, "float32", "float32") for n, x in plain.items()}
    step = DenseStep.build([[1, 2, 3, 4], [5, 6]], table.memory)
    embeds = on(table, codes), table.memory.put(dense, "float32", "float32")
    got, wanted = (np.asarray(Model(spec, {**put, "embed.weight": e}, table, 64)(step)) for e in embeds)
    assert np.abs(got - wanted).max() < 1e-4


@pytest.mark.parametrize("scheme", ["int4-asym", "int3-exact"])
def test_a_model_of_permuted_codes(scheme: str) -> None:
    """With one order of columns for the matrices of an input, stages are fused; with several they are composed."""
    spec, rng, format = SPECS["cla2"], np.random.default_rng(1), format_of(scheme)
    plain, step = random_weights(spec), DenseStep.build([[1, 2, 3, 4], [5, 6]], NumpyMemory())
    orders: dict[int, Any] = {}
    for is_shared in (True, False):
        weights: dict[str, Any] = {**plain}
        for w in spec.weights():
            if w.name.startswith("layers.") and w.may_be_rounded and len(w.shape) == 2:
                order = rng.permutation(w.shape[1])
                order = orders.setdefault(w.shape[1], order) if is_shared else order
                weights[w.name] = replace(coded(format, plain[w.name][:, order]), permutation=order)
        tables = open_table("cpu"), TABLES["numpy"]
        one, other = (np.asarray(Model(spec, weights, table, 64, FormatTable(format))(step)) for table in tables)
        # A tie of a token that is rounded may move it by a step.
        assert np.abs(one - other).max() < (1e-5 if "exact" in scheme else 0.1) * other.std()
        refusals = [reason for choice in tables[0].choices() for _, reason in choice.refusals]
        assert any("permutations of columns differ" in reason for reason in refusals) != is_shared


def test_matrices_in_different_formats_are_not_packed_as_one() -> None:
    spec, table = SPECS["cla2"], open_table("cpu")
    weights: dict[str, Any] = {**random_weights(spec)}
    name = "layers.0.mixer.q.weight"
    mixed = {**weights, name: coded(ROUNDED["int8"], weights[name])}
    dense = {**weights, name: NumpyBackend().primitive(api.DEQUANTIZE, ROUNDED["int8"])(mixed[name])}
    step = DenseStep.build([[1, 2, 3, 4], [5, 6]], table.memory)
    one, other = (Model(spec, w, table, 64)(step) for w in (mixed, dense))
    assert np.abs(np.asarray(one) - np.asarray(other)).max() < 0.05 * np.asarray(other).std()
    refusals = [reason for choice in table.choices() for _, reason in choice.refusals]
    assert "among matrices that one kernel multiplies with at once, formats differ" in refusals


def test_a_matrix_of_codes_that_cannot_be_stored_is_named() -> None:
    spec, table = SPECS["cla2"], open_table("cpu")
    weights: dict[str, Any] = {**random_weights(spec)}
    name = "layers.1.mlp.up.weight"
    matrix = coded(ROUNDED["int8"], weights[name])
    matrix.scales[0, 0] = np.nan  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"^layer 1: a code or a scale is outside of the range of int8$"):
        Model(spec, {**weights, name: matrix}, table, 64, FormatTable(ROUNDED["int8"]))


def fingerprint() -> bytes:
    """Products of codes in blocks with rounded tokens, and their dequantized matrices."""
    found = []
    for name in BLOCKS:
        format, rng = format_of(name.replace("-exact", "")), np.random.default_rng(6)
        matrix = drawn_codes(format, 512, rng, permuted=True)
        x = rng.normal(size=(21, 512)).astype(np.float32)
        found += [np.ascontiguousarray(a).tobytes() for a in products(TABLES["cpu"], matrix, format, x)]
    return b"".join(found)


@pytest.mark.parametrize("isa", OTHERS)
def test_blocks_have_the_same_bits_on_other_instruction_sets(isa: str) -> None:
    assert fingerprint_under(isa, "test_quant_codes") == fingerprint()
