"""Large bodies, long texts and templates in requests are answered, or refused with an error that names the limit."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu.serving import Server, serving
from ridgeline.bounded.frames import encode, read_frame
from ridgeline.load import chat
from ridgeline.serve.api.sampling_fields import MAX_STOP_CHARS
from ridgeline.serve.helpers import packed
from ridgeline.serve.helpers.jobs import MAX_REST
from ridgeline.serve.helpers.pool import LONG_TEXT
from ridgeline.serve.http.body import LARGE_BODY

CHARS = 400_000  # value of --max-prompt-chars
MESSAGES = [{"role": "user", "content": "x"}]
ENDLESS = "{% for i in range(90000) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("pocket", "--trust-request-chat-template", "--max-prompt-chars", str(CHARS)) as server:
        yield server


SHORT = 4  # replaces packed.LONG
long_parts = st.one_of(
    st.text(min_size=SHORT, max_size=SHORT + 2),
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=SHORT, max_size=SHORT + 2),
    st.lists(st.floats(allow_nan=False), min_size=SHORT + 1, max_size=SHORT + 2),
    st.sampled_from([[0] * SHORT + [1 << 80], [0] * SHORT + [True], [0] * SHORT + [1.0], "\ud800" * (SHORT + 1)]),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | long_parts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(values)
@settings(max_examples=100, deadline=None)
def test_packing_keeps_the_body(value: Any) -> None:
    with mock.patch.object(packed, "LONG", SHORT):
        found = packed.unpack(read_frame(io.BytesIO(b"".join(encode(packed.pack(value))))))
    assert found == value and json.dumps(found) == json.dumps(value)  # True is not 1


REFUSED = [
    ("/v1/completions", {"prompt": "a" * CHARS}),
    ("/v1/completions", {"prompt": ["a", "a" * CHARS]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * CHARS}], "max_tokens": 1}),
    ("/v1/responses", {"input": "a" * CHARS}),
    ("/v1/embeddings", {"input": "a" * CHARS, "pooling": "mean"}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=[path for path, _ in REFUSED])
def test_a_text_that_cannot_fit(server: Server, path: str, body: dict[str, Any]) -> None:
    status, answer = server.ask("POST", path, body)
    message = answer["error"]["message"]
    assert (status == 400 and "characters, which are at least" in message) or "--max-prompt-chars" in message, answer
    assert "context is" in message or f"the limit is {CHARS}" in message


def test_more_characters_than_the_option_allows(server: Server) -> None:
    """The option is the limit even if the text would fit the context."""
    status, answer = server.post("/tokenize", prompt="a" * (CHARS + 1))
    assert status == 400
    assert f"{CHARS + 1} characters; the limit is {CHARS} (--max-prompt-chars)" in answer["error"]["message"]


def test_a_long_text_has_the_same_tokens(server: Server) -> None:
    """The helper process gives the same tokens as tokenizing the lines of the text one by one."""
    piece = "def f(x):\n    return x + 1\n\n"
    status, short = server.post("/tokenize", prompt=piece * 10)
    count = math.ceil(LONG_TEXT / len(piece) / 10) * 10
    again, long = server.post("/tokenize", prompt=piece * count, return_token_strs=True)
    assert (status, again) == (200, 200)
    assert long["count"] == len(long["tokens"]) == len(long["token_strs"])
    assert long["tokens"][: short["count"] - 3] == short["tokens"][:-3]
    text = server.post("/detokenize", tokens=long["tokens"], skip_special_tokens=True)[1]["prompt"]
    assert text == piece * count
    messages = [{"role": "user", "content": piece * count}]
    rendered = server.post("/v1/chat/completions/render", messages=messages)[1]
    assert rendered["count"] == server.post("/tokenize", messages=messages)[1]["count"] > long["count"] // 2


def test_a_large_body_gives_the_same_answer(server: Server) -> None:
    body = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
    small = server.ask("POST", "/v1/completions", body)[1]
    for padding in ({"note": "é" * LARGE_BODY}, {"ids": [*range(LARGE_BODY // 8)]}):
        status, large = server.ask("POST", "/v1/completions", {**body, "metadata": padding})
        assert status == 200, large
        assert large["choices"] == small["choices"]


def large(text: bytes) -> bytes:
    return b" " * LARGE_BODY + text


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b'{"prompt": "x", }', "invalid_json", "the body is not valid JSON"),
        (b'{"prompt": "\xff"}', None, ""),
        (b'{"prompt": "x", "nonsense": 1}', "unknown_parameter", "nonsense"),
        (b'{"prompt": [' + b"0," * (1 << 20) + b"0]}", "too_long", "elements"),
        (b'{"prompt": [' + b"null," * (MAX_REST // 5) + b"0]}", "too_long", f"the limit is {MAX_REST}"),
        (b"[" * 100_000 + b"]" * 100_000, "too_expensive", "nested too deeply"),
    ],
    ids=["no JSON", "no UTF-8", "unknown", "elements", "rest", "deep"],
)
def test_invalid_large_bodies(server: Server, body: bytes, code: str | None, text: str) -> None:
    status, answer = server.ask("POST", "/v1/completions", large(body))
    assert status == 400 and text in answer["error"]["message"], answer
    assert code is None or answer["error"]["code"] == code


def test_a_stop_text_has_a_maximum_length(server: Server) -> None:
    status, answer = server.post("/v1/completions", prompt="x", stop=["a" * (MAX_STOP_CHARS + 1)])
    assert status == 400 and str(MAX_STOP_CHARS) in answer["error"]["message"]


def test_a_template_of_the_request(server: Server) -> None:
    template = "{% for m in messages %}{{ m.content }}!{{ mark }}{% endfor %}"
    body = {"messages": MESSAGES, "chat_template": template, "chat_template_kwargs": {"mark": "?"}}
    assert server.post("/v1/chat/completions/render", **body)[1]["prompt"] == "x!?"
    assert server.post("/tokenize", **body)[1]["tokens"] == server.post("/tokenize", prompt="x!?")[1]["tokens"]
    assert server.post("/v1/chat/completions", max_tokens=2, **body)[0] == 200


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (ENDLESS, f"it takes longer than the limit of {chat.RENDERING.seconds:g} s"),
        ("{% for", "line 1"),
        ("{{ raise_exception('no') }}", "rejects these messages: no"),
        ("{{ messages.__class__ }}", "unsafe"),
    ],
    ids=["endless", "no template", "raises", "unsafe"],
)
def test_an_invalid_template_of_the_request(server: Server, template: str, text: str) -> None:
    status, answer = server.post("/v1/chat/completions", messages=MESSAGES, chat_template=template)
    assert status == 400 and text in answer["error"]["message"], answer
    assert server.post("/v1/completions", prompt="x", max_tokens=1)[0] == 200
