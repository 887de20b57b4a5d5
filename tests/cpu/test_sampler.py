"""From logits to a token: the filters are transformers', the noise depends on its key alone, the draw is fair."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ridgeline.errors import RequestError
from ridgeline.runtime.sampler import NoiseKey, draw, filter_probabilities, penalise, pick, softmax, token_logprobs
from ridgeline.spec.request import SamplingParams

KEY = NoiseKey(0, 0)
BORDER = 1e-9  # a sum this close to top_p is decided by rounding: either answer is right

# Distinct values on a lattice: ties are another test's business.
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
        "repetition_penalty": st.sampled_from([0.3, 0.9, 1.0, 1.1, 1.8, 5.0]),
    },
).map(lambda kwargs: SamplingParams(**kwargs))


def ours(logits: np.ndarray, params: SamplingParams, history: list[int]) -> np.ndarray:
    """The distribution that `pick` draws from."""
    scores = penalise(logits.astype(np.float64), history, params.repetition_penalty)
    return filter_probabilities(scores / params.temperature, params)


def theirs(logits: np.ndarray, params: SamplingParams, history: list[int]) -> np.ndarray:
    """transformers' distribution, in float64."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    scores = chain(torch.tensor([history], dtype=torch.int64), torch.from_numpy(logits).double()[None])
    return scores.softmax(-1)[0].numpy()


def on_a_border(logits: np.ndarray, params: SamplingParams, history: list[int]) -> bool:
    """Whether rounding decides what top_p or min_p keeps."""
    before = SamplingParams(top_k=params.top_k)
    scores = penalise(logits.astype(np.float64), history, params.repetition_penalty) / params.temperature
    kept = -np.sort(-filter_probabilities(scores, before))
    near_p = params.top_p < 1 and bool((np.abs(kept.cumsum() - params.top_p) < BORDER).any())
    return near_p or (params.min_p > 0 and bool((np.abs(kept / kept[0] - params.min_p)[1:] < BORDER).any()))


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(logits=_LOGITS, params=_PARAMS, data=st.data())
def test_the_distribution_is_that_of_transformers(logits: np.ndarray, params: SamplingParams, data: Any) -> None:
    history = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=8))
    penalised = penalise(logits.astype(np.float64), history, params.repetition_penalty)
    assume(len(np.unique(penalised)) == len(penalised))  # the penalty can make ties
    assume(not on_a_border(logits, params, history))
    found, expected = ours(logits, params, history), theirs(logits, params, history)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
    assert found.sum() == pytest.approx(1.0, abs=1e-12)


def test_filters_apply_in_their_order() -> None:
    """top_p counts what top_k left, and min_p what top_p left: 0.4 of 0.7 is more than half."""
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert (filter_probabilities(scores, SamplingParams(top_p=0.5)) > 0).tolist() == [True, True, False, False]
    assert (filter_probabilities(scores, SamplingParams(top_k=2, top_p=0.5)) > 0).tolist() == [True] + [False] * 3
    both = filter_probabilities(scores, SamplingParams(top_p=0.85, min_p=0.6))
    np.testing.assert_allclose(both, [4 / 7, 3 / 7, 0, 0])


def test_no_filter_leaves_the_softmax() -> None:
    scores = np.random.default_rng(0).normal(size=300) * 5
    for params in (SamplingParams(), SamplingParams(top_k=-1), SamplingParams(top_k=300), SamplingParams(top_k=10**30)):
        np.testing.assert_allclose(
            filter_probabilities(scores, params), torch.from_numpy(scores).softmax(0).numpy(), rtol=1e-12
        )


def test_ties_at_a_border_go_to_the_lower_id() -> None:
    scores = np.array([0.0, 2.0, 1.0, 2.0, 2.0])
    assert np.flatnonzero(filter_probabilities(scores, SamplingParams(top_k=2))).tolist() == [1, 3]
    assert np.flatnonzero(filter_probabilities(scores, SamplingParams(top_p=0.2))).tolist() == [1]
    assert np.flatnonzero(filter_probabilities(scores, SamplingParams(min_p=1.0))).tolist() == [1, 3, 4]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.array([1.0, 7.0, 7.0, -2.0, 7.0], np.float32)
    params = SamplingParams(temperature=0, top_k=3, seed=1)
    assert {pick(logits, params, [], NoiseKey(s, 0), p) for s in range(5) for p in range(5)} == {1}
    assert pick(np.zeros(5, np.float32), params, [], KEY, 0) == 0


def test_greedy_heeds_the_repetition_penalty() -> None:
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert pick(logits, params, [1], KEY, 1) == 2
    assert pick(logits, params, [1, 1, 1, 1], KEY, 4) == 2  # once, however often it occurred
    assert pick(-logits, params, [0], KEY, 1) == 0  # -1 becomes -2, equal to token 2's: the lower id
    assert logits.tolist() == [1.0, 3.0, 2.0]  # the logits themselves are not touched


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 1e-307, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    """No overflow to inf - inf on the way; warnings are errors here."""
    logits = np.array([-3.0, 1.0, 17.0, 16.0], np.float32)
    params = SamplingParams(temperature=temperature)
    assert {pick(logits, params, [], KEY, position) for position in range(50)} == {2}


def test_the_largest_temperature_is_uniform() -> None:
    params = SamplingParams(temperature=1e300)
    drawn = [pick(np.array([0.0, 30.0, -30.0], np.float32), params, [], KEY, p) for p in range(3000)]
    assert min(np.bincount(drawn, minlength=3)) > 900


def test_logits_beyond_what_an_exponential_holds() -> None:
    logits = np.array([1e5, 1e5 - 1, -1e30, 3e38], np.float32)
    assert pick(logits, SamplingParams(), [], KEY, 0) == 3
    assert math.isfinite(token_logprobs(logits[:2], 1, 2).logprob)


# The draw ----------------------------------------------------------------------------------------------


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The probability of a larger statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.7, top_k=12, top_p=0.95), SamplingParams(min_p=0.2)],
    ids=["plain", "top_k and top_p", "min_p"],
)
def test_draws_follow_the_distribution(params: SamplingParams, seed: int) -> None:
    logits = np.random.default_rng(3).uniform(-1.5, 1.5, size=25).astype(np.float32)
    probabilities = ours(logits, params, [])
    assert (probabilities > 0).sum() > 8
    count, noise = 20_000, NoiseKey(seed, 0)
    found = np.bincount([draw(probabilities, noise.uniform(p)) for p in range(count)], minlength=len(logits))
    assert not found[probabilities == 0].any()
    kept = probabilities > 0
    expected = probabilities[kept] * count
    small = expected < 5  # the test's approximation wants five in each: the rare ones are counted together
    observed = np.append(found[kept][~small], found[kept][small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square_tail(statistic, len(wanted) - 1) > 1e-4


def test_pick_draws_with_the_noise_of_its_key_and_position() -> None:
    logits = np.random.default_rng(4).normal(size=50).astype(np.float32)
    params = SamplingParams(temperature=1.3, top_k=20)
    for position in range(20):
        key = NoiseKey(11, 2)
        expected = draw(ours(logits, params, [1, 2]), key.uniform(position))
        assert pick(logits, params, [1, 2], key, position) == expected


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(weights=st.lists(st.integers(0, 3), min_size=1, max_size=9), uniform=st.floats(0, 1, exclude_max=True))
@example(weights=[0, 0, 1, 0], uniform=0.0)
@example(weights=[1, 0, 0], uniform=math.nextafter(1, 0))
def test_a_draw_never_takes_what_is_impossible(weights: list[int], uniform: float) -> None:
    assume(sum(weights))
    probabilities = np.array(weights, np.float64) / sum(weights)
    token = draw(probabilities, uniform)
    assert probabilities[token] > 0
    below, above = probabilities[:token].sum(), probabilities[: token + 1].sum()
    assert below - 1e-12 <= uniform <= above + 1e-12  # slices of [0, 1) in order of token id


# The noise ---------------------------------------------------------------------------------------------


def test_noise_depends_on_its_key_and_position_only() -> None:
    keys = [(s, c, p) for s in (0, 1, 2, 2**32, 2**63 - 1) for c in (0, 1, 5) for p in (0, 1, 2, 100_000)]
    first = {key: NoiseKey(*key[:2]).uniform(key[2]) for key in keys}
    np.random.seed(1)  # noqa: NPY002  global state must not matter
    again = {key: NoiseKey(*key[:2]).uniform(key[2]) for key in reversed(keys)}
    assert first == again
    assert len(set(first.values())) == len(keys)
    assert all(0 <= value < 1 for value in first.values())
    assert NoiseKey(3, 0).uniform(7, purpose=1) != NoiseKey(3, 0).uniform(7)


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_noise_is_uniform_along_every_axis(axis: str) -> None:
    """Neighbouring seeds, choices and positions are independent: none of them merely counts."""
    count = 4000
    values = np.array(
        [NoiseKey(i if axis == "seed" else 9, i if axis == "choice" else 0).uniform(i if axis == "position" else 3)
         for i in range(count)]
    )  # fmt: skip
    found = np.bincount((values * 20).astype(int), minlength=20)
    assert chi_square_tail(float(((found - count / 20) ** 2 / (count / 20)).sum()), 19) > 1e-4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.07


def test_noise_never_changes_between_versions() -> None:
    """Philox is specified: a seed written down today gives the same text tomorrow."""
    generator = np.random.Generator(np.random.Philox(key=[5, 1], counter=[0, 0, 9, 0]))
    assert NoiseKey(5, 1).uniform(9) == generator.random()


# Log probabilities -------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1, 2, 30, 3000]), count=st.integers(0, 20))
def test_logprobs_are_log_softmax_in_float64(seed: int, size: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * 20).astype(np.float32)
    before = logits.copy()
    token = int(rng.integers(size))
    expected = torch.from_numpy(logits).double().log_softmax(0).numpy()
    found = token_logprobs(logits, token, count)
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-12)
    assert [t for t, _ in found.top] == np.argsort(-expected, kind="stable")[:count].tolist()
    np.testing.assert_allclose([v for _, v in found.top], expected[[t for t, _ in found.top]], atol=1e-12)
    assert (logits == before).all()


def test_softmax_of_one_and_of_equals() -> None:
    assert softmax(np.array([3.0])).tolist() == [1.0]
    assert softmax(np.zeros(4)).tolist() == [0.25] * 4


# Parameters --------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
HUGE = 10**400  # JSON knows no largest number, and this one is no float
WHOLE = (-2, 1.5, 2.0, NAN, INF, True, "3", [1])
FLOATS = (-0.1, NAN, INF, -INF, True, "0.5", None, HUGE, [0.5])
BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((*WHOLE, 0, None, 10**12), "1"),
    "max_tokens": ((*WHOLE, 0), "1"),
    "temperature": (FLOATS, "0"),
    "top_p": ((*FLOATS, 0, 0.0, 1.0000001, 2), "1"),
    "top_k": ((*WHOLE, None), "-1"),
    "min_p": ((*FLOATS, 1.0000001), "1"),
    "repetition_penalty": ((*FLOATS, 0, 0.0), "0"),
    "seed": ((*WHOLE, -1, 2**63, HUGE), str(2**63 - 1)),
    "stop_token_ids": (((-1,), (1.0,), (True,), (3, NAN), ("a",), ([1],)), "0"),
    "ignore_eos": ((1, "no", None), ""),
    "logprobs": ((*WHOLE, -1, 21, HUGE), "20"),
    "skip_special_tokens": ((0, "yes", None), ""),
}


def test_every_parameter_is_here() -> None:
    assert set(BAD) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}={'huge' if value == HUGE else value}")
        for name, (values, _) in BAD.items()
        for value in values
    ],
)
def test_out_of_range_is_refused_with_name_and_limit(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert BAD[name][1] in message.lower()
    assert "\n" not in message


@pytest.mark.parametrize("value", [5, None, "ab", {3: 4}, {3}])
def test_stop_tokens_are_a_list(value: Any) -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids is .*list"):
        SamplingParams(stop_token_ids=value)
    assert {SamplingParams(stop_token_ids=[3, 4])} == {SamplingParams(stop_token_ids=(3, 4))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "good",
    [
        {"n": 1}, {"n": 64}, {"max_tokens": None}, {"max_tokens": 10**9}, {"temperature": 0}, {"temperature": 2},
        {"top_p": 1}, {"top_p": 1e-9}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"min_p": 0}, {"min_p": 1},
        {"repetition_penalty": 0.5}, {"repetition_penalty": 2}, {"seed": 0}, {"seed": 2**63 - 1}, {"seed": None},
        {"stop_token_ids": ()}, {"stop_token_ids": (0, 5)}, {"logprobs": 0}, {"logprobs": 20}, {"ignore_eos": True},
    ],
    ids=str,
)  # fmt: skip
def test_the_limits_themselves_are_allowed(good: dict[str, Any]) -> None:
    (name,) = good
    assert getattr(SamplingParams(**good), name) == good[name]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(repetition_penalty=1e-320),
        lambda: SamplingParams(repetition_penalty=1.7e308),
    ],
    ids=["tiny", "huge"],
)
def test_the_wildest_penalty_still_gives_a_token(make: Callable[[], SamplingParams]) -> None:
    """Refused, or computed without an overflow to NaN; warnings are errors here."""
    try:
        params = make()
    except RequestError:
        return
    logits = np.array([3.0, -2.0, 0.5, 5.0], np.float32)
    assert pick(logits, params, [0, 1, 3], KEY, 3) in range(4)
    assert np.isfinite(ours(logits, params, [0, 1, 3])).all()
