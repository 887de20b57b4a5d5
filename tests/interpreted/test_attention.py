"""Attention over pages against its definition in float64, with NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interpreted.guarded import interpreted, nightly, serves
from interpreted.sequences import Sequences
from ridgeline.ops import api
from ridgeline.ops.triton import paged
from ridgeline.spec import Attention, Dilated, FirstTokens, Strided
from ridgeline.spec.trees import paths

TABLE = interpreted()

PLAIN = Attention(4, 2, 64, 0.125)
ODD = Attention(6, 2, 20, 0.2, window=24, softcap=20.0, sinks=True)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the keys of short sequences, too: into splits of two tiles."""
    monkeypatch.setattr(paged, "SPLIT", 64)
    monkeypatch.setattr(paged, "BLOCK_KEYS", 32)


@pytest.mark.parametrize(
    ("case", "dtype", "page"),
    [
        (PLAIN, torch.float16, 16), (ODD, torch.float16, 3),
        (replace(ODD, window=None, softcap=2.0), torch.bfloat16, 16), (Attention(8, 1, 128, 0.1), torch.float16, 16),
        (PLAIN, torch.int8, 16), (ODD, torch.uint8, 1), (ODD, torch.float32, 16),
        (Attention(2, 1, 288, 0.1), torch.int8, 16),
        (Attention(20, 1, 16, 0.3, window=90), torch.uint8, 16),
        (replace(ODD, window=24, pattern=FirstTokens(3)), torch.float16, 3),
        (replace(ODD, window=9, pattern=Dilated(13)), torch.bfloat16, 16),
        *nightly(
            (Attention(68, 2, 16, 0.3, window=90), torch.uint8, 16), (PLAIN, torch.bfloat16, 1),
            (replace(PLAIN, num_heads=2, window=1), torch.float16, 16),
            (replace(ODD, window=200), torch.bfloat16, 63), (ODD, torch.int8, 3), (PLAIN, torch.uint8, 16),
            (Attention(2, 1, 200, 0.1, softcap=9.0), torch.float16, 16),
            (Attention(2, 1, 160, 0.1), torch.float32, 16),
            (replace(ODD, num_kv_heads=3, head_dim=300, scale=0.05), torch.float32, 16),
            (replace(ODD, head_dim=257, scale=0.05), torch.float32, 16), (Attention(24, 1, 16, 0.3), torch.float16, 16),
            (replace(ODD, window=70, pattern=FirstTokens(70)), torch.int8, 16),
            (replace(ODD, window=9, pattern=Strided(7)), torch.float16, 16),
        ),
    ],
)  # fmt: skip
def test_chunks_and_decode_steps_equal_the_definition(case: Attention, dtype: torch.dtype, page: int) -> None:
    assert serves(TABLE, api.PAGED_ATTENTION, case)
    sequences = Sequences(case, [257, 63, 100, 1], page, dtype)
    bound = 1e-5 if dtype == torch.float16 else 1e-4  # weights are two slices: 2^-22 and, in bfloat16, 2^-17 of each
    assert sequences.error([0, 2, 3], [256, 99, 0], [1, 1, 1]) < bound
    assert sequences.error([1, 0, 2], [0, 250, 40], [63, 7, 1]) < bound


@pytest.mark.parametrize(
    ("case", "dtype"), [(PLAIN, torch.float16), (replace(ODD, window=70, pattern=FirstTokens(9)), torch.int8)]
)
def test_a_token_has_the_same_bits_in_every_step(case: Attention, dtype: torch.dtype) -> None:
    """The token at position 199 is decoded alone, beside others, in a chunk, and by one program for all splits."""
    attend, sequences = TABLE.primitive(api.PAGED_ATTENTION, case), Sequences(case, [200, 257, 63], 16, dtype)

    def last(rows: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
        """Return the result of the last token of row 0, which comes first in the step."""
        q, kv = sequences.step(rows, starts, counts)
        return attend(q, kv, sequences.given)[counts[0] - 1]

    alone = last([0], [199], [1])
    assert torch.equal(alone, last([0, 1, 2], [199, 256, 62], [1, 1, 1]))
    assert torch.equal(alone, last([0], [170], [30]))
    assert torch.equal(alone, last([0, 2, 1], [193, 0, 250], [7, 63, 1]))


def test_few_and_many_programs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(PLAIN, [257, 100], 16, torch.float16)
    q, kv = sequences.step([0, 1], [256, 99], [1, 1])
    found = []
    for programs in (512, 0):
        monkeypatch.setattr(paged, "PROGRAMS", programs)
        found.append(TABLE.primitive(api.PAGED_ATTENTION, PLAIN)(q, kv, None))
    assert torch.equal(*found)


def test_two_programs_share_long_values_in_float32() -> None:
    """Each of them computes a half of the numbers of a value, in one split and in several."""
    sequences = Sequences(replace(ODD, num_heads=4, head_dim=260, scale=0.05), [70, 3], 16, torch.float32)
    assert sequences.error([0, 1], [69, 2], [1, 1]) < 1e-4
    assert sequences.error([1, 0], [0, 66], [3, 2]) < 1e-4


def test_large_queries_are_not_cut() -> None:
    """A query beyond the largest float16 number and a query of zeros."""
    sequences = Sequences(replace(PLAIN, scale=1e-7), [63, 63], 16, torch.float16)
    sequences.q[0] *= 1e6
    sequences.q[1] *= 0
    assert sequences.error([0, 1], [62, 62], [1, 1]) < 1e-5


TREES = [[-1, 0, 0, 2, -1, 3], [], [-1, -1, 1]]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (replace(PLAIN, num_heads=2), torch.float16),
        (replace(ODD, window=24, pattern=FirstTokens(40)), torch.int8),
    ],
)  # fmt: skip
def test_a_draft_in_a_tree_has_the_bits_of_its_path_as_a_chain(case: Attention, dtype: torch.dtype) -> None:
    """A prompt's tail with a tree, a token alone and a decode step with a tree; then each path in pages of its own."""
    sequences, steps = Sequences(case, [68, 3, 34], 16, dtype), ([0, 1, 2], [59, 2, 30], [9, 1, 4])
    attend = TABLE.primitive(api.PAGED_ATTENTION, case)
    assert sequences.error(*steps, TREES) < 1e-4
    q, kv = sequences.step(*steps, TREES)
    got = attend(q, kv, sequences.given)
    known, tree = 62, TREES[0]
    assert torch.equal(got[:3], attend(*sequences.step([0], [59], [3]), sequences.given))
    for draft in (4, 5):
        path = [i for i in range(len(tree)) if paths(tree)[draft] >> i & 1]
        chain = Sequences(case, [68, 3, 34], 16, dtype)
        for part in chain.parts:
            for view in (x for x in paged.views_of(part) if x is not None):
                rows = [view[chain.tables[0, (known + i) // 16], (known + i) % 16].clone() for i in path]
                for at, row in enumerate(rows, known):
                    view[chain.tables[0, at // 16], at % 16] = row
        _, alone = chain.step([0], [known + len(path) - 1], [1])
        assert torch.equal(got[3 + draft], attend(q[3 + draft][None], alone, chain.given)[0])


def test_2000_keys_in_splits_of_512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for case in (replace(PLAIN, num_heads=2), Attention(2, 2, 16, 0.3, window=100, pattern=FirstTokens(600))):
        sequences = Sequences(case, [2000], 16, torch.float16)
        assert sequences.error([0], [1999], [1]) < 1e-5
        assert sequences.error([0], [1990], [10]) < 1e-5


def test_heads_beyond_the_registers_are_refused_with_a_reason() -> None:
    reason = "heads have 576 numbers; kernels take 512 at most"
    assert dict(TABLE.choose(api.PAGED_ATTENTION, Attention(1, 1, 576, 1.0)).refusals)["triton"] == reason
