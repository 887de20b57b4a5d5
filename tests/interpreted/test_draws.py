"""Draws and accepted drafts are those of the definition in numpy (ops/draws.py), in the interpreter."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import torch

from interpreted.guarded import interpreted, nightly, reference
from interpreted.tape import taped
from ridgeline.ops import api
from ridgeline.ops.draws import Draw, Trial, pack_draws, pack_trials
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


def drafted(rows: int, vocabulary: int) -> torch.Tensor:
    """Return logits of some likely tokens among others."""
    rng, likely = np.random.default_rng(vocabulary), min(vocabulary, 12)
    logits = np.full((rows, vocabulary), -7, np.float32)
    for row in logits:
        row[rng.choice(vocabulary, likely, replace=False)] = rng.normal(size=likely)
    return torch.from_numpy(logits)


def siblings_of(logits: torch.Tensor, count: int, number: int, is_typical: bool) -> list[tuple[int, float]]:
    """Return drafts for one position, and the numbers that decide: they lie close to what decides them.

    Rejection sampling rejects the first ones, of which the second repeats the first, and accepts or rejects the last
    one, by `number`. Typical acceptance rejects all but the last one.
    """
    p = logits.double().softmax(0).numpy()
    order = (-p).argsort()
    if is_typical:
        least = min(0.09, 0.3 * np.exp((p * np.log(p)).sum()))
        below = [int(token) for token in order if p[token] <= least] or [0]
        tokens = [*below[1 : count - 1], below[0], int(order[number % 4])]
        return [(token, 0.0) for token in tokens[-count:]] if count else []
    tokens = [int(order[number % 3]), *order.tolist(), *order.tolist()][:count]
    tokens[1:2] = tokens[:1] * len(tokens[1:2])
    found = list[tuple[int, float]]()
    for i, token in enumerate(tokens):
        share = 0.0 if token in tokens[:i] else p[token] / p[[t for t in range(len(p)) if t not in tokens[:i]]].sum()
        found.append((token, float(share * (0.98 if i == len(tokens) - 1 and number % 2 else 1.02))))
    return found


def tried(logits: torch.Tensor, parents: list[int], begin: int) -> list[Draw]:
    """Return draws of the rows of a work with drafts. Some works have filters, and some have typical acceptance."""
    trials, is_typical = [Trial()] * len(logits), begin % 7 < 3
    for node in range(-1, len(parents)):
        siblings = [i for i, parent in enumerate(parents) if parent == node]
        drafts = siblings_of(logits[node + 1], len(siblings), begin + node, is_typical)
        for child, after, draft in zip(siblings, [*siblings, None][1:] if siblings else [], drafts, strict=False):
            trials[child + 1] = Trial(0, 0 if after is None else after - child, draft[0], False, draft[1])
        if siblings:
            trials[node + 1] = trials[node + 1]._replace(first=siblings[0] - node, is_typical=is_typical)
    kept = [FILTERS[(begin + i) % 7 if begin % 4 == 1 else 0] for i in range(len(trials))]
    return [draw_of(begin + i, 1.0, kept[i])._replace(trial=trial) for i, trial in enumerate(trials)]


@pytest.mark.parametrize("vocabulary", [100, *nightly((63,), (1_000,))])
def test_drafts_are_accepted_as_by_the_definition(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains and trees, by rejection sampling and typical acceptance, in one batch. Some rows are greedy or broken."""
    monkeypatch.setattr(tokens, "BEST_BLOCK", 128)
    monkeypatch.setattr(tokens, "DRAW_BLOCK", 64)
    logits, draws = drafted(72, vocabulary), list[Draw]()
    for parents in ([-1, -1, -1, -1], [-1, 0, 1, 2], [-1, -1, -1, 0, 0, 0], []) * 4:
        begin = len(draws)
        draws += tried(logits[begin : begin + len(parents) + 1], parents, begin)
    draws[1] = draws[1]._replace(temperature=0.0)
    logits[13] = float("nan")
    given = logits[: len(draws)], *(torch.from_numpy(pack(draws).copy()) for pack in (pack_draws, pack_trials))
    found, top = TABLE.primitive(api.ACCEPT)(*given)
    wanted, best = REFERENCE.primitive(api.ACCEPT)(*given)
    assert TABLE.choose(api.ACCEPT).backend == "triton"
    assert found.tolist() == wanted.tolist()
    assert torch.equal(top.nan_to_num(99), best.nan_to_num(99))
    plain = REFERENCE.primitive(api.DRAW)(*given[:2], None)[0]
    assert (plain != found).sum() > 5, "drafts that are tried change tokens"
    with pytest.raises(ValueError, match=f"4 numbers of trials for {len(draws)} rows; each row has 5"):
        TABLE.primitive(api.ACCEPT)(*given[:2], given[2][:4])


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
