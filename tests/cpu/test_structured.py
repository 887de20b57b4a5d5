"""Structured outputs in the sampler: every answer follows its structure, however its tokens are computed."""

from __future__ import annotations

import json
import re
import threading
import time
from itertools import pairwise
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.engine import late
from ridgeline.errors import RequestError
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.sample import masks
from ridgeline.sample.grammar import Grammars
from ridgeline.sample.masks import Grammar, Matcher
from ridgeline.settings import EngineOptions
from ridgeline.spec.structure import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PARAMS = [
    # this request is first, so that others are preempted for it
    SamplingParams(max_tokens=140, seed=4, n=2, ignore_eos=True),
    SamplingParams(max_tokens=120, seed=1, n=2, structured_outputs={"json": SCHEMA}),
    SamplingParams(max_tokens=60, seed=2, structured_outputs={"regex": "[a-c]{2,5}-[0-9]{3}"}, logprobs=2),
    SamplingParams(max_tokens=60, temperature=0, structured_outputs={"choice": ["red", "green", "gr\u00fcn"]}),
    SamplingParams(max_tokens=60, seed=3, structured_outputs={"grammar": 'start: "(" start ")" | "."'}, top_k=3),
]
PROMPTS = ["def f(x):", "import os\n", "class A:", "# ", "print("]


def texts(llm: LLM) -> list[list[str]]:
    answers = [o.outputs for o in llm.generate(PROMPTS, PARAMS)]
    assert all(a.error is None for some in answers for a in some)
    return [[a.text for a in some] for some in answers]


@pytest.fixture(scope="module")
def wanted() -> list[list[str]]:
    return texts(LLM("pocket", cache="off"))


def test_answers_follow_their_structure(wanted: list[list[str]]) -> None:
    assert all(jsonschema_rs.is_valid(SCHEMA, json.loads(text)) for text in wanted[1])
    assert re.fullmatch("[a-c]{2,5}-[0-9]{3}", wanted[2][0])
    assert wanted[3][0] in ("red", "green", "gr\u00fcn")
    assert re.fullmatch(r"\(*\.\)*", wanted[4][0])
    outputs = LLM("pocket").generate(PROMPTS, PARAMS)
    assert [[a.finish_reason for a in o.outputs] for o in outputs[1:4]] == [["stop"] * 2, ["stop"], ["stop"]]


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(),
        EngineOptions(max_num_batched_tokens=3, block_size=2),
        # With pages for fewer sequences than there are, some are preempted, and their grammars are advanced again.
        EngineOptions(block_size=4, kv_cache_memory_bytes=40 * 4 * 2048, max_num_seqs=6),
        EngineOptions(steps_in_flight=2),
    ],
)
@pytest.mark.parametrize("quick", [0.0, np.inf])
def test_the_engine_gives_the_tokens_of_naive_sampling(
    options: EngineOptions, quick: float, wanted: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are made in threads only, or within the steps."""
    monkeypatch.setattr(masks, "QUICK_SECONDS", quick)
    llm = LLM("pocket", engine=options, max_model_len=150)
    assert texts(llm) == wanted
    stats = llm.stats()
    assert stats is not None
    if options.kv_cache_memory_bytes:
        assert stats.preempted_recompute > 0


def test_masks_are_begun_before_the_steps_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def watch(owner: type, name: str) -> None:
        found = owner.submit

        def watched(self: object, *args: object, **more: object) -> object:
            order.append(name)
            return found(self, *args, **more)

        monkeypatch.setattr(owner, "submit", watched)

    monkeypatch.setattr(masks, "QUICK_SECONDS", 0.0)
    watch(Grammar, "mask"), watch(DeviceRunner, "step")
    LLM("pocket").generate(PROMPTS[0], SamplingParams(max_tokens=8, structured_outputs={"regex": "[a-z]{8}"}))
    steps = [i for i, name in enumerate(order) if name == "step"]
    assert len(steps) > 1 and all("mask" in order[before:at] for before, at in pairwise([0, *steps]))


@pytest.fixture(autouse=True)
def _wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer waits too long, although the machine may be busy."""
    monkeypatch.setattr(late, "MAX_WAIT_SECONDS", 300.0)


class Tap:
    """Holds back the masks of one grammar's answers until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
        self.open, self.pattern, self.grammars = threading.Event(), pattern, list[Grammar]()
        found, make, tap = Grammars.compile, Matcher.make, self
        monkeypatch.setattr(masks, "QUICK_SECONDS", 0.0)

        def compile_it(self: Grammars, structure: StructuredOutputs) -> Grammar:
            grammar = found(self, structure)
            tap.grammars += [grammar] if structure.regex == pattern else []
            grammar._quick = False  # a kept grammar may be quick
            return grammar

        def slow(self: Matcher) -> Any:
            assert self._grammar not in tap.grammars or tap.open.wait(60)
            return make(self)

        monkeypatch.setattr(Grammars, "compile", compile_it)
        monkeypatch.setattr(Matcher, "make", slow)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_late_mask_holds_up_its_own_answer_alone(monkeypatch: pytest.MonkeyPatch, steps_in_flight: int) -> None:
    """The other answers are complete before the first mask is ready, and all tokens equal those without a delay."""
    params = [
        SamplingParams(max_tokens=60, seed=2, structured_outputs={"regex": "[a-c]{2,5}-[0-9]{3}"}, logprobs=2),
        SamplingParams(max_tokens=40, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0, structured_outputs={"choice": ["red", "green"]}),
    ]
    llm = LLM("pocket", engine=EngineOptions(steps_in_flight=steps_in_flight))
    alone = [llm.generate(prompt, p)[0].outputs[0] for prompt, p in zip(PROMPTS, params, strict=False)]
    tap, over = Tap(monkeypatch, "[a-c]{2,5}-[0-9]{3}"), list[int]()

    def done(number: int, output: object) -> None:
        over.append(number)
        if len(over) == 2:
            tap.open.set()

    found = [o.outputs[0] for o in llm.generate(PROMPTS[:3], params, on_done=done)]
    assert sorted(over[:2]) == [1, 2] and over[2] == 0
    assert [(a.token_ids, a.text, a.logprobs) for a in found] == [(a.token_ids, a.text, a.logprobs) for a in alone]


@pytest.mark.parametrize("pattern", ["a" * 100_000, "(.*a.{20}b|.*b.{25}c)*"])
def test_slow_patterns_beside_another_answer(pattern: str) -> None:
    """Steps do not wait for the masks of a slow pattern: 100 tokens of another answer are
    complete before its 8 tokens.
    """
    llm, over = LLM("pocket"), list[int]()
    hostile = SamplingParams(max_tokens=8, n=4, seed=1, structured_outputs={"regex": pattern})
    params = [SamplingParams(max_tokens=100, seed=4, ignore_eos=True), hostile]
    alone = llm.generate(PROMPTS[0], params[0])[0].outputs[0]
    beside, slow = llm.generate(PROMPTS[:2], params, on_done=lambda number, output: over.append(number))
    assert beside.outputs[0].token_ids == alone.token_ids
    assert all(answer.error is None for answer in slow.outputs)
    assert over == [0, 1] or len(pattern) < 100  # with the second pattern, only some masks are slow


def test_an_answer_that_waits_too_long_ends_alone(monkeypatch: pytest.MonkeyPatch, wanted: list[list[str]]) -> None:
    monkeypatch.setattr(late, "MAX_WAIT_SECONDS", 0.0)
    tap = Tap(monkeypatch, "a+")
    llm = LLM("pocket")
    params = [SamplingParams(structured_outputs={"regex": "a+"}), PARAMS[0]]
    first, second = llm.generate(["x", PROMPTS[0]], params, on_done=lambda number, output: tap.open.set())
    assert first.outputs[0].finish_reason == "error" and "limit of 0 s" in str(first.outputs[0].error)
    assert [a.text for a in second.outputs] == wanted[0]
    llm.session.check()


def test_a_late_answer_is_preempted_and_aborted(monkeypatch: pytest.MonkeyPatch, wanted: list[list[str]]) -> None:
    """Other requests take the pages of an answer that waits; it still gives the same tokens."""
    options = EngineOptions(block_size=4, kv_cache_memory_bytes=40 * 4 * 2048, max_num_seqs=6)
    tap = Tap(monkeypatch, "[a-c]{2,5}-[0-9]{3}")
    # later than a step waits for a mask
    monkeypatch.setattr(tap.open, "wait", lambda seconds: time.sleep(0.005) or True)
    llm = LLM("pocket", engine=options, max_model_len=150)
    assert texts(llm) == wanted
    ids = [llm.session.add(llm.frontend.request(PROMPTS[0], PARAMS[2], i), lambda chunk: None) for i in range(3)]
    llm.session.step()
    for number in ids:
        llm.session.abort(number)
    llm.session.check()
    assert not len(llm.session)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_logits_are_kept_of_held_answers_only(monkeypatch: pytest.MonkeyPatch, steps_in_flight: int) -> None:
    """An answer that is preempted while it waits frees its logits: cost/memory.py counts only those of running
    sequences.
    """
    drop, stale = late.LateRows.drop_preempted, list[int]()

    def watched(self: late.LateRows) -> None:
        drop(self)
        waiting = [*self._waiting, *self._in_flight]
        stale.extend(sequence for sequence in waiting if not self._scheduler.is_held(sequence))

    monkeypatch.setattr(late.LateRows, "drop_preempted", watched)
    tap = Tap(monkeypatch, "[a-c]{2,5}-[0-9]{3}")
    pages = 26 * 4 * 2048  # pages for one sequence of 100 tokens, and the null page
    options = EngineOptions(block_size=4, kv_cache_memory_bytes=pages, max_num_seqs=6, steps_in_flight=steps_in_flight)
    llm = LLM("pocket", engine=options, max_model_len=100)
    params = [
        SamplingParams(max_tokens=85, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=60, seed=2, n=3, structured_outputs={"regex": "[a-c]{2,5}-[0-9]{3}"}),
    ]
    _, slow = llm.generate(PROMPTS[:2], params, on_done=lambda number, output: tap.open.set())
    assert sum(answer.error is None for answer in slow.outputs) == 3
    stats = llm.stats()
    assert stats is not None and stats.preempted_recompute > 0 and not stale


def test_one_that_no_token_satisfies_fails_alone(wanted: list[list[str]]) -> None:
    params = SamplingParams(structured_outputs={"regex": "abc"}, bad_token_ids=tuple(range(4096))[1:], max_tokens=5)
    first, second = LLM("pocket").generate(["x", PROMPTS[0]], [params, PARAMS[0]])
    assert first.outputs[0].finish_reason == "error" and "leave no token" in str(first.outputs[0].error)
    assert second.outputs[0].text == wanted[0][0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"regex": 3}, "regex is 3"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"what": "a"}, "'what'"),
    ],
)
def test_structures_that_are_invalid(given: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        StructuredOutputs.of(given)
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})
