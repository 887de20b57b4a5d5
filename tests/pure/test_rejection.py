"""Rejection sampling: tokens have exactly the model's distribution, and each planted bug is found.

Model and draft are two Markov chains over a few tokens, so that the distribution of the first two tokens is known in
closed form. The gate is the uniformity of the p-values of 20 seeds, as one small p-value means little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ridgeline.runtime.drafter import Ask
from ridgeline.runtime.growth import Drawn
from ridgeline.runtime.sampling import Target, sample_targets
from ridgeline.sample import acceptance, rejection
from ridgeline.sample.acceptance import draw_draft
from ridgeline.sample.masks import Grammar
from ridgeline.sample.noise import PURPOSE_DRAFT, draw
from ridgeline.sample.rejection import (
    Distribution,
    Draft,
    choose,
    draw_siblings,
    is_typical,
    point_mass,
    residual,
    without,
)
from ridgeline.sample.sampler import NoiseKey, SampleRow, distribution
from ridgeline.spec.request import SamplingParams

SIZE, DEPTH, SEEDS = 6, 3, 20
RNG = np.random.default_rng(5)
TARGET = (RNG.normal(size=(SIZE, SIZE)) * 1.5).astype(np.float32)  # logits by the last token
DRAFT = (TARGET * 0.5 + RNG.normal(size=(SIZE, SIZE))).astype(np.float32)
PARAMS = {
    "0.3": {"temperature": 0.3}, "0.7": {"temperature": 0.7}, "1": {}, "top_k": {"top_k": 4},
    "0.7, top_p": {"temperature": 0.7, "top_p": 0.8}, "top_k, top_p": {"top_k": 5, "top_p": 0.9},
    "min_p": {"temperature": 1.3, "min_p": 0.1},
}  # fmt: skip
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.9, "presence_penalty": 0.5, "logit_bias": ((2, 0.7),)}
Round = Callable[[SampleRow, list[int]], list[int]]
Patch = pytest.MonkeyPatch


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    found: np.ndarray = weights / weights.sum()
    return found


def last(output: Sequence[int]) -> int:
    return output[-1] if output else 0


def drawn(row: SampleRow, purpose: int, p: Distribution, index: int = 0) -> int:
    return int(p.ids[draw(p.scores(), p.ids, row.noise.key(row.position, purpose, index))])


# ---- one verification: an answer's row and its tokens so far -> tokens ----------------------------------------------


def verified(row: SampleRow, output: list[int], drafts: Sequence[Draft], parents: tuple[int, ...] = ()) -> list[int]:
    """Verify a chain or a tree as the runner does."""
    tokens = [d.token for d in drafts]
    q = None if any(d.q is None for d in drafts) else [d.q for d in drafts if d.q]
    target = Target(row, 0, tuple(tokens), "rejection", q, parents)
    sample_targets(TARGET[[last(output), *tokens]], [target])
    assert 1 <= len(target.tokens) <= len(drafts) + 1
    return target.tokens


def chain(row: SampleRow, output: list[int], spoil: Callable[[Draft, int], Draft] = lambda d, at: d) -> list[int]:
    ahead, drafts, at = row.again(row.noise, output), [], last(output)
    for _ in range(DEPTH):
        drafts.append(spoil(draw_draft(DRAFT[at], ahead, "rejection"), at))
        at = drafts[-1].token
        ahead.push(at)
    return verified(row, output, drafts)


def point_masses(row: SampleRow, output: list[int]) -> list[int]:
    """Drafts without q, such as those that were looked up."""
    drafts, at = [], last(output)
    for _ in range(DEPTH):
        at = int(DRAFT[at].argmax())
        drafts.append(Draft(at))
    return verified(row, output, drafts)


def tree(row: SampleRow, output: list[int], replace: bool = False, width: int = 2) -> list[int]:
    """A binary tree of depth 2; with `replace`, siblings may be equal."""

    def siblings(path: list[int], node: int) -> list[Draft]:
        ahead = row.again(row.noise, [*output, *path])
        q = distribution(DRAFT[last([*output, *path])], ahead)
        if replace:
            return [Draft(drawn(ahead, PURPOSE_DRAFT, q, width * node + i), q) for i in range(width)]
        return draw_siblings(q, width, row.noise.key(ahead.position, PURPOSE_DRAFT, node))

    drafts = siblings([], 0)
    parents = [-1] * len(drafts)
    for node, draft in enumerate(list(drafts)):
        more = siblings([draft.token], node + 1)
        parents += [node] * len(more)
        drafts += more
    return verified(row, output, drafts, tuple(parents))


def grown(
    row: SampleRow, output: list[int], keep: Callable[[list[Draft]], list[Draft]] = lambda drafts: drafts
) -> list[int]:
    """A tree as an EAGLE head grows it. Siblings after different drafts share their noise."""
    growth = Drawn(Ask(0, 0, [0, *output], 6, row), 2, DEPTH, DRAFT[last(output)])
    while growth.goes_on():
        growth.grow(DRAFT[growth.tokens[-growth.fresh :]])
    drafts = keep(growth.drafts())
    return verified(row, output, drafts, tuple(-1 if d.parent is None else d.parent for d in drafts))


ROUNDS: dict[str, Round] = {
    "chain": chain, "point masses": point_masses, "tree": tree, "tree with replacement": partial(tree, replace=True),
    "grown": grown,
}  # fmt: skip


class Changing:
    """A grammar without a library: tokens from 3 on need an odd number of tokens before them, and none repeats."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def start(self) -> Changing:
        return Changing()

    def push(self, token: int) -> None:
        self.known.append(token)

    def prepare(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        return True

    def allowed(self) -> np.ndarray:
        mask = np.ones(SIZE, np.bool_)
        mask[self.known[-1:]] = False
        mask[3:] &= len(self.known) % 2 == 1
        return mask


GRAMMAR: Any = Changing()


# ---- the statistic --------------------------------------------------------------------------------------------------


def start(seed: int, number: int, params: SamplingParams, grammar: Grammar | None = None) -> SampleRow:
    return SampleRow.start(params, [0], NoiseKey(seed, number), (), grammar=grammar)


def p_value(verify: Round, params: SamplingParams, seed: int, count: int, grammar: Grammar | None = None) -> float:
    """Return the p-value of the first two tokens of `count` answers; cells with less than 5 expected are merged."""
    found = np.zeros((SIZE, SIZE), np.int64)
    for number in range(count):
        row, output = start(seed, number, params, grammar), list[int]()
        while len(output) < 2:
            output += verify(row, output)
            row = row.again(row.noise, output)
        found[output[0], output[1]] += 1
    row, expected = start(seed, 0, params, grammar), np.zeros((SIZE, SIZE))
    first = distribution(TARGET[0], row)
    for token, share in zip(first.ids.tolist(), first.probabilities, strict=True):
        then = distribution(TARGET[token], row.again(row.noise, [token]))
        expected[token, then.ids] = share * then.probabilities * count
    assert not found[expected == 0].any()
    few = expected < 5
    cells = np.append(found[~few], found[few].sum()), np.append(expected[~few], expected[few].sum())
    some = cells[1] > 0
    if cells[1][-1] < 5 and some[-1]:  # the merged cells together are still too few
        at = int(cells[1][:-1].argmin())
        cells[0][at] += cells[0][-1]
        cells[1][at] += cells[1][-1]
        some[-1] = False
    return float(stats.chisquare(cells[0][some], cells[1][some]).pvalue)


def check(
    verify: Round, fields: dict[str, Any], count: int, seeds: int = SEEDS, grammar: Grammar | None = None
) -> None:
    values = [p_value(verify, SamplingParams(**fields), seed, count, grammar) for seed in range(seeds)]
    assert stats.kstest(values, "uniform").pvalue > 1e-4, values


@pytest.mark.parametrize(("name", "fields"), [
    ("chain", {"temperature": 0.7, "top_p": 0.8}), ("chain", PENALTIES), ("point masses", {"top_k": 4}),
    ("tree", {"temperature": 0.7}), ("tree with replacement", {"top_p": 0.9}), ("grown", {"top_k": 5}),
])  # fmt: skip
def test_answers_have_the_distribution_of_the_model(name: str, fields: dict[str, Any]) -> None:
    check(ROUNDS[name], fields, 30)


def test_a_grammar_holds_for_accepted_tokens_only() -> None:
    """Drafts are drawn with the grammar's masks too; a rejected one leaves no trace in the grammar."""
    check(chain, {"frequency_penalty": 0.9}, 30, grammar=GRAMMAR)


@pytest.mark.nightly
@pytest.mark.parametrize("fields", [*PARAMS.values(), PENALTIES], ids=[*PARAMS, "penalties"])
@pytest.mark.parametrize("name", ROUNDS)
def test_answers_have_the_distribution_of_the_model_under_all_parameters(name: str, fields: dict[str, Any]) -> None:
    check(ROUNDS[name], fields, 400)


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def residual_from_p(patch: Patch) -> Round:
    patch.setattr(rejection, "residual", lambda p, draft: p)
    return chain


def residual_from_p_in_a_tree(patch: Patch) -> Round:
    patch.setattr(rejection, "residual", lambda p, draft: p)
    return tree


def q_before_temperature_and_filters(patch: Patch) -> Round:
    everything = np.arange(SIZE)
    return partial(chain, spoil=lambda d, at: Draft(d.token, Distribution(everything, softmax(DRAFT[at]))))


def rejected_drafts_stay_in_the_edits(patch: Patch) -> Round:
    """Penalties and grammars are not rolled back: the draft is pushed before it is verified."""
    call = acceptance.Rejection.__call__

    def push(self: acceptance.Rejection, scores: Any, ids: Any, row: SampleRow) -> int:
        index = call(self, scores, ids, row)
        token = index if ids is None else int(ids[index])
        if token != self.drafts[0].token and row.edits is not None:
            row.edits.push(self.drafts[0].token)
        return index

    patch.setattr(acceptance.Rejection, "__call__", push)

    def stale(row: SampleRow, output: list[int]) -> list[int]:
        """Continue with the row as verification left it, as the engine does."""
        tokens = chain(row, output)
        if len(output) + len(tokens) < 2:
            tokens += chain(row, [*output, *tokens])
        return tokens

    return stale


def point_mass_stays_possible(patch: Patch) -> Round:
    patch.setattr(rejection, "residual", lambda p, draft: p if draft.q is None else residual(p, draft))
    return point_masses


def unlikely_drafts_are_dropped(patch: Patch) -> Round:
    """Which drafts are verified depends on what was drawn, as if the best nodes of a drawn tree were kept."""

    def likely(drafts: list[Draft]) -> list[Draft]:
        return [d for d in drafts if d.parent == -1 and d.q is not None and d.q.of(d.token) > 0.3]

    return partial(grown, keep=likely)


BUGS: list[tuple[Callable[[Patch], Round], dict[str, Any]]] = [
    (residual_from_p, {}), (residual_from_p_in_a_tree, {}), (q_before_temperature_and_filters, {"temperature": 0.5}),
    (q_before_temperature_and_filters, {"top_k": 3}), (rejected_drafts_stay_in_the_edits, {}),
    (point_mass_stays_possible, {}), (unlikely_drafts_are_dropped, {}),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("bug", "fields"), BUGS, ids=[f"{bug.__name__} {fields}" for bug, fields in BUGS])
def test_bugs_are_caught_with_every_seed(
    bug: Callable[[Patch], Round], fields: dict[str, Any], monkeypatch: Patch
) -> None:
    verify = bug(monkeypatch)
    grammar = GRAMMAR if bug is rejected_drafts_stay_in_the_edits else None
    values = [p_value(verify, SamplingParams(**fields), seed, 1_500, grammar) for seed in range(SEEDS)]
    assert max(values) < 1e-4


def test_a_grammar_that_is_not_rolled_back_is_caught(monkeypatch: Patch) -> None:
    verify = rejected_drafts_stay_in_the_edits(monkeypatch)
    with pytest.raises(AssertionError):
        check(verify, {}, 150, seeds=3, grammar=GRAMMAR)


def test_a_residual_from_p_is_caught(monkeypatch: Patch) -> None:
    with pytest.raises(AssertionError):
        check(residual_from_p(monkeypatch), {}, 200, seeds=4)


# ---- closed forms ---------------------------------------------------------------------------------------------------


def some(rng: np.random.Generator, size: int = 9) -> Distribution:
    ids = np.sort(rng.choice(20, size, replace=False))
    return Distribution(ids, rng.dirichlet(np.full(size, 0.5)))


def dense(p: Distribution) -> np.ndarray:
    out = np.zeros(20)
    out[p.ids] = p.probabilities
    return out


def outcome(p: Distribution, first: Distribution, second: Callable[[int], Distribution | None], claimed: Any) -> Any:
    """Return the distribution of the token, by summing over all pairs of siblings and outcomes of `choose`.

    second: the distribution of the second sibling after the first; None: there is none. claimed: its q as it is given.
    """
    total = np.zeros(20)
    for one, share in zip(first.ids.tolist(), first.probabilities.tolist(), strict=True):
        left = second(one)
        others = [(0, 1.0)] if left is None else zip(left.ids.tolist(), left.probabilities.tolist(), strict=True)
        for two, chance in others:
            drafts = [Draft(one, first)] if left is None else [Draft(one, first), Draft(two, claimed(one))]
            now, reached = p, share * chance
            for draft in drafts:
                assert draft.q is not None
                accepted = min(1.0, now.of(draft.token) / draft.q.of(draft.token))
                total[draft.token] += reached * accepted
                reached *= 1 - accepted
                now = residual(now, draft)
            total += reached * dense(now)
    return total


def test_a_token_has_distribution_p_in_closed_form() -> None:
    """One draft, and two siblings with and without replacement; a q of the second that is not its own is not exact."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(20):
        p, q = some(rng), some(rng)
        rest, same, none = partial(without, q), lambda one, q=q: q, lambda one: None
        for second in (none, rest, same):
            np.testing.assert_allclose(outcome(p, q, second, second), dense(p), atol=1e-12)
        worst = max(worst, np.abs(outcome(p, q, rest, same) - dense(p)).max())
    assert worst > 0.01


def test_the_edges_of_a_choice() -> None:
    p = Distribution(np.array([1, 4]), np.array([0.25, 0.75]))
    never: Callable[[Distribution], int] = lambda p: pytest.fail("drawn")  # noqa: E731
    assert choose(p, [Draft(4, p)], lambda n: np.nextafter(1, 0), never) == (0, 4)  # p equals q
    assert choose(p, [Draft(7), Draft(1)], lambda n: 0.0, never) == (1, 1)
    assert choose(p, [Draft(1)], lambda n: 0.25, lambda left: int(left.ids[0])) == (None, 4)
    assert choose(p, [], lambda n: 0.0, lambda left: 1) == (None, 1)
    assert residual(p, Draft(1, p)) == p  # nothing is left of p - q
    assert residual(p, Draft(7)).probabilities.tolist() == [0.25, 0.75]
    assert residual(p, Draft(1)).ids.tolist() == [4]
    assert point_mass(3).of(3) == 1 and point_mass(3).of(2) == 0
    assert [d.token for d in draw_siblings(p, 9, (1, 2, 3, 4))] in ([1, 4], [4, 1])


def test_the_first_sibling_is_what_a_single_draw_gives() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        q, key = some(rng), tuple(rng.integers(2**64, size=4, dtype=np.uint64).tolist())
        drafts = draw_siblings(q, 4, key)
        assert drafts[0].token == q.ids[draw(q.scores(), q.ids, key)]
        assert len({d.token for d in drafts}) == 4
        left = q
        for d in drafts:
            assert d.q is not None
            np.testing.assert_allclose(dense(d.q), dense(left), atol=1e-15)
            left = without(left, d.token)


def test_typical_acceptance_is_that_of_medusa() -> None:
    flat = Distribution(np.arange(40), np.full(40, 1 / 40))  # exp(-entropy) = 1/40
    assert is_typical(flat, 7) and not is_typical(flat, 40)
    peaked = Distribution(np.arange(3), np.array([0.9, 0.095, 0.005]))
    assert [is_typical(peaked, token) for token in range(3)] == [True, True, False]


@pytest.mark.nightly
@pytest.mark.parametrize("depth", [1, 4])
def test_tokens_of_a_verification_with_independent_drafts(depth: int) -> None:
    """(1 - a^(k + 1)) / (1 - a) within 2 %, with a the sum of min(p, q) (arXiv:2211.17192)."""
    p, q = softmax(TARGET[1].astype(float)), softmax(DRAFT[1].astype(float))
    a, count, tokens = float(np.minimum(p, q).sum()), 6_000, 0
    for number in range(count):
        row = start(3, number, SamplingParams())
        ahead, drafts = row.again(row.noise), []
        for _ in range(depth):
            drafts.append(draw_draft(DRAFT[1], ahead, "rejection"))
            ahead.push(drafts[-1].token)
        target = Target(row, 0, tuple(d.token for d in drafts), "rejection", [d.q for d in drafts if d.q])
        sample_targets(TARGET[[1] * (depth + 1)], [target])
        tokens += len(target.tokens)
    assert tokens / count == pytest.approx((1 - a ** (depth + 1)) / (1 - a), rel=0.02)
