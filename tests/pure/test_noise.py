"""The noise of tokens: its bits are specified, its Gumbel numbers independent, and a draw with it is fair."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from ridgeline import ops
from ridgeline.ops.noise import Key, gumbel, scrambled
from ridgeline.sample import noise
from ridgeline.sample.noise import PURPOSE_SAMPLE, PURPOSE_XTC, draw
from ridgeline.sample.sampler import NoiseKey

MASK = 2**32 - 1
KEY = NoiseKey(5, 1)


def word(parts: tuple[int, int, int], token: int) -> int:
    """Return a word of a token id by the definition, with Python's integers."""
    x = (token * 0x9E3779B1 + parts[0]) & MASK
    x = (x ^ (x >> 16)) * 0x21F0AAAD & MASK
    x = (x + parts[1]) & MASK
    x = (x ^ (x >> 15)) * 0x735A2D97 & MASK
    return ((x ^ (x >> 15)) + parts[2]) & MASK


def defined(key: Key, token: int) -> float:
    """Return the Gumbel number of a token id by the definition."""
    one, two, three, four = key
    high, low = (word((a & MASK, a >> 32, b & MASK), token) for a, b in ((one, two), (three, four)))
    return -math.log(-math.log1p(-((high << 20 | low >> 12) + 0.5) / 2**52))


def keys(count: int) -> list[Key]:
    return [KEY.key(position, PURPOSE_SAMPLE) for position in range(count)]


def exact(scores: np.ndarray, ids: np.ndarray | None, key: Key) -> int:
    """Return the index of the token to draw: every sum in float64."""
    return int((scores + gumbel(key, np.arange(scores.size) if ids is None else ids)).argmax())


def test_noise_never_changes_between_versions() -> None:
    """Philox is specified, and the words are defined by integers, so a seed gives the same text in all versions."""
    generator = np.random.Generator(np.random.Philox(key=[5, 1], counter=[0, PURPOSE_XTC, 9, 2]))
    assert KEY.uniform(9, PURPOSE_XTC, 2) == generator.random()
    assert KEY.key(9, PURPOSE_SAMPLE)[0] == 17250283294367192727
    ids = np.array([0, 1, 40_000, 2**31, MASK])
    for key in (*keys(5), (0, 0, 0, 0), (2**64 - 1,) * 4):
        assert gumbel(key, ids).tolist() == pytest.approx([defined(key, token) for token in ids.tolist()], rel=1e-14)
    assert [draw(np.zeros(size), None, KEY.key(9, PURPOSE_SAMPLE)) for size in (9, 100_000)] == [2, 12_530]


def test_noise_depends_on_its_key_position_and_purpose_only() -> None:
    names = [(s, c, p) for s in (0, 1, 2, 2**32, 2**63 - 1) for c in (0, 1, 5) for p in (0, 1, 2, 100_000)]
    first = {name: NoiseKey(*name[:2]).key(name[2], 0) for name in names}
    np.random.seed(1)  # noqa: NPY002  global state must not matter
    again = {name: NoiseKey(*name[:2]).key(name[2], 0) for name in reversed(names)}
    assert first == again
    assert len({part for key in first.values() for part in key}) == 4 * len(names)
    one = NoiseKey(3, 0)
    assert len({one.key(7, purpose, index) for purpose in range(5) for index in range(5)}) == 25
    assert all(0 <= one.uniform(7, purpose) < 1 for purpose in range(50))


@pytest.mark.parametrize("size", [5_000, 40_000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 40.0])
def test_bounds_find_the_token_that_sums_find(size: int, spread: float) -> None:
    rng = np.random.default_rng(size)
    for key in keys(8):
        scores = rng.normal(size=size) * spread
        scores[rng.random(size) < 0.3] = -np.inf
        scores -= scores.max()
        ids = np.sort(rng.choice(200_000, size, replace=False))
        for given in (None, ids):
            assert draw(scores, given, key) == exact(scores, given, key)
        few = scores[:300] - scores[:300].max()
        assert draw(few, ids[:300], key) == exact(few, ids[:300], key)


def test_words_at_both_ends_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums stay below their bounds for all words: of zeros, of ones, and between."""
    ends = np.array([0, 1, 2**12, 2**31 - 1, 2**31, 3 * 2**30 + 5, MASK - 1, MASK], np.uint32)

    def scramble(words: np.ndarray, room: np.ndarray, parts: object) -> None:
        words[:] = ends[(words >> np.uint32(9)) % np.uint32(len(ends))]

    for module in (noise, ops.noise):
        monkeypatch.setattr(module, "scramble", scramble)
    scores = np.where(np.arange(20_000) % 9 < 4, -np.inf, -np.random.default_rng(0).random(20_000) * 60)
    scores[6], scores[4] = 0.0, -1e300  # the latter is minus infinity in float32, without a warning
    found = gumbel((0, 0, 0, 0), np.arange(scores.size))
    assert np.isfinite(found).all() and len(set(found.tolist())) > 6
    assert found.max() == pytest.approx(53 * math.log(2)) and found.min() == pytest.approx(-math.log(53 * math.log(2)))
    possible = scores > -1e300
    room = (noise._bounds(scores, None, (0, 0, 0, 0)) + noise._OFFSET)[possible] - (scores + found)[possible]
    assert room.min() > -noise._SLACK / 3
    assert draw(scores, None, (0, 0, 0, 0)) == exact(scores, None, (0, 0, 0, 0))


def test_ties_go_to_the_lower_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "gumbel", lambda key, ids: np.zeros(ids.size))
    assert draw(np.array([-1.0, 0.0, 0.0]), np.array([2, 5, 9]), (0, 0, 0, 0)) == 1


# Axes along which neighbors must be independent: index -> (key of the stream, token id).
AXES: dict[str, Callable[[int], tuple[Key, int]]] = {
    "token id": lambda i: (NoiseKey(9, 0).key(3, 0), i),
    "position": lambda i: (NoiseKey(9, 0).key(i, 0), 17),
    "seed": lambda i: (NoiseKey(i, 0).key(3, 0), 17),
    "choice": lambda i: (NoiseKey(9, 1 << 32 | i).key(3, 0), 17),
    "purpose": lambda i: (NoiseKey(9, 0).key(3, i), 17),
    "position and token id": lambda i: (NoiseKey(9, 0).key(i // 64, 0), i % 64),
}


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_gumbel_and_independent_along_every_axis(axis: str) -> None:
    count = 3_200
    pairs = [AXES[axis](i) for i in range(count)]
    g = np.array([gumbel(key, np.array([token]))[0] for key, token in pairs])
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-4
    cells = np.minimum((np.exp(-np.exp(-g)) * 8).astype(int), 7)
    for lag in (1, 2, 64):
        table = np.bincount(cells[:-lag] * 8 + cells[lag:], minlength=64).reshape(8, 8)
        assert stats.chi2_contingency(table).pvalue > 1e-4
        assert abs(np.corrcoef(g[:-lag], g[lag:])[0, 1]) < 4 / math.sqrt(count)


@pytest.mark.nightly
@pytest.mark.parametrize("lag", [1, 2, 3, 34, 256, 1024, 2584, 4096, 16384])
def test_words_of_two_token_ids_are_independent(lag: int) -> None:
    """10 million pairs: half of what the noise consists of, two rounds without the first product, fails from lag 16."""
    found = np.zeros(1024, np.int64)
    for key in keys(600):
        cells = scrambled(*key[:2], np.arange(16_384 + lag)) >> np.uint32(27)
        found += np.bincount(cells[:-lag].astype(np.int64) * 32 + cells[lag:], minlength=1024)
    assert stats.chisquare(found).pvalue > 1e-4


@pytest.mark.parametrize("size", [40, 4_500])
def test_draws_follow_the_softmax(size: int) -> None:
    """Chi-square over cells of about equal probability; the p-values of 20 seeds are uniform."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=size) * 2
    scores -= scores.max()
    weights = np.exp(scores) / np.exp(scores).sum()
    order = rng.permutation(size)
    cell = np.empty(size, int)
    cell[order] = np.minimum((weights[order].cumsum() * 12).astype(int), 11)
    expected = np.bincount(cell, weights, minlength=12)
    values = []
    for seed in range(20):
        stream = NoiseKey(seed, 0)
        drawn = [draw(scores, None, stream.key(position, 0)) for position in range(200)]
        found = np.bincount(cell[drawn], minlength=12)
        some = expected * 200 >= 5
        values.append(stats.chisquare(found[some], expected[some] / expected[some].sum() * found[some].sum()).pvalue)
    assert stats.kstest(values, "uniform").pvalue > 1e-4 and min(values) > 1e-4
