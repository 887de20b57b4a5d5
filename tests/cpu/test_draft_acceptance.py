"""Ways to accept drafts in the engine: greedy answers never change, and q reaches the verifier."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cpu.test_drafts import NEW_TOKENS, PROMPTS, SAMPLED, Answers, loaded, plain, requests, settings
from cpu.test_proposers import right, serve
from oracle.mixers import VOCAB
from ridgeline.engine import Engine
from ridgeline.propose import Drafts, NgramProposer, Wanted
from ridgeline.sample.rejection import Distribution
from ridgeline.settings import EngineConfig
from ridgeline.spec.acceptance import Acceptance

FLAT = Distribution(np.arange(VOCAB), np.full(VOCAB, 1 / VOCAB))


@dataclass
class Flat:
    """Draws every draft from a flat distribution; the noise depends on the tokens before it only."""

    q: Distribution | None = FLAT
    bias: int = 0
    proposed: int = 0
    lengths: list[int] = field(default_factory=list)

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Drafts]:
        found = {}
        for w in wanted:
            rng = np.random.default_rng([*w.tokens, 7])
            tokens = rng.integers(0, VOCAB, w.most).tolist()
            found[w.sequence] = Drafts(tokens, None if self.q is None else [self.q] * (len(tokens) + self.bias))
            self.proposed += len(tokens)
        return found

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        self.lengths.append(len(tokens))

    def fork(self, parent: int, child: int) -> None: ...
    def preempt(self, sequence: int) -> None: ...
    def end(self, sequence: int) -> None: ...
    def reset(self) -> None: ...


class Scripted(Flat):
    """Proposes the drafts of a script, as point masses."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.script = script

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Drafts]:
        return {w.sequence: Drafts(self.script(w)) for w in wanted}


def config(name: str, acceptance: Acceptance, **options: Any) -> EngineConfig:
    return replace(settings(name, max_num_seqs=16, **options), draft_acceptance=acceptance)


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_greedy_answers_are_those_without_drafts(acceptance: Acceptance) -> None:
    name = "attention"
    wanted = plain(name)
    for proposer in (NgramProposer(), Flat(), Scripted(right(wanted))):
        engine = Engine(loaded(name), config(name, acceptance), proposer=proposer)
        assert serve(engine)[0] == wanted
        stats = engine.stats()
        assert stats.unproposed is None and stats.draft_acceptance == acceptance and stats.draft_tokens


def test_same_ignores_q() -> None:
    wanted = plain("attention", **SAMPLED)
    engine = Engine(loaded("attention"), config("attention", "same"), proposer=Flat())
    assert serve(engine, **SAMPLED)[0] == wanted


def answers(
    acceptance: Acceptance, flat: Flat, name: str = "attention", alone: bool = False, **params: Any
) -> tuple[Answers, int]:
    engine = Engine(loaded(name), config(name, acceptance), proposer=flat)
    if not alone:
        out, _ = serve(engine, **params)
        return out, engine.stats().accepted_tokens
    out = {}
    for i, request in enumerate(requests(**params)):
        engine.add(i, request)
        while len(engine):
            for event in engine.step():
                out.setdefault((i, event.choice), []).extend(event.tokens)
    return out, engine.stats().accepted_tokens


@pytest.mark.parametrize(("name", "params"), [
    ("hybrid", {"temperature": 1.0}), ("attention", {**SAMPLED, "logprobs": 2}),
    ("attention", {"temperature": 1.3, "min_tokens": 9, "bad_token_ids": (5, 6), "logprobs_mode": "processed"}),
], ids=["plain", "n, penalties, logprobs", "masks"])  # fmt: skip
def test_rejection_does_not_depend_on_the_batch(name: str, params: dict[str, Any]) -> None:
    together, accepted = answers("rejection", Flat(), name, **params)
    apart, again = answers("rejection", Flat(), name, alone=True, **params)
    assert together == apart and accepted == again > 0
    assert all(len(tokens) == NEW_TOKENS for tokens in together.values())
    assert together.keys() == {(i, j) for i in range(len(PROMPTS)) for j in range(params.get("n", 1))}


def test_logprobs_of_accepted_and_of_other_tokens_are_those_of_the_model() -> None:
    """Log probabilities of an answer equal those of the same tokens as greedy drafts would have them."""
    name, params = "attention", {"temperature": 1.0, "logprobs": 0}
    engine = Engine(loaded(name), config(name, "rejection"), proposer=Flat())
    values: dict[int, list[float]] = {}
    tokens: dict[int, list[int]] = {}
    for i, request in enumerate(requests(**params)):
        engine.add(i, request)
    while len(engine):
        for event in engine.step():
            values.setdefault(event.request, []).extend(e.logprob for e in event.logprobs)
            tokens.setdefault(event.request, []).extend(event.tokens)
    assert engine.stats().accepted_tokens > 0
    for i, prompt in enumerate(PROMPTS):
        known = [*prompt, *tokens[i]]
        step = loaded(name).dense_step([known], [len(known)])
        model, memory = loaded(name).model, loaded(name).table.memory
        rows = memory.integers(np.arange(len(prompt) - 1, len(known) - 1))
        logits = np.asarray(memory.get(model.logits(model.forward(step), rows)), np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
        np.testing.assert_allclose(values[i], logprobs[np.arange(len(tokens[i])), tokens[i]], atol=2e-5)


def test_q_reaches_the_verifier() -> None:
    """A flat draft of a nearly flat model is accepted often, but not as a point mass, whose chance is 1 in 97."""
    params = {"temperature": 4.0}
    _, with_q = answers("rejection", Flat(), **params)
    _, without = answers("rejection", Flat(None), **params)
    _, same = answers("same", Flat(), **params)
    assert with_q > 20 * max(1, without) and without < 20 and same < 20


def test_typical_accepts_likely_drafts_and_says_so() -> None:
    flat = Flat()
    out, accepted = answers("typical", flat, temperature=4.0)
    assert (
        accepted == sum(flat.lengths) - len(flat.lengths) > 50
    )  # each of 97 tokens is likelier than 0.3 exp(-entropy)
    assert all(len(tokens) == NEW_TOKENS for tokens in out.values())


@pytest.mark.parametrize(("flat", "why"), [
    (Flat(bias=1), "it proposed 5 tokens with 6 distributions"),
    (Flat(Distribution(np.arange(VOCAB), np.full(VOCAB, 0.5))), "their sum is not 1"),
    (Flat(Distribution(np.arange(VOCAB)[::-1], np.full(VOCAB, 1 / VOCAB))), "not ascending token ids below 97"),
    (Flat(Distribution(np.arange(VOCAB + 1), np.full(VOCAB + 1, 1 / (VOCAB + 1)))), "ascending token ids below 97"),
    (Flat(Distribution(np.arange(2), np.ones(3) / 3)), "has ids (2,) and probabilities (3,)"),
    (Flat(Distribution(np.array([VOCAB - 1]), np.array([np.nan]))), "negative, or their sum is not 1"),
    (Flat(Distribution(np.array([VOCAB - 1]), np.array([1.0]))), "which its distribution does not have"),
], ids=["too many", "sum", "order", "vocabulary", "shapes", "NaN", "other token"])  # fmt: skip
def test_a_wrong_distribution_ends_drafts_not_answers(flat: Flat, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = Engine(loaded("attention"), config("attention", "same"), proposer=flat)
    assert serve(engine)[0] == plain("attention")
    assert why in (engine.stats().unproposed or "")
