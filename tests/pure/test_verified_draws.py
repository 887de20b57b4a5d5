"""Drafts that the op ACCEPT verifies: it takes the tokens that the host's sampler takes (sample/acceptance.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import pytest

from ridgeline.ops.draws import Draw, accept, draw, pack_draws, pack_trials
from ridgeline.runtime.sampling import Target, best_results, sample_targets
from ridgeline.sample.acceptance import draw_verified
from ridgeline.sample.sampler import Best, NoiseKey, SampleRow
from ridgeline.sched.work import Result, Work
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.request import SamplingParams

VOCABULARY = 40


class Filters(TypedDict, total=False):
    top_k: int
    top_p: float
    min_p: float


FILTERS: list[Filters] = [
    {}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.9, "min_p": 0.01}, {"top_k": 1},
]  # fmt: skip
TREES: list[tuple[int, ...]] = [(), (-1, -1, -1, 0, 0, 3), (-1, 0, -1, -1, 1)]


def work_of(row: int, tokens: Sequence[int], parents: tuple[int, ...]) -> Work:
    """Return the work of a sequence of one known token, with drafts."""
    return Work(row, row, 0, 10, (1, *tokens), True, 10, len(tokens), parents=parents)


def row_of(seed: int, temperature: float, filters: Filters) -> SampleRow:
    params = SamplingParams(temperature=temperature, **filters)
    return SampleRow.start(params, [1] * 10, NoiseKey(seed, 0), ())


def on_host(logits: np.ndarray, row: SampleRow, work: Work, acceptance: Acceptance) -> Result:
    """Return what the host's sampler takes."""
    target = Target(row.ahead(0), 0, work.tokens[1:], acceptance, None, work.parents)
    sample_targets(logits, [target])
    return target.result()


def by_op(logits: np.ndarray, row: SampleRow, work: Work, acceptance: Acceptance) -> Result:
    """Return what the definition of ACCEPT takes."""
    draws = draw_verified(row, work.tokens[1:], work.parents, acceptance)
    assert draws is not None
    found, top = accept(logits, pack_draws(draws), pack_trials(draws))
    return best_results(Best(found, top), [row], [work])[0]


@pytest.mark.parametrize("acceptance", ["same", "rejection", "typical"])
@pytest.mark.parametrize("parents", TREES, ids=["chain", "tree", "bush"])
def test_tokens_are_those_of_the_host(parents: tuple[int, ...], acceptance: Acceptance) -> None:
    """Chains and trees, every filter, drafts that repeat, and drafts that the filters removed."""
    rng, lengths = np.random.default_rng(len(parents)), Counter[int]()
    for seed in range(120):
        count = len(parents) or seed % 5
        logits = (rng.normal(size=(count + 1, VOCABULARY)) * 2).astype(np.float32)
        likely = logits.argsort(1)[:, -1 - seed % 4]
        tokens = [int(likely[0 if parents and parents[i] < 0 else i]) for i in range(count)]
        if seed % 3:
            tokens = [int(rng.choice([token, token, rng.integers(VOCABULARY)])) for token in tokens]
        work, row = work_of(0, tokens, parents), row_of(seed, [0.0, 0.3, 1.0, 1.7][seed % 4], FILTERS[seed % 6])
        wanted = on_host(logits, row, work, acceptance)
        assert by_op(logits, row, work, acceptance) == wanted, seed
        lengths[len(wanted.tokens)] += 1
    assert len(lengths) > 2


def test_rejection_keeps_the_distribution() -> None:
    """Over many keys the token after any drafts has the probabilities of the softmax."""
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]] * 4, np.float32))
    for tokens, parents in (((0,), ()), ((3, 1, 0), (-1, -1, -1))):
        work, found = work_of(0, tokens, parents), Counter[int]()
        for seed in range(1_500):
            found[by_op(logits, row_of(seed, 1.0, {}), work, "rejection").tokens[0]] += 1
        expected = 1_500 * np.exp(logits[0].astype(np.float64))
        misses = sum((found[i] - expected[i]) ** 2 / expected[i] for i in range(4))
        assert misses < 16.3, "a chi-square of 3 degrees is above this once in 1,000 times"


def test_rows_without_trials_are_drawn() -> None:
    logits = np.random.default_rng(0).normal(size=(4, VOCABULARY)).astype(np.float32)
    logits[3, 5] = np.nan
    draws = [Draw(), Draw((1, 2, 3, 4), 0.7), Draw((1, 2, 3, 5), 1.0, 4), Draw((1, 2, 3, 5), 1.0)]
    found, wanted = accept(logits, pack_draws(draws), pack_trials(draws)), draw(logits, pack_draws(draws), None)
    assert found[0].tolist() == wanted[0].tolist() and found[0][3] == 5


def test_greedy_rows_and_filters_of_the_host() -> None:
    """A greedy row tries no draft, and a row whose filter the op does not have has no draws."""
    greedy = draw_verified(row_of(1, 0.0, {}), [4, 5], (), "rejection")
    assert greedy == [Draw()] * 3
    assert draw_verified(row_of(1, 1.0, {"typical_p": 0.5}), [4, 5], (), "rejection") is None
