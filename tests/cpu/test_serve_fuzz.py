"""Invalid requests get JSON errors in OpenAI's format, and the next request gets a correct answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from cpu.serving import Server, serving, write_template

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
    "/v1/chat/completions/render",
)  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "x", "pooling": "mean"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "x"}]},
}
FIELDS = (
    "prompt", "messages", "input", "tokens", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop",
    "seed", "logit_bias", "logprobs", "echo", "stream", "stream_options", "response_format", "structured_outputs",
    "tools", "tool_choice", "priority", "cache_salt", "model", "user", "allowed_token_ids", "stop_token_ids",
    "top_logprobs", "chat_template_kwargs", "text", "instructions", "encoding_format", "pooling", "prompt_logprobs",
    "min_tokens", "zzz",
)  # fmt: skip
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**70, -0.5, 0.5, 1e308, float("nan"), float("inf"), "", "x", "\x00", "\ud800",
    "é" * 50, [], [[]], [""], ["x", 1], [-1], [10**9], {}, {"a": None}, {"0": 1.0}, {"type": "json_schema"}, DEEP,
    {"regex": "("}, {"regex": "(a{1,500}){1,500}"}, {"json": {"$ref": "#"}}, {"grammar": "start: start"},
    {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, {"choice": ["a" * 999]}, {"regex": "(?=a)b"},
    {"json": {"type": "array", "minItems": 10**7}}, {"json": {"enum": []}}, {"regex": ".{100000}"},
    [{"role": "user"}], [{"role": 1}], [{"role": "user", "content": [{"type": "image_url"}]}], [{}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}], "auto", "required",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_template(tmp_path_factory.mktemp("template"))
    with serving("pocket", "--chat-template", template, "--quiet", "--max-num-seqs", "16") as server:
        yield server


def body_of(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(PATHS)
    body = dict(GOOD[path]) if rng.random() < 0.8 else {}
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    data = json.dumps(body if rng.random() < 0.95 else rng.choice(VALUES)).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        cut = rng.randrange(len(data) + 1)
        data = data[:cut] + rng.choice((b"", b"\xff", b"\x00", b"[" * 5000, b'{"a":' * 3000)) + data[cut:]
    return path, data


def check(server: Server, seed: int, count: int) -> None:
    rng = random.Random(seed)
    statuses = set()
    for i in range(count):
        path, data = body_of(rng)
        status, found, headers = server.raw("POST", path, data)
        statuses.add(status)
        assert status in (200, 400, 404, 413, 429), (status, path, data[:400], found[:400])
        if status == 200 and headers["content-type"].startswith("text/event-stream"):
            assert found.endswith(b"data: [DONE]\n\n") or b'"error"' in found or b"response.completed" in found
        elif status != 200:
            assert set(json.loads(found)["error"]) == {"message", "type", "param", "code"}, (path, data[:400], found)
        if i % 200 == 0:
            good(server)
    good(server)
    assert {200, 400} <= statuses


def good(server: Server) -> None:
    status, answer = server.post("/v1/completions", prompt="import", max_tokens=3, temperature=0)
    assert status == 200 and answer["usage"]["completion_tokens"] == 3


def test_bodies(server: Server) -> None:
    check(server, 1, 300)
    assert server.metric("ridgeline:engine_restarts_total") == 0
    server.until("ridgeline:answers_open", 0)


@pytest.mark.nightly
def test_ten_thousand_bodies(server: Server) -> None:
    check(server, 2, 10_000)
    assert server.metric("ridgeline:engine_restarts_total") == 0
    server.until("ridgeline:answers_open", 0)
    server.until("ridgeline:pages_used", 0)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/completions", {}, 405),
        ("POST", "/v1/nothing", {}, 404),
        ("GET", "/v1/models/none", {}, 404),
        ("POST", "/v1/completions", {"content_type": "text/plain"}, 400),
        ("POST", "/v1/completions", {"content_type": "application/json; charset=utf-99"}, 200),
        ("POST", "/v1/completions", {"x_long": "y" * 60_000}, 200),
        ("POST", "/v1/completions", {"x_long": "y" * 70_000}, 400),
        ("PATCH", "/../../etc/passwd", {}, 404),
    ],
)
def test_headers_and_paths(server: Server, method: str, path: str, headers: Any, status: int) -> None:
    found, answer = server.ask(method, path, GOOD["/v1/completions"], **headers)
    assert found == status, answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    good(server)
