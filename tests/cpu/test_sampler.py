"""From logits to a token: the filters equal transformers', the noise depends on its key alone, the draw is fair, and a
row's result never depends on its neighbors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ridgeline.errors import RequestError
from ridgeline.ops.noise import gumbel
from ridgeline.sample import sampler
from ridgeline.sample.filters import filter_scores
from ridgeline.sample.logits import top_k
from ridgeline.sample.noise import PURPOSE_SAMPLE
from ridgeline.sample.sampler import NoiseKey, SampledToken, SampleRow, prompt_logprobs, sample
from ridgeline.spec.request import SamplingParams, TokenLogprobs

KEY = NoiseKey(0, 0)
BORDER = 1e-9  # a sum this close to top_p is decided by rounding: either answer is right

# The values are distinct points of a lattice; another test covers ties.
_LOGITS = st.lists(st.integers(-600, 600), min_size=1, max_size=40, unique=True).map(
    lambda values: np.array(values, np.float32) / 32
)
_PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.9, 30.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 39, 40, 1000]),
        "top_p": st.floats(0.001, 1.0),
        "min_p": st.sampled_from([0.0, 1e-4, 0.05, 0.3, 0.9, 1.0]),
        "typical_p": st.floats(0.001, 1.0),
    },
).map(lambda kwargs: SamplingParams(**kwargs))


def row(params: SamplingParams, noise: NoiseKey = KEY, position: int = 0) -> SampleRow:
    return SampleRow.start(params, [0] * position, noise, ())


def token(found: SampledToken | RequestError) -> int:
    assert isinstance(found, SampledToken)
    return found.token


def pick(logits: np.ndarray, params: SamplingParams, noise: NoiseKey = KEY, position: int = 0) -> int:
    return token(sample(logits[None], [row(params, noise, position)])[0])


def softmax(scores: np.ndarray) -> np.ndarray:
    return torch.from_numpy(scores).softmax(-1).numpy()


def filtered(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the distribution after the filters, for scores after temperature."""
    left = scores - scores.max()
    filter_scores(left, params, lambda purpose: 0.0)
    return softmax(left)


def ours(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the distribution that `sample` draws from."""
    return filtered(logits.astype(np.float64) / params.temperature, params)


def theirs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return transformers' distribution, in float64."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        chain.append(TypicalLogitsWarper(params.typical_p))
    scores = chain(torch.zeros((1, 1), dtype=torch.int64), torch.from_numpy(logits).double()[None])
    return scores.softmax(-1)[0].numpy()


def on_a_border(logits: np.ndarray, params: SamplingParams) -> bool:
    """Return whether rounding decides which tokens top_p, min_p or typical_p keeps."""
    kept = -np.sort(-ours(logits, SamplingParams(temperature=params.temperature, top_k=params.top_k)))
    near_p = params.top_p < 1 and bool((np.abs(kept.cumsum() - params.top_p) < BORDER).any())
    near_m = params.min_p > 0 and bool((np.abs(kept / kept[0] - params.min_p)[1:] < BORDER).any())
    return near_p or near_m or _on_a_typical_border(logits, params)


def _on_a_typical_border(logits: np.ndarray, params: SamplingParams) -> bool:
    if params.typical_p == 1:
        return False
    before = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    left = ours(logits, before)
    left = left[left > 0]
    distance = np.abs(-np.log(left) + (left * np.log(left)).sum())
    order = np.argsort(distance)
    near = bool((np.abs(left[order].cumsum() - params.typical_p) < BORDER).any())
    return near or bool((np.diff(distance[order]) < BORDER).any())  # another test covers equal distances


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(logits=_LOGITS, params=_PARAMS)
def test_the_distribution_is_that_of_transformers(logits: np.ndarray, params: SamplingParams) -> None:
    assume(not on_a_border(logits, params))
    found, expected = ours(logits, params), theirs(logits, params)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
    assert found.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 40.0])
@pytest.mark.parametrize(
    "kwargs",
    [{"top_k": 50}, {"top_k": 4000}, {"top_p": 0.3}, {"top_p": 0.999}, {"min_p": 0.1}, {"typical_p": 0.2},
     {"typical_p": 0.95}, {"top_k": 900, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}],
    ids=str,
)  # fmt: skip
def test_large_vocabularies(kwargs: dict[str, Any], spread: float) -> None:
    """In flat and in peaked distributions, the tokens that are kept are among the best few, or are not."""
    logits = (np.random.default_rng(2).normal(size=5000) * spread).astype(np.float32)
    params = SamplingParams(**kwargs)
    found, expected = ours(logits, params), theirs(logits, params)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)


def test_filters_apply_in_their_order() -> None:
    """top_p counts the tokens that top_k left, and min_p those that top_p left: 0.4 of 0.7 is more than half."""
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert (filtered(scores, SamplingParams(top_p=0.5)) > 0).tolist() == [True, True, False, False]
    assert (filtered(scores, SamplingParams(top_k=2, top_p=0.5)) > 0).tolist() == [True] + [False] * 3
    # 0.4, 0.3, 0.2 have 0.92, 1.20, 1.61 nats after top_k=3 of 1.06 expected: 0.3 is the most typical of them.
    assert np.flatnonzero(filtered(scores, SamplingParams(top_k=3, typical_p=0.3))).tolist() == [1]
    both = filtered(scores, SamplingParams(top_p=0.85, min_p=0.6))
    np.testing.assert_allclose(both, [4 / 7, 3 / 7, 0, 0])


def test_no_filter_leaves_the_softmax() -> None:
    scores = np.random.default_rng(0).normal(size=300) * 5
    for params in (SamplingParams(), SamplingParams(top_k=-1), SamplingParams(top_k=300), SamplingParams(top_k=10**30)):
        np.testing.assert_allclose(filtered(scores, params), torch.from_numpy(scores).softmax(0).numpy(), rtol=1e-12)


def test_ties_at_a_border_go_to_the_lower_id() -> None:
    scores = np.array([0.0, 2.0, 1.0, 2.0, 2.0])
    assert np.flatnonzero(filtered(scores, SamplingParams(top_k=2))).tolist() == [1, 3]
    assert np.flatnonzero(filtered(scores, SamplingParams(top_p=0.2))).tolist() == [1]
    assert np.flatnonzero(filtered(scores, SamplingParams(min_p=1.0))).tolist() == [1, 3, 4]
    assert np.flatnonzero(filtered(np.zeros(5), SamplingParams(typical_p=0.5))).tolist() == [0, 1, 2]
    assert top_k(np.zeros(9), 4).tolist() == [0, 1, 2, 3]
    assert top_k(np.array([0.0, -1.0, -1.0, -np.inf, -np.inf]), 4).tolist() == [0, 1, 2, 3]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.array([1.0, 7.0, 7.0, -2.0, 7.0], np.float32)
    params = SamplingParams(temperature=0, top_k=3, seed=1)
    assert {pick(logits, params, NoiseKey(s, 0), p) for s in range(5) for p in range(5)} == {1}
    assert pick(np.zeros(5, np.float32), params) == 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 1e-307, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    """The computation does not overflow to inf - inf; warnings are errors here."""
    logits = np.array([-3.0, 1.0, 17.0, 16.0], np.float32)
    params = SamplingParams(temperature=temperature)
    assert {pick(logits, params, position=position) for position in range(50)} == {2}


def test_the_largest_temperature_is_uniform() -> None:
    params = SamplingParams(temperature=1e300)
    drawn = [pick(np.array([0.0, 30.0, -30.0], np.float32), params, position=p) for p in range(3000)]
    assert min(np.bincount(drawn, minlength=3)) > 900


def test_logits_whose_exponentials_overflow() -> None:
    logits = np.array([1e5, 1e5 - 1, -1e30, 3e38], np.float32)
    assert pick(logits, SamplingParams()) == 3
    assert math.isfinite(prompt_logprobs(logits[None, :2], [1], 2)[0].logprob)


# The draw ----------------------------------------------------------------------------------------------


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Return the probability of a larger statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=12, top_p=0.95),
        SamplingParams(min_p=0.2),
        SamplingParams(typical_p=0.6),
    ],
    ids=["plain", "top_k and top_p", "min_p", "typical_p"],
)
def test_draws_follow_the_distribution(params: SamplingParams, seed: int) -> None:
    logits = np.random.default_rng(3).uniform(-1.5, 1.5, size=25).astype(np.float32)
    probabilities = ours(logits, params)
    assert (probabilities > 0).sum() > 4
    count = 8_000
    rows = [row(params, NoiseKey(seed, 0), position) for position in range(count)]
    drawn = sample(np.broadcast_to(logits, (count, len(logits))), rows)
    found = np.bincount([token(d) for d in drawn], minlength=len(logits))
    assert not found[probabilities == 0].any()
    kept = probabilities > 0
    expected = probabilities[kept] * count
    small = expected < 5  # the test's approximation needs five in each cell, so rare tokens are counted together
    observed = np.append(found[kept][~small], found[kept][small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square_tail(statistic, len(wanted) - 1) > 1e-4


def test_sampling_draws_with_the_noise_of_its_key_and_position() -> None:
    logits = np.random.default_rng(4).normal(size=50).astype(np.float32)
    params, key = SamplingParams(temperature=1.3, top_k=20), NoiseKey(11, 2)
    with np.errstate(divide="ignore"):
        scores = np.log(ours(logits, params))
    for position in range(20):
        sums = scores + gumbel(key.key(position, PURPOSE_SAMPLE), np.arange(50))
        assert pick(logits, params, key, position) == sums.argmax()


# Log probabilities -------------------------------------------------------------------------------------


def check_logprobs(found: TokenLogprobs, logits: np.ndarray, count: int) -> None:
    expected = torch.from_numpy(logits).double().log_softmax(0).numpy()
    assert found.logprob == pytest.approx(expected[found.token_id], abs=1e-12)
    best = np.argsort(-expected, kind="stable")[:count]
    best = best[expected[best] > -np.inf]
    assert [t for t, _ in found.top] == best.tolist()
    np.testing.assert_allclose([v for _, v in found.top], expected[best], atol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6), size=st.sampled_from([1, 2, 30, 3000]), count=st.integers(0, 20),
    chunk=st.integers(1, 7), step=st.sampled_from([1e-6, 0.5]),
)  # fmt: skip
def test_prompt_logprobs_are_log_softmax_in_float64(seed: int, size: int, count: int, chunk: int, step: float) -> None:
    """Coarse steps make ties, in which the lower id comes first. Chunks give the same result as the whole."""
    rng = np.random.default_rng(seed)
    logits = (np.round(rng.normal(size=(7, size)) * 20 / step) * step).astype(np.float32)
    before, ids = logits.copy(), rng.integers(size, size=7).tolist()
    found = [e for i in range(0, 7, chunk) for e in prompt_logprobs(logits[i : i + chunk], ids[i : i + chunk], count)]
    assert [entry.token_id for entry in found] == ids
    for entry, row_logits in zip(found, logits, strict=True):
        check_logprobs(entry, row_logits, count)
    assert found == prompt_logprobs(logits, ids, count)
    assert (logits == before).all()


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_raw_and_processed_logprobs(temperature: float) -> None:
    logits = np.random.default_rng(5).normal(size=(4, 300)).astype(np.float32) * 3
    kwargs: dict[str, Any] = {"bad_token_ids": (5, 9), "logit_bias": ((3, 4.0),), "logprobs": 6, "top_k": 4}
    rows = [
        row(SamplingParams(temperature=temperature, logprobs_mode=mode, **kwargs), NoiseKey(i, 0))
        for i in range(2) for mode in ("raw", "processed")
    ]  # fmt: skip
    found = [f.logprobs for f in sample(logits, rows) if isinstance(f, SampledToken)]
    assert all(entry is not None for entry in found)
    scores = logits.astype(np.float64)
    scores[:, (5, 9)] = -np.inf
    scores[:, 3] += 4.0
    for i, entry in enumerate(found):
        assert entry is not None
        if i % 2 == 0:
            check_logprobs(entry, logits[i], 6)
        elif temperature == 0:  # no filter applies to tokens that are not drawn
            check_logprobs(entry, scores[i], 6)
        else:
            left = scores[i] / temperature
            left[np.argsort(-left)[4:]] = -np.inf
            check_logprobs(entry, left, 6)
            assert len(entry.top) == 4


def test_no_logprobs_unless_requested() -> None:
    logits = np.zeros((2, 5), np.float32)
    without, with_none = sample(logits, [row(SamplingParams()), row(SamplingParams(logprobs=0))])
    assert isinstance(without, SampledToken)
    assert isinstance(with_none, SampledToken)
    assert without.logprobs is None
    assert with_none.logprobs == TokenLogprobs(with_none.token, pytest.approx(-math.log(5)), ())


# In a batch --------------------------------------------------------------------------------------------

_ROWS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.7])},
    optional={
        "top_k": st.sampled_from([1, 3, 40]), "top_p": st.sampled_from([0.3, 0.9]), "min_p": st.just(0.05),
        "typical_p": st.sampled_from([0.3, 0.9]), "repetition_penalty": st.just(1.3),
        "presence_penalty": st.just(0.5), "frequency_penalty": st.just(-0.3), "logit_bias": st.just(((2, 3.0),)),
        "bad_token_ids": st.just((0, 1)), "allowed_token_ids": st.just((0, 3, 4, 6)), "min_tokens": st.just(3),
        "logprobs": st.sampled_from([0, 5, 20]), "logprobs_mode": st.sampled_from(["raw", "processed"]),
    },
).map(lambda kwargs: SamplingParams(**kwargs))  # type: ignore[arg-type]  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    params=st.lists(_ROWS, min_size=1, max_size=12), vocabulary=st.sampled_from([7, 64, 257, 1003, 4099]),
    seed=st.integers(0, 10**6), block=st.sampled_from([1, 3000, 2**18]), broken=st.booleans(),
)  # fmt: skip
def test_a_row_has_equal_results_in_any_batch(
    params: list[SamplingParams], vocabulary: int, seed: int, block: int, broken: bool
) -> None:
    """The token, its log probabilities, and those of the others are equal to the bit."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(len(params), vocabulary)) * 4).astype(np.float32)
    prompts = rng.integers(7, size=(len(params), 9)).tolist()
    output = rng.integers(7, size=rng.integers(5)).tolist()
    rows = [
        SampleRow.start(p, prompt, NoiseKey(seed, i), (5,), output)
        for i, (p, prompt) in enumerate(zip(params, prompts, strict=True))
    ]
    with pytest.MonkeyPatch.context() as patch:
        alone = [sample(logits[i : i + 1], [r]) for i, r in enumerate(rows)]
        patch.setattr(sampler, "BLOCK", block)
        if broken:  # a row whose logits are invalid
            logits = np.concatenate([np.full((1, vocabulary), np.nan, np.float32), logits])
            rows = [row(SamplingParams()), *rows]
            alone = [[RequestError()], *alone]
        order = rng.permutation(len(rows))
        together = sample(logits[order], [rows[i] for i in order])
    for number, i in enumerate(order):
        if not isinstance(alone[i][0], RequestError):
            assert together[number] == alone[i][0]
            assert repr(together[number]) == repr(alone[i][0])
        else:
            assert isinstance(together[number], RequestError)


def test_no_rows_no_tokens() -> None:
    assert sample(np.zeros((0, 9), np.float32), []) == []
    assert prompt_logprobs(np.zeros((0, 9), np.float32), [], 3) == []
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample(np.zeros((2, 9), np.float32), [row(SamplingParams())])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_fail_alone(bad: float, temperature: float) -> None:
    logits = np.zeros((3, 9), np.float32)
    logits[1, 4 if bad != -np.inf else slice(None)] = bad
    for edits in ({}, {"bad_token_ids": (4,), "logprobs": 2}):
        params: dict[str, Any] = {"temperature": temperature, **edits}
        first, second, third = sample(logits, [row(SamplingParams(**params))] * 3)
        assert isinstance(second, RequestError)
        assert "NaN" in str(second)
        assert first == third
        assert isinstance(first, SampledToken)
    logits[1] = 0
    logits[1, 5:] = -np.inf  # some logits of minus infinity are valid: a model may rule tokens out
    assert token(sample(logits, [row(SamplingParams(temperature=temperature))] * 3)[1]) < 5
