"""Masks, bias and penalties, in their order: equal to transformers' processors where they
exist, else to closed forms.
"""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from oracle.data import shared_data
from ridgeline import LLM, SamplingParams
from ridgeline.errors import RequestError
from ridgeline.sample.edits import Edits, TokenCounts
from ridgeline.sample.sampler import NoiseKey, SampledToken, SampleRow, sample
from ridgeline.spec.breakers import TokenBreaker

KEY = NoiseKey(0, 0)
SIZE = 12
_LOGITS = st.lists(st.integers(-600, 600), min_size=SIZE, max_size=SIZE).map(lambda v: np.array(v, np.float64) / 32)
_TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=20)


def edited(
    scores: np.ndarray, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> np.ndarray:  # fmt: skip
    """Return the scores of a sequence after all edits; its tokens are added one by one."""
    out = scores.astype(np.float64)
    if edits := Edits.of(params, prompt, ends):
        for token in output:
            edits.push(token)
        edits.apply(out)
    return out


def processed(scores: np.ndarray, processor: LogitsProcessor, history: Sequence[int]) -> np.ndarray:
    return processor(torch.tensor([list(history)], dtype=torch.int64), torch.from_numpy(scores)[None])[0].numpy()


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(scores=_LOGITS, prompt=_TOKENS, output=_TOKENS, factor=st.sampled_from([0.3, 0.9, 1.1, 1.8, 5.0]))
def test_the_repetition_penalty_is_that_of_transformers(
    scores: np.ndarray, prompt: list[int], output: list[int], factor: float
) -> None:
    found = edited(scores, SamplingParams(repetition_penalty=factor), prompt, output)
    expected = processed(scores, RepetitionPenaltyLogitsProcessor(factor), prompt + output)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(scores=_LOGITS, bad=st.sets(st.integers(0, SIZE - 1)), allowed=st.sets(st.integers(0, SIZE - 1), min_size=1))
def test_masks_are_those_of_transformers(scores: np.ndarray, bad: set[int], allowed: set[int]) -> None:
    if bad:
        found = edited(scores, SamplingParams(bad_token_ids=tuple(bad)))
        assert (found == processed(scores, SuppressTokensLogitsProcessor(list(bad)), [0])).all()
    if allowed - bad:
        found = edited(scores, SamplingParams(allowed_token_ids=tuple(allowed), bad_token_ids=tuple(bad)))
        others = [t for t in range(SIZE) if t not in allowed or t in bad]
        assert (found == processed(scores, SuppressTokensLogitsProcessor(others), [0])).all() if others else True


_SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(scores=_LOGITS, bad=_SEQUENCES, output=st.lists(st.integers(0, 3), min_size=1, max_size=10))
def test_bad_sequences_are_those_of_transformers(scores: np.ndarray, bad: list[list[int]], output: list[int]) -> None:
    """Bad words are searched in the answer alone; the processor gets the answer as its whole input."""
    found = edited(scores, SamplingParams(bad_token_sequences=tuple(map(tuple, bad))), [0, 1, 2, 3], output)
    assert (found == processed(scores, NoBadWordsLogitsProcessor(bad), output)).all()


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(scores=_LOGITS, prompt=_TOKENS, output=_TOKENS, minimum=st.integers(0, 12))
def test_min_tokens_is_that_of_transformers(
    scores: np.ndarray, prompt: list[int], output: list[int], minimum: int
) -> None:
    found = edited(scores, SamplingParams(min_tokens=minimum), prompt, output, ends=(2, 7))
    expected = processed(scores, MinNewTokensLengthLogitsProcessor(len(prompt), minimum, [2, 7]), prompt + output)
    assert (found == expected).all()


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(scores=_LOGITS, bias=st.dictionaries(st.integers(0, SIZE - 1), st.integers(-50, 50), min_size=1))
def test_a_bias_is_that_of_transformers(scores: np.ndarray, bias: dict[int, int]) -> None:
    theirs = SequenceBiasLogitsProcessor([[[token], float(value)] for token, value in bias.items()])
    found = edited(scores, SamplingParams(logit_bias=bias))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, processed(scores.astype(np.float32), theirs, [0]), rtol=1e-6)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    scores=_LOGITS, prompt=_TOKENS, output=_TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2),
)  # fmt: skip
def test_presence_and_frequency_in_closed_form(
    scores: np.ndarray, prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    """Compare with OpenAI's reference, mu[j] - c[j] * frequency - (c[j] > 0) * presence, with the counts c of the
    answer.
    """
    found = edited(scores, SamplingParams(presence_penalty=presence, frequency_penalty=frequency), prompt, output)
    counts = Counter(output)
    expected = [s - counts[j] * frequency - (counts[j] > 0) * presence for j, s in enumerate(scores)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_order_of_edits() -> None:
    """The bias is applied before the repetition penalty, then the other penalties; masks stay."""
    params = SamplingParams(
        logit_bias={0: 4.0, 1: 50.0, 2: -3.0}, bad_token_ids=(1,), repetition_penalty=2.0, presence_penalty=0.5,
        frequency_penalty=0.25,
    )  # type: ignore[arg-type]  # fmt: skip
    found = edited(np.array([1.0, 1.0, 1.0, 1.0]), params, prompt=[1, 2], output=[0, 0, 1])
    assert found.tolist() == [(1 + 4) / 2 - 0.5 - 2 * 0.25, -math.inf, (1 - 3) * 2, 1.0]


def test_no_edits_without_parameters() -> None:
    assert Edits.of(SamplingParams(top_p=0.5, stop="a"), [1], [2]) is None  # type: ignore[arg-type]
    assert Edits.of(SamplingParams(min_tokens=3), [1], []) is None  # there is no end token to forbid
    assert Edits.of(SamplingParams(min_tokens=3), [1], [2]) is not None


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(prompt=st.lists(st.integers(0, 200), max_size=40), output=st.lists(st.integers(0, 200), max_size=200))
def test_counts_are_those_of_a_counter(prompt: list[int], output: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in output:
        counts.push(token)
    expected = Counter(output) + Counter()
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: expected[token] for token in {*prompt, *output}
    }


@pytest.mark.parametrize("penalty", [1e-320, 1e-300, 1.7e308])
def test_the_wildest_penalty_still_gives_a_token(penalty: float) -> None:
    """The penalty gives no NaN by overflow; warnings are errors here."""
    logits = np.array([[3.0, -2.0, 0.5, 5.0, -np.inf]], np.float32)
    for temperature in (0.0, 1.0, 5e-324):
        params = SamplingParams(repetition_penalty=penalty, temperature=temperature, logprobs=4)
        (found,) = sample(logits, [SampleRow.start(params, [0, 1, 3, 4], KEY, ())])
        assert isinstance(found, SampledToken)
        assert found.token < 4
        assert found.logprobs is not None


def test_greedy_heeds_edits_and_leaves_the_logits_alone() -> None:
    logits = np.array([1.0, 3.0, 2.0], np.float32)

    def pick(scores: np.ndarray, prompt: list[int], **kwargs: Any) -> int:
        (found,) = sample(scores[None], [SampleRow.start(SamplingParams(temperature=0, **kwargs), prompt, KEY, ())])
        assert isinstance(found, SampledToken)
        return found.token

    assert pick(logits, [1], repetition_penalty=2.0) == 2
    # the penalty applies once, however often the token occurred
    assert pick(logits, [1, 1, 1, 1], repetition_penalty=2.0) == 2
    assert pick(-logits, [0], repetition_penalty=2.0) == 0  # -1 becomes -2, equal to token 2's score: the lower id wins
    assert pick(logits, [], bad_token_ids=(1,)) == 2
    assert pick(logits, [], logit_bias={0: 2.0}) == 0  # the score equals token 1's: the lower id wins
    assert logits.tolist() == [1.0, 3.0, 2.0]


def test_a_row_without_possible_tokens_fails_alone() -> None:
    logits = np.zeros((3, 5), np.float32)
    only_the_end = SamplingParams(allowed_token_ids=(2,), min_tokens=1, max_tokens=4)
    row = SampleRow.start(only_the_end, [0], KEY, (2,))
    free = SampleRow.start(SamplingParams(logprobs=2), [0], KEY, (2,))
    first, second, third = sample(logits, [free, row, free])
    assert isinstance(second, RequestError)
    assert all(name in str(second) for name in ("allowed_token_ids", "bad_token_ids", "min_tokens"))
    assert first == third
    assert isinstance(first, SampledToken)
    row.push(0)
    assert sample(logits[:1], [row]) == [SampledToken(2)]  # the answer ends as soon as it may


def test_a_row_that_restarts_continues_unchanged() -> None:
    """A row that restarts after a preemption gets the output so far; its masks, penalties and noise continue."""
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, min_tokens=6)
    logits = np.random.default_rng(0).normal(size=(1, 30)).astype(np.float32)
    row, output = SampleRow.start(params, [3, 4], KEY, (0, 1)), []
    for _ in range(20):
        (found,) = sample(logits, [row])
        assert sample(logits, [SampleRow.start(params, [3, 4], KEY, (0, 1), output)]) == [found]
        assert isinstance(found, SampledToken)
        row.push(found.token)
        output.append(found.token)
    assert not {0, 1} & set(output[:6])


# A whole model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories() -> LLM:
    return LLM(str(shared_data() / "models" / "stories260K"))


def answer(llm: LLM, **kwargs: Any) -> list[int]:
    kwargs = {"temperature": 0, "max_tokens": 24} | kwargs
    return llm.generate("Once upon a time", SamplingParams(**kwargs))[0].outputs[0].token_ids


def test_edits_reach_the_answer(stories: LLM) -> None:
    free = answer(stories)
    assert free[0] not in answer(stories, bad_token_ids=free[:1])
    allowed = sorted(set(free[:4]))
    assert set(answer(stories, allowed_token_ids=allowed)) <= set(allowed)
    assert answer(stories, logit_bias={77: 100.0}) == [77] * 24
    assert answer(stories, logit_bias={77: 100.0}, presence_penalty=2.0) == [77] * 24
    few = {"allowed_token_ids": allowed, "max_tokens": 24}
    often = Counter(answer(stories, **few)).most_common(1)[0][1]
    assert Counter(answer(stories, **few, frequency_penalty=2.0)).most_common(1)[0][1] < often


def test_bad_words_are_not_in_the_answer(stories: LLM) -> None:
    """The bad words are of one token and of several, with and without a space before them;
    parts of a word are allowed.
    """
    text = stories.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text
    words = [w for w in dict.fromkeys(text.replace(".", " ").replace(",", " ").split()) if len(w) > 2]
    assert stories.tokenizer is not None and len(words) > 4
    assert any(len(stories.tokenizer.encode(w, add_special_tokens=False)) > 2 for w in words)
    params = SamplingParams(temperature=0, max_tokens=40, bad_words=[f" {words[0]}", *words[1:]])  # type: ignore[arg-type]
    (output,) = stories.generate("Once upon a time", params)
    assert output.outputs[0].finish_reason == "length"
    assert not set(words) & set(output.outputs[0].text.replace(".", " ").replace(",", " ").split())
    parts = stories.tokenizer.encode(words[-1], add_special_tokens=False)
    row = SampleRow.start(SamplingParams(temperature=0, bad_token_sequences=(tuple(parts),)), [1], KEY, (2,))
    logits = np.zeros((1, stories.loaded.spec.vocab_size), np.float32)
    for index, token in enumerate(parts):
        logits[:] = 0
        logits[0, token] = 9
        (found,) = sample(logits, [row])
        assert isinstance(found, SampledToken) and (found.token == token) is (index < len(parts) - 1)
        row.push(token)


def test_bad_words_need_a_tokenizer() -> None:
    llm = LLM(str(shared_data() / "models" / "stories260K"), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(bad_words=["a"]))  # type: ignore[arg-type]


def test_penalties_equal_a_computation_from_the_logits(stories: LLM) -> None:
    """Each token is the best of the dense model's logits after an edit that the test computes
    from the whole history.
    """
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.6, "presence_penalty": 0.3, "bad_token_ids": (400,)}
    prompt, output = stories.encode("Once upon a time"), answer(stories, **params)
    rows = stories.logits([prompt + output])[0][len(prompt) - 1 : -1]
    for i, row in enumerate(rows):
        expected = edited(row, SamplingParams(**params), prompt, output[:i])  # type: ignore[arg-type]
        assert output[i] == expected.argmax()


def test_prompt_logprobs(stories: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(prompt_logprobs=3, max_tokens=2, n=2, temperature=0, bad_token_ids=(5,))
    (output,) = stories.generate("Once upon a time there was a girl", params)
    ids, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == len(ids)
    expected = torch.from_numpy(stories.logits([ids])[0]).double().log_softmax(-1).numpy()
    for token, entry, row in zip(ids[1:], found[1:], expected[:-1], strict=True):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert [t for t, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
    monkeypatch.setattr("ridgeline.runtime.generator.PROMPT_CHUNK", 3)
    (chunked,) = stories.generate("Once upon a time there was a girl", params)
    assert chunked.prompt_logprobs is not None
    for one, other in zip(found[1:], chunked.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
    shortest, without = stories.generate([[5], [5, 6]], [params, SamplingParams(max_tokens=2)])
    assert shortest.prompt_logprobs == [None]
    assert without.prompt_logprobs is None


def test_one_request_fails_and_the_others_do_not(stories: LLM) -> None:
    assert stories.checkpoint.eos_token_ids == (2,)
    impossible = SamplingParams(allowed_token_ids=(2,), min_tokens=2, max_tokens=8, temperature=0)
    fine = SamplingParams(max_tokens=8, temperature=0)
    done: list[int] = []
    first, failed, last = stories.generate(
        ["Lily"] * 3, [fine, impossible, fine], on_done=lambda index, output: done.append(index)
    )
    assert failed.outputs[0].finish_reason == "error"
    assert "leave no token" in (failed.outputs[0].error or "")
    assert failed.outputs[0].token_ids == []
    assert first.outputs == last.outputs
    assert len(first.outputs[0].token_ids) == 8
    assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(name: str, stories: LLM) -> None:
    value: Any = {512: 1.0} if name == "logit_bias" else [512]
    with pytest.raises(RequestError, match=rf"{name} has 512"):
        stories.generate("a", SamplingParams(**{name: value}))


def test_many_answers_share_what_is_large() -> None:
    """A thousand answers with all tables at their limits: each with its own took 8 s and 300 MB, once for each."""
    params = SamplingParams(
        bad_token_sequences=[[i, i + 1, i + 2] for i in range(4000)],  # type: ignore[arg-type]
        allowed_token_ids=list(range(20_000)),  # type: ignore[arg-type]
        stop_token_ids=list(range(20_000)),  # type: ignore[arg-type]
        logit_bias=dict.fromkeys(range(20000), 1.0),  # type: ignore[arg-type]
        frequency_penalty=1, dry_multiplier=1, dry_token_breakers=[TokenBreaker(frozenset(range(20_000)))],  # type: ignore[arg-type]
    )  # fmt: skip
    row = SampleRow.start(params, list(range(20_000)), KEY, (1,))
    tracemalloc.start()
    try:
        rows = [row.again(NoiseKey(0, i)) for i in range(100)]
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len({id(r.edits) for r in rows}) == 100
    assert used < 100 * 200_000  # counts of 20,000 tokens are 160,000 bytes each; a set of them alone is 1 MiB


def test_answers_to_one_prompt_do_not_share_what_they_push() -> None:
    """Each has its own counts, its own last tokens and its own number of tokens."""
    params = SamplingParams(
        temperature=0, frequency_penalty=1, min_tokens=3, bad_token_sequences=((1, 2),), dry_multiplier=1, logprobs=0
    )
    row = SampleRow.start(params, [0, 1, 3, 4, 0, 1], KEY, (2,))
    logits = np.random.default_rng(0).normal(size=(1, 8)).astype(np.float32)
    outputs = [[1], [7, 7, 7, 1], [], [3, 4, 0, 5]]
    rows = [row.again(KEY) for _ in outputs]
    for each, output in zip(rows, outputs, strict=True):
        for token in output:
            each.push(token)
    for each, output in zip(rows, outputs, strict=True):
        alone = SampleRow.start(params, [0, 1, 3, 4, 0, 1], KEY, (2,), output)
        assert sample(logits, [each]) == sample(logits, [alone]) == sample(logits, [row.again(KEY, output)])
