"""vLLM's fields have vLLM's meaning on every endpoint. Unknown fields are errors or are ignored."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cpu.serving import CHAT_TEMPLATE, Server, serving, write_template
from oracle.data import shared_data
from ridgeline.errors import RequestError
from ridgeline.load.chat import ChatTemplate
from ridgeline.runtime.request import TextToEncode
from ridgeline.serve.api.prompt import marked, until
from ridgeline.serve.api.types import ChatBody, CompletionBody
from ridgeline.serve.app import build_app
from ridgeline.serve.http.unknown import ATTEMPTS, header, read
from ridgeline.serve.keys import Keys
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.service import Service

GREEDY = {"temperature": 0, "max_tokens": 12}
CODE = "def fibonacci(n):\n"
MESSAGES = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "import numpy as "}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_template(tmp_path_factory.mktemp("template"))
    with serving("pocket", "--chat-template", template, "--quiet", "--max-num-seqs", "8") as server:
        yield server


def answer(server: Server, path: str, **body: Any) -> Any:
    status, found = server.post(path, **body)
    assert status == 200, found
    return found


# Bad words ---------------------------------------------------------------------------------------------


def test_bad_words_on_every_endpoint(server: Server) -> None:
    asked: dict[str, tuple[dict[str, Any], Any]] = {
        "/v1/completions": ({"prompt": CODE, **GREEDY}, lambda a: a["choices"][0]["text"]),
        "/v1/chat/completions": ({"messages": MESSAGES[:1], **GREEDY}, lambda a: a["choices"][0]["message"]["content"]),
        "/v1/responses": (
            {"input": "x", "temperature": 0, "max_output_tokens": 12},
            lambda a: a["output"][0]["content"][0]["text"],
        ),
    }
    for path, (body, text) in asked.items():
        free = text(answer(server, path, **body))
        (word, *_) = re.findall(r"\w{3,}", free)
        assert word not in re.findall(r"\w+", text(answer(server, path, **body, bad_words=[word]))), path
        status, told = server.post(path, **body, bad_words=[""])
        assert status == 400 and "bad_words" in told["error"]["message"]


# Prompts -----------------------------------------------------------------------------------------------


def test_truncated_prompts(server: Server) -> None:
    ids = answer(server, "/tokenize", prompt=CODE * 5)["tokens"]
    body = {"prompt": CODE * 5, "return_token_ids": True, "echo": True, **GREEDY}
    choice = answer(server, "/v1/completions", **body, truncate_prompt_tokens=6)["choices"][0]
    assert choice["prompt_token_ids"] == [ids[0], *ids[-5:]]  # the BOS stays
    cut = answer(server, "/detokenize", tokens=ids[-5:], skip_special_tokens=True)["prompt"]
    assert choice["text"].startswith(cut)
    choice = answer(server, "/v1/completions", **body, truncate_prompt_tokens=6, truncation_side="right")["choices"][0]
    assert choice["prompt_token_ids"] == ids[:6]
    long = {"prompt": "x " * 5000, "truncate_prompt_tokens": -1, "return_token_ids": True, **GREEDY}
    found = answer(server, "/v1/completions", **long)
    (model,) = server.ask("GET", "/v1/models")[1]["data"]
    assert found["usage"]["prompt_tokens"] == model["max_model_len"] - 12
    assert found["choices"][0]["finish_reason"] == "length"
    chat = answer(server, "/v1/chat/completions", messages=MESSAGES[:1], return_token_ids=True, **GREEDY)
    cut = answer(
        server, "/v1/chat/completions", messages=MESSAGES[:1], return_token_ids=True, truncate_prompt_tokens=2, **GREEDY
    )
    whole = chat["prompt_token_ids"]
    assert cut["prompt_token_ids"] == [whole[0], whole[-1]]  # the BOS stays
    used = answer(server, "/v1/responses", input="x", max_output_tokens=2, truncate_prompt_tokens=2)["usage"]
    assert used["input_tokens"] == 2
    vectors = answer(server, "/v1/embeddings", input=["x " * 5000, "x"], pooling="mean", truncate_prompt_tokens=3)
    assert vectors["usage"]["prompt_tokens"] <= 6 and len(vectors["data"]) == 2
    for wrong in (0, -2, "3", 10**6):
        assert server.post("/v1/completions", prompt="x", truncate_prompt_tokens=wrong)[0] == 400


def test_special_tokens_of_a_prompt(server: Server) -> None:
    with_bos = answer(server, "/tokenize", prompt=CODE)["tokens"]
    for special, wanted in ((True, with_bos), (None, with_bos), (False, with_bos[1:])):
        body = {"prompt": CODE, "add_special_tokens": special, "return_token_ids": True, **GREEDY}
        assert answer(server, "/v1/completions", **body)["choices"][0]["prompt_token_ids"] == wanted
        assert answer(server, "/tokenize", prompt=CODE, add_special_tokens=special)["tokens"] == wanted
        rendered = answer(server, "/v1/chat/completions/render", messages=MESSAGES[:1], add_special_tokens=special)
        chat = {"messages": MESSAGES[:1], "add_special_tokens": special, "return_token_ids": True, **GREEDY}
        found = answer(server, "/v1/chat/completions", **chat)["prompt_token_ids"]
        assert found == rendered["prompt_token_ids"] and (found[0] == with_bos[0]) is (special is not False)
        used = answer(server, "/v1/embeddings", input=CODE, pooling="mean", add_special_tokens=special)["usage"]
        assert used["prompt_tokens"] == len(wanted)


def test_the_last_message_is_continued(server: Server) -> None:
    text = "user: x\nassistant: import numpy as "
    rendered = answer(server, "/v1/chat/completions/render", messages=MESSAGES, continue_final_message=True)
    assert rendered["prompt"] == text
    chat = answer(server, "/v1/chat/completions", messages=MESSAGES, continue_final_message=True, **GREEDY)
    plain = answer(server, "/v1/completions", prompt=text, **GREEDY)
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    items = answer(
        server, "/v1/responses", input=MESSAGES, continue_final_message=True, temperature=0, max_output_tokens=12
    )
    assert items["output"][0]["content"][0]["text"] == plain["choices"][0]["text"]
    assert answer(server, "/tokenize", messages=MESSAGES, continue_final_message=True)["count"] == rendered["count"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert server.post("/v1/chat/completions", messages=MESSAGES, **both)[0] == 400
    none = [{"role": "assistant", "content": None}]
    assert server.post("/v1/chat/completions", messages=none, continue_final_message=True)[0] == 400


TEMPLATES = [
    CHAT_TEMPLATE,
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}",
    "{% for m in messages %}[{{ m.content.strip() + ' ' }}]{% endfor %}",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
]


def templates() -> list[str]:
    config = shared_data() / "tokenizers" / "qwen2.5" / "tokenizer_config.json"
    return [*TEMPLATES, json.loads(config.read_text())["chat_template"]] if config.exists() else TEMPLATES


@pytest.mark.parametrize("source", templates())
@pytest.mark.parametrize("content", ["a b", " a b ", "a\n", "", "import numpy as "])
def test_continued_as_by_transformers(source: str, content: str) -> None:
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": content}]
    template = ChatTemplate(source)

    def continued() -> str:
        text = template.render(marked(messages, "MARK"), add_generation_prompt=False)
        return until(text, "MARK", content)

    try:
        ((wanted,), _) = render_jinja_template(
            [[dict(m) for m in messages]], chat_template=source, continue_final_message=True
        )
    except ValueError:
        with pytest.raises(RequestError, match="the chat template changes the last message"):
            continued()
        return
    assert continued() == wanted


# Structures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{4}"}, r"[0-9]{4}"),
        ({"guided_choice": ["yes!", "no!"]}, r"(yes|no)!"),
        ({"guided_grammar": 'start: "<" /[a-c]{3}/ ">"'}, r"<[a-c]{3}>"),
        ({"guided_json": {"enum": [17]}}, "17"),
        ({"guided_json": '{"enum": [17]}', "guided_decoding_backend": "guidance"}, "17"),
        ({"guided_json": {"const": {"a": [1, 2]}}, "guided_whitespace_pattern": ""}, r'\{"a":\[1,2\]\}'),
        ({"response_format": {"type": "json_object", "schema": {"const": 17}}}, "17"),
        ({"structured_outputs": {"json": {"const": {"a": 1}}, "whitespace_pattern": "  "}}, r'\{"a"(  )?:(  )?1\}'),
    ],
)
def test_guided_answers(server: Server, fields: dict[str, Any], pattern: str) -> None:
    text = answer(server, "/v1/completions", prompt="x", max_tokens=40, **fields)["choices"][0]["text"]
    assert re.fullmatch(pattern, text), text
    chat = answer(server, "/v1/chat/completions", messages=MESSAGES[:1], max_tokens=40, **fields)
    assert re.fullmatch(pattern, chat["choices"][0]["message"]["content"])
    if "response_format" in fields:  # responses have text.format instead
        return
    items = answer(server, "/v1/responses", input="x", max_output_tokens=40, **fields)
    assert re.fullmatch(pattern, items["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"guided_regex": "a", "guided_whitespace_pattern": " "},
        {"guided_whitespace_pattern": " "},
        {"response_format": {"type": "text", "schema": {}}},
        {"guided_decoding_backend": "outlines"},
    ],
)
def test_invalid_structures(server: Server, fields: dict[str, Any]) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES[:1]})):
        assert server.post(path, **body, **fields)[0] == 400


# Streams, names ----------------------------------------------------------------------------------------


def test_stream_options_need_a_stream(server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES[:1]}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
    ):  # fmt: skip
        body = body if "input" in body else {**body, "max_tokens": 2}
        options = {} if path == "/v1/responses" else {"include_usage": True}
        for more in ({}, {"stream": False}):
            status, told = server.post(path, **body, **more, stream_options=options)
            assert status == 400 and "stream_options" in told["error"]["message"]
        assert server.raw("POST", path, {**body, "stream": True, "stream_options": options})[0] == 200


@pytest.mark.parametrize(
    ("options", "each", "last"),
    [
        (None, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": False}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_usage_in_streams(server: Server, options: Any, each: bool, last: bool) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": options, **GREEDY}
    _, data, _ = server.raw("POST", "/v1/completions", body)
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    with_choices = [e for e in events if e["choices"]]
    assert all((e.get("usage") is not None) is each for e in with_choices)
    assert [bool(e.get("usage")) for e in events if not e["choices"]] == ([True] if last else [])


def test_tokens_named_by_id(server: Server) -> None:
    body = {"prompt": CODE, "logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True, **GREEDY}
    choice = answer(server, "/v1/completions", **body)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    chat = {"messages": MESSAGES[:1], "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    choice = answer(server, "/v1/chat/completions", **chat, return_token_ids=True, **GREEDY)["choices"][0]
    assert [t["token"] for t in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    names = [top["token"] for t in choice["logprobs"]["content"] for top in t["top_logprobs"]]
    assert all(name.startswith("token_id:") for name in names)


def test_an_answer_has_the_clients_request_id(server: Server) -> None:
    for path, body, prefix in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}, "cmpl-"),
        ("/v1/chat/completions", {"messages": MESSAGES[:1], "max_tokens": 2}, "chatcmpl-"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}, "resp_"),
    ):
        _, data, headers = server.raw("POST", path, body, x_request_id="my-id.7")
        assert json.loads(data)["id"] == f"{prefix}my-id.7" and headers["x-request-id"] == "my-id.7"
        assert answer(server, path, **body, request_id="own")["id"] == f"{prefix}own"
        assert (
            json.loads(server.raw("POST", path, {**body, "request_id": "own"}, x_request_id="h")[1])["id"][-2:]
            == f"{prefix}h"[-2:]
        )
        _, data, headers = server.raw("POST", path, {**body, "stream": True}, x_request_id="s")
        assert f'"id":"{prefix}s"'.encode() in data and headers["x-request-id"] == "s"
        for wrong in ("a b", "y" * 129):
            assert server.raw("POST", path, body, x_request_id=wrong)[0] == 400
            assert server.post(path, **body, request_id=wrong)[0] == 400
    _, _, one = server.raw("GET", "/health")
    _, _, two = server.raw("GET", "/nothing")
    assert len({one["x-request-id"], two["x-request-id"]}) == 2


# Unknown fields --------------------------------------------------------------------------------


def ask(path: str, body: Any, **options: Any) -> httpx.Response:
    """Send one request to an application without an engine."""

    async def off_loop(work: Any) -> Any:
        return work()

    async def tokenize(work: TextToEncode) -> list[int]:
        return [len(work.text)]

    one = SimpleNamespace(
        options=ServeOptions(("m",), **options), check_model=lambda name, adapters: None, off_loop=off_loop,
        max_model_len=9, keys=Keys({}),
        frontend=SimpleNamespace(tokenizer=lambda: None), tokenize=tokenize, statuses=Counter[tuple[str, int]](),
    )  # fmt: skip
    transport = httpx.ASGITransport(build_app(cast(Service, one)))

    async def sent() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    return asyncio.run(sent())


def test_unknown_fields_are_errors_unless_they_are_ignored() -> None:
    body = {"prompt": "abc", "zzz": 1, "tools": [{"function": {"name": "f", "strange": {}}}]}
    refused = ask("/tokenize", body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "unknown_parameter"
    told = ask("/tokenize", body, unknown_fields="ignore")
    assert told.status_code == 200 and told.json()["tokens"] == [3]
    assert told.headers["warning"] == '299 ridgeline "unknown fields are ignored: tools.0.function.strange, zzz"' or (
        set(re.findall(r"[\w.]+", told.headers["warning"])) >= {"zzz", "tools.0.function.strange"}
    )
    assert "warning" not in ask("/tokenize", {"prompt": "abc"}, unknown_fields="ignore").headers
    wrong = ask("/tokenize", {"prompt": 5, "zzz": 1}, unknown_fields="ignore")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt"


def test_a_list_that_is_too_long_is_told_where_a_text_may_stand() -> None:
    for path, field in (("/v1/completions", "stop"), ("/api/embed", "input")):
        body = {"model": "m", "prompt": "abc", field: ["a"] * 50_000}
        if path == "/api/embed":
            del body["prompt"]
        refused = ask(path, body)
        assert refused.status_code == 400
        assert "should have at most" in refused.text and "not 50000" in refused.text


def test_unknown_fields_are_dropped_at_any_depth() -> None:
    """Fields under union types, in lists, and several in one object are dropped. Nothing else changes."""
    body = {
        "messages": [{"role": "user", "content": "x", "extra": 1}], "top_a": 0.2, "mirostat": 2,
        "tools": [{"type": "function", "function": {"name": "f", "x": 1}}, {"function": {"name": "g", "y": 2}}],
        "tool_choice": {"type": "function", "function": {"name": "f", "z": 3}},
        "stream_options": {"include_usage": True, "w": 4},
    }  # fmt: skip
    before = json.dumps(body)
    found, ignored = read(ChatBody, body, "ignore")
    assert json.dumps(body) == before
    names = {
        "top_a",
        "mirostat",
        "tools.0.function.x",
        "tools.1.function.y",
        "tool_choice.function.z",
        "stream_options.w",
    }
    assert set(ignored) == names and len(ignored) == len(names)
    assert found.messages[0].model_dump()["extra"] == 1  # chat templates may read it
    assert found.tools is not None and [t.function.name for t in found.tools] == ["f", "g"]
    with pytest.raises(ValueError, match="valid"):
        read(CompletionBody, {"prompt": [[1], "a"], "zzz": 1}, "ignore")


def test_many_invalid_elements_end_after_some_attempts() -> None:
    tools = [{"function": {"name": "f", "x": 1}} for _ in range(ATTEMPTS + 3)]
    with pytest.raises(ValueError, match="extra_forbidden"):
        read(ChatBody, {"messages": [], "tools": tools}, "ignore")


def test_a_warning_is_a_valid_header() -> None:
    rng = random.Random(0)
    names = ["".join(chr(rng.choice((10, 34, 92, 65, 233, 0x4E00, 0x1F600))) for _ in range(50)) for _ in range(100)]
    text = header(names)
    assert text.isascii() and text.isprintable() and text.count('"') == 2 and "and 80 more" in text


def test_a_batch_says_what_it_ignored(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ridgeline.cli.main import app

    lines = [
        {
            "custom_id": "a",
            "url": "/v1/completions",
            "body": {"prompt": "x", "max_tokens": 2, "zzz": 1, "bad_words": ["a"]},
        },
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2, "request_id": "mine"}},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "stream_options": {}}},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    CliRunner().invoke(app, ["run-batch", str(source), "-o", str(out), "--unknown-fields", "ignore"])
    found = {r["custom_id"]: r["response"] for r in map(json.loads, out.read_text().splitlines())}
    assert found["a"]["status_code"] == 200 and found["a"]["warning"] == "unknown fields are ignored: zzz"
    assert found["b"]["body"]["id"] == "cmpl-mine" and "warning" not in found["b"]
    assert found["c"]["status_code"] == 400 and "stream_options" in found["c"]["body"]["error"]["message"]
