"""A whole model on the kernels, in the interpreter: its logits, and the bits of a token in different steps."""

from __future__ import annotations

import pytest
import torch

from interpreted.guarded import interpreted, reference
from interpreted.steps import Paged, llama
from ridgeline.ops import OpsTable, api

SPEC = llama(width=63, layers=2, heads=4, kv_heads=2, head_dim=16, inner=100, vocabulary=257)
PROMPT, OTHER = [5, 9, 200, 3, 77, 31], [44, 2, 17]


def paged(table: OpsTable) -> Paged:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for w in SPEC.weights():
        drawn = torch.randn(w.shape, generator=generator)
        weights[w.name] = (drawn / w.shape[-1] ** 0.5).bfloat16() if w.is_matrix else 1 + drawn / 8
    return Paged(SPEC, weights, table, rows=2, tokens=64)


def test_logits_equal_the_definition() -> None:
    table = interpreted()
    got, wanted = paged(table), paged(reference())
    for tokens, starts in (([PROMPT, OTHER], [0, 0]), ([[1], [2]], [6, 3])):
        error = (got.logits(tokens, starts) - wanted.logits(tokens, starts)).abs().max()
        assert error < 2e-3  # two slices of bfloat16 differ from float32 by 2^-17 in each product
    served = {choice.op for choice in table.choices() if choice.backend == "triton"}
    stages = {api.ATTENTION_INPUT, api.MLP_BLOCK, api.HEAD, api.PRODUCT, api.PAGED_ATTENTION, api.WRITE_PAGES, api.NORM}
    assert {op.name for op in stages} <= served


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_prompt_in_chunks_beside_another_gives_the_same_bits(chunk: int) -> None:
    whole = paged(interpreted()).logits([PROMPT], [0])[-1]
    model = paged(interpreted())
    for start in range(0, len(PROMPT), chunk):
        piece = PROMPT[start : start + chunk]
        beside = [[OTHER[start]]] if start < len(OTHER) and chunk == 1 else []
        last = model.logits([piece, *beside], [start] * (1 + len(beside)))[len(piece) - 1]
    assert torch.equal(whole, last)
