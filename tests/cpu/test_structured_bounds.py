"""Structures from unknown clients: a structure that cannot be served is refused with one sentence, and nothing else
fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cpu.serving import serving
from ridgeline import LLM
from ridgeline.errors import RequestError
from ridgeline.sample import grammar_checks, guidance
from ridgeline.sample.grammar import Grammars
from ridgeline.sample.guidance_errors import sentence
from ridgeline.sample.schema_ends import endless
from ridgeline.spec.structure import StructuredOutputs


def chain(count: int, link: Callable[[str], Any]) -> dict[str, Any]:
    """Return a schema whose references form a chain."""
    links: dict[str, Any] = {f"a{i}": link(f"#/$defs/a{i + 1}") for i in range(count)}
    return {"$defs": {**links, f"a{count}": {"type": "null"}}, "$ref": "#/$defs/a0"}


RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2734)) + 'r2734: "a"\n'
BOMBS: dict[str, dict[str, Any]] = {
    "references": {"json": chain(3000, lambda ref: {"$ref": ref})},
    "allOf": {"json": chain(3000, lambda ref: {"allOf": [{"$ref": ref}]})},
    "rules": {"grammar": RULES},
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return LLM("pocket").grammars


@pytest.mark.parametrize("name", BOMBS)
def test_a_stack_overflow_names_the_limit(grammars: Grammars, name: str) -> None:
    with pytest.raises(RequestError, match="more stack than the limit of 8 MiB"):
        grammars.compile(StructuredOutputs.of(BOMBS[name]))
    grammars.compile(StructuredOutputs(regex="[a-z]"))


def test_a_result_is_cached(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = StructuredOutputs(regex="[p-q]"), StructuredOutputs(regex="[")
    assert not grammars.is_known(good)
    grammars.compile(good)
    with pytest.raises(RequestError):
        grammars.compile(bad)
    assert grammars.is_known(good) and grammars.is_known(bad)
    monkeypatch.setattr(grammar_checks.BoundedPool, "run_sync", None)  # the helper is not called again
    grammars.compile(good)
    with pytest.raises(RequestError, match="not valid"):
        grammars.compile(bad)
    monkeypatch.setattr(grammar_checks, "KEPT_SECONDS", -1.0)
    assert not grammars.is_known(good)


@pytest.mark.parametrize("schema", [True, {}, {"a": 1}, chain(30, lambda ref: {"$ref": ref})])
def test_odd_schemas_are_served(grammars: Grammars, schema: Any) -> None:
    grammars.compile(StructuredOutputs.of({"json": schema}))


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
DEEP = json.loads('{"items":' * 200 + "true" + "}" * 200)


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {**NODE, "required": ["next"], "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/no"}}, "$defs": {"no": {"$ref": "#/$defs/no"}}},
    ],
)
def test_references_to_itself_that_end_are_served(grammars: Grammars, schema: Any) -> None:
    assert endless(schema) is None
    grammars.compile(StructuredOutputs.of({"json": schema}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": False}, "the schema is false, so no value satisfies it"),
        ({"json": "3"}, "a JSON schema is an object, true or false; this one is '3'"),
        ({"json": "{"}, "the schema is not JSON: Expecting property name"),
        ({"json": '{"const": NaN}'}, "NaN is not a number of JSON"),
        ({"json": {"$ref": "#"}}, "no value satisfies the schema, because # demands itself again without end"),
        ({"json": {"allOf": [{"$ref": "#"}]}}, "because # demands itself again without end"),
        ({"json": {**NODE, "required": ["next"]}}, "because # demands itself again without end"),
        ({"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, "demands itself again without end"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "because #/$defs/a demands itself"),
        ({"json": {"$ref": "#/nope"}}, "a $ref to '#/nope', and there is nothing at that place"),
        ({"json": {"$ref": "http://x/y"}}, "a $ref to 'http://x/y': only references into the same schema"),
        ({"json": {"not": {"type": "null"}}}, 'the schema uses "not", which is not supported: leave it out'),
        ({"json": {"enum": []}}, "because a list of alternatives is empty"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum (2) is greater than maximum (1)"),
        ({"json": DEEP}, "nested deeper than 127 levels: move inner parts to $defs"),
        ({"json": json.dumps(DEEP)}, "nested deeper than 127 levels: move inner parts to $defs"),
        ({"json": {"enum": ["x" * 300_000]}}, "json has more than 262144 characters, which is the limit: simplify it"),
        ({"regex": "(" * 100_000 + ")" * 100_000}, "it is nested too deeply|not valid"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"grammar": "start: start"}, "no text satisfies it, because it demands itself again"),
        ({"grammar": 'x: "a"'}, "the grammar has no rule named start"),
        ({"grammar": "start: b"}, 'line 1, column 8: unknown name: "b"'),
    ],
)
def test_structures_that_cannot_be_served_are_refused_in_a_sentence(grammars: Grammars, given: Any, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.compile(StructuredOutputs.of(given))
    text = str(refused.value)
    assert any(part in text for part in words.split("|")), text
    assert text.startswith("structured_outputs: ") and "\n" not in text and len(text) < 400
    assert not any(debris in text for debris in ("<non-verbose/>", "NoExtension", "limits.", "LLParser"))


def test_an_unknown_error_is_still_one_line() -> None:
    assert sentence("Odd\n<non-verbose/>") == "structured_outputs: it cannot be followed: Odd"
    assert len(sentence("x" * 100_000)) < 400
    fuel = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable limits.precompute_large"
    assert "exceeds the limit on the work for its patterns: simplify it" in sentence(fuel)


def test_a_structure_may_take_all_that_its_check_took(grammars: Grammars) -> None:
    """A structure that passes the check with 8 MiB of stack in the helper has 64 MiB in the engine."""
    assert 8 * guidance.CHECK_LIMITS.stack_bytes <= guidance.STACK_BYTES
    grammars.compile(StructuredOutputs.of({"json": chain(900, lambda ref: {"items": {"$ref": ref}})}))


def test_no_structure_hurts_another_request() -> None:
    """Over HTTP, each attack gets a 400, the server stays healthy, and another answer has the
    tokens that it has alone.
    """
    with serving("pocket") as server:
        body = {"prompt": "def f(x):", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        _, alone = server.post("/v1/completions", **body)
        pid = server.engine_pid()
        beside = server.send("/v1/completions", {**body, "max_tokens": 300})
        for structure in BOMBS.values():
            status, answer = server.post("/v1/completions", prompt="x", structured_outputs=structure)
            assert status == 400 and "the limit of 8 MiB" in answer["error"]["message"]
            assert server.raw("GET", "/health")[0] == 200
        assert server.engine_pid() == pid
        data = b""
        while piece := beside.recv(1 << 16):
            data += piece
            if data.endswith(b"}") and b"usage" in data:
                break
        found = json.loads(data[data.index(b"{") :])
        assert found["choices"][0]["text"] == alone["choices"][0]["text"]
