"""The n-gram proposer: the longest match decides, and sequences see only answers with their own root."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.propose import NgramProposer, Wanted, ngram
from ridgeline.propose.ngram import LEAST_MATCH, LONGEST_MATCH, compared, longest_match

few = st.lists(st.integers(0, 2), max_size=80)


def match(text: list[int], last: list[int]) -> tuple[int, int]:
    """Return what `longest_match` returns, by trying every end and every length."""
    best = (0, 0)
    for end in range(1, len(text) + 1):
        for length in range(LEAST_MATCH, min(end, len(last), LONGEST_MATCH) + 1):
            if text[end - length : end] == last[-length:] and length >= best[0]:
                best = length, end
    return best


@given(few, few.filter(bool))
def test_the_longest_match_is_that_of_a_full_search(text: list[int], last: list[int]) -> None:
    both = np.array(text, np.int32), np.array(last, np.int32)
    assert longest_match(*both) == compared(*both) == match(text, last)


@given(few.filter(bool), st.integers(1, 8))
def test_drafts_follow_the_longest_match_of_the_sequence_itself(tokens: list[int], most: int) -> None:
    proposer = NgramProposer()
    found = proposer.propose([Wanted(1, tokens, most)]).get(1, [])
    length, at = match(tokens[:-1], tokens)
    assert len(found) == min(length, most)
    endless = tokens[at:] * most if length else []
    assert found == endless[: len(found)]


@given(few.filter(bool), few, st.integers(1, 8))
def test_commits_are_as_a_longer_prompt(tokens: list[int], more: list[int], most: int) -> None:
    one, other = NgramProposer(), NgramProposer()
    one.propose([Wanted(1, tokens, most)])
    for token in more:
        one.commit(1, [token])
    assert one.propose([Wanted(1, [*tokens, *more], most)]) == other.propose([Wanted(1, [*tokens, *more], most)])


def finish(proposer: NgramProposer, sequence: int, prompt: list[int], answer: list[int], root: bytes) -> None:
    proposer.propose([Wanted(sequence, prompt, 4, root, len(prompt))])
    proposer.commit(sequence, answer)
    proposer.end(sequence)


def test_finished_answers_are_seen_under_their_root_alone() -> None:
    proposer = NgramProposer()
    finish(proposer, 1, [50, 51, 52], [1, 2, 3, 4, 5, 6], b"a")
    assert proposer.propose([Wanted(2, [9, 2, 3, 4], 8, b"a", 1)]) == {2: [5, 6]}  # not across the end of an answer
    assert proposer.propose([Wanted(3, [9, 2, 3, 4], 8, b"b", 1)]) == {}
    assert proposer.propose([Wanted(4, [9, 50, 51], 8, b"a", 1)]) == {}  # prompts of others are not kept


def test_the_longer_match_wins() -> None:
    proposer = NgramProposer()
    finish(proposer, 1, [0], [1, 2, 3, 4, 5, 6], b"")
    own = [3, 4, 9, 9, 2, 3, 4]  # two tokens match in the sequence, three in the answer
    assert proposer.propose([Wanted(2, own, 8)]) == {2: [5, 6]}
    assert proposer.propose([Wanted(3, [2, *own[:2], 8, 9, *own[-3:]], 8)]) == {3: [8, 9, 2]}  # a tie


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of a long text is searched, and only the latest of many short matches are compared further."""
    monkeypatch.setattr(ngram, "CANDIDATES", 2)
    text = np.array([7, 1, 2, 5, 1, 2, 6, 1, 2, 8, 7, 1, 2], np.int32)
    assert longest_match(text[:-1], text) == (2, 9)  # the longer match at the beginning is the third one from the end
    monkeypatch.setattr(ngram, "SEARCHED_TOKENS", 4)
    proposer = NgramProposer()
    proposer.propose([Wanted(1, [1, 2, 3, *range(10, 40), 1, 2], 4)])
    assert proposer.propose([Wanted(1, [], 4)]) == {}


def test_memory_is_bounded() -> None:
    proposer = NgramProposer()
    for i in range(300):
        finish(proposer, i, [0], list(range(1000)), b"%d" % (i % 100))
    assert len(proposer._finished) == ngram.MAX_ROOTS
    for i in range(200):
        finish(proposer, i, [0], list(range(1000)), b"x")
    kept = proposer._finished[b"x"]
    assert len(kept.tokens) >= ngram.KEPT_TOKENS and kept._room.nbytes <= 4 * 4 * ngram.KEPT_TOKENS
    assert not proposer._open


def test_unknown_sequences_are_no_error() -> None:
    proposer = NgramProposer()
    proposer.commit(5, [1]), proposer.preempt(5), proposer.fork(5, 6), proposer.end(5)
    proposer.propose([Wanted(1, [1, 1, 1], 4)])
    proposer.reset()
    assert proposer.propose([Wanted(1, [2, 2, 2], 4)]) == {1: [2, 2]}
