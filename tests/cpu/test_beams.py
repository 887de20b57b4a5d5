"""Beam search returns transformers' answers and scores, and finds the best answers if it is wide enough."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from oracle.build import build
from oracle.case import VOCAB
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.errors import RequestError
from ridgeline.sample.beams import BeamSearch, Branch, Candidates, Hypothesis, top_candidates
from ridgeline.spec.request import MAX_BEAM_WIDTH, BeamSearchParams
from shares import daily

History = tuple[int, ...]
NextLogits = Callable[[Sequence[History]], np.ndarray]  # histories, the prompt included -> [n, vocabulary]
PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0)
STOPPING = (False, True, "never")


# Both searches ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of our search, with counts of what happened.

    beaten: hypotheses that better ones replaced. overtime: steps after there were as many hypotheses as were requested.
    """

    answers: list[Hypothesis]
    steps: int
    beaten: int
    overtime: int


def search(params: BeamSearchParams, prompt: History, eos: Sequence[int], logits: NextLogits) -> Outcome:
    """Run our search with logits that are computed from whole histories."""
    assert params.max_tokens is not None
    beams = BeamSearch(params, eos, params.max_tokens)
    live: list[History] = [prompt]
    steps, overtime, seen = 0, 0, set()
    while not beams.done:
        overtime += len(beams.results()) == params.answers
        branches = beams.advance(candidates(logits(live), beams.count))
        live = [(*live[b.parent], b.token) for b in branches]
        seen.update(beams.results())
        steps += 1
    return Outcome(beams.results(), steps, len(seen) - len(beams.results()), overtime)


def candidates(logits: np.ndarray, count: int) -> list[Candidates]:
    found = top_candidates(logits, count)
    assert all(isinstance(best, tuple) for best in found)
    return [best for best in found if isinstance(best, tuple)]


@torch.no_grad()
def wanted(
    model: Any, params: BeamSearchParams, prompt: History, eos: Sequence[int]
) -> tuple[list[History], list[float], int]:
    """Return transformers' answers without padding, their scores, and the number of steps."""
    # With one beam, `generate` would use its greedy search, which has no scores.
    chosen = {"custom_generate": type(model)._beam_search} if params.beam_width == 1 else {}
    out = model.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.answers,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **chosen,
    )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    answers = [tuple(row[:n]) for row, n in zip(out.sequences[:, len(prompt) :].tolist(), lengths, strict=True)]
    return answers, out.sequences_scores.tolist(), len(out.scores)


def check(model: Any, logits: NextLogits, params: BeamSearchParams, prompt: History, eos: Sequence[int]) -> Outcome:
    """Check that both searches are equal, and return the outcome of ours."""
    answers, scores, steps = wanted(model, params, prompt, eos)
    got = search(params, prompt, eos, logits)
    assert [h.tokens for h in got.answers] == answers, (params, eos)
    assert [h.score for h in got.answers] == pytest.approx(scores, rel=1e-5, abs=1e-4), (params, eos)
    assert got.steps == steps, (params, eos)
    assert [h.finished for h in got.answers] == [tokens[-1] in eos for tokens in answers]
    return got


class Tally:
    """Counts how often each situation occurred that a comparison must cover."""

    def __init__(self, parts: Iterable[Tally] = ()) -> None:
        self.count: Counter[str] = Counter()
        for part in parts:
            self.count.update(part.count)

    def add(self, params: BeamSearchParams, got: Outcome) -> None:
        assert params.max_tokens is not None
        early, full = got.steps < params.max_tokens, params.answers == params.beam_width
        finished = {h.finished for h in got.answers}
        self.count["stopped early"] += early
        self.count["stopped early, but went on when it could have stopped"] += early and full and got.overtime > 0
        self.count["went on to the end although it could have stopped"] += not early and full and got.overtime > 0
        self.count["a hypothesis was beaten"] += got.beaten > 0
        self.count["all cut off"] += finished == {False}
        self.count["cut off and ended together"] += finished == {False, True}
        self.count["different lengths"] += len({len(h.tokens) for h in got.answers}) > 1

    def check(self, least: int) -> None:
        assert min(self.count.values()) >= least, self.count


# Models of several families ---------------------------------------------------------------------------


class Peer:
    """A model of the oracle, loaded by transformers and by us. Our logits are cached by history."""

    def __init__(self, name: str) -> None:
        with TemporaryDirectory() as folder:
            self.model: Any = build(CASES[name], folder)
            self.llm = LLM(folder, max_model_len=CASES[name].max_model_len)
        self.model.generation_config.eos_token_id = None  # each comparison sets its own
        rng = np.random.default_rng(CASES[name].seed)
        self.prompts: list[History] = [tuple(rng.integers(3, VOCAB, n).tolist()) for n in (5, 30)]
        self._rows: dict[History, np.ndarray] = {}

    def logits(self, histories: Sequence[History]) -> np.ndarray:
        new = [h for h in histories if h not in self._rows]
        self._rows.update((h, rows[-1]) for h, rows in zip(new, self.llm.logits(new), strict=True))
        return np.stack([self._rows[h] for h in histories])

    @cache  # noqa: B019
    def likely(self, prompt: History) -> list[int]:
        """Return tokens that a search prefers at some position after the first, the most frequent ones first."""
        found: Counter[int] = Counter()
        for answer in search(BeamSearchParams(beam_width=5, max_tokens=12), prompt, (), self.logits).answers:
            for end in range(2, len(answer.tokens)):
                (best,) = candidates(self.logits([prompt + answer.tokens[:end]]), 2)
                found.update(token for token, _ in best)
        return [token for token, _ in found.most_common()]


peer = cache(Peer)
FAMILIES = ["llama_gqa", "qwen2_window", "gemma3", "mixtral"]


# beam_width, length_penalty, early_stopping, number of end tokens, max_tokens
GRID = list(itertools.product((1, 2, 3, 5), PENALTIES, STOPPING, (0, 1, 3, 8), (1, 8, 20)))


def compare_families(name: str, indices: Sequence[int]) -> Tally:
    """Compare both searches at some points of the grid. Half of them return all answers, half of them fewer."""
    p, tally = peer(name), Tally()
    for i in indices:
        width, penalty, stopping, ends, length = GRID[i]
        prompt, n = p.prompts[i % 2], width if i % 4 < 2 else 1 + i % width
        params = BeamSearchParams(
            beam_width=width, n=n, max_tokens=length, length_penalty=penalty, early_stopping=stopping
        )
        tally.add(params, check(p.model, p.logits, params, prompt, p.likely(prompt)[:ends]))
    return tally


@cache
def some_of_the_grid(name: str) -> Tally:
    """None of these cases is a near tie: noise of 1e-4 on the logits changes no answer, here and in the first random
    tables.
    """
    indices = np.random.default_rng(FAMILIES.index(name)).permutation(len(GRID))
    return compare_families(name, indices[:32].tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_scores_equal_transformers(name: str) -> None:
    some_of_the_grid(name)


def test_every_situation_occurs_in_the_comparison_of_families() -> None:
    Tally(some_of_the_grid(name) for name in FAMILIES).check(2)


@pytest.mark.parametrize("name", daily([*FAMILIES, "gpt2"], ()))
def test_the_whole_grid_equals_transformers(name: str) -> None:
    compare_families(name, range(len(GRID))).check(5)


# Models that are a table ------------------------------------------------------------------------------


# a prompt of 4 and 12 more tokens; if a table were used twice, two orders of the same tokens would have equal scores
POSITIONS = 16


class TableConfig(PretrainedConfig):
    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    """A language model whose logits after a token are a row of a table, with another table at each position.

    table [POSITIONS, vocabulary, vocabulary].
    """

    config_class = TableConfig
    main_input_name = "input_ids"

    def __init__(self, table: np.ndarray) -> None:
        super().__init__(TableConfig(vocab_size=table.shape[1]))
        self.generation_config = GenerationConfig(use_cache=False)
        self.table = torch.nn.Parameter(torch.from_numpy(table), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table[input_ids.shape[1] - 1, input_ids[:, -1:]])

    def rows(self, histories: Sequence[History]) -> np.ndarray:
        """Return the logits [n, vocabulary] for our search."""
        return np.stack([self.table[len(h) - 1, h[-1]].numpy() for h in histories])


def random_case(seed: int) -> tuple[TableModel, BeamSearchParams, History, list[int]]:
    """Return a table, parameters, a prompt and end tokens, which are more likely in some tables than in others."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(12, 30))
    eos = rng.choice(vocab, rng.choice([0, 1, 1, 1, 2, 2, 4]), replace=False).tolist()
    table = rng.normal(0, rng.choice([0.3, 1.0, 3.0]), (POSITIONS, vocab, vocab)).astype(np.float32)
    table[:, :, eos] += rng.choice([-1, 1, 2, 4])
    width = int(rng.integers(1, 8))
    params = BeamSearchParams(
        beam_width=width,
        n=int(rng.integers(1, width + 1)) if rng.random() < 0.5 else None,
        max_tokens=int(rng.choice([1, 4, 12, 12])),
        length_penalty=float(rng.choice([*PENALTIES, rng.normal()])),
        early_stopping=STOPPING[rng.integers(3)],
    )
    return TableModel(table), params, tuple(rng.integers(0, vocab, rng.integers(1, 5)).tolist()), eos


def compare_tables(seeds: Sequence[int]) -> Tally:
    tally = Tally()
    for seed in seeds:
        model, params, prompt, eos = random_case(seed)
        tally.add(params, check(model, model.rows, params, prompt, eos))
    return tally


def test_random_tables_equal_transformers() -> None:
    compare_tables(range(300)).check(5)


@pytest.mark.nightly
def test_many_random_tables_equal_transformers() -> None:
    compare_tables(range(1000, 6000)).check(100)


# Cases without an oracle in transformers --------------------------------------------------------------


def scattered(history: History, vocab: int) -> np.ndarray:
    """Return logits [vocab] that depend on every token of a history."""
    return np.random.default_rng([77, *history]).normal(0, 2, vocab).astype(np.float32)


def every_answer(vocab: int, depth: int, eos: Sequence[int], penalty: float) -> dict[History, float]:
    """Return all possible answers with their scores, by definition."""

    def logprob(history: History, token: int) -> float:
        logits = scattered(history, vocab).astype(np.float64)
        return float(logits[token] - math.log(np.exp(logits).sum()))

    found: dict[History, float] = {}
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if not set(tokens[:-1]) & set(eos) and (tokens[-1] in eos or length == depth):
                total = sum(logprob((0, *tokens[:i]), token) for i, token in enumerate(tokens))
                found[tokens] = total / length**penalty
    return found


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("eos", [(), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize(("vocab", "depth", "width"), [(3, 3, 27), (4, 3, 64), (3, 4, MAX_BEAM_WIDTH)])
def test_a_search_that_is_wide_enough_finds_the_best_answers(
    vocab: int, depth: int, width: int, eos: tuple[int, ...], penalty: float
) -> None:
    """A search as wide as the number of answers is exhaustive; 64 of 81 beams are enough for the best answer."""
    wanted = sorted(every_answer(vocab, depth, eos, penalty).items(), key=lambda found: -found[1])
    params = BeamSearchParams(beam_width=width, max_tokens=depth, length_penalty=penalty, early_stopping="never")
    got = search(params, (0,), eos, lambda live: np.stack([scattered(h, vocab) for h in live])).answers
    if width < vocab**depth:
        wanted, got = wanted[:1], got[:1]
    assert [h.tokens for h in got] == [tokens for tokens, _ in wanted]
    assert [h.score for h in got] == pytest.approx([score for _, score in wanted])


def chain(*rows: Sequence[float]) -> NextLogits:
    """Return logits that are the logarithms of probabilities and depend only on the position, after a prompt of one
    token.
    """
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(rows, np.float32))
    return lambda live: np.stack([logits[len(h) - 1] for h in live])


def test_branches_name_their_parents() -> None:
    beams = BeamSearch(BeamSearchParams(beam_width=2), (), 3)
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.98, 0.01, 0.01]], np.float32))
    assert (beams.count, beams.done) == (2, False)
    assert beams.advance(candidates(logits[:1], 2)) == [Branch(0, 0), Branch(0, 1)]
    assert beams.advance(candidates(logits[1:], 2)) == [Branch(0, 1), Branch(1, 0)]  # 0.5 * 0.8, 0.3 * 0.98
    assert not beams.results()
    assert beams.advance(candidates(logits[[2, 2]], 2)) == []
    assert beams.done
    scores = [math.log(0.4 * 0.98) / 3, math.log(0.3 * 0.98**2) / 3]
    assert [h.tokens for h in beams.results()] == [(0, 1, 0), (1, 0, 0)]
    assert [h.score for h in beams.results()] == pytest.approx(scores)
    with pytest.raises(ValueError, match="candidates of 1 beams; 0 are live"):
        beams.advance([((0, -1.0),)])


def test_stop_tokens_end_an_answer_like_eos() -> None:
    logits = chain([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1])

    def answers(eos: Sequence[int] = (), **fields: Any) -> list[Hypothesis]:
        return search(BeamSearchParams(beam_width=2, max_tokens=3, **fields), (0,), eos, logits).answers

    stopped = answers(stop_token_ids=(1, 3))
    assert stopped == answers((1, 3)) == answers((1,), stop_token_ids=(3,))
    assert stopped == answers((0,), stop_token_ids=(1, 3), ignore_eos=True)
    assert any(h.finished for h in stopped)
    assert not any(h.finished for h in answers((1, 3), ignore_eos=True))


def test_an_answer_without_probability_is_none() -> None:
    """If only two answers are possible, a wider search returns these two and invents no others."""
    logits = chain([0, 0.75, 0.25], [0, 1, 0], [0, 1, 0])
    for stopping in STOPPING:
        params = BeamSearchParams(beam_width=4, max_tokens=3, early_stopping=stopping)
        got = search(params, (0,), (2,), logits).answers
        assert [(h.tokens, h.finished) for h in got] == [((1, 1, 1), False), ((2,), True)]
    params = BeamSearchParams(beam_width=4, max_tokens=3)
    got = search(params, (0,), (1,), chain([0, 1, 0])).answers  # no possible token is left
    assert got == [Hypothesis((1,), 0.0, True)]


def test_an_older_hypothesis_a_better_beam_and_a_lower_token_win_a_tie() -> None:
    half = chain([0.25] * 4, [0.25] * 4)
    params = BeamSearchParams(beam_width=3, max_tokens=2, length_penalty=0)
    assert [h.tokens for h in search(params, (0,), (), half).answers] == [(0, 0), (0, 1), (0, 2)]
    params = BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=0)
    certain = chain([0.5, 0.5, 0], [0, 0, 1])
    assert [h.tokens for h in search(params, (0,), (1,), certain).answers] == [(1,), (0, 2)]


def test_a_beam_that_can_only_draw_level_is_not_followed() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=2, length_penalty=0)
    assert search(params, (0,), (0,), chain([0.5, 0.5], [0, 1])).steps == 1


def test_scores_far_below_the_limit_of_transformers() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=20, length_penalty=-10)
    got = search(params, (0,), (), chain(*[[0.6, 0.4]] * 20)).answers
    assert [h.tokens for h in got] == [(0,) * 20, (0,) * 19 + (1,)]
    assert got[0].score == pytest.approx(20 * math.log(0.6) * 20.0**10)


# Candidates -------------------------------------------------------------------------------------------


def test_candidates_are_the_best_tokens_with_their_log_probabilities() -> None:
    logits = np.random.default_rng(3).normal(0, 5, (300, 1001)).astype(np.float32)  # more than one block
    logits[:, 500:] = logits[:, :501]  # every score occurs twice: the lower id comes first
    before, found = logits.copy(), candidates(logits, 7)
    np.testing.assert_array_equal(logits, before)
    exact = torch.from_numpy(logits).double().log_softmax(dim=1).numpy()
    for best, row in zip(found, exact, strict=True):
        order = np.lexsort((np.arange(row.size), -row))[:7]
        assert [token for token, _ in best] == order.tolist()
        assert [logprob for _, logprob in best] == pytest.approx(row[order].tolist(), abs=1e-12)
    assert [candidates(logits[i : i + 1], 7)[0] for i in range(0, 300, 37)] == found[::37]


def test_candidates_that_do_not_exist() -> None:
    logits = np.array([[0, 0, -np.inf], [-np.inf] * 3, [0, np.nan, 0], [np.inf, 0, 0], [1, 2, 3]], np.float32)
    found = top_candidates(logits, 10)
    assert [type(f) for f in found] == [tuple, RequestError, RequestError, RequestError, tuple]
    assert found[0] == ((0, pytest.approx(math.log(0.5))), (1, pytest.approx(math.log(0.5))))
    assert [token for token, _ in candidates(logits[4:], 10)[0]] == [2, 1, 0]
    assert top_candidates(logits[:0], 5) == []
    assert "NaN or infinity" in str(found[2])


# Parameters -------------------------------------------------------------------------------------------

WHOLE = (-1, 0, 1.5, 2.0, math.nan, math.inf, True, "3", [1], 10**400)
BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "beam_width": ((*WHOLE, None, MAX_BEAM_WIDTH + 1), f"1..{MAX_BEAM_WIDTH}"),
    "n": ((*WHOLE[:-1], 6), "at "),
    "max_tokens": (WHOLE[:-1], "at least 1"),
    "length_penalty": ((math.nan, math.inf, -math.inf, True, None, "1", [1.0], 10.1, -10.1, 10**400), "at most 10"),
    "early_stopping": ((0, 1, None, "Never", "", "True", ["never"], 1.0), "true, false or never"),
    "stop_token_ids": ((5, None, "ab", {3}, (-1,), (1.0,), (True,), ("a",), ([1],)), ""),
    "ignore_eos": ((0, 1, None, "no"), "true or false"),
    "skip_special_tokens": ((0, 1, None, "no"), "true or false"),
}


def test_every_parameter_is_here() -> None:
    assert set(BAD) == {f.name for f in fields(BeamSearchParams)}


@pytest.mark.parametrize("name", BAD)
def test_out_of_range_is_refused_with_name_and_limit(name: str) -> None:
    values, limit = BAD[name]
    for value in values:
        with pytest.raises(RequestError) as caught:
            BeamSearchParams(**{"beam_width": 5, name: value})
        assert name in str(caught.value)
        assert limit in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_limits_themselves_are_allowed() -> None:
    params = BeamSearchParams(
        beam_width=MAX_BEAM_WIDTH, n=MAX_BEAM_WIDTH, max_tokens=None, length_penalty=-10, stop_token_ids=[0, 3]
    )  # type: ignore[arg-type]
    assert (params.answers, params.stop_token_ids) == (MAX_BEAM_WIDTH, (0, 3))
    params.check_vocabulary(4)
    with pytest.raises(RequestError, match=r"stop_token_ids has 3; .*0\.\.2"):
        params.check_vocabulary(3)
    assert len({params, BeamSearchParams(beam_width=1, length_penalty=10)}) == 2  # hashable
    assert BeamSearchParams(beam_width=4).answers == 4
    assert BeamSearchParams(beam_width=4, n=1).answers == 1
    assert [BeamSearchParams(beam_width=1, early_stopping=s).early_stopping for s in STOPPING] == list(STOPPING)
    with pytest.raises(RequestError, match="n is 5; it must be at most beam_width, 4"):
        BeamSearchParams(beam_width=4, n=5)
