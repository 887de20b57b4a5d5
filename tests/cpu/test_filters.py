"""top-n-sigma and XTC: llama.cpp's own test cases, closed forms, bounds, and noise that depends on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.sample.filters import FILTERS, filter_scores, kept_ids
from ridgeline.sample.noise import PURPOSE_SAMPLE, PURPOSE_XTC
from ridgeline.sample.sampler import NoiseKey, SampledToken, SampleRow, sample
from ridgeline.spec.parameters import Stage
from ridgeline.spec.request import SAMPLING, SamplingParams

UP, DOWN = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]
_SCORES = st.lists(st.integers(-300, 300), min_size=1, max_size=30).map(lambda v: np.array(v, np.float64) / 16)


def filtered(scores: np.ndarray, uniform: float = 0.0, **fields: Any) -> np.ndarray:
    """Return the distribution after the filters, by softmax."""
    left = scores - scores.max()
    filter_scores(left, SamplingParams(**fields), lambda purpose: uniform)
    weights = np.exp(left - left.max())
    return weights / weights.sum()


def test_every_filter_is_declared_and_in_the_order_in_which_it_acts() -> None:
    stages = {name: parameter.stage for name, _, parameter in SAMPLING}
    declared = [name for name in stages if stages[name] is Stage.FILTER]
    assert [name for name in declared if name in FILTERS] == list(FILTERS)
    assert set(declared) - set(FILTERS) == {"xtc_threshold"}  # this field alone enables no filter


# llama.cpp, tests/test-sampling.cpp: probabilities, remaining tokens, n
@pytest.mark.parametrize(("n", "left"), [(1.0, [0, 0, 0.428571, 0.571429]), (0.0, UP), (3.0, UP), (-1.0, UP)])
def test_top_n_sigma_is_that_of_llama_cpp(n: float, left: list[float]) -> None:
    np.testing.assert_allclose(filtered(np.log(UP), top_n_sigma=n), left, atol=1e-6)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(scores=_SCORES, n=st.floats(0.01, 4), temperature=st.sampled_from([0.25, 1.0, 4.0]), masked=st.integers(0, 5))
def test_top_n_sigma_in_closed_form(scores: np.ndarray, n: float, temperature: float, masked: int) -> None:
    """Compare with the definition over the possible tokens, at any temperature; the best token always stays."""
    border = scores.max() - n * scores.std()
    if np.abs(scores - border).min() < 1e-9:  # rounding decides this case
        return
    left = np.append(scores, [-np.inf] * masked) / temperature
    expected = np.append(scores >= border, [False] * masked)
    found = filtered(left, top_n_sigma=n) > 0
    assert (found == expected).all() and found[left.argmax()]


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_top_n_sigma_of_extreme_scores(scale: float) -> None:
    scores = np.array([0.0, -1.0, -2.0, -np.inf]) * scale
    assert (filtered(scores, top_n_sigma=1.0) > 0).tolist() == [True, False, False, False]
    assert (filtered(np.full(4, scale), top_n_sigma=1.0) > 0).all()


def test_top_n_sigma_sees_all_tokens_although_top_k_is_on() -> None:
    """With top_k alone, only the best logits are read; top-n-sigma needs the deviation of all logits."""
    logits = np.array([[5.0, 4.5, 1.0, 0.0, -9.0]], np.float32)
    rows = [SampleRow.start(SamplingParams(top_k=3, top_n_sigma=0.2), [], NoiseKey(0, i), ()) for i in range(20)]
    found = {r.token for r in sample(np.repeat(logits, 20, axis=0), rows) if isinstance(r, SampledToken)}
    assert found == {0, 1}  # the deviation of the best three, 1.78, would keep only the best one


# llama.cpp, tests/test-sampling.cpp: "XTC should", "XTC should not"; its probabilities are not renormalized
@pytest.mark.parametrize(
    ("threshold", "left"),
    [(0.09, [0, 0, 0, 0.1]), (0.19, [0, 0, 0.2, 0.1]), (0.29, [0, 0.3, 0.2, 0.1]), (0.39, DOWN), (0.6, DOWN)],
)
def test_xtc_is_that_of_llama_cpp(threshold: float, left: list[float]) -> None:
    expected = np.array(left) / sum(left)
    fields = {"xtc_probability": 0.99, "xtc_threshold": threshold}
    np.testing.assert_allclose(filtered(np.log(DOWN), 0.5, **fields), expected)
    np.testing.assert_allclose(filtered(np.log(DOWN), 0.995, **fields), DOWN)


def test_xtc_keeps_the_lowest_id_of_equals() -> None:
    assert filtered(np.zeros(4), xtc_probability=1, xtc_threshold=0.2).tolist() == [1, 0, 0, 0]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    scores=_SCORES, masked=st.integers(0, 3), threshold=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 1.0]),
    fields=st.fixed_dictionaries({}, optional={
        "top_k": st.integers(1, 9), "top_p": st.sampled_from([0.5, 0.95]), "min_p": st.just(0.05),
        "typical_p": st.just(0.8), "top_n_sigma": st.just(1.0),
    }),
)  # fmt: skip
def test_xtc_leaves_a_token_and_never_an_impossible_one(
    scores: np.ndarray, masked: int, threshold: float, fields: dict[str, Any]
) -> None:
    """XTC counts the probabilities that the other filters left; a token below the threshold stays."""
    left = np.append(scores, [-np.inf] * masked)
    before = filtered(left, **fields)
    after = filtered(left, xtc_probability=1, xtc_threshold=threshold, **fields)
    removed = (before > 0) & (after == 0)
    assert after.sum() == pytest.approx(1) and not after[before == 0].any()
    top = (before > 0) & (before >= threshold * (1 - 1e-9))
    assert not removed[~top].any() and removed.sum() <= max(top.sum() - 1, 0)
    if removed.any():
        assert before[removed].min() >= before[top & ~removed].min() - 1e-12


def test_xtc_acts_as_often_as_its_probability_says() -> None:
    """The noise depends only on seed, answer and position, and differs from the noise of the draw."""
    params, scores = SamplingParams(xtc_probability=0.3, xtc_threshold=0.1), np.log(DOWN) - np.log(0.4)
    keys = [(NoiseKey(seed, 0), position) for seed in range(4) for position in range(1000)]
    acts = [kept_ids(scores, params, lambda p, k=k, at=at: k.uniform(at, p)) is not None for k, at in keys]
    assert abs(np.mean(acts) - 0.3) < 0.03
    decides, draws = ([k.uniform(at, purpose) for k, at in keys] for purpose in (PURPOSE_XTC, PURPOSE_SAMPLE))
    assert abs(np.corrcoef(decides, draws)[0, 1]) < 0.05


def test_greedy_is_not_filtered() -> None:
    params = SamplingParams(temperature=0, xtc_probability=1, xtc_threshold=0.01, top_n_sigma=1)
    (found,) = sample(np.array([[1.0, 3.0, 2.0]], np.float32), [SampleRow.start(params, [], NoiseKey(0, 0), ())])
    assert found == SampledToken(1)
