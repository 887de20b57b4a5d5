"""DRY: llama.cpp's own test cases, text-generation-webui's definition by brute force, breakers, bounds and cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import LLM
from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.sample.breakers import BreakerIndex
from ridgeline.sample.dry import BreakerCount, BreakerTree, Dry, matches
from ridgeline.sample.sampler import NoiseKey, SampleRow, sample
from ridgeline.spec.breakers import TokenBreaker
from ridgeline.spec.request import SamplingParams

_TOKENS = st.lists(st.integers(0, 3), max_size=40)


def penalty(history: Sequence[int], size: int, pushed: int = 0, **fields: Any) -> list[float]:
    """Return the penalty of each token after `history`, whose last `pushed` tokens were added one by one."""
    dry, scores = Dry(SamplingParams(**fields), history[: len(history) - pushed]), np.zeros(size)
    for token in history[len(history) - pushed :]:
        dry.apply(scores.copy())
        dry.push(token)
    dry.apply(scores)
    return (-scores).tolist()


# llama.cpp, tests/test-sampling.cpp: tokens, probabilities (all were equal), multiplier, base, allowed length, last n
@pytest.mark.parametrize(
    ("history", "left", "fields", "breakers"),
    [
        ([0, 1], [0.25] * 4, (1.0, 1.1, 2, 4), []),
        ([0, 1, 2, 0, 1], [0.296923, 0.296923, 0.109232, 0.296923], (1.0, 1.1, 2, 5), []),
        ([0, 1, 3, 4, 0, 1], [0.2] * 5, (1.0, 1.1, 2, 6), [{3}]),
        ([0, 1, 2, 0, 1], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818], (2.0, 1.1, 2, 5), []),
        ([0, 1, 2, 3, 4, 0, 1], [0.2] * 5, (1.0, 1.1, 4, 7), []),
    ],
)
@pytest.mark.parametrize("pushed", [0, 1, 2])
def test_the_penalty_is_that_of_llama_cpp(
    history: list[int], left: list[float], fields: tuple[float, float, int, int], breakers: list[set[int]], pushed: int
) -> None:
    multiplier, base, allowed, last = fields
    lost = penalty(
        history, len(left), pushed, dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed,
        dry_penalty_last_n=last, dry_token_breakers=[TokenBreaker(frozenset(heads)) for heads in breakers],
    )  # fmt: skip
    weights = np.exp(-np.array(lost))
    np.testing.assert_allclose(weights / weights.sum(), left, atol=1e-6)


def expected(history: Sequence[int], size: int, params: SamplingParams) -> list[float]:
    """Compute the definition of text-generation-webui#5677: for each token, the longest run before it that also ends
    the sequence.
    """
    window = (
        list(history) if params.dry_penalty_last_n < 0 else list(history)[len(history) - params.dry_penalty_last_n :]
    )
    single = {token for one in params.dry_token_breakers for token in one.heads}
    best: dict[int, int] = {}
    for at in range(1, len(window)):
        length = 0
        while length < at and window[at - 1 - length] == window[-1 - length] and window[-1 - length] not in single:
            length += 1
        if length >= params.dry_allowed_length and window[at] not in single:
            best[window[at]] = max(length, best.get(window[at], 0))
    power = {token: params.dry_base ** (length - params.dry_allowed_length) for token, length in best.items()}
    return [params.dry_multiplier * power.get(token, 0.0) for token in range(size)]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    history=_TOKENS, pushed=st.integers(0, 20), allowed=st.integers(1, 5), last=st.sampled_from([-1, 1, 3, 8, 20]),
    breakers=st.sets(st.integers(0, 3), max_size=2),
)  # fmt: skip
def test_the_penalty_by_brute_force(
    history: list[int], pushed: int, allowed: int, last: int, breakers: set[int]
) -> None:
    """The penalty of a history is equal whether its tokens are added at once or one by one."""
    last = min(last, len(history)) if last > 0 else last
    heads = [TokenBreaker(frozenset(breakers))] if breakers else []
    fields = {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": allowed, "dry_token_breakers": heads}
    if last == 0:  # an empty history
        return
    params = SamplingParams(**fields, dry_penalty_last_n=last)  # type: ignore[arg-type]
    found = penalty(history, 4, min(pushed, len(history)), **fields, dry_penalty_last_n=last)
    np.testing.assert_allclose(found, expected(history, 4, params), rtol=1e-12)


@pytest.mark.parametrize("last", [-1, 5, 300, 700])
def test_a_long_history_as_its_window(last: int) -> None:
    """A long history has the penalty of its last tokens, after many pushes in which the arrays grow and drop old
    tokens.
    """
    rng = np.random.default_rng(3)
    history = rng.integers(0, 2, 2000).tolist()
    fields: dict[str, Any] = {"dry_multiplier": 0.5, "dry_base": 1.1, "dry_penalty_last_n": last}
    dry = Dry(SamplingParams(**fields), history[:10])
    for at in range(10, 2000):
        dry.push(history[at])
        if at % 97 == 0 or at % 97 == 1 or at > 1990:
            scores = np.zeros(2)
            dry.apply(scores)
            fresh = penalty(history[: at + 1], 2, **fields)
            np.testing.assert_allclose(-scores, fresh)
    np.testing.assert_allclose(fresh, expected(history, 2, SamplingParams(**fields)))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(tokens=_TOKENS)
def test_matches_by_brute_force(tokens: list[int]) -> None:
    def common(at: int) -> int:
        return next((i for i in range(at) if tokens[at - 1 - i] != tokens[-1 - i]), at)

    assert matches(tokens) == [common(at) for at in range(len(tokens))]


def test_a_breaker_of_several_tokens() -> None:
    """A breaker matches one of its heads followed by its whole tail; a part of it has no effect."""
    count = BreakerCount(BreakerTree([TokenBreaker(frozenset({5, 6}), (7, 8)), TokenBreaker(frozenset({9}))]))
    seen = []
    for token in [1, 5, 7, 8, 1, 7, 8, 6, 7, 7, 8, 6, 7, 8, 2, 9, 1]:
        count.push(token)
        seen.append(count.count)
    assert seen == [1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 0, 1]
    assert count.tree.single == {9}


def test_many_breakers_with_one_end_cost_as_much_as_one() -> None:
    """Every token of the prompt is the last one of 2,000 breakers: comparing with each took 1 ms a token."""
    heads = frozenset({9})
    tree = BreakerTree([TokenBreaker(heads, (i, *[5] * 30)) for i in range(10, 2010)])
    count, start = BreakerCount(tree), time.process_time()
    for token in [5] * 20_000:
        count.push(token)
    assert count.count == 20_000
    for token in [9, 1000, *[5] * 30]:
        count.push(token)
    assert count.count == 0
    assert time.process_time() - start < 5  # 0.05 s are usual, 20 s without the tree


@pytest.mark.parametrize("used", [False, True])
def test_answers_to_one_prompt(used: bool) -> None:
    """They share its matching, and nothing of their own; the penalty is that of an answer alone."""
    rng = np.random.default_rng(5)
    prompt, fields = rng.integers(0, 3, 300).tolist(), {"dry_multiplier": 1.0, "dry_base": 1.1}
    params = SamplingParams(**fields, dry_token_breakers=(TokenBreaker(frozenset({2}), (0, 1)),))  # type: ignore[arg-type]
    origin = Dry(params, prompt)
    answers = [origin.start() for _ in range(3)]
    tails = [rng.integers(0, 3, 40 + i).tolist() for i in range(3)]
    for dry, tail in zip(answers, tails, strict=True):
        if used:
            dry.apply(np.zeros(3))
        for token in tail:
            dry.push(token)
    for dry, tail in zip(answers, tails, strict=True):
        scores, alone = np.zeros(3), np.zeros(3)
        dry.apply(scores)
        Dry(params, [*prompt, *tail]).apply(alone)
        np.testing.assert_array_equal(scores, alone)


def test_no_penalty_is_too_large() -> None:
    """The penalty is finite, however long the repetition; a token that is ruled out stays so."""
    scores = np.array([0.0, -np.inf, 1.0])
    Dry(SamplingParams(dry_multiplier=1e300, dry_base=1e300), [0] * 50).apply(scores)
    assert np.isfinite(scores[0]) and scores[0] < -1e300 and scores[1:].tolist() == [-np.inf, 1.0]
    params = SamplingParams(dry_multiplier=1e300, dry_base=1e300, repetition_penalty=1e300, top_n_sigma=1)
    logits = np.array([[9.0, 3.0, 8.0]], np.float32)
    (found,) = sample(logits, [SampleRow.start(params, [0] * 50, NoiseKey(0, 0), ())])
    assert getattr(found, "token", None) in (1, 2)


@pytest.mark.parametrize("period", [1, 2, 50, 10**6])
def test_the_cost_is_linear(period: int) -> None:
    """A hundred thousand tokens with any period take seconds; a quadratic method would take minutes."""
    history = [i % period for i in range(100_000)]
    start = time.process_time()
    dry = Dry(SamplingParams(dry_multiplier=1), history)
    for token in range(20):
        dry.apply(np.zeros(100_000))
        dry.push(token)
    assert time.process_time() - start < 20  # usually 0.1 s


# Breakers as texts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket")


def find(llm: LLM, *texts: str) -> tuple[TokenBreaker, ...]:
    assert llm.tokenizer is not None
    return BreakerIndex(llm.tokenizer, llm.loaded.spec.vocab_size).find(texts)


@pytest.mark.parametrize("text", ["\n", ":", "self", "return x", "):\n", "é"])
def test_a_text_is_found_however_it_is_tokenized(llm: LLM, text: str) -> None:
    """A breaker is found after any text, however its characters are divided into tokens."""
    assert isinstance(llm.tokenizer, Tokenizer)
    for before in ("a", " x", "foo(", "\n", "b ", "é"):
        ids = llm.tokenizer.encode(before + text, add_special_tokens=False)
        count = BreakerCount(BreakerTree(find(llm, text)))
        for token in [*ids, *llm.tokenizer.encode("\n", add_special_tokens=False)][: len(ids)]:
            count.push(token)
        assert count.count == 0, (before, text, [llm.tokenizer.token_name(i) for i in ids])


def test_which_tokens_contain_a_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (one,) = find(llm, ":")
    texts = llm.tokenizer.token_texts()
    assert not one.tail and one.heads == {i for i, text in enumerate(texts) if ":" in text}
    assert all(one.tail for one in find(llm, "\uffff"))  # no token contains this character


def test_breakers_stay_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.spec.breakers.MAX_BREAKER_TOKENS", 20)
    with pytest.raises(RequestError, match=r"dry_sequence_breakers matches more than 20 tokens .* fewer or longer"):
        find(llm, "e")
    with pytest.raises(RequestError, match="dry_sequence_breakers"):
        find(llm, "eeeeeeeeee")


def test_dry_through_the_engine(llm: LLM) -> None:
    """DRY ends a loop of greedy decoding, and breakers allow it again; n and preemption change nothing."""
    free = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    prompt = [5, 6, 7, 8] * 4
    params = [
        SamplingParams(**free),  # type: ignore[arg-type]
        SamplingParams(**free, dry_multiplier=50, dry_sequence_breakers=()),  # type: ignore[arg-type]
    ]
    (loops,), (ended,) = (out.outputs for out in llm.generate([prompt, prompt], params))
    fours = [tuple(ended.token_ids[i : i + 4]) for i in range(37)]
    assert len(set(fours)) == len(fours) and ended.token_ids != loops.token_ids
    request = llm.frontend.request("x", SamplingParams(dry_multiplier=1))
    assert isinstance(request.params, SamplingParams) and request.params.dry_token_breakers


def test_breakers_without_a_tokenizer() -> None:
    bare = LLM("pocket", skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="dry_sequence_breakers needs a tokenizer"):
        bare.generate([[5]], SamplingParams(dry_multiplier=1))
    breakers = (TokenBreaker(frozenset({3})),)
    params = SamplingParams(dry_multiplier=1, dry_sequence_breakers=(), dry_token_breakers=breakers, max_tokens=2)
    assert len(bare.generate([[5]], params)[0].outputs[0].token_ids) <= 2
