"""Matrix products of the cpu backend: within derived bounds of float64, and the same bits in any batch.

Inputs are slices of arrays full of NaN, and outputs are surrounded by NaN.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from ridgeline.spec.quant import NUMBERS, PLAIN, format_of

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from cpu.instruction_sets import ISAS  # noqa: E402
from ridgeline.ops.cpu.coded import pack_codes, rounds_here, tokens_of  # noqa: E402
from ridgeline.quant.bounds import bound  # noqa: E402

SIZES = (1, 63, 100, 257)
UNIT = 2.0**-24
TOKENS = (1, 2, 3, 4, 5, 8, 11, 12, 13, 25, 33, 97, 130)
HERE = Path(__file__).parent
LACKS = re.compile("has no such instructions|RIDGELINE_MATRIX_UNIT=amx: ")  # errors where a CPU lacks something


class Format(NamedTuple):
    """A type of numbers, or a format of --weights."""

    name: Any
    group: int = 0
    text: str = ""

    @property
    def stored(self) -> Any:
        return format_of(self.text) if self.text else None

    @property
    def is_rounded(self) -> bool:
        return self.text != "" and self.stored.activations == "int8"


FLOATS = [Format("fp32"), Format("bf16"), Format("fp16")]
ROUNDED = [
    Format(format_of(text).numbers, format_of(text).group, text)
    for text in ("int8", "int4", "int4-128", "int8-32", "int4-asym", "int3-128-asym", "int3", "int2", "int2-row")
]
EXACT = [
    Format(format_of(text).numbers, format_of(text).group, text)
    for text in ("int8-exact", "int4-asym-exact", "int3-128-exact", "int2-exact", "fp8", "fp8-64x128")
]
FORMATS = [*FLOATS, *ROUNDED, *EXACT]
by_format = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.text or f.name)


@pytest.fixture(scope="module")
def pool() -> Any:
    return kernels.Pool(1)


def rng(*key: int) -> np.random.Generator:
    return np.random.default_rng([11, *key])


def draw(*shape: int, spread: float = 6.0, key: int = 0) -> np.ndarray:
    """Return numbers with magnitudes over `spread` powers of two, so that sums round and cancel."""
    r = rng(key, *shape)
    return (r.normal(size=shape) * 2.0 ** r.uniform(-spread, 0, shape)).astype(np.float32)


def poisoned(x: np.ndarray) -> np.ndarray:
    """Return the values as a slice of rows, from an array whose other elements are NaN."""
    room = np.full((x.shape[0] + 2, x.shape[1] + 5), np.nan, np.float32)
    inner = room[1:-1, 2:-3]
    inner[...] = x
    return inner


def matrix(pool: Any, form: Format, weight: Any, bias: Any = None) -> Any:
    """Pack a matrix, or several below each other with a list of biases."""
    parts, biases = (weight, bias) if isinstance(weight, list) else ([weight], [bias])
    if form.text and not rounds_here(form.stored):
        return pack_codes(pool, parts, form.stored, biases, interleave=False)
    tokens = tokens_of(form.stored) if form.text else "exact"
    return kernels.Matrix(pool, parts, "float32", form.name, form.group, biases, False, tokens=tokens)


def product(pool: Any, w: Any, x: np.ndarray) -> np.ndarray:
    """Return x times the matrix, computed into the middle of an array of NaN whose edge must not change."""
    room = np.full((len(x) + 2, w.rows + 7), np.nan, np.float32)
    out = room[1:-1, 3:-4]
    kernels.Projection(pool, w, None, 1.0, 1.0, 0.0)(x, None, None, None, out)
    edge = np.ones(room.shape, bool)
    edge[1:-1, 3:-4] = False
    assert np.isnan(room[edge]).all()
    return out


def meaning(pool: Any, w: Any) -> np.ndarray:
    """Return the matrix that the kernel computes with."""
    out = np.full((w.rows, w.columns), np.nan, np.float32)
    w.take(pool, np.arange(w.rows), out)
    return out.astype(np.float64)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens as int8 and int4 matrices read them, in float64, and their scales [T, 1]."""
    peak = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(2.0**-100))
    scale = (peak / np.float32(127)).astype(np.float64)
    return np.rint(x * (np.float32(127) / peak)) * scale, scale


def gamma(n: int) -> float:
    """Return the relative error of n roundings in a row (Higham, Accuracy and Stability of
    Numerical Algorithms, 3.1).
    """
    return n * UNIT / (1 - n * UNIT)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(
        np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32)
    )


# ---- results ---------------------------------------------------------------------------------------------------------


@by_format
@pytest.mark.parametrize("n_out", SIZES)
@pytest.mark.parametrize("n_in", SIZES)
def test_products(pool: Any, form: Format, n_in: int, n_out: int) -> None:
    """Compare with float64. `terms` counts the roundings.

    A sum of floats has one for each term. Whole numbers with a scale for each row have four: the sum, its products with
    two scales, and each weight. With groups there is one for the product with a scale, one for each sum of groups but
    the first, and one for the product with the token's scale. The sum of fp8 is multiplied with the scale of its row,
    with which the matrix was rounded too. The bias adds one.
    """
    weight, bias, x = draw(n_out, n_in), draw(n_out, key=1), draw(37, n_in, key=2)
    w = matrix(pool, form, weight, bias)
    got, mean = product(pool, w, poisoned(x)), meaning(pool, w)
    if w.in_tiles:  # the arithmetic of a matrix unit: unit_cases.py
        wide, added = x.astype(np.float64), bias.astype(np.float64)
        assert (np.abs(got - (wide @ mean.T + added)) <= bound(wide, mean, added, PLAIN, in_tiles=True)).all()
        return
    seen, scale = rounded(x) if form.is_rounded else (x.astype(np.float64), np.zeros((len(x), 1)))
    floats = n_in + 2 * (form.name == "fp8")
    terms = (floats if not form.is_rounded else -(-n_in // form.group) + 1 if form.group else 4) + 1
    size = np.abs(seen) @ np.abs(mean).T + np.abs(bias)
    assert (np.abs(got - (seen @ mean.T + bias)) <= gamma(terms) * size).all()
    # Compared with tokens that are not rounded, each element is at most half a step away, plus its own two roundings.
    step = (0.5 + 2.0**-15) * scale * np.abs(mean).sum(1)
    assert (np.abs(got - (x.astype(np.float64) @ mean.T + bias)) <= step + gamma(terms) * size).all()


@by_format
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_the_stored_numbers_of_a_matrix(pool: Any, form: Format, kind: Any) -> None:
    """The kernel keeps the stored numbers if the format can hold them, or else numbers within half a step of the
    scheme.
    """
    stored = draw(70, 300).astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    wide = stored.astype(np.float32)
    given = stored if kind == "float32" else stored.view(np.uint16)
    if form.text and not rounds_here(form.stored):
        pytest.skip("numpy rounds to this format: test_quant.py")
    w = kernels.Matrix(pool, [given], kind, form.name, form.group, [None], False)
    kept = meaning(pool, w)
    match form.name:
        case "fp32":
            assert np.array_equal(kept, wide)
        case "bf16" | "fp16":
            narrow = ml_dtypes.bfloat16 if form.name == "bf16" else np.float16
            assert np.array_equal(kept, wide.astype(narrow).astype(np.float64))
        case _:
            steps = NUMBERS[form.stored.numbers].steps
            for begin in range(0, 300, form.group or 300):
                part = slice(begin, begin + (form.group or 300))
                scale = np.abs(wide[:, part]).max(1, keepdims=True) / steps
                error = 2.0**-7 if form.group else 2.0**-15  # a float16 scale moves 7.5 by 2^-8, 127 by 2^-4
                error = max(error, form.group and steps * 2.0**-10)
                assert (np.abs(kept[:, part] - wide[:, part]) <= scale * (0.5 + error)).all()
            if form.name == "int8" and not form.group:
                assert len(np.unique(np.rint(kept[0] / scale[0]))) > 50


def test_every_number_of_16_bits_is_kept(pool: Any) -> None:
    """Every conversion keeps all finite halves and bfloat16 numbers, including subnormal ones."""
    bits = np.arange(2**16, dtype=np.uint16)
    for kind, form, narrow in (("float16", "fp16", np.float16), ("bfloat16", "bf16", ml_dtypes.bfloat16)):
        finite = bits[np.isfinite(bits.view(narrow).astype(np.float32))].reshape(-1, 2)
        wanted = finite.view(narrow).astype(np.float64)
        for given, name in ((finite, kind), (finite.view(narrow).astype(np.float32), "float32")):
            w = kernels.Matrix(pool, [given], name, form, 0, [None], False)
            assert np.array_equal(meaning(pool, w), wanted)
            flushed = np.where(np.abs(wanted) < 2.0**-126, 0, wanted) if w.in_tiles else wanted
            assert np.array_equal(product(pool, w, np.eye(2, dtype=np.float32)).T, flushed)


@by_format
def test_parts_and_biases(pool: Any, form: Format) -> None:
    """The parts of a matrix give the same bits as separate matrices."""
    sizes = (64, 33, 1)
    weights, biases = [draw(n, 130, key=n) for n in sizes], [draw(64, key=1), None, draw(1, key=2)]
    x, outs = draw(9, 130, key=3), [np.full((9, n), np.nan, np.float32) for n in sizes]
    w = matrix(pool, form, weights, biases)
    kernels.Heads(pool, w, None, 1.0, 1, 0, False, False, [], 0)(x, None, None, None, None, outs)
    for weight, bias, out in zip(weights, biases, outs, strict=True):
        assert same_bits(out, product(pool, matrix(pool, form, weight, bias), x))
    assert np.array_equal(meaning(pool, w), np.concatenate([meaning(pool, matrix(pool, form, a)) for a in weights]))


@pytest.mark.parametrize("numbers", ["int8", "int6", "int5", "int4", "int3", "int2"])
@pytest.mark.parametrize("group", [0, 32])
def test_sums_of_the_largest_codes_are_exact(pool: Any, numbers: str, group: int) -> None:
    """No partial sum of 16 bits overflows or saturates, whatever the signs are."""
    top = 1 << (int(numbers[3:]) - 1)
    extremes = np.random.default_rng(group).choice([-top, top - 1], (6, 96)).astype(np.int8)
    codes = np.concatenate([extremes, np.full((1, 96), -top, np.int8), np.full((1, 96), top - 1, np.int8)])
    x = np.where(np.concatenate([extremes, codes[-2:]]) < 0, -127, 127).astype(np.float32)
    x = np.concatenate([x, -x])
    scales = np.ones((len(codes), 96 // group if group else 1), np.float32)
    kinds = [("none", []), ("zero_points", [np.zeros(scales.shape, np.int8)])] if group else [("none", [])]
    for kind, offsets in kinds:
        w = kernels.Matrix(pool, [codes], "codes", numbers, group, [None], False, [scales], kind, offsets)
        for tokens in (1, 5, len(x)):
            assert np.array_equal(product(pool, w, x[:tokens]), x[:tokens] @ codes.T.astype(np.float32))


# ---- equal bits ------------------------------------------------------------------------------------------------------


@by_format
def test_a_token_is_the_same_in_every_batch(pool: Any, form: Format) -> None:
    """A token has the same bits alone, among 2 to 1,100 others, first or last, in every order, and with each number of
    threads.
    """
    w, x = matrix(pool, form, draw(100, 1300), draw(100, key=1)), draw(1100, 1300, key=2)
    whole = product(pool, w, x)
    for tokens in TOKENS:
        assert same_bits(product(pool, w, x[:tokens]), whole[:tokens])
        assert same_bits(product(pool, w, x[-tokens:]), whole[-tokens:])
    order = rng().permutation(33)
    assert same_bits(product(pool, w, x[:33][order]), whole[:33][order])
    for threads in (2, 4):
        crowd = kernels.Pool(threads)
        for tokens in (1, 7, 33, 130):
            assert same_bits(product(crowd, w, x[:tokens]), whole[:tokens])
            assert same_bits(
                product(crowd, matrix(crowd, form, draw(100, 1300), draw(100, key=1)), x[:tokens]), whole[:tokens]
            )


def digest(form: Format) -> int:
    """Return a digest of products in which every loop and every remainder takes part."""
    pool, found = kernels.Pool(1), 0
    for n_out, n_in, tokens in ((100, 1300, 1), (33, 260, 4), (70, 137, 9), (257, 63, 130)):
        got = product(pool, matrix(pool, form, draw(n_out, n_in)), draw(tokens, n_in, key=1))
        found = zlib.crc32(np.ascontiguousarray(got).tobytes(), found)
    # Neighbors of equal sign and magnitude, whose products with the largest codes exceed 16 bits.
    got = product(pool, matrix(pool, form, np.sign(draw(40, 96))), np.sign(draw(11, 48, key=1)).repeat(2, 1))
    return zlib.crc32(np.ascontiguousarray(got).tobytes(), found)


def run_with(isa: str, *command: str, unit: str = "off") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "RIDGELINE_ISA": isa, "RIDGELINE_MATRIX_UNIT": unit, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)


def test_instruction_sets_agree_to_the_bit() -> None:
    """All of them where sums are of whole numbers, in a matrix unit too; those with a fused multiply-add for floats."""
    code = "import test_kernels_linear as t; print(t.kernels.isa(), *map(t.digest, t.FORMATS))"
    found = {}
    for isa, unit in [(isa, unit) for unit in ("off", "emulated") for isa in ISAS]:
        run = run_with(isa, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}", unit=unit)
        if LACKS.search(run.stderr):
            continue
        name, *digests = run.stdout.split()
        assert name == isa
        found[isa, unit] = digests
    whole = slice(len(FLOATS), len(FLOATS) + len(ROUNDED))
    assert len({tuple(d[whole]) for d in found.values()}) == 1
    brain = FORMATS.index(Format("bf16"))  # a unit has an arithmetic of its own there, the same bits everywhere
    for unit in ("off", "emulated"):
        assert len({tuple(d) for (isa, own), d in found.items() if own == unit and isa != "portable"}) <= 1
    assert len({d[brain] for (_, unit), d in found.items() if unit == "emulated"}) == 1
    fused = {(*d[:brain], *d[brain + 1 :]) for (isa, _), d in found.items() if isa != "portable"}
    assert len(fused) <= 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("isa", "unit"), [*((isa, "off") for isa in ISAS), (kernels.isa(), "emulated"), (kernels.isa(), "amx")]
)
def test_every_instruction_set_passes(isa: str, unit: str) -> None:
    """Run the tests of this file, of the stages and of experts with each instruction set and matrix unit."""
    files = [str(HERE / f"test_kernels_{name}.py") for name in ("linear", "stages", "experts")]
    files += [str(HERE / "unit_cases.py")] if unit == "amx" else []  # test_kernels_unit.py runs it with an emulated one
    options = ["-n0", "-k", "not instruction_set", "-p", "no:cacheprovider"]
    run = run_with(isa, "-m", "pytest", *files, *options, unit=unit)
    if LACKS.search(run.stdout + run.stderr):
        pytest.skip(f"this CPU has no {isa}, or no matrix unit {unit}")
    assert run.returncode == 0, run.stdout[-3000:]


def test_a_matrix_unit_serves_rounded_tokens_and_bf16() -> None:
    """An emulated unit is used from the first token on, for bf16 from the fourth; formats that it does not serve say so
    with None.
    """
    code = "import test_kernels_linear as t; print([t.unit_of(form) for form in t.FORMATS])"
    run = run_with(kernels.isa(), "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}", unit="emulated")
    assert run.returncode == 0, run.stderr
    assert ast.literal_eval(run.stdout) == [
        4 if form == Format("bf16") else 1 if form in ROUNDED else None for form in FORMATS
    ]


def unit_of(form: Format) -> int | None:
    """Return the least number of tokens for which the matrix unit multiplies a matrix of this format."""
    return matrix(kernels.Pool(1), form, draw(33, 64)).unit_from


def test_an_unknown_instruction_set_is_an_error() -> None:
    run = run_with("mmx", "-c", "import ridgeline._kernels")
    assert f"RIDGELINE_ISA=mmx: known are {', '.join(ISAS)}" in run.stderr


def test_an_unknown_matrix_unit_is_an_error() -> None:
    run = run_with(kernels.isa(), "-c", "import ridgeline._kernels", unit="npu")
    assert "RIDGELINE_MATRIX_UNIT=npu: known are off, auto, emulated, amx" in run.stderr


# ---- numbers at the edge ---------------------------------------------------------------------------------------------


@by_format
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_token_harms_no_other(pool: Any, form: Format, bad: float) -> None:
    w, x = matrix(pool, form, draw(100, 130)), draw(13, 130, key=1)
    before = product(pool, w, x)
    x[5, 7] = bad
    after = product(pool, w, x)
    assert not np.isfinite(after[5]).any()
    assert same_bits(np.delete(after, 5, 0), np.delete(before, 5, 0))


@by_format
def test_tiny_and_huge_tokens(pool: Any, form: Format) -> None:
    """Zeros stay zeros; subnormal tokens change by at most half a step; the largest tokens do not overflow."""
    w = matrix(pool, form, draw(33, 130, spread=0.0))
    mean = meaning(pool, w)
    assert np.array_equal(product(pool, w, np.zeros((3, 130), np.float32)), np.zeros((3, 33)))
    tiny = np.full((2, 130), 1e-42, np.float32)
    step = 2.0**-100 / 127 if form.is_rounded else 2.0**-126 if w.in_tiles else 2.0**-149
    assert (
        np.abs(product(pool, w, tiny) - tiny.astype(np.float64) @ mean.T) <= step * (np.abs(mean).sum(1) + 130)
    ).all()
    huge = np.zeros((2, 130), np.float32)
    huge[:, 3] = np.finfo(np.float32).max / 256
    got, wanted = product(pool, w, huge), huge.astype(np.float64) @ mean.T
    np.testing.assert_allclose(got, wanted, rtol=1e-2 if form.is_rounded else 1e-6)


@pytest.mark.parametrize("form", ROUNDED[:2], ids=lambda f: f.text)
def test_rows_of_zeros_and_of_tiny_numbers(pool: Any, form: Format) -> None:
    weight = np.zeros((3, 64), np.float32)
    weight[1], weight[2, 0] = 1e-40, 1.0
    kept = meaning(pool, matrix(pool, form, weight))
    assert np.array_equal(kept[:2], np.zeros((2, 64)))
    assert kept[2, 0] == pytest.approx(1.0, rel=0.1)


def test_no_tokens(pool: Any) -> None:
    assert product(pool, matrix(pool, FORMATS[0], draw(5, 7)), np.zeros((0, 7), np.float32)).shape == (0, 5)


# ---- invalid input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "kind", "name", "group", "message"),
    [
        ([np.ones((2, 3))], "float32", "fp32", 0, "must be a float32 array"),
        ([np.ones((2, 3), np.float32)], "bfloat16", "bf16", 0, "as a uint16 array"),
        ([np.ones((2, 3), np.float32).T], "float32", "fp32", 0, "the last one dense"),
        ([np.ones(3, np.float32)], "float32", "fp32", 0, "two axes"),
        ([np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)], "float32", "fp32", 0, "one width, not 3 and 4"),
        ([np.ones((2, 3), np.float32)], "float32", "int7", 0, "format int7 is none of fp32, bf16"),
        ([np.ones((2, 3), np.float32)], "float32", "int4", 48, "a multiple of 32 up to 256"),
        ([np.ones((2, 3), np.float32)], "float32", "fp32", 32, "for codes, or 0"),
        ([np.ones((2, 3), np.float32)], "float32", "fp8", 0, "floats are rounded to whole numbers"),
        ([np.full((2, 3), np.nan, np.float32)], "float32", "int8", 0, "not finite"),
        ([np.full((2, 3), np.inf, np.float32)], "float32", "int4", 32, "not finite"),
        ([np.full((2, 3), 1e6, np.float32)], "float32", "fp16", 0, "too large for fp16"),
        ([np.full((2, 3), 1e6, np.float32)], "float32", "int4", 32, "too large for int4"),
        ([np.ones((1, 65537), np.float32)], "float32", "int8", 0, "overflow beyond 65536 columns"),
        ([np.ones((0, 3), np.float32)], "float32", "fp32", 0, "at least one row"),
        ([], "float32", "fp32", 0, "1 to 6 parts"),
    ],
)
def test_matrices_that_cannot_be(pool: Any, parts: Any, kind: Any, name: Any, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.Matrix(pool, parts, kind, name, group, [None] * len(parts), False)


def test_arrays_that_do_not_fit(pool: Any) -> None:
    w = matrix(pool, FORMATS[0], draw(5, 8))
    run = kernels.Projection(pool, w, None, 1.0, 1.0, 0.0)
    x, out = draw(3, 8), np.zeros((3, 5), np.float32)
    offset = np.frombuffer(b"\0" * 97, np.uint8)[1:].view(np.float32).reshape(3, 8)
    for bad_x, bad_out, error, message in (
        (x.astype(np.float64), out, TypeError, "incompatible"),
        # a conversion would write to a copy, which is then lost
        (x, out.astype(np.float64), TypeError, "incompatible"),
        (x[:, :7], out, ValueError, r"x is \[3, 7\], but \[3, 8\]"),
        (x, out[:2], ValueError, r"out is \[2, 5\], but \[3, 5\]"),
        (np.ones((8, 3), np.float32).T, out, ValueError, "must be dense behind its first axis"),
        (x, np.zeros((3, 10), np.float32)[:, ::2], ValueError, "must be dense behind its first axis"),
        (offset, out, ValueError, "is not aligned to its type"),
    ):
        with pytest.raises(error, match=message):
            run(bad_x, None, None, None, bad_out)
    with pytest.raises(IndexError, match="row 3 of 3"):
        run(x, None, np.array([0, 3]), None, out[:2])
    with pytest.raises(IndexError, match="row -1 of 5"):
        w.take(pool, np.array([-1]), np.zeros((1, 8), np.float32))
    read_only = out.copy()
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        run(x, None, None, None, read_only)


def test_a_matrix_with_strided_rows_gives_equal_bits(pool: Any) -> None:
    """Weights may be a slice of a larger array, such as a part of a fused matrix in a file."""
    room = np.full((80, 200), np.nan, np.float32)
    room[3:70:2, 10:140] = draw(34, 130)
    assert np.array_equal(meaning(pool, matrix(pool, FORMATS[0], room[3:70:2, 10:140])), draw(34, 130))
