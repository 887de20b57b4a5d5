"""Launches of every kernel at the shapes of an 8B model, on torch's meta device: nothing is computed."""

from __future__ import annotations

import torch

from compiled.building import Launched, Recorder
from ridgeline.ops.api import Buckets, PagedKeyValues, PagedLayout, QuantizedMatrix
from ridgeline.ops.triton.packing import pack_codes, pack_plain
from ridgeline.ops.triton.paged import paged_attention
from ridgeline.ops.triton.products import product_of
from ridgeline.spec import Attention
from ridgeline.spec.quant import PLAIN, format_of

WIDTH = 4096


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(name: str, rows: int, columns: int) -> QuantizedMatrix:
    format = format_of(name)
    groups = rows, format.num_groups(columns)
    codes = torch.uint8 if format.numbers == "fp8" else torch.int8
    zeros = meta(*groups, dtype=torch.int8) if format.offsets == "zero_points" else None
    return QuantizedMatrix(format, meta(rows, columns, dtype=codes), meta(*groups), zeros)


def product(name: str, tokens: int) -> list[Launched]:
    """Return the launches of a product of some tokens with a matrix of 4096 x 4096 in a format."""
    plain = meta(WIDTH, WIDTH, dtype=torch.bfloat16)
    packed = pack_plain(plain) if name == PLAIN.name else pack_codes(matrix(name, WIDTH, WIDTH))
    recorder = Recorder()
    product_of(packed, meta(WIDTH), 2, recorder)(meta(tokens, WIDTH), meta(tokens, WIDTH))
    return recorder.launches


def attention(case: Attention, tokens: int, sequences: int, dtype: torch.dtype, page: int = 16) -> list[Launched]:
    """Return the launch of attention over pages for sequences of up to 8,192 tokens."""
    recorder, integers = Recorder(), torch.int64
    keys = meta(4096, 2, page, case.num_kv_heads, case.head_dim, dtype=dtype)
    tables = meta(sequences, 8192 // page, dtype=integers)
    several = [meta(n, dtype=integers) for n in (tokens, tokens, sequences, sequences)]
    layout = PagedLayout(*several, tables, lambda: Buckets((), several[0]))
    q = meta(tokens, case.num_heads, case.head_dim)
    sinks = meta(case.num_heads) if case.sinks else None
    paged_attention(case, 2, recorder)(q, PagedKeyValues(keys[:, 0], keys[:, 1], layout), sinks)
    return recorder.launches
