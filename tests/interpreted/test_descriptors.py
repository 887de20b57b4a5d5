"""Attention whose keys and values come through tensor descriptors: the bits of the kernel that reads pointers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interpreted.guarded import guarded, interpreted, nightly, serves
from interpreted.sequences import Sequences
from ridgeline.errors import DeviceError
from ridgeline.ops import OpsTable, api
from ridgeline.ops.reference.backend import ReferenceBackend
from ridgeline.ops.triton import paged
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.descriptors import NAME, DescriptorBackend
from ridgeline.spec import Attention, FirstTokens

TABLE = interpreted()
PLAIN = Attention(4, 2, 32, 0.2)


def described() -> OpsTable:
    """Return a table of kernels whose attention the user gave to descriptors."""
    op = api.PAGED_ATTENTION.name
    return OpsTable(
        TABLE.memory, (DescriptorBackend(guarded, [op]), TritonBackend(guarded), ReferenceBackend()), {op: NAME}
    )


@pytest.mark.parametrize(
    ("case", "dtype", "page"),
    [
        (PLAIN, torch.bfloat16, 32), (replace(PLAIN, softcap=5.0, sinks=True), torch.float16, 64),
        *nightly(
            (replace(PLAIN, window=40), torch.bfloat16, 32),
            (replace(PLAIN, num_kv_heads=1, window=70, pattern=FirstTokens(9)), torch.float16, 32),
        ),
    ],
)  # fmt: skip
def test_they_give_the_bits_of_pointers(
    case: Attention, dtype: torch.dtype, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages hold one tile of keys or two. Slots that must not be read are NaN."""
    monkeypatch.setattr(paged, "SPLIT", 64)
    monkeypatch.setattr(paged, "BLOCK_KEYS", 32)
    sequences = Sequences(case, [257, 63, 100, 1], page, dtype)
    ours, other = (table.primitive(api.PAGED_ATTENTION, case) for table in (described(), TABLE))
    steps = [([1, 0, 2], [0, 250, 40], [63, 7, 1]), ([0, 2, 3], [256, 99, 0], [1, 1, 1]), ([0], [192], [64])]
    for rows, starts, counts in steps:
        q, kv = sequences.step(rows, starts, counts)
        assert torch.equal(ours(q, kv, sequences.given), other(q, kv, sequences.given))
    q, kv = sequences.step([0, 1], [59, 2], [9, 1], [[-1, 0, 0, 2, -1, 3], []])
    assert torch.equal(ours(q, kv, sequences.given), other(q, kv, sequences.given))


def test_other_cases_are_refused_with_a_reason() -> None:
    table = described()
    assert table.choose(api.PAGED_ATTENTION, PLAIN).backend == NAME
    assert serves(table, api.NORM, None)
    refused = DescriptorBackend(guarded)
    assert "--ops paged_attention=descriptors chooses it" in str(refused.refuses(api.PAGED_ATTENTION, PLAIN))
    assert refused.refuses(api.PAGED_ATTENTION, Attention(2, 1, 80, 0.1)) == (
        "heads have 80 numbers; descriptors read powers of two from 16 to 128"
    )
    for dtype, page, reason in (
        (torch.bfloat16, 16, "pages have 16 tokens; descriptors load 64 at once: --block-size 64 or a multiple"),
        (
            torch.float32,
            64,
            "pages are torch.float32; descriptors read bfloat16 and float16: --kv-cache-dtype bfloat16",
        ),
    ):
        sequences = Sequences(PLAIN, [70], page, dtype)
        with pytest.raises(DeviceError, match=reason):
            table.primitive(api.PAGED_ATTENTION, PLAIN)(*sequences.step([0], [0], [70]), None)
