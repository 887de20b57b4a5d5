"""Norms, writes into pages and the best logit against the definitions, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from interpreted.guarded import guarded, interpreted, reference, serves
from ridgeline.ops import api
from ridgeline.ops.triton import tokens
from ridgeline.ops.triton.packing import pack_codes
from ridgeline.ops.triton.products import round_rows
from ridgeline.ops.triton.tokens import Normalizer
from ridgeline.spec import Attention, LatentAttention, LayerNorm, RMSNorm
from ridgeline.spec.quant import format_of

TABLE, REFERENCE = interpreted(), reference()


@pytest.mark.parametrize("case", [RMSNorm(), RMSNorm(1e-5, 1.0), LayerNorm()])
@pytest.mark.parametrize("width", [1, 63, 100, 257])
def test_norms(case: RMSNorm | LayerNorm, width: int) -> None:
    assert serves(TABLE, api.NORM, case)
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(2, 3, width, generator=generator) * 5, torch.randn(width, generator=generator)
    bias = torch.randn(width, generator=generator) if isinstance(case, LayerNorm) else None
    got = TABLE.primitive(api.NORM, case)(x, weight, bias)
    wide = [None if a is None else a.double() for a in (x, weight, bias)]
    wanted = REFERENCE.primitive(api.NORM, case)(*wide)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1, 2], TABLE.primitive(api.NORM, case)(x[1, 2][None], weight, bias)[0])


@pytest.mark.parametrize(("case", "scale"), [(RMSNorm(1e-5, 1.0), None), (LayerNorm(), 0.02)])
def test_norms_round_tokens_as_a_kernel_of_its_own_does(case: RMSNorm | LayerNorm, scale: float | None) -> None:
    """To the bit, also tokens that are not finite, with columns that fill up a tile."""
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(5, 100, generator=generator), torch.randn(100, generator=generator)
    x[1], x[2, 7], x[3, 99] = 0.0, float("inf"), float("nan")
    codes = REFERENCE.primitive(api.QUANTIZE, format_of("int8"))(torch.randn(63, 100, generator=generator))
    packed = replace(pack_codes(codes), input_scale=scale)
    bias = weight if isinstance(case, LayerNorm) else None
    apart = round_rows(packed, Normalizer(case, weight, bias, guarded)(x)[1], guarded)
    at_once = Normalizer(case, weight, bias, guarded, packed)(x)[1]
    assert torch.equal(at_once.steps, apart.steps)
    assert torch.equal(at_once.token_scales.nan_to_num(-1.0), apart.token_scales.nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8])
@pytest.mark.parametrize("case", [Attention(4, 2, 20, 1.0), LatentAttention(2, 63, 8, 37, 8, 1.0, RMSNorm())])
def test_writing_touches_the_written_slots_only(case: Attention | LatentAttention, dtype: torch.dtype) -> None:
    """Keys and values, or latents, with ties, signed zeros, large and small numbers, infinities and NaN."""
    assert serves(TABLE, api.WRITE_PAGES, case)
    generator = torch.Generator().manual_seed(0)
    heads, numbers = case.state().parts[0]
    both = torch.randn(5, 2 * heads + 1, numbers, generator=generator)  # and a head that is not written
    parts = [both[:, :heads].clone(), both[:, heads : 2 * heads]][: len(case.state().parts)]
    parts[0][0, 0, 0], parts[0][1, -1, 3], parts[0][2, 0, 1] = 1e6, float("-inf"), float("nan")
    parts[0][3, 0, :8] = torch.tensor([-0.0, 0.0176, 0.0178, -1e-9, 0.3125, 0.34375, 1e-5, 20.0])
    parts[0][4] = 0.0
    parts[0][4, 0, 0] = 1e-41
    found = []
    for table in (TABLE, REFERENCE):
        arena = torch.full((6, 2, 4, heads, numbers + 4 * (dtype == torch.int8)), 9).to(dtype)
        pages, slots = torch.tensor([4, 1, 4, 2, 2]), torch.tensor([2, 0, 0, 3, 1])
        views = (arena[:, 0], arena[:, 1])[: len(parts)]
        table.primitive(api.WRITE_PAGES, case)(views, parts, pages, slots, (0.05, 0.02))
        found.append(arena.view(torch.uint8) if dtype.itemsize == 1 else arena)
    assert torch.equal(found[0].nan_to_num(7.0), found[1].nan_to_num(7.0))
    assert (found[0][[0, 3, 5]] == 9).all()


@pytest.mark.parametrize("vocabulary", [1, 63, 100, 257])
def test_best(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "BEST_BLOCK", 64)
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    last = vocabulary - 1
    logits[0], logits[1], logits[2, last] = float("-inf"), 3.0, float("inf")
    logits[3, last], logits[4] = float("nan"), float("nan")
    ids, values = TABLE.primitive(api.BEST)(logits)
    wanted = np.argmax(logits.numpy(), 1)  # the first of equal ones, or the first NaN
    assert ids.dtype == torch.int64
    assert ids.tolist() == wanted.tolist()
    assert torch.equal(values.nan_to_num(99), logits[torch.arange(9), ids].nan_to_num(99))
