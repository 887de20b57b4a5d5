"""Attention over latents in pages against its definition in float64, with NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interpreted.guarded import guarded, interpreted, nightly, serves
from interpreted.sequences import Sequences
from ridgeline.ops import api
from ridgeline.ops.triton import paged
from ridgeline.ops.triton.latent import HeadProduct
from ridgeline.spec import LatentAttention, RMSNorm

TABLE = interpreted()
SMALL = LatentAttention(3, 40, 24, 8, 20, 0.1, RMSNorm())
MANY = LatentAttention(20, 64, 16, 16, 100, 0.1, RMSNorm())
DEEPSEEK = LatentAttention(2, 512, 128, 64, 128, 192**-0.5, RMSNorm())  # with fewer heads


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the keys of short sequences, too: into splits of two tiles."""
    monkeypatch.setattr(paged, "SPLIT", 64)
    monkeypatch.setattr(paged, "BLOCK_KEYS", 32)


@pytest.mark.parametrize(
    ("case", "dtype", "page", "matrix"),
    [
        (SMALL, torch.float16, 16, torch.bfloat16), (SMALL, torch.bfloat16, 1, torch.float32),
        (MANY, torch.int8, 3, torch.bfloat16), (SMALL, torch.uint8, 16, torch.bfloat16),
        (DEEPSEEK, torch.bfloat16, 16, torch.bfloat16),
        *nightly(
            (MANY, torch.float16, 16, torch.float16), (SMALL, torch.float32, 63, torch.bfloat16),
            (replace(SMALL, kv_lora_rank=320), torch.float32, 16, torch.bfloat16),
        ),
    ],
)  # fmt: skip
def test_chunks_and_decode_steps_equal_the_definition(
    case: LatentAttention, dtype: torch.dtype, page: int, matrix: torch.dtype
) -> None:
    assert serves(TABLE, api.PAGED_LATENT_ATTENTION, case)
    sequences = Sequences(case, [257, 63, 100, 1], page, dtype)
    assert sequences.given is not None
    sequences.given = sequences.given.to(matrix)
    assert sequences.error([0, 2, 3], [256, 99, 0], [1, 1, 1]) < 1e-4
    many = 63 if case.num_heads == 3 else 5
    assert sequences.error([1, 0, 2], [63 - many, 250, 40], [many, 7, 1]) < 1e-4


def test_the_closed_form() -> None:
    """The last of 100 tokens, with keys and values that are rebuilt for each head."""
    sequences = Sequences(SMALL, [100], 16, torch.float32)
    q, kv = sequences.step([0], [99], [1])
    got = TABLE.primitive(api.PAGED_LATENT_ATTENTION, SMALL)(q, kv, sequences.given)
    assert sequences.given is not None
    rows = kv.parts[0][torch.from_numpy(sequences.tables[0])].flatten(0, 1)[:100, 0].double()
    latents, key = rows[:, :40], rows[:, 40:]
    for head, up in enumerate(sequences.given.double()):
        scores = torch.cat((latents @ up[:24].T, key), 1) @ q[0, head].double() * SMALL.scale
        wanted = scores.softmax(0) @ (latents @ up[24:].T)
        assert (got[0, head * 20 : (head + 1) * 20] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(("case", "dtype"), [(SMALL, torch.int8), (replace(MANY, num_heads=17), torch.float16)])
def test_a_token_has_the_same_bits_in_every_step(case: LatentAttention, dtype: torch.dtype) -> None:
    """The token at position 99 is decoded alone, beside others, in a chunk, and by one program for all splits."""
    attend, sequences = TABLE.primitive(api.PAGED_LATENT_ATTENTION, case), Sequences(case, [100, 130, 17], 16, dtype)

    def last(rows: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
        """Return the result of the last token of row 0, which comes first in the step."""
        q, kv = sequences.step(rows, starts, counts)
        return attend(q, kv, sequences.given)[counts[0] - 1]

    alone = last([0], [99], [1])
    assert torch.equal(alone, last([0, 1, 2], [99, 129, 16], [1, 1, 1]))
    assert torch.equal(alone, last([0], [90], [10]))
    assert torch.equal(alone, last([0, 2, 1], [96, 0, 128], [4, 17, 2]))


def test_a_draft_in_a_tree_has_the_result_of_the_definition() -> None:
    sequences = Sequences(SMALL, [68, 3, 34], 16, torch.float16)
    assert sequences.error([0, 1, 2], [59, 2, 30], [9, 1, 4], [[-1, 0, 0, 2, -1, 3], [], [-1, -1, 1]]) < 1e-4


@pytest.mark.parametrize(
    ("rows", "columns", "copied", "dtype"),
    [
        (1, 63, 0, torch.float32), (100, 257, 3, torch.bfloat16), (257, 100, 0, torch.float16),
        (63, 1, 64, torch.bfloat16),
        *nightly((257, 100, 0, torch.bfloat16), (100, 257, 3, torch.float32), (63, 1, 64, torch.float16)),
    ],
)  # fmt: skip
def test_products_of_heads(rows: int, columns: int, copied: int, dtype: torch.dtype) -> None:
    """Tokens are the same alone and in a batch, also in a view; the numbers behind them are NaN."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(70, 3, columns + copied + 1, generator=generator)
    x[..., -1] = float("nan")
    matrices = torch.randn(3, columns, rows, generator=generator).to(dtype).mT
    multiply = HeadProduct(guarded)
    got = multiply(x[..., :-1], matrices, copied)
    terms = torch.einsum("thc,hrc->thr", x[..., :columns].abs().double(), matrices.abs().double())
    wanted = torch.einsum("thc,hrc->thr", x[..., :columns].double(), matrices.double())
    assert ((got[..., :rows] - wanted).abs() <= terms * 2.0**-15).all()
    assert torch.equal(got[..., rows:], x[..., columns:-1])
    assert torch.equal(multiply(x[69:, :, :-1], matrices, copied)[0], got[69])


def test_latents_beyond_the_registers_are_refused_with_a_reason() -> None:
    case = LatentAttention(1, 576, 8, 8, 8, 1.0, RMSNorm())
    reason = "latents have 576 numbers; kernels take 512 at most"
    assert dict(TABLE.choose(api.PAGED_LATENT_ATTENTION, case).refusals)["triton"] == reason
