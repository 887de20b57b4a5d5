"""Proposers of drafts: they never change an answer, and they are told of every event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from cpu.test_drafts import DRAFTS, NEW_TOKENS, PROMPTS, SAMPLED, STACKS, Answers, loaded, plain, requests, settings
from oracle.mixers import VOCAB
from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.propose import NgramProposer, Proposer, Wanted
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.settings import EngineConfig, EngineOptions
from ridgeline.spec.request import BeamSearchParams

Script = Callable[[Wanted], Sequence[int]]


@dataclass
class Recorder:
    """Proposes the drafts of a script, and checks that the events agree with the tokens that it receives."""

    script: Script
    # tokens of each sequence: received at first, then appended by commits
    tokens: dict[int, list[int]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    preempted: list[int] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)
    calls: int = 0

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Sequence[int]]:
        self.calls += 1
        ids = [w.sequence for w in wanted]
        assert len(set(ids)) == len(ids) and not self.over.intersection(ids)
        for w in wanted:
            assert self.tokens.setdefault(w.sequence, list(w.tokens)) == list(w.tokens), "a commit was not reported"
            assert 0 < w.most <= DRAFTS
        return {w.sequence: self.script(w) for w in wanted}

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        assert tokens and sequence not in self.over
        if sequence in self.tokens:
            self.tokens[sequence] += tokens

    def fork(self, parent: int, child: int) -> None:
        self.forks.append((parent, child))

    def preempt(self, sequence: int) -> None:
        assert sequence not in self.over
        self.preempted.append(sequence)

    def end(self, sequence: int) -> None:
        assert sequence not in self.over
        self.over.add(sequence)

    def reset(self) -> None:
        self.tokens.clear()
        self.calls += 100


def right(answers: Answers) -> Script:
    """Propose the answer's next tokens; each answer is recognized by all tokens so far."""
    whole = [[*PROMPTS[request], *tokens] for (request, _), tokens in answers.items()]

    def propose(wanted: Wanted) -> Sequence[int]:
        known = list(wanted.tokens)
        return next((tokens[len(known) :] for tokens in whole if tokens[: len(known)] == known), [])

    return propose


def wrong(answers: Answers) -> Script:
    """Propose tokens that are all wrong."""
    coming = right(answers)
    return lambda wanted: [(token + 1) % VOCAB for token in coming(wanted)]


def serve(engine: Engine, **params: object) -> tuple[Answers, int]:
    """Answer all requests at once; return their tokens and the number of steps."""
    out: Answers = {}
    steps = 0
    for i, request in enumerate(requests(**params)):
        engine.add(i, request)
    while len(engine):
        for event in engine.step():
            assert event.error is None
            out.setdefault((event.request, event.choice), []).extend(event.tokens)
        engine.check()
        steps += 1
        assert steps < 3000, "no progress"
    return out, steps


def engine_of(name: str, proposer: Proposer, config: EngineConfig | None = None) -> Engine:
    return Engine(loaded(name), config or settings(name), proposer=proposer)


@pytest.mark.parametrize("name", ["attention", "hybrid"])
@pytest.mark.parametrize("script", [right, wrong])
def test_a_proposer_changes_no_answer(name: str, script: Callable[[Answers], Script]) -> None:
    wanted = plain(name)
    recorder = Recorder(script(wanted))
    engine = engine_of(name, recorder)
    out, steps = serve(engine)
    assert out == wanted
    stats = engine.stats()
    assert steps - 1 <= recorder.calls <= steps  # it is not called if each answer lacks only its last token
    assert recorder.over == set(recorder.tokens) and len(recorder.over) == len(PROMPTS)
    assert stats.unproposed is None and stats.draft_tokens > NEW_TOKENS
    if script is right:
        assert stats.accepted_tokens == stats.draft_tokens
        assert steps <= 3 + -(-NEW_TOKENS // (DRAFTS + 1))
    else:
        assert stats.accepted_tokens == 0 and steps >= NEW_TOKENS


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_looked_up_drafts_change_no_answer(name: str, params: dict[str, Any]) -> None:
    """The second time, finished answers hold every token of the answers."""
    wanted = plain(name, **params)
    engine = engine_of(name, NgramProposer(), settings(name, max_num_seqs=16))
    assert serve(engine, **params)[0] == wanted
    before = engine.stats()
    assert serve(engine, **params)[0] == wanted
    stats = engine.stats()
    assert stats.unproposed is None
    assert stats.accepted_tokens - before.accepted_tokens > NEW_TOKENS
    drafts = stats.drafts
    assert sum(drafts.accepted_at) == drafts.accepted and len(drafts.accepted_at) <= DRAFTS
    assert drafts.verifications <= drafts.run <= DRAFTS * drafts.verifications


@pytest.mark.parametrize("how", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption(depth: int, how: Literal["recompute", "swap"]) -> None:
    name = "hybrid"
    wanted = plain(name)
    config = settings(name, steps_in_flight=depth, max_num_batched_tokens=24, state_snapshot_tokens=4)
    few = tuple(g.most_pages(61 + NEW_TOKENS) + 3 for g in config.groups)
    config = replace(config, num_pages=few, num_host_pages=tuple(4 * n if how == "swap" else 0 for n in few))
    recorder = Recorder(right(wanted))
    engine = engine_of(name, recorder, config)
    engine._scheduler._swap_cost = (lambda num_tokens, num_bytes: how) if how == "swap" else None
    assert serve(engine)[0] == wanted
    stats = engine.stats()
    assert len(recorder.preempted) == stats.preempted_swap + stats.preempted_recompute > 0
    assert stats.accepted_tokens > 0


def test_forks_and_stops() -> None:
    """Choices of n = 3 fork from the first one; a stop token among accepted drafts ends an answer."""
    wanted = plain("hybrid", **SAMPLED)
    recorder = Recorder(right(wanted))
    engine = engine_of("hybrid", recorder, settings("hybrid", max_num_seqs=16))
    out, steps = serve(engine, **SAMPLED)
    assert out == wanted and steps < NEW_TOKENS
    assert len(recorder.forks) == 2 * (len(PROMPTS) - 1)  # a prompt of one token has nothing to share
    greedy = plain("hybrid")
    stop = greedy[3, 0][7]
    engine = engine_of("hybrid", Recorder(right(greedy)))
    assert serve(engine, stop_token_ids=(stop,))[0] == {
        key: tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for key, tokens in greedy.items()
    }


def test_beams_have_no_drafts_and_others_do() -> None:
    wanted = plain("attention")
    recorder = Recorder(right(wanted))
    engine = engine_of("attention", recorder, settings("attention", max_num_seqs=16))
    engine.add(99, GenerationRequest(PROMPTS[2], BeamSearchParams(beam_width=3, max_tokens=8), ()))
    assert {key: tokens for key, tokens in serve(engine)[0].items() if key[0] != 99} == wanted
    assert engine.stats().accepted_tokens > 0


class Failing(Recorder):
    """Raises an error or proposes an invalid token at one of its calls."""

    where: str = ""

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Sequence[int]]:
        found = super().propose(wanted)
        if self.calls == 5:
            if self.where == "propose":
                raise KeyError("no such table")
            if self.where == "token":
                return {w.sequence: [VOCAB] for w in wanted}
            if self.where == "sequence":
                return {-1: [5]}
            if self.where == "fraction":
                return {w.sequence: [3.7] for w in wanted}  # type: ignore[list-item]
            if self.where == "exit":
                sys.exit("no table")
            if self.where == "change":
                wanted[0].tokens.append(5)  # type: ignore[attr-defined]
        return found

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        super().commit(sequence, tokens)
        if self.where == "commit" and self.calls == 5:
            raise KeyError("no such table")


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("propose", "KeyError: 'no such table'"),
        ("commit", "KeyError: 'no such table'"),
        ("token", "ValueError: it proposed token 97; the vocabulary has 97"),
        ("sequence", "ValueError: it proposed drafts for sequence -1, which can take none"),
        ("fraction", "TypeError: 'float' object cannot be interpreted as an integer"),
        ("exit", "SystemExit: no table"),
        ("change", "AttributeError: 'ReadOnly' object has no attribute 'append'"),
    ],
)
def test_a_failing_proposer_changes_no_answer(where: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(lambda wanted: [])
    failing.where = where
    engine = engine_of("attention", failing, settings("attention", steps_in_flight=2))
    assert serve(engine)[0] == plain("attention")
    assert engine.stats().unproposed == f"the proposer Failing failed with {why}"
    assert [r.message for r in caplog.records] == [f"{engine.stats().unproposed}; answers continue without drafts"]
    assert failing.calls == 5


def test_drafts_are_cut_to_the_tokens_of_a_step() -> None:
    recorder = Recorder(lambda wanted: [5] * 1000)
    engine = engine_of("attention", recorder)
    assert serve(engine)[0] == plain("attention")
    assert engine.stats().unproposed is None


def test_who_may_propose() -> None:
    engine = engine_of("attention", Recorder(lambda wanted: []))
    engine.add(0, requests()[0])
    with pytest.raises(RequestError, match="this engine has a proposer"):
        engine.propose(0, 0, [5])


def test_an_engine_that_was_reset_proposes_again() -> None:
    wanted = plain("attention")
    failing = Failing(wrong(wanted))
    failing.where = "propose"
    engine = engine_of("attention", failing)
    assert serve(engine)[0] == wanted and engine.stats().unproposed
    engine.add(7, requests()[0])
    engine.step()
    failing.script = right(wanted)
    engine.reset()
    assert serve(engine)[0] == wanted
    assert engine.stats().unproposed is None and engine.stats().accepted_tokens > 0


def test_users_set_num_speculative_tokens_with_a_proposer() -> None:
    recorder = Recorder(lambda wanted: list(wanted.tokens[: wanted.most]))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    plain_llm = LLM("pocket", skip_tokenizer_init=True)
    four = EngineOptions(num_speculative_tokens=4)
    llm = LLM("pocket", skip_tokenizer_init=True, engine=four, proposer=recorder)
    assert llm.config is not None and llm.config.num_speculative_tokens == 4
    out = [each.generate([prompt], params)[0].outputs[0].token_ids for each in (plain_llm, llm)]
    assert out[0] == out[1] and recorder.calls > 0
    with pytest.raises(
        RequestError, match=r"is 4, but nothing proposes draft tokens; set --speculative ngram, pass LLM\(proposer"
    ):
        LLM("pocket", engine=four)
    with pytest.raises(RequestError, match="a proposer needs cache='on' and EngineOptions"):
        LLM("pocket", proposer=recorder)
    with pytest.raises(RequestError, match="num_speculative_tokens is -1; it must be a whole number of at least 0"):
        LLM("pocket", skip_tokenizer_init=True, engine=EngineOptions(num_speculative_tokens=-1))
