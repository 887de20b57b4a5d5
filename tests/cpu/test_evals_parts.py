"""The parts of evaluation: windows, batches of windows, means and their errors."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.evals import Document, Estimate, Proportion, SlidingContext
from ridgeline.evals.estimates import block_mean
from ridgeline.evals.windows import batches


@given(st.integers(0, 90), st.integers(2, 20), st.data())
def test_every_token_is_scored_once(num_tokens: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    unscored = data.draw(st.integers(1, 3))
    windows = list(SlidingContext(context, stride).windows(num_tokens, unscored))
    assert [i for w in windows for i in range(w.first, w.stop)] == list(range(unscored, num_tokens))
    for w in windows:
        assert 0 <= w.start < w.first < w.stop <= min(num_tokens, w.start + context)
        assert w.start % stride == 0
        assert w.start == 0 or w.first - w.start >= context - stride


@given(st.lists(st.integers(0, 60), max_size=5), st.integers(2, 20), st.integers(1, 80), st.data())
def test_every_row_predicts_its_target(
    lengths: list[int], context: int, batch_tokens: int, data: st.DataObject
) -> None:
    sliding = SlidingContext(context, data.draw(st.integers(1, context - 1)))
    documents = [Document(list(range(1000 * i, 1000 * i + n))) for i, n in enumerate(lengths)]
    found = list(batches(documents, sliding, batch_tokens))
    for batch in found:
        inputs = np.concatenate(batch.sequences)
        assert (inputs[batch.rows] + 1 == batch.targets).all()
        assert len(inputs) == batch.num_tokens <= max(batch_tokens, context)
    scored = [token for batch in found for token in batch.targets.tolist()]
    assert scored == [token for d in documents for token in d.token_ids[1:]]
    for a, b in pairwise(found):  # the batch is full: the next window did not fit
        assert a.num_tokens + len(b.sequences[0]) > batch_tokens


def test_standard_errors_of_independent_blocks() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(2, 1, 600)
    (mean, error) = dataclasses.astuple(block_mean(values, [600], 1))
    assert (mean, error) == pytest.approx((values.mean(), values.std(ddof=1) / math.sqrt(600)))
    means = values.reshape(12, 50).mean(1)
    assert block_mean(values, [600], 50).standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(12))
    # Two documents have three blocks each, because no block spans both.
    values = np.repeat([1.0, 1.0, 2.0, 5.0, 5.0, 6.0], [4, 4, 2, 4, 4, 2])
    sums, counts = np.array([4, 4, 4, 20, 20, 12]), np.array([4, 4, 2, 4, 4, 2])
    expected = math.sqrt(6 / 5 * ((sums - values.mean() * counts) ** 2).sum()) / 20
    assert block_mean(values, [10, 10], 4).standard_error == pytest.approx(expected)
    assert block_mean(values, [20]) == Estimate(values.mean(), None)  # one block says nothing about the spread


def test_the_standard_error_is_the_spread_of_repeated_runs() -> None:
    """Documents have different lengths, and their tokens share most of their noise."""
    rng, lengths = np.random.default_rng(1), [60, 100, 20, 80] * 25
    runs = [
        block_mean(np.repeat(rng.normal(3, 1, 100), lengths) + rng.normal(0, 1, sum(lengths)), lengths)
        for _ in range(400)
    ]
    spread = np.std([run.value for run in runs], ddof=1)
    assert np.mean([run.standard_error for run in runs]) == pytest.approx(spread, rel=0.1)


def test_errors_are_carried_over() -> None:
    """A loss that is one error higher changes perplexity and bits per byte by their errors, to first order."""
    nll = Estimate(1.5, 1e-5)
    assert nll.exp().standard_error == pytest.approx(math.exp(1.5 + 1e-5) - math.exp(1.5), rel=1e-4)
    assert nll.scaled(3) == Estimate(4.5, pytest.approx(3e-5))
    assert Estimate(1e4, None).exp() == Estimate(math.inf, None)


@pytest.mark.parametrize(("count", "total"), [(8, 10), (0, 7), (7, 7), (4999, 5000)])
def test_the_interval_is_wilsons(count: int, total: int) -> None:
    """The interval ends at the shares p that are 1.96 standard deviations sqrt(p (1 - p) / n) away from the observed
    one.
    """
    found = Proportion.of(count, total)
    assert found.value == count / total
    for p in (found.low, found.high):
        assert (found.value - p) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / total, rel=1e-5, abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high
