"""Convert bodies to requests, and check requests before their endpoints, without an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from ridgeline.errors import RequestError
from ridgeline.load.chat import ChatTemplate
from ridgeline.runtime.request import Rendered
from ridgeline.serve.api.answer import AnswerReader
from ridgeline.serve.api.chat import Chat
from ridgeline.serve.api.completions import Completion
from ridgeline.serve.api.prompt import rendered
from ridgeline.serve.api.responses import as_chat
from ridgeline.serve.api.types import ChatBody, CompletionBody, RenderBody
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.app import build_app
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.http.guard import Guard
from ridgeline.serve.http.shapes import shape_of
from ridgeline.serve.keys import Keys
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.service import Service
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, Timing, TokenLogprobs

SECRET = "what nobody else may read"
MESSAGES = [{"role": "user", "content": "x"}]


def service(**more: Any) -> Service:
    """The part of a service that a request needs before it is sent."""
    facts = {
        "name": "m", "fingerprint": "f", "tool_parser": None, "reasoning_parser": "think", "tokenizer": None, **more,
    }  # fmt: skip
    return cast(
        Service,
        SimpleNamespace(check_model=lambda name, adapters: None, answers_as=lambda name: "m", defaults=dict, **facts),
    )


def with_template(source: str) -> Service:
    """Return a service whose model has this chat template."""
    tokenizer = SimpleNamespace(special_tokens={}, template_for=lambda name, tools: ChatTemplate(source))

    async def off_loop(work: Any) -> Any:
        return work()

    return service(frontend=SimpleNamespace(tokenizer=lambda: tokenizer), off_loop=off_loop)


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "[0-9]+"}}, False),
        ({"tools": [{"function": {"name": "f"}}]}, True),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, False),
    ],
)
def test_a_structure_does_not_continue_reasoning(fields: dict[str, Any], thinks: bool) -> None:
    chat = Chat(with_template("x<think>\n"), ChatBody.model_validate({"messages": MESSAGES, **fields}))
    assert asyncio.run(chat._prompts()) == [Rendered("x<think>")]
    reader = AnswerReader(chat.reading)
    pieces = [*reader.push("42"), *reader.flush()]
    assert "".join(p.reasoning for p in pieces) == ("42" if thinks else "")
    assert "".join(p.content for p in pieces) == ("" if thinks else "42")


@pytest.mark.parametrize(
    "item", [{"role": "user", "content": 3}, {"role": "user", "content": [SECRET]}, {"role": "user", "content": {}}]
)
def test_items_that_a_chat_does_not_accept_are_bad_requests(item: dict[str, Any]) -> None:
    with pytest.raises(APIError) as e:
        as_chat(ResponseBody(input=[item]))
    assert e.value.status == 400 and SECRET not in e.value.message


@pytest.mark.parametrize("name", ["self", "template", "messages", "tools"])
def test_reserved_template_variables(name: str) -> None:
    one = with_template("{{ thinking }}")
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: 1}}
    with pytest.raises(RequestError, match=f"chat_template_kwargs has '{name}'"):
        asyncio.run(rendered(one, RenderBody.model_validate(body)))
    body = {**body, "chat_template_kwargs": {"thinking": 1}}
    assert asyncio.run(rendered(one, RenderBody.model_validate(body))) == Rendered("1")


def test_a_template_of_a_request_needs_the_option() -> None:
    body = RenderBody.model_validate({"messages": MESSAGES, "chat_template": "x"})
    one = service(options=ServeOptions(("m",)))
    with pytest.raises(APIError, match="--trust-request-chat-template") as e:
        asyncio.run(rendered(one, body))
    assert (e.value.status, e.value.param) == (400, "chat_template")


async def ask(app: Any, path: str, **options: Any) -> tuple[httpx.Response, Counter[tuple[str, int]]]:
    one = SimpleNamespace(options=ServeOptions(("m",), **options), statuses=Counter[tuple[str, int]](), keys=Keys({}))
    transport = httpx.ASGITransport(Guard(app, cast(Service, one)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path), one.statuses


def test_bugs_are_counted_answered_and_logged_without_values(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError(SECRET)

    with caplog.at_level(logging.INFO):
        response, statuses = asyncio.run(ask(broken, "/"))
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert statuses == {("", 500): 1}
    assert "KeyError" in caplog.text and "in broken" in caplog.text and SECRET not in caplog.text
    with caplog.at_level(logging.INFO):
        asyncio.run(ask(broken, "/", log_requests=True))
    assert SECRET in caplog.text


def test_a_bug_during_an_answer_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError(SECRET)

    with (
        pytest.raises(AssertionError),
        caplog.at_level(logging.INFO),
    ):  # from the transport: an incomplete answer
        asyncio.run(ask(broken, "/"))
    assert " 500 " in caplog.text and SECRET not in caplog.text


def test_a_path_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with caplog.at_level(logging.INFO):
        asyncio.run(ask(fine, "/a%0AGET%20/admin%20200%1B[2J"))
    assert "\n" not in caplog.messages[-1] and "\x1b" not in caplog.messages[-1]


def test_the_docs_need_no_key_and_no_other_server() -> None:
    """/docs and its data need no key and load nothing from other servers; a bad request is 400."""
    options = ServeOptions(("m",), key_hashes=(b"x" * 32,))
    one = cast(Service, SimpleNamespace(options=options, statuses=Counter[tuple[str, int]](), keys=Keys({})))
    transport = httpx.ASGITransport(build_app(one))

    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(path) for path in ("/docs", "/openapi.json", "/live")]

    page, described, closed = asyncio.run(both())
    assert (page.status_code, described.status_code, closed.status_code) == (200, 200, 401)
    assert "default-src 'none'" in page.headers["content-security-policy"] and "http" not in page.text
    schema = described.json()
    assert set(schema["components"]["schemas"]["ErrorAnswer"]["properties"]) == {"error"}
    errors = {
        "openai": "ErrorAnswer",
        "anthropic": "AnthropicError",
        "ollama": "OllamaError",
        "llama.cpp": "LlamaError",
    }
    streams = {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/completion", "/completions",
        "/infill", "/invocations",
    }  # fmt: skip
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"], path
            told = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert told["$ref"].endswith(f"/{errors[shape_of(path)]}")
            content = operation["responses"]["200"]["content"]
            assert ("text/event-stream" in content) == (path in streams)
            if path != "/metrics":
                assert content["application/json"]["schema"]["$ref"], path
            else:
                assert content == {"text/plain": {"schema": {"type": "string"}}}


class Decoder:
    """A tokenizer whose tokens have the same text everywhere. It counts calls and records their threads."""

    special_ids = frozenset[int]()
    settled = True

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.threads = set[int]()

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Decoder:
        return self

    def peek(self, token: int) -> tuple[str, bytes]:
        self.asked.append(token)
        self.threads.add(threading.get_ident())
        return f"t{token}", b"t"

    def push(self, token: int) -> str:
        return f"t{token}"

    def flush(self) -> str:
        return ""

    async def off_loop(self, work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)

    def service(self) -> Service:
        return service(reasoning_parser=None, tokenizer=self, off_loop=self.off_loop)


def turn(answer: CompletionOutput) -> Any:
    """Return the result of a prompt of two tokens."""
    first = TokenLogprobs(8, -1.0, ((8, -1.0),))
    output = RequestOutput("ab", [7, 8], [answer], Timing(0.0, None, 0.0, 0.0), prompt_logprobs=[None, first])
    chunk = OutputChunk(0, answer.text, tuple(answer.token_ids), tuple(answer.logprobs or ()), "stop", 9, None, output)
    batches = iter([[(0, chunk)], []])

    async def batch() -> Any:
        return next(batches)

    return SimpleNamespace(requests=[SimpleNamespace(prompt_token_ids=[7, 8], prompt="ab")], batch=batch, close=dict)


ENTRY = TokenLogprobs(5, -0.5, ((5, -0.5), (6, -2.0)))


@pytest.mark.parametrize("chat", [True, False])
def test_logprobs_are_decoded_once_and_in_a_thread(chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder()
    answer = CompletionOutput(0, [5] * 50, "x" * 50, "length", logprobs=[ENTRY] * 50)
    work: Any = Completion(decoder.service(), CompletionBody(prompt="ab", logprobs=2))
    if chat:
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        work = Chat(decoder.service(), ChatBody.model_validate(body))

    async def ask() -> dict[str, Any]:
        async def opened(*, stream: bool) -> Any:
            return turn(answer)

        monkeypatch.setattr(work, "open", opened)
        return cast(dict[str, Any], await work.answer())

    found = asyncio.run(ask())["choices"][0]["logprobs"]
    assert len(found["content"] if chat else found["tokens"]) == 50
    assert sorted(decoder.asked) == [5, 6] and threading.get_ident() not in decoder.threads


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_plain_chunks_are_written_as_all_others(chat: bool, ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way to write a chunk gives the bytes of the long way."""
    texts = ["", "a", "", 'say "no"\\\n\x00\x7f', "\u20ac \U0001f600 %b", "\ud800"]
    chunks = [OutputChunk(i % 2, text, tuple(range(i))) for i, text in enumerate([*texts, *texts])]
    chunks += [OutputChunk(1, "b", (5,), (), "stop", 9), OutputChunk(0, "c", (5, 6), (ENTRY, ENTRY))]

    def written() -> list[bytes]:
        options = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "return_token_ids": ids, "n": 2}
        if chat:
            work: Any = Chat(Decoder().service(), ChatBody.model_validate({"messages": MESSAGES, **options}))
        else:
            work = Completion(Decoder().service(), CompletionBody.model_validate({"prompt": "ab", **options}))
        data = work.events(turn(CompletionOutput(0))).chunks([(0, chunk) for chunk in chunks])
        return [event.partition(b'"choices"')[2] for event in data.split(b"\n\n")[:-1]]

    short, asked = written(), list[OutputChunk]()
    for kind, name in ((Completion, "_is_plain"), (Chat, "_plain")):
        monkeypatch.setattr(kind, name, lambda self, chunk, *rest: asked.append(chunk))
    assert written() == short and len(asked) >= len(texts)
    assert sum(len(json.loads(b"{" + b'"choices"' + event)["choices"]) for event in short) >= 10


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_without_an_answer_has_no_completion_tokens(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"stream_options": {"include_usage": True}} if stream else {"logprobs": 1}
    body = {"prompt": "ab", "echo": True, "max_tokens": 0, "return_token_ids": True, "stream": stream, **more}
    work = Completion(Decoder().service(), CompletionBody.model_validate(body))
    one = turn(CompletionOutput(0, [5], "x", "stop", 9, logprobs=[ENTRY]))

    async def ask() -> list[dict[str, Any]]:
        async def opened(*, stream: bool) -> Any:
            return one

        monkeypatch.setattr(work, "open", opened)
        if not stream:
            return [await work.answer()]
        events = work.events(one)
        data = events.begin() + events.chunks(await one.batch()) + events.end()
        return [json.loads(e[6:]) for e in data.split(b"\n\n") if e[6:7] == b"{"]

    told = asyncio.run(ask())
    (choice,) = told[0]["choices"]
    assert (choice["text"], choice["token_ids"]) == ("ab", [])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert told[-1]["usage"]["completion_tokens"] == 0 and told[-1]["usage"]["total_tokens"] == 2
    if not stream:
        assert choice["logprobs"]["tokens"] == ["t7", "t8"]
