"""Products of the triton backend: exact activations against float64, rounded tokens against the definition's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from interpreted.guarded import guarded, interpreted, nightly, reference, serves
from ridgeline.ops import OpsTable, api
from ridgeline.ops.triton import products
from ridgeline.ops.triton.launch import Compiled
from ridgeline.ops.triton.tilings import COUNTS, Block, Tilings, tilings_of
from ridgeline.quant import StoredLinear, bound
from ridgeline.quant.bounds import sliced_bound
from ridgeline.spec.quant import PLAIN, Format, format_of

TABLE, REFERENCE = interpreted(), reference()
EXACT = ["auto", "fp8", "fp8-64x128", "int8-exact", "int8-asym-exact", "int4-exact", "int4-128-asym-exact"]
ROUNDED = ["int8", "int8-asym", "int8-64", "int6", "int4", "int4-asym", "int4-128", "int3-128-asym", "int2-256"]
SHAPES = [(1, 63, 100), (63, 257, 1), (100, 1, 63)]  # tokens, columns, rows


def format_named(name: str) -> Format:
    return PLAIN if name == "auto" else format_of(name)


def problem(tokens: int, columns: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, a matrix in bfloat16 and a bias, with magnitudes over eight powers of two."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        spread = torch.rand(shape, generator=generator) * 8
        return torch.randn(shape, generator=generator) * 2**-spread

    return draw(tokens, columns), draw(rows, columns).bfloat16(), draw(rows)


def linear(table: OpsTable, format: Format, matrix: torch.Tensor, bias: torch.Tensor | None) -> StoredLinear:
    found = StoredLinear(matrix, bias, table, format)
    found.prepare()
    return found


def allowed(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor, format: Format, slices: int) -> np.ndarray:
    return sliced_bound(x.double().numpy(), matrix.double().numpy(), bias.double().numpy(), format, slices)


@pytest.mark.parametrize("name", EXACT)
def test_exact_activations_are_within_their_bound(name: str) -> None:
    format = format_named(name)
    assert serves(TABLE, api.PRODUCT, format)
    for tokens, columns, rows in SHAPES if name == "auto" else SHAPES[:2]:
        x, matrix, bias = problem(tokens, columns, rows)
        stored, same = linear(TABLE, format, matrix, bias), linear(REFERENCE, format, matrix, bias)
        wide = stored.dequantize()
        assert torch.equal(wide, same.dequantize())
        wanted = x.double() @ wide.double().T + bias.double()
        error = (stored.apply(x).double() - wanted).abs().numpy()
        assert (error <= allowed(x, wide, bias, format, 2)).all(), (tokens, columns, rows)


@pytest.mark.parametrize("name", ["auto", "fp8", "int4-128-asym"])
def test_tokens_in_bfloat16_have_a_bound_of_their_own(name: str) -> None:
    """One slice is within the bound for one, and beyond the bound for two; the rest is that of a sum in float32."""
    format = format_of(name, "bf16")
    assert serves(TABLE, api.PRODUCT, format)
    x, matrix, bias = problem(63, 257, 100)
    stored, same = linear(TABLE, format, matrix, bias), linear(REFERENCE, format, matrix, bias)
    got, wide = stored.apply(x), stored.dequantize()
    error = (got.double() - (x.double() @ wide.double().T + bias.double())).abs().numpy()
    assert (error <= allowed(x, wide, bias, format, 1)).all()
    assert (error > allowed(x, wide, bias, format, 2)).any()
    torch.testing.assert_close(got, same.apply(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_tokens_have_the_bits_of_the_definition(name: str) -> None:
    format = format_of(name)
    assert serves(TABLE, api.PRODUCT, format)
    for tokens, columns, rows in SHAPES[:2]:
        x, matrix, bias = problem(tokens, columns, rows)
        stored, same = linear(TABLE, format, matrix, bias), linear(REFERENCE, format, matrix, bias)
        got = stored.apply(x)
        assert torch.equal(got, same.apply(x)), (tokens, columns, rows)
        wide = stored.dequantize().double()
        error = (got.double() - (x.double() @ wide.T + bias.double())).abs().numpy()
        assert (error <= bound(x.double().numpy(), wide.numpy(), bias.double().numpy(), format)).all()


def test_a_sum_beyond_24_bits_is_rounded_once() -> None:
    """A row of 1,200 products of 127 x 127 is beyond 2^24."""
    x, matrix, _ = torch.ones(1, 1200), torch.ones(3, 1200).bfloat16(), None
    x[0, 7] = 0.5
    got, wanted = (linear(table, format_of("int8"), matrix, None).apply(x) for table in (TABLE, REFERENCE))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["auto", "fp8-64x128", "int8", "int4-asym"])
def test_a_token_is_the_same_alone_and_in_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program computes all splits of 70 tokens; a token alone has a program for each split."""
    monkeypatch.setattr(products, "SPLIT_TILES", 1)
    x, matrix, bias = problem(70, 257, 63)
    stored = linear(TABLE, format_named(name), matrix, bias)
    whole = stored.apply(x)
    assert torch.equal(whole[:20], stored.apply(x[:20]))
    for token in (0, 33, 69):
        assert torch.equal(whole[token], stored.apply(x[token : token + 1])[0])


@pytest.mark.parametrize("name", ["auto", "int8", "int4"])
def test_a_token_that_is_not_finite_is_alone_in_that(name: str) -> None:
    x, matrix, bias = problem(20, 63, 63)
    stored = linear(TABLE, format_named(name), matrix, bias)
    clean = stored.apply(x)
    x[3, 5], x[7, 62] = float("inf"), float("nan")
    got = stored.apply(x)
    assert not got[[3, 7]].isfinite().any()
    others = [i for i in range(20) if i not in (3, 7)]
    assert torch.equal(got[others], clean[others])
    assert torch.equal(stored.apply(x[:8]).nan_to_num(-1), got[:8].nan_to_num(-1))


@pytest.mark.parametrize(("rows", "launched"), [(128, 1), (100, 2)])
@pytest.mark.parametrize("tokens", [1, 70])
def test_two_products_are_one_launch_with_the_same_bits(rows: int, launched: int, tokens: int) -> None:
    """One input is multiplied with rows that fill up whole blocks, and another one with those below."""
    x, matrix, bias = problem(tokens, 40, rows)
    other, below, _ = problem(tokens, 40, 30, seed=1)
    linears = StoredLinear(matrix, bias, TABLE, PLAIN), StoredLinear(below, None, TABLE, PLAIN)
    count: list[str] = []

    def launch(kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
        count.append(kernel.fn.__name__)
        guarded(kernel, grid, compiled, **arguments)

    multiply = products.TwoProducts(linears, launch)
    for one in linears:
        one.prepare()
    both = torch.cat((x, torch.full((tokens, 3), float("nan")), other), 1)
    for given in ((both[:, :40], both[:, 43:]), (both[:, :40], other)):
        found = multiply(*given)
        assert torch.equal(found[0], linears[0].apply(x))
        assert torch.equal(found[1], linears[1].apply(other))
    assert len(count) == 2 * launched


@pytest.mark.parametrize("name", ["auto", "int4-128", *nightly(("int8",))])
def test_tilings_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits are programs of their own, in blocks of fewer tokens than a step has, and in wide ones."""
    monkeypatch.setattr(products, "SPLIT_TILES", 1)
    x, matrix, bias = problem(40, 257, 130)
    packed = products.pack_together([StoredLinear(matrix, bias, TABLE, format_named(name))])
    kernel = "whole" if name.startswith("int") else "dense"
    found = []
    for block in ((16, 64, 4, 3), (64, 128, 8, 2), (32, 128, 4, 1), (32, 64, 4, 4)):
        tilings, out = Tilings({kernel: dict.fromkeys(COUNTS, block)}), torch.empty(40, 130)
        products.product_of(packed, bias, guarded, tilings)(x, out)
        found.append(out)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_gpu_has_its_tilings_and_others_those_of_the_default() -> None:
    own = {"dense fp8": {"1": (16, 128, 8, 5)}, "whole": {"16": (32, 64, 4, 3)}}
    default = {"dense": dict.fromkeys(COUNTS, (16, 64, 4, 4)), "whole": dict.fromkeys(COUNTS, (16, 32, 2, 4))}
    tilings = Tilings(own, default)
    assert tilings.block("dense", "fp8", 1) == Block(16, 128, Compiled(8, 5))
    assert tilings.block("dense", "fp8", 2) == tilings.block("dense", "bytes", 1) == Block(16, 64, Compiled(4, 4))
    assert tilings.block("whole", "bytes", 9).tokens == 32 and tilings.block("whole", "bytes", 17).tokens == 16
    assert tilings_of("no such GPU").block("dense", "fp8", 1000) == tilings_of().block("dense", "", 65)
    wrong = {
        "32 rows; take a power of two from 64": {"dense": {"1": (16, 32, 4, 4)}},
        "96 rows": {"whole": {"1": (16, 96, 4, 4)}}, "8 tokens": {"whole": {"1": (8, 32, 2, 4)}},
        "3 warps": {"whole": {"1": (16, 64, 3, 4)}}, "9 stages": {"whole": {"1": (16, 64, 4, 9)}},
        "8 warps for 64 rows": {"dense": {"1": (16, 64, 8, 4)}}, "tilings of 'other'": {"other": {}},
    }  # fmt: skip
    for text, part in wrong.items():
        with pytest.raises(ValueError, match=text):
            Tilings(part)


def test_shapes_of_tokens() -> None:
    """A product takes any leading axes, a batch of no tokens and rows of a wider array."""
    x, matrix, bias = problem(6, 63, 100)
    stored = linear(TABLE, PLAIN, matrix, bias)
    flat = stored.apply(x)
    assert torch.equal(stored.apply(x.view(2, 3, 63)), flat.view(2, 3, 100))
    assert stored.apply(x[:0]).shape == (0, 100)
    wider = torch.cat((x, torch.full((6, 5), float("nan"))), 1)
    assert torch.equal(stored.apply(wider[:, :63]), flat)


@pytest.mark.parametrize("name", ["int5-16-asym", "int4-fp8", "nf4-64", "int4-32of256-min", "int8-outliers"])
def test_other_formats_are_refused_with_a_reason(name: str) -> None:
    assert dict(TABLE.choose(api.PRODUCT, format_of(name)).refusals)["triton"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_matrices_in_wider_floats(dtype: torch.dtype) -> None:
    """Their numbers are two slices, too; a token is the same alone and in a batch."""
    x, _, bias = problem(70, 100, 63)
    matrix = torch.randn(63, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    for activations, slices in (("exact", 2), ("bf16", 1)):
        format = format_of("auto", activations)
        stored = linear(TABLE, format, matrix, bias)
        got, wide = stored.apply(x), stored.dequantize()
        assert torch.equal(wide, matrix.float()) and torch.equal(got[69:], stored.apply(x[69:]))
        error = (got.double() - (x.double() @ wide.double().T + bias.double())).abs().numpy()
        numbers = x.double().numpy(), wide.double().numpy(), bias.double().numpy()
        assert (error <= sliced_bound(*numbers, format, slices, is_wide=True)).all()
    served = {choice.backend for choice in TABLE.choices() if choice.op == "product"}
    assert "triton" in served
    float64 = linear(TABLE, PLAIN, matrix.double(), None)
    torch.testing.assert_close(float64.apply(x), x @ matrix.float().T)
    reasons = [reason for choice in TABLE.choices() for _, reason in choice.refusals]
    assert any("no plain matrices in float64" in reason for reason in reasons)
