"""A draft model in the engine: answers stay as they are, and its state follows that of its target.

The strongest check is a draft with the weights of its target: every draft must be accepted, however prefixes, forks,
preemption and swaps moved the pages.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from cpu.test_drafts import DRAFTS, NEW_TOKENS, PROMPTS, STACKS, Answers, loaded, plain, requests
from oracle.mixers import CONVOLUTION, FULL, LOCAL, NORM, VOCAB, WIDTH
from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.engine.model_drafts import ModelDrafting
from ridgeline.errors import RequestError
from ridgeline.runtime import drafter
from ridgeline.runtime.filled import Filled
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.model_drafter import ModelDrafter
from ridgeline.sample.rejection import Draft
from ridgeline.sample.sampler import NoiseKey
from ridgeline.sched.scheduler import Scheduler
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec import GatedMLP, Layer, ModelSpec, TokenMixer, to_json
from ridgeline.spec.groups import StateGroup, state_groups, with_layers

DRAFT_STACKS: dict[str, tuple[TokenMixer, ...]] = {"full": (FULL,), "local": (LOCAL, FULL)}


@cache
def draft_of(name: str) -> LoadedModel:
    """Return a tiny draft with random weights, or a target of attention as its own draft."""
    if name in STACKS:
        return loaded(name)
    with TemporaryDirectory() as folder:
        layers = tuple(Layer(mixer, GatedMLP(16), NORM) for mixer in DRAFT_STACKS[name])
        config = {"model_type": "ridgeline", "spec": to_json(ModelSpec("draft", VOCAB, WIDTH, 256, layers, NORM))}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(folder, load_format="dummy", skip_tokenizer_init=True, cache="off").loaded


def settings(name: str, draft: str, **options: Any) -> EngineConfig:
    usual = {"max_num_seqs": 8, "block_size": 4, "state_snapshot_tokens": 16, "num_speculative_tokens": DRAFTS}
    return resolve(
        loaded(name).spec, 256, EngineOptions(**usual | options), free_bytes=1 << 30, fixed_len=True,
        draft=draft_of(draft).spec,
    )  # fmt: skip


def serve(engine: Engine, rounds: int = 1, **params: Any) -> Answers:
    out: Answers = {}
    for _ in range(rounds):  # the second round finds the prefixes of the first
        for i, request in enumerate(requests(**params)):
            engine.add(i, request)
        out = answers_of(engine)
    return out


def answers_of(engine: Engine) -> Answers:
    """Run an engine until all its requests are answered."""
    out: Answers = {}
    while len(engine):
        for event in engine.step():
            assert event.error is None
            out.setdefault((event.request, event.choice), []).extend(event.tokens)
        engine.check()
    assert engine.stats().unproposed is None
    return out


def tight(config: EngineConfig, how: str) -> EngineConfig:
    """Return settings with so few pages that sequences are preempted."""
    few = tuple(g.most_pages(61 + NEW_TOKENS) + 8 for g in config.groups)
    return replace(config, num_pages=few, num_host_pages=tuple(4 * n if how == "swap" else 0 for n in few))


@pytest.mark.parametrize("draft", DRAFT_STACKS)
@pytest.mark.parametrize("name", STACKS)
def test_a_draft_model_changes_nothing(name: str, draft: str) -> None:
    engine = Engine(loaded(name), settings(name, draft), draft=draft_of(draft))
    assert serve(engine, rounds=2) == plain(name)
    assert engine.stats().draft_tokens > 0


SAMPLED = {"temperature": 1.0, "n": 2, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2}


@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_drawn_answers_stay_as_they_are(name: str) -> None:
    engine = Engine(loaded(name), settings(name, "full", max_num_seqs=16), draft=draft_of("full"))
    assert serve(engine, **SAMPLED) == plain(name, **SAMPLED)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "n": 2, "top_k": 20}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("how", ["", "recompute", "swap", "chunks"])
def test_every_draft_of_a_model_that_is_its_own_draft_is_accepted(how: str, params: dict[str, Any]) -> None:
    """A row of the draft's state that is missing, stale or of another sequence would change its tokens."""
    config = settings("attention", "attention", max_num_seqs=16, max_num_batched_tokens=24 if how else 512)
    engine = Engine(
        loaded("attention"), tight(config, how) if how in ("recompute", "swap") else config, draft=draft_of("attention")
    )
    engine._scheduler._swap_cost = (lambda num_tokens, num_bytes: how) if how == "swap" else None
    assert serve(engine, rounds=2, **params) == plain("attention", **params)
    stats = engine.stats()
    assert stats.draft_tokens > 50
    # The last verification of an answer may have fewer tokens left than drafts; else all are accepted.
    assert stats.accepted_tokens >= stats.draft_tokens - DRAFTS * len(plain("attention", **params)) * 2
    if not how:
        assert stats.accepted_tokens == stats.draft_tokens
    if how in ("recompute", "swap"):
        assert stats.preempted_swap if how == "swap" else stats.preempted_recompute


# ---- planted bugs: each loses accepted drafts, and none changes an answer --------------------------------------------


def wrong_second_drafts(patch: pytest.MonkeyPatch) -> None:
    """Make the second draft of each verification wrong, and draft in each third step only.

    So the rows after it must be computed again, for the tokens that two steps without drafts gave.
    """
    propose, steps = ModelDrafting.propose, count()

    def every_third(self: ModelDrafting, scheduler: Scheduler, answers: Any) -> None:
        if next(steps) % 3 == 0:
            propose(self, scheduler, answers)

    patch.setattr(ModelDrafting, "propose", every_third)
    extend = drafter.extend

    def extended(drafts: Any, asks: Any, going: Any, *rest: Any) -> list[int]:
        left = extend(drafts, asks, going, *rest)
        for i in going:
            if len(drafts[i]) == 2:
                drafts[i][-1] = Draft((drafts[i][-1].token + 1) % VOCAB)
        return left

    patch.setattr(drafter, "extend", extended)
    run = ModelDrafter._run  # one round at a time, so that the wrong draft is in the draft's state too
    patch.setattr(ModelDrafter, "_run", lambda self, spans, asks, rounds: run(self, spans, asks, 1))


def rejected_rows_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Filled, "drop", lambda *args: None)


def missing_rows_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Filled, "right", lambda self, sequence, row, length: length)


def one_position_late(patch: pytest.MonkeyPatch) -> None:
    run = ModelDrafter._run
    patch.setattr(
        ModelDrafter, "_run",
        lambda self, spans, asks, rounds: run(self, [s._replace(start=s.start + 1) for s in spans], asks, rounds),
    )  # fmt: skip


@cache
def first_accepted() -> int:
    """Return how many first drafts are accepted, which is all of them, if the second ones are wrong."""
    with pytest.MonkeyPatch.context() as patch:
        wrong_second_drafts(patch)
        engine = Engine(loaded("attention"), settings("attention", "attention"), draft=draft_of("attention"))
        assert serve(engine) == plain("attention")
    counts = engine.stats().drafts
    assert counts.accepted_at[0] == counts.verifications
    return counts.accepted_at[0]


@pytest.mark.parametrize("bug", [rejected_rows_stay, missing_rows_are_read, one_position_late])
def test_a_bug_in_the_draft_costs_only_drafts(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_accepted() > 20
    wrong_second_drafts(monkeypatch)
    bug(monkeypatch)
    engine = Engine(loaded("attention"), settings("attention", "attention"), draft=draft_of("attention"))
    assert serve(engine) == plain("attention")
    counts = engine.stats().drafts
    assert counts.accepted_at[0] < counts.verifications


def test_a_request_limits_its_drafts() -> None:
    """The first request has none, the second one at most one in a step, and the third as many as the engine."""
    engine = Engine(loaded("attention"), settings("attention", "attention"), draft=draft_of("attention"))
    limits = {0: 0, 1: 1, 2: None}
    for i, limit in limits.items():
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, num_speculative_tokens=limit)
        engine.add(i, GenerationRequest(PROMPTS[1], params, (NoiseKey(0, 0),)))
    most, found = dict.fromkeys(limits, 0), dict[int, list[int]]()
    while len(engine):
        for event in engine.step():
            found.setdefault(event.request, []).extend(event.tokens)
            most[event.request] = max(most[event.request], len(event.tokens))
    assert most == {0: 1, 1: 2, 2: DRAFTS + 1}
    assert found[0] == found[1] == found[2]


class Clock:
    """Counts seconds: a step takes one, and so do the first calls of the draft model; later ones take twenty more.

    Real times depend on what else the machine does, and with some of them no draft pays.
    """

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def drafted(self) -> None:
        self.calls += 1
        self.now += 20.0 if self.calls > 12 else 0.0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_gain_is_measured_where_depths_are_chosen(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps in flight, steps overlap while the rule rests, and none does when drafts are made.

    Drafts pay at first, and then no more.
    """
    clock, find = Clock(), ModelDrafting._find

    def timed(*args: Any) -> Any:
        clock.drafted()
        return find(*args)

    monkeypatch.setattr("ridgeline.engine.drafts.time", clock)
    monkeypatch.setattr(ModelDrafting, "_find", timed)
    config = settings("attention", "attention", draft_depth="chosen", steps_in_flight=in_flight, max_num_seqs=16)
    engine = Engine(loaded("attention"), config, draft=draft_of("attention"))
    assert serve(engine, rounds=4, n=2) == plain("attention", n=2)
    speed = engine.stats().draft_speed
    assert speed is not None and speed.factor is not None and speed.expected_factor is not None
    assert speed.seconds > speed.drafting > 0
    assert len(speed.depths) == DRAFTS + 1 and speed.depths[0] > 0
    assert sum(speed.depths[1:]) == engine.stats().drafts.verifications


def test_a_draft_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(loaded("attention"), settings("attention", "full"), draft=draft_of("full"))

    def broken(*args: Any) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(ModelDrafter, "_run", broken)
    for i, request in enumerate(requests()):
        engine.add(i, request)
    found: Answers = {}
    while len(engine):
        for event in engine.step():
            found.setdefault((event.request, event.choice), []).extend(event.tokens)
    assert found == plain("attention")
    assert "no such kernel" in (engine.stats().unproposed or "")


def test_nan_of_a_draft_gives_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ModelDrafter, "_run", lambda self, spans, asks, rounds: [np.full((len(asks), VOCAB), np.nan, np.float32)]
    )
    engine = Engine(loaded("attention"), settings("attention", "full"), draft=draft_of("full"))
    assert serve(engine) == plain("attention")
    assert engine.stats().draft_tokens == 0


# ---- memory, and what does not fit -----------------------------------------------------------------------------------


def test_groups_of_both_models_share_page_tables() -> None:
    target, draft = loaded("hybrid").spec, draft_of("local").spec
    own = state_groups(target, page_tokens=4)
    more = state_groups(draft, page_tokens=4)
    both = with_layers(own, more, len(target.layers))
    assert sum(g.page_bytes for g in both) == sum(g.page_bytes for g in (*own, *more))
    assert len(both) == len(own)  # full and local attention are in both
    for group in both:
        ends = 0
        for slot in group.slots:
            assert slot.offset == ends  # no two layers overlap
            ends = slot.offset + slot.bytes
        assert ends == group.page_bytes
    lone = with_layers(state_groups(loaded("mamba").spec, page_tokens=4), more, 2)
    assert [g.name for g in lone] == ["snapshot", *(g.name for g in more)]
    assert isinstance(lone[-1], StateGroup)


def write(folder: Path, *mixers: TokenMixer, vocab: int = VOCAB) -> str:
    spec = ModelSpec("draft", vocab, WIDTH, 256, tuple(Layer(m, GatedMLP(16), NORM) for m in mixers), NORM)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": to_json(spec)}))
    return str(folder)


def test_drafts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = write(tmp_path / "target", FULL)

    def run(draft: str) -> LLM:
        options = EngineOptions(speculative=draft)
        return LLM(target, load_format="dummy", skip_tokenizer_init=True, engine=options)

    with pytest.raises(RequestError, match="98 tokens and the model 97"):
        run(write(tmp_path / "wide", FULL, vocab=VOCAB + 1))
    with pytest.raises(RequestError, match=r"recurrent layer \(layer 1\)"):
        run(write(tmp_path / "recurrent", FULL, CONVOLUTION))
    with pytest.raises(RequestError, match=r"must be auto, off, ngram, or a draft model"):
        run("./ngrm")
    llm = run(write(tmp_path / "draft", FULL))
    answer = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=8, temperature=0))[0]
    assert len(answer.outputs[0].token_ids) == 8
    assert llm.config is not None
    assert llm.config.num_speculative_tokens == 4


def test_another_vocabulary_is_refused_by_its_first_token() -> None:
    with pytest.raises(RequestError, match=r"token \d+ is .* there and .* in the model"):
        LLM("pocket", engine=EngineOptions(speculative="../shared/data/models/stories260K"))


def test_the_built_in_pair_drafts_well() -> None:
    """Greedily, many drafts are accepted; the answers are those without drafts."""
    prompt = "def __init__(self, path):"
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain_llm = LLM("pocket")
    with pytest.raises(RequestError, match=r"speculative='ngram'\) is given as well"):
        LLM("pocket", speculative="pocket-draft", engine=EngineOptions(speculative="ngram"))
    llm = LLM("pocket", speculative="pocket-draft", engine=EngineOptions(draft_depth="fixed"))
    assert llm.generate(prompt, params)[0].outputs == plain_llm.generate(prompt, params)[0].outputs
    stats = llm.stats()
    assert stats is not None
    assert stats.accepted_tokens > 0.3 * stats.draft_tokens
