"""Draws take the tokens of the definition in numpy (ops/draws.py), in the interpreter."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import torch

from interpreted.guarded import interpreted, nightly, reference
from interpreted.tape import taped
from ridgeline.ops import api
from ridgeline.ops.draws import Draw, pack_draws
from ridgeline.ops.noise import gumbel
from ridgeline.ops.triton import tokens

TABLE, REFERENCE = interpreted(), reference()
TEMPERATURES = [0.0, 1e-29, 0.01, 0.7, 40.0, 1e300]
FILTERS = [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.8, 0.1), (0, 0.999, 1e-6),
    (9999999, 0.5, 0.0), (0, 1e-9, 0.0), (0, 1.0, 1.0),
]  # fmt: skip


def draw_of(row: int, temperature: float, kept: tuple[int, float, float]) -> Draw:
    words = np.random.default_rng(row).integers(0, 2**64, 4, np.uint64).tolist()
    return Draw((words[0], words[1], words[2], words[3]), temperature, *kept)


def made(rows: int, vocabulary: int, spread: float = 4.0) -> torch.Tensor:
    """Return logits with ties, zeros of both signs and minus infinities."""
    rng = np.random.default_rng((rows, vocabulary))
    logits = (rng.normal(size=(rows, vocabulary)) * spread).round(1).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = -0.0
    logits[np.arange(rows), rng.integers(0, vocabulary, rows)] = spread
    return torch.from_numpy(logits)


def check(logits: torch.Tensor, draws: list[Draw], ids: torch.Tensor | None = None) -> list[int]:
    """Compare draws with those of the definition, and return them."""
    given = logits, torch.from_numpy(pack_draws(draws).copy()), ids
    found, top = TABLE.primitive(api.DRAW)(*given)
    wanted, best = REFERENCE.primitive(api.DRAW)(*given)
    assert TABLE.choose(api.DRAW).backend == "triton"
    assert found.dtype == torch.int64 and top.dtype == torch.float32
    assert found.tolist() == wanted.tolist()
    assert torch.equal(top.nan_to_num(99), best.nan_to_num(99))
    return [int(x) for x in found]


@pytest.mark.parametrize("vocabulary", [63, 257, *nightly((1,), (100,))])
def test_draws_of_small_vocabularies(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has several parts and blocks, and more likely tokens than there is room for; it is alone or in a batch."""
    monkeypatch.setattr(tokens, "BEST_BLOCK", 128)
    monkeypatch.setattr(tokens, "DRAW_BLOCK", 64)
    monkeypatch.setattr(tokens, "MOST_LIKELY", 90)
    ways = zip(cycle(TEMPERATURES), FILTERS, strict=False)
    draws = [draw_of(vocabulary + i, t, kept) for i, (t, kept) in enumerate(ways)]
    logits = made(len(draws), vocabulary)
    found = check(logits, draws)
    assert check(logits[5:6], draws[5:6]) == found[5:6]
    ids = torch.from_numpy(np.random.default_rng(0).permutation(200_000)[:vocabulary])
    check(logits[3:6], draws[3:6], ids)


def test_draws_of_a_thousand_tokens() -> None:
    draws = [draw_of(i, 0.7, kept) for i, kept in enumerate(FILTERS)]
    check(made(len(draws), 1_000), draws)


def test_draws_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that likely tokens decide, and one that they do not decide: it keeps half of 50,257 tokens.

    The interpreter is faster with large blocks.
    """
    monkeypatch.setattr(tokens, "BEST_BLOCK", 2**15)
    monkeypatch.setattr(tokens, "DRAW_BLOCK", 2**15)
    ways = [
        (1.0, (0, 1.0, 0.0)), (0.8, (40, 0.9, 0.05)), (0.7, (0, 0.95, 0.0)), (40.0, (0, 0.5, 0.0)), (0.0, FILTERS[0]),
    ]  # fmt: skip
    check(made(len(ways), 50_257, 2.0), [draw_of(i, t, kept) for i, (t, kept) in enumerate(ways)])


def test_ties_at_the_last_kept_token() -> None:
    """Among equal logits the first ones are kept: 500 of 1,000 tokens have exactly the probability 0.5."""
    even, steep = torch.zeros(1_000), torch.arange(0, -1_000, -1).float()
    pairs = torch.arange(1_000).div(2, rounding_mode="floor").float() * -0.01
    for logits, kept in (
        (even, (0, 0.5, 0.0)), (even, (7, 1.0, 0.0)), (even, (10, 0.35, 0.0)), (even, (0, 1e-300, 0.0)),
        (steep, (30, 1.0, 0.0)), (steep, (0, 1.0, 1e-6)), (pairs, (3, 1.0, 0.0)), (pairs, (0, 0.3, 0.0)),
        (pairs.flip(0), (5, 0.7, 0.0)),
    ):  # fmt: skip
        draws = [draw_of(i, 1.0, kept) for i in range(2)]
        check(logits.expand(2, -1), draws)


def test_rows_without_finite_numbers_draw_nothing() -> None:
    logits = torch.tensor([[1, np.nan, 2, 0], [-np.inf] * 4, [0, np.inf, 0, np.inf], [-np.inf, 3, -np.inf, -np.inf]])
    for kept in FILTERS[2:4]:
        assert check(logits, [draw_of(i, 1.0, kept) for i in range(4)]) == [1, 0, 1, 1]
    with pytest.raises(ValueError, match="8 numbers of draws for 4 rows; each row has 8"):
        TABLE.primitive(api.DRAW)(logits, torch.zeros(8, dtype=torch.int64), None)


def test_an_unfiltered_draw_is_the_largest_sum_of_score_and_noise() -> None:
    """The closed form, also for the keys and the ids at the ends of their ranges."""
    ids = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    logits = torch.tensor([[0.0, 0.5, 0.25, -0.5, 0.125]])
    for key in ((0, 0, 0, 0), (2**64 - 1,) * 4, (1, 2, 3, 2**63), (2**63, 2**33, 5, 6)):
        sums = logits[0].numpy().astype(np.float64) / 0.5 + gumbel(key, ids.numpy())
        assert check(logits, [Draw(key, 0.5)], ids) == [int(sums.argmax())]


def test_draws_are_recorded() -> None:
    """Nothing is read on the host, and each run reads how its rows draw."""
    table, _ = taped()
    assert table.driver is not None
    recorder, logits = table.driver.recorder(), made(3, 100)
    words = recorder.words(3 * 8)
    found = recorder.record(lambda: table.primitive(api.DRAW)(logits, words, None), [logits])
    assert not isinstance(found, str), found
    for begin in range(4):
        draws = pack_draws([draw_of(begin + i, 1.0, FILTERS[i]) for i in range(3)])
        recorder.assign(words, draws)
        found.run()
        wanted, _ = REFERENCE.primitive(api.DRAW)(logits, torch.from_numpy(draws.copy()), None)
        assert found.results[0].tolist() == wanted.tolist()
