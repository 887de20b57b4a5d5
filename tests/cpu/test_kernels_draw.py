"""Draws by kernels take the token that numpy takes, and Philox gives numpy's bits."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")

from cpu.instruction_sets import OTHERS, fingerprint_under  # noqa: E402
from ridgeline import SamplingParams  # noqa: E402
from ridgeline.ops import OpsTable, api, open_table  # noqa: E402
from ridgeline.ops.draws import Draw, pack_draws  # noqa: E402
from ridgeline.ops.host.backend import NumpyBackend  # noqa: E402
from ridgeline.ops.host.memory import NumpyMemory  # noqa: E402
from ridgeline.ops.noise import Key, gumbel  # noqa: E402
from ridgeline.runtime.chain import spread as spread_over  # noqa: E402
from ridgeline.sample import drawing, noise, sampler  # noqa: E402
from ridgeline.sample.acceptance import draw_ahead, draw_draft  # noqa: E402
from ridgeline.sample.sampler import NoiseKey, SampleRow, distribution, sample  # noqa: E402

FILTERS: tuple[dict[str, float], ...] = (
    {}, {"top_k": 1}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.1}, {"top_p": 0.999, "min_p": 1e-6},
)  # fmt: skip
SIZES = [1, 15, 16, 17, 63, 100, 257, 5_000, 40_000]
TEMPERATURES = [1e-29, 0.01, 0.7, 1.0, 40.0]


@cache
def tables() -> tuple[OpsTable, ...]:
    return open_table("cpu"), OpsTable(NumpyMemory(), (NumpyBackend(),)), open_table("reference")


def keys(count: int) -> list[Key]:
    return [NoiseKey(7, 2).key(position, 0) for position in range(count)]


def made(size: int, spread: float = 4.0, seed: int = 0) -> np.ndarray:
    """Return logits, some of which are minus infinity."""
    rng = np.random.default_rng((size, seed))
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    logits[rng.random(size) < 0.2] = -np.inf
    logits[rng.integers(size)] = spread
    return logits


def exact(scores: np.ndarray, ids: np.ndarray, key: Key) -> int:
    return int((scores + gumbel(key, ids)).argmax())


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("size", SIZES)
def test_logits(size: int, temperature: float) -> None:
    for key in keys(12):
        logits = made(size)
        top = float(logits.max())
        with np.errstate(over="ignore"):
            scores = (logits.astype(np.float64) - top) / temperature
        assert kernels.draw_logits(logits, top, temperature, key) == exact(scores, np.arange(size), key)


@pytest.mark.parametrize("spread", [0.0, 0.01, 4.0, 400.0])
@pytest.mark.parametrize("size", SIZES)
def test_scores(size: int, spread: float) -> None:
    ids = np.sort(np.random.default_rng(size).choice(200_000, size, replace=False))
    for key in keys(12):
        scores = made(size, spread).astype(np.float64)
        scores -= scores.max()
        scores[scores < -300] = -1e300  # minus infinity in float32
        assert kernels.draw_scores(scores, None, key) == exact(scores, np.arange(size), key)
        assert kernels.draw_scores(scores, ids, key) == exact(scores, ids, key)
        assert noise.draw(scores, ids, key) == exact(scores, ids, key)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 40.0])
@pytest.mark.parametrize("size", [1, 17, 257, 5_000])
def test_rows_draw_what_the_sampler_draws(size: int, spread: float) -> None:
    """The op draws as the host, by kernels and by its definitions in numpy and torch."""
    ways = [(t, own) for t in (0.0, 0.3, 1.0, 40.0) for own in FILTERS]
    logits = np.stack([made(size, spread, i) for i in range(len(ways))])
    vocabulary = np.sort(np.random.default_rng(size).choice(3 * size, size, replace=False))
    rows = [SampleRow.start(SamplingParams(temperature=t, **own), [1], NoiseKey(7, 2), ()) for t, own in ways]
    draws = pack_draws([draw for row in rows if (draw := draw_ahead(row, "same", 3)) is not None])
    for ids in (None, vocabulary):
        whole = spread_over(logits, ids, 3 * size)
        wanted = [draw_draft(x, row.ahead(3), "same").token for x, row in zip(whole, rows, strict=True)]
        for table in tables():
            put, integers = table.memory.put, table.memory.integers
            found, top = table.primitive(api.DRAW)(
                put(logits, "float32", "float32"), integers(draws), None if ids is None else integers(ids)
            )
            assert np.asarray(found if ids is None else ids[np.asarray(found)]).tolist() == wanted
            assert np.asarray(top).tolist() == logits.max(axis=1).tolist()


def test_filters_that_likely_tokens_do_not_decide() -> None:
    """They are decided among all tokens: half of equal ones, more than the likely ones, all that are above a limit."""
    even, steep = np.zeros(1_000, np.float32), np.arange(0, -1_000, -1, np.float32)
    cases = [(even, {"top_p": 0.5}), (steep, {"top_k": 30}), (steep, {"min_p": 1e-6}), (even, {"top_k": 2_000})]
    for logits, own in cases:
        rows = [SampleRow.start(SamplingParams(**own), [1], NoiseKey(i, 0), ()) for i in range(40)]
        draws = pack_draws([draw for row in rows if (draw := draw_ahead(row, "same", 0)) is not None])
        wanted = [draw_draft(logits, row, "same").token for row in rows]
        found, _ = tables()[0].primitive(api.DRAW)(np.stack([logits] * 40), draws, None)
        assert found.tolist() == wanted


def test_rows_that_hold_no_numbers_draw_nothing() -> None:
    logits = np.array([[1, np.nan, 2], [-np.inf] * 3, [0, np.inf, 0]], np.float32)
    draws = pack_draws([Draw((1, 2, 3, 4), 1.0, top_p=0.5)] * 3)
    for table in tables():
        found, top = table.primitive(api.DRAW)(table.memory.put(logits, "float32", "float32"),
                                               table.memory.integers(draws), None)  # fmt: skip
        assert np.asarray(found).tolist() == [1, 0, 1]
        assert not np.isfinite(np.asarray(top)).any()
    with pytest.raises(ValueError, match="draws"):
        tables()[0].primitive(api.DRAW)(logits, draws[:-1].copy(), None)


def test_large_ids_and_keys() -> None:
    ids = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    for key in ((0, 0, 0, 0), (2**64 - 1,) * 4, (1, 2, 3, 2**63)):
        assert kernels.draw_scores(np.zeros(5), ids, key) == exact(np.zeros(5), ids, key)


def test_a_view_is_drawn_from() -> None:
    logits = np.stack([made(100, seed=i) for i in range(3)]).T  # rows are not dense
    for key in keys(4):
        top = float(logits[:, 1].max())
        whole = np.ascontiguousarray(logits[:, 1])
        assert drawing.draw_logits(logits[:, 1], top, 0.8, key) == kernels.draw_logits(whole, top, 0.8, key)
        assert drawing.draw(made(64).astype(np.float64)[::2], np.arange(64)[::2], key) in range(32)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("size", SIZES)
def test_likely_tokens(size: int, temperature: float) -> None:
    logits = made(size)
    top = float(logits.max())
    with np.errstate(over="ignore"):
        scores = (logits.astype(np.float64) - top) / temperature
    found = np.full(size + 1, -1, np.int64)
    count, rest = kernels.likely(logits, top, temperature, -10.0, found)
    others = np.delete(scores, found[:count])
    assert rest == pytest.approx(np.exp(others).sum(), rel=1e-6)
    assert (np.diff(found[:count]) > 0).all()
    is_found = np.zeros(size, bool)
    is_found[found[:count]] = True
    assert is_found[scores > -9.9999].all() and not is_found[scores < -10.0001].any()


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.1}, {"top_p": 0.999, "typical_p": 0.8, "xtc_probability": 0.5}]
)
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_a_nucleus_of_likely_tokens_is_the_whole_one(
    params: dict[str, float], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(20, 30_000)) * spread).astype(np.float32)
    sampling = SamplingParams(temperature=0.8, logprobs=3, logprobs_mode="processed", **params)
    rows = [SampleRow.start(sampling, [1], NoiseKey(i, 0), ()) for i in range(20)]
    found, ways = sample(logits, rows), [distribution(x, row) for x, row in zip(logits, rows, strict=True)]
    monkeypatch.setattr(sampler, "likely", lambda *args: None)
    assert sample(logits, rows) == found
    for x, row, way in zip(logits, rows, ways, strict=True):
        other = distribution(x, row)
        assert np.array_equal(other.ids, way.ids) and np.allclose(other.probabilities, way.probabilities, rtol=1e-12)


def nucleus_of(logits: np.ndarray, **params: float) -> tuple[bool, np.ndarray]:
    """Return whether likely tokens were enough, and the ids that are kept."""
    row = SampleRow.start(SamplingParams(**params), [1], NoiseKey(1, 0), ())
    found = sampler._nucleus_first(logits, float(logits.max()), row)
    return found is not None, distribution(logits, row).ids


def test_a_total_that_rounding_could_decide_is_summed_exactly() -> None:
    even = np.zeros(1_000, np.float32)  # 500 tokens have exactly the mass 0.5
    assert nucleus_of(even, top_p=0.5) == (False, pytest.approx(np.arange(500)))
    assert nucleus_of(even, top_p=0.5004) == (True, pytest.approx(np.arange(501)))


def test_a_large_nucleus_is_decided_by_likely_tokens() -> None:
    """A sum over all tokens that is rounded more than the weight of one would nearly never decide."""
    rng = np.random.default_rng(0)
    decided = [nucleus_of((rng.normal(size=150_000) * 3).astype(np.float32), top_p=0.9)[0] for _ in range(8)]
    assert sum(decided) >= 7


@pytest.mark.parametrize("temperature", [1e-29, 1e30, 1e46, 1e300])
def test_extreme_temperatures_keep_the_same_nucleus(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = made(300)
    _, ids = nucleus_of(logits, temperature=temperature, top_p=0.7)
    monkeypatch.setattr(sampler, "likely", lambda *args: None)
    assert np.array_equal(nucleus_of(logits, temperature=temperature, top_p=0.7)[1], ids)
    for key in keys(8):
        with np.errstate(over="ignore"):
            scores = (logits.astype(np.float64) - float(logits.max())) / temperature
        drawn = kernels.draw_logits(logits, float(logits.max()), temperature, key)
        assert drawn == exact(scores, np.arange(300), key)


@pytest.mark.parametrize("words", [(0, 0), (1, 2), (2**64 - 1, 2**63)])
@pytest.mark.parametrize("counter", [(1, 0, 0, 0), (1, 4, 100_000, 3), (1, 2**64 - 1, 2**32, 2**64 - 1)])
def test_philox(words: tuple[int, int], counter: tuple[int, int, int, int]) -> None:
    wanted = np.random.Philox(key=np.array(words, np.uint64), counter=np.array([0, *counter[1:]], np.uint64))
    assert kernels.philox(words, counter) == wanted.random_raw(4).tolist()


def test_without_kernels_the_tokens_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plain = runpy.run_path(str(Path(drawing.__file__)))
    assert plain["draw"] is noise.draw
    for key in keys(20):
        logits = made(300)
        top = float(logits.max())
        assert plain["draw_logits"](logits, top, 0.7, key) == drawing.draw_logits(logits, top, 0.7, key)
    assert plain["random_words"]((5, 1), (1, 0, 9, 0)) == drawing.random_words((5, 1), (1, 0, 9, 0))


def test_what_cannot_be_drawn_from() -> None:
    none = np.zeros(0, np.float32)
    with pytest.raises(ValueError, match="there are no logits"):
        kernels.draw_logits(none, 0.0, 1.0, keys(1)[0])
    with pytest.raises(ValueError, match="there are no scores"):
        kernels.draw_scores(none.astype(np.float64), None, keys(1)[0])
    with pytest.raises(ValueError, match="temperature"):
        kernels.draw_logits(made(5), 0.0, 0.0, keys(1)[0])
    with pytest.raises(ValueError, match="found"):
        kernels.likely(made(5), 0.0, 1.0, -10.0, np.zeros(5, np.int64))
    with pytest.raises(ValueError, match="least"):
        kernels.likely(made(5), 0.0, 1.0, -90.0, np.zeros(6, np.int64))
    with pytest.raises(ValueError, match="ids"):
        kernels.draw_scores(np.zeros(5), np.arange(4), keys(1)[0])
    with pytest.raises(TypeError):
        kernels.draw_logits(made(5).astype(np.float64), 0.0, 1.0, keys(1)[0])


def fingerprint() -> bytes:
    drawn = [
        kernels.draw_logits(logits, float(logits.max()), t, key)
        for size in SIZES for logits in [made(size)] for t in TEMPERATURES for key in keys(4)
    ]  # fmt: skip
    found = np.zeros(40_001, np.int64)
    counts = [kernels.likely(made(n), float(made(n).max()), 0.7, -10.0, found[: n + 1])[0] for n in SIZES]
    return np.array(drawn + counts).tobytes()


@pytest.mark.parametrize("isa", OTHERS)
def test_instruction_sets_draw_the_same_tokens(isa: str) -> None:
    assert fingerprint_under(isa, "test_kernels_draw") == fingerprint()
