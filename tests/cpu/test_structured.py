"""Structured outputs in the sampler: what comes out follows the structure, whichever way the tokens are computed."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.errors import RequestError
from ridgeline.plan import EngineOptions
from ridgeline.runtime.masks import Matcher
from ridgeline.runtime.runner import Forward, Runner
from ridgeline.spec.request import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PARAMS = [
    SamplingParams(max_tokens=140, seed=4, n=2, ignore_eos=True),  # first, so that the others must make room
    SamplingParams(max_tokens=120, seed=1, n=2, structured_outputs={"json": SCHEMA}),
    SamplingParams(max_tokens=60, seed=2, structured_outputs={"regex": "[a-c]{2,5}-[0-9]{3}"}, logprobs=2),
    SamplingParams(max_tokens=60, temperature=0, structured_outputs={"choice": ["red", "green", "gr\u00fcn"]}),
    SamplingParams(max_tokens=60, seed=3, structured_outputs={"grammar": 'start: "(" start ")" | "."'}, top_k=3),
]
PROMPTS = ["def f(x):", "import os\n", "class A:", "# ", "print("]


def texts(llm: LLM) -> list[list[str]]:
    return [[a.text for a in o.outputs] for o in llm.generate(PROMPTS, PARAMS)]


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
        # Pages for fewer sequences than there are: some are preempted, and walk their grammars again.
        EngineOptions(block_size=4, kv_cache_memory_bytes=40 * 4 * 4096, max_num_seqs=6),
        EngineOptions(steps_in_flight=2),
    ],
)
def test_the_engine_gives_what_naive_sampling_gives(options: EngineOptions, wanted: list[list[str]]) -> None:
    llm = LLM("pocket", engine=options, max_model_len=150)
    assert texts(llm) == wanted
    stats = llm.stats()
    assert stats is not None
    if options.kv_cache_memory_bytes:
        assert stats.preempted_recompute > 0


def test_masks_are_made_before_logits_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def watch(owner: type, name: str) -> None:
        found = getattr(owner, name)

        def watched(self: object, *args: object) -> object:
            order.append(name)
            return found(self, *args)

        monkeypatch.setattr(owner, name, watched)

    watch(Matcher, "prepare"), watch(Forward, "logits"), watch(Runner, "submit")
    LLM("pocket").generate(PROMPTS[0], SamplingParams(max_tokens=8, structured_outputs={"regex": "[a-z]{8}"}))
    after = [order[i : i + 3] for i, name in enumerate(order) if name == "submit"]
    assert after == [["submit", "prepare", "logits"]] * len(after) != []


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
def test_what_is_no_structure(given: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        StructuredOutputs.of(given)
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})
