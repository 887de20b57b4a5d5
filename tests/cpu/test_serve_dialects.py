"""The APIs of Anthropic, Ollama, llama.cpp and vLLM, by their official clients where these exist."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import ollama
import pytest

from cpu.serving import Server, serving, write_template
from ridgeline.serve.api.answer import Reading
from ridgeline.serve.dialects import anthropic as to_anthropic
from ridgeline.serve.dialects import ollama as to_ollama
from ridgeline.serve.dialects.llama_cpp_types import LlamaAnswer
from ridgeline.serve.dialects.ollama_types import OllamaChatBody
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.http.shapes import shaped
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, Timing

KEY = "secret"
LIMITED = "a key with limits"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL: Any = {"name": "f", "description": "what f does", "input_schema": SCHEMA}
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_template(tmp_path_factory.mktemp("template"))
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"keys:\n- {{key: {LIMITED}, name: guest, requests_per_minute: 3, tokens_per_minute: 1000}}\n")
    with serving("pocket", "--chat-template", template, "--quiet", "--max-num-seqs", "4", "--api-key", KEY,
                 "--max-model-len", "512", "--kv-cache-memory-bytes", "33554432",
                 "--server-dev-mode", "--api-keys", str(keys),
                 "--enable-tokenizer-info-endpoint") as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llama(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url.removesuffix("/v1"), headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def ask(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    return server.ask(method, path, body, x_api_key=KEY)


def content(server: Server, **fields: Any) -> Any:
    """Return the message of OpenAI's endpoint, which is the same model's answer."""
    body = {"messages": HELLO, "temperature": 0, **fields}
    return ask(server, "POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]


# Anthropic ---------------------------------------------------------------------------------------------


def test_a_message_is_the_answer_of_a_chat(server: Server, claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "pocket", "max_tokens": 12,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    told = content(server, messages=[{"role": "system", "content": "be kind"}, *HELLO], max_tokens=12)["content"]
    reply = claude.messages.with_raw_response.create(**asked)
    assert reply.headers["warning"] == '299 ridgeline "fields without effect: system.cache_control"'
    message = reply.parse()
    (block,) = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", told, "max_tokens")
    with claude.messages.stream(**asked) as stream:
        names = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert streamed.content[0].text == told and streamed.usage.output_tokens == 12
    assert names[:2] == ["message_start", "content_block_start"] and names[-1] == "message_stop"
    counted = claude.messages.count_tokens(model="pocket", messages=asked["messages"], system="be kind")
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_stop_sequences_and_a_message_to_continue(server: Server, claude: anthropic.Anthropic) -> None:
    whole = content(server, max_tokens=12)["content"]
    stop = whole.strip()[1:3]
    more: dict[str, Any] = {"model": "pocket", "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = claude.messages.create(messages=HELLO, stop_sequences=[stop], **more)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    begun = [*HELLO, {"role": "assistant", "content": whole[:5]}]
    told = content(server, messages=begun, continue_final_message=True, max_tokens=12)["content"]
    assert claude.messages.create(messages=begun, **more).content[0].text == told


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "f"}, {"type": "any", "disable_parallel_tool_use": True}])
def test_a_tool_is_called_and_answered(claude: anthropic.Anthropic, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "pocket", "max_tokens": 120, "tools": [TOOL], "messages": HELLO}
    message = claude.messages.create(tool_choice=choice, **asked)
    with claude.messages.stream(tool_choice=choice, **asked) as stream:
        streamed = stream.get_final_message()
    for found in (message, streamed):
        (call,) = found.content
        assert found.stop_reason == "tool_use" and (call.type, call.name) == ("tool_use", "f")
        assert isinstance(call.input["a"], bool)
    result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "no such file", "is_error": True}
    asked["messages"] = [
        *HELLO,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(**asked).content


@pytest.mark.parametrize(("fields", "status", "words"), [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "reads only text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "wat": 1}]}]}, 400, "wat is not a known"),
    ({"messages": []}, 400, ""),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 9999}, 400, "exceed the context"),
    ({"model": "other"}, 404, "does not exist"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, 400, "not in tools"),
    ({"tool_choice": {"type": "any"}}, 400, "tools is empty"),
    ({"thinking": {"type": "between_tools"}}, 400, "thinking.type"),
    ({"stop_sequences": ["x" * 2000]}, 400, "2000 characters"),
])  # fmt: skip
def test_errors_have_anthropics_format(
    claude: anthropic.Anthropic, fields: dict[str, Any], status: int, words: str
) -> None:
    asked = {"model": "pocket", "max_tokens": 8, "messages": HELLO, **fields}
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.messages.create(**asked)
    assert caught.value.status_code == status
    body = caught.value.body
    assert isinstance(body, dict) and body["type"] == "error" and words in body["error"]["message"]
    assert body["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}


@pytest.mark.parametrize(("path", "fields"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, SOUND]}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}),
    ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    ("/api/generate", {"prompt": "x", "images": ["eA=="]}),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}),
    ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]}}),
    ("/apply-template", {"messages": [{"role": "user", "content": [PICTURE]}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": [PICTURE]}]}),
])  # fmt: skip
def test_images_and_sound_are_refused_in_each_dialect(server: Server, path: str, fields: dict[str, Any]) -> None:
    model = {} if path in ("/completion", "/apply-template") else {"model": "pocket"}
    status, found = ask(server, "POST", path, {**model, **fields})
    assert status == 400 and "this server reads only text" in json.dumps(found), found


def test_a_key_is_needed(server: Server) -> None:
    wrong = anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError) as caught:
        wrong.messages.create(model="pocket", max_tokens=8, messages=HELLO)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    for path in ("/api/chat", "/completion", "/invocations", "/sleep", "/reset_prefix_cache"):
        assert server.ask("POST", path, {})[0] == 401
    for path in ("/api/tags", "/props", "/slots", "/load", "/tokenizer_info"):
        assert server.ask("GET", path)[0] == 401


def test_a_key_has_limits_of_its_own(server: Server) -> None:
    body = {"model": "pocket", "max_tokens": 8, "messages": HELLO}
    left = []
    for stream in (True, False, True):
        status, _, headers = server.raw("POST", "/v1/messages", {**body, "stream": stream}, x_api_key=LIMITED)
        left.append((status, headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-limit-tokens"]))
    assert left == [(200, "2", "1000"), (200, "1", "1000"), (200, "0", "1000")]
    status, data, headers = server.raw("POST", "/v1/messages", body, x_api_key=LIMITED)
    assert status == 429 and json.loads(data)["error"]["type"] == "rate_limit_error" and b"'guest'" in data
    assert 0 < int(headers["retry-after"]) <= 20 and headers["x-ratelimit-remaining-requests"] == "0"
    assert server.raw("GET", "/v1/models", x_api_key=LIMITED)[0] == 200  # only requests to compute count
    text = server.raw("GET", "/metrics", x_api_key=KEY)[1].decode()
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if 'key="guest"' in line}
    count = ask(server, "POST", "/v1/messages/count_tokens", {"messages": HELLO})[1]["input_tokens"]
    assert found == {
        "ridgeline:key_requests_total": 3, "ridgeline:key_refused_total": 1, "ridgeline:key_waiting": 0,
        "ridgeline:key_tokens_total": 3 * (count + 8),
    }  # fmt: skip


ANSWER = '<think>hm</think>I call it.\n<tool_call>{"name": "f", "arguments": {"a": true}}</tool_call>'


def chunks_of(text: str) -> Iterator[OutputChunk]:
    """Yield a text in chunks of three characters, as an engine would send it."""
    output = RequestOutput("", [1, 2], [CompletionOutput(0, [3], text)], Timing(0.1, 0.1, 0.5, 2.0))
    for at in range(0, len(text), 3):
        yield OutputChunk(0, text[at : at + 3], (3,))
    yield OutputChunk(0, "", (4,), (), "stop", None, None, output)


def test_reasoning_text_and_calls_are_blocks() -> None:
    chat: Any = SimpleNamespace(reading=Reading("auto", "hermes", thinks=True))
    turn: Any = SimpleNamespace(requests=[SimpleNamespace(prompt_token_ids=[1, 2])])
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
            "stop_sequence": None}  # fmt: skip
    for shows in (True, False):
        events = to_anthropic._Events(chat, turn, head, to_anthropic.Blocks(shows))
        data = events.begin() + b"".join(events.chunks([(0, chunk)]) for chunk in chunks_of(ANSWER)) + events.end()
        reply = httpx2.Response(200, content=data, headers={"content-type": "text/event-stream"})
        transport = httpx2.MockTransport(lambda _, reply=reply: reply)
        client = anthropic.Anthropic(api_key="k", http_client=httpx2.Client(transport=transport), base_url="http://x")
        with client, client.messages.stream(model="m", max_tokens=8, messages=HELLO) as stream:
            message = stream.get_final_message()
        assert [b.type for b in message.content] == ["thinking"] * shows + ["text", "tool_use"]
        assert message.content[-2].text.strip() == "I call it." and message.content[-1].input == {"a": True}
        assert message.stop_reason == "tool_use" and (not shows or message.content[0].thinking == "hm")


def test_a_call_that_is_cut_keeps_its_text() -> None:
    blocks = to_anthropic.Blocks(True)
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a": tr'}}
    blocks.add(SimpleNamespace(reasoning="", content="", calls=(call,)))  # type: ignore[arg-type]
    blocks.close()
    assert blocks.content[0]["input"] == {"INVALID_JSON": '{"a": tr'}


def test_each_api_has_its_own_errors() -> None:
    error = APIError(429, "later", retry_after=3)
    assert shaped(error, "/v1/messages")["error"]["type"] == "rate_limit_error"
    assert shaped(error, "/api/chat") == {"error": "later"}
    assert shaped(APIError(503, "no"), "/infill")["error"] == {
        "code": 503,
        "message": "no",
        "type": "unavailable_error",
    }
    assert shaped(error, "/v1/completions") == error.body()


# Ollama ------------------------------------------------------------------------------------------------


def test_a_plain_curl_needs_no_content_type_and_a_page_of_another_site_does(server: Server) -> None:
    body = {"model": "pocket", "prompt": "import", "stream": False, "options": GREEDY}

    def send(**headers: str) -> int:
        form = "application/x-www-form-urlencoded"
        return server.ask("POST", "/api/generate", body, x_api_key=KEY, **{"content-type": form}, **headers)[0]

    assert send() == 200
    assert send(origin="https://example.org") == send(origin="null") == send(sec_fetch_site="cross-site") == 400


def test_ollama_chats(server: Server, llama: ollama.Client) -> None:
    told = content(server, max_tokens=8)["content"]
    whole = llama.chat("pocket", HELLO, options=GREEDY, logprobs=True, top_logprobs=2)
    assert whole.message.content == told and whole.done_reason == "length" and whole.eval_count == 8
    assert whole.logprobs is not None and "".join(one.token for one in whole.logprobs) == told
    assert all(len(one.top_logprobs or ()) == 2 for one in whole.logprobs)
    parts = list(llama.chat("pocket:latest", HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == told
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1].prompt_eval_count
    told = content(server, max_tokens=60, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    found = llama.chat("pocket", HELLO, format=SCHEMA, options={"temperature": 0, "num_predict": 60})
    assert found.message.content == told["content"] and json.loads(told["content"]).keys() == {"a"}
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    talk = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "yes", "tool_name": "f"}]  # fmt: skip
    assert llama.chat("pocket", talk, tools=[tool], options=GREEDY).done


def test_ollama_generates(server: Server, llama: ollama.Client) -> None:
    told = content(server, max_tokens=8, messages=[{"role": "system", "content": "be kind"}, *HELLO])["content"]
    assert llama.generate("pocket", "hello", system="be kind", options=GREEDY).response == told
    body = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0}
    raw = ask(server, "POST", "/v1/completions", body)[1]["choices"][0]["text"]
    parts = llama.generate("pocket", "import os\n", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == raw
    assert llama.generate("pocket", "").done_reason == "load"
    status, data, headers = server.raw("POST", "/api/generate", {
        "model": "pocket", "prompt": "x", "stream": False, "keep_alive": "5m",
        "options": {"num_gpu": 9, "num_predict": 2},
    }, x_api_key=KEY)  # fmt: skip
    assert status == 200 and json.loads(data)["done"]
    assert headers["warning"] == '299 ridgeline "fields without effect: options.num_gpu, keep_alive"'


def test_ollama_describes_the_model(server: Server, llama: ollama.Client) -> None:
    (model,), (running,) = llama.list().models, llama.ps().models
    assert model.model == running.model == "pocket:latest" and model.digest == running.digest
    assert running.context_length and running.expires_at and running.expires_at.year == 9999
    shown = llama.show("pocket")
    assert (
        shown.modelinfo and shown.modelinfo["general.architecture"] == "qwen3" and shown.capabilities == ["completion"]
    )
    assert ask(server, "GET", "/api/version")[1] == ask(server, "GET", "/version")[1]
    body = {"model": "pocket", "input": ["a", "b c"], "pooling": "mean"}
    status, found = ask(server, "POST", "/api/embed", body)
    assert status == 200 and found["prompt_eval_count"] > 2
    lengths = [sum(x * x for x in vector) for vector in ollama.EmbedResponse(**found).embeddings]
    assert lengths == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize(("path", "fields", "words"), [
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "leave the images out"),
    ("/api/chat", {"messages": HELLO, "options": {"num_ctx": 1 << 20}}, "num_ctx is 1048576"),
    ("/api/chat", {"messages": HELLO, "options": {"wat": 1}}, "options.wat is not a known field"),
    ("/api/chat", {"messages": HELLO, "options": {"mirostat": 1}}, "options.mirostat"),
    ("/api/chat", {"messages": HELLO, "format": "yaml"}, "format"),
    ("/api/chat", {"messages": HELLO, "top_logprobs": 2}, "logprobs"),
    ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not a known field"),
    ("/api/generate", {"prompt": "x", "context": [1]}, "context is not a known field"),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system needs a chat template"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/api/generate", {"keep_alive": 0}, "keeps its model loaded"),
    ("/api/embed", {"input": []}, ""),
])  # fmt: skip
def test_bad_requests_to_ollama(server: Server, path: str, fields: dict[str, Any], words: str) -> None:
    status, found = ask(server, "POST", path, {"model": "pocket", **fields})
    assert status == 400 and words in found["error"], found


def test_ollama_clients_see_errors(llama: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        llama.chat("other", HELLO)
    assert caught.value.status_code == 404 and "does not exist" in caught.value.error


def test_lines_have_reasoning_and_calls() -> None:
    service: Any = SimpleNamespace(tokenizer=None)
    reply = object.__new__(to_ollama.Reply)
    reply._service, reply._model = service, "m"
    reply._body = OllamaChatBody(model="m")
    reply.work = SimpleNamespace(reading=Reading("auto", "hermes", thinks=True))  # type: ignore[assignment]
    turn: Any = SimpleNamespace(requests=[SimpleNamespace(prompt_token_ids=[1, 2])])
    lines = reply.events(turn)
    data = b"".join(lines.chunks([(0, chunk)]) for chunk in chunks_of(ANSWER)) + lines.end()
    parts = [ollama.ChatResponse(**json.loads(line)) for line in data.splitlines()]
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert call.function.name == "f" and call.function.arguments == {"a": True}
    assert parts[-1].done and parts[-1].total_duration == 500_000_000


# llama.cpp ---------------------------------------------------------------------------------------------


def test_completions_of_llama_cpp(server: Server) -> None:
    asked = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    told = ask(server, "POST", "/v1/completions", asked)[1]["choices"][0]
    body = {"prompt": "import os\n", "n_predict": 8, "temperature": 0, "n_probs": 2, "return_tokens": True}
    status, found = ask(server, "POST", "/completion", body)
    LlamaAnswer.model_validate(found)
    assert status == 200 and found["content"] == told["text"] and len(found["tokens"]) == 8
    probs = [one["logprob"] for one in found["completion_probabilities"]]
    assert probs == pytest.approx(told["logprobs"]["token_logprobs"]) and found["stop_type"] == "limit"
    _, after = ask(server, "POST", "/completion", {**body, "temperature": 1.0, "seed": 1, "post_sampling_probs": True})
    assert all(0 < one["prob"] <= 1 and len(one["top_probs"]) <= 2 for one in after["completion_probabilities"])
    _, data, _ = server.raw("POST", "/completion", {**body, "stream": True}, x_api_key=KEY)
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]
    assert "".join(event["content"] for event in events) == told["text"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    stop = told["text"].strip()[1:3]
    assert ask(server, "POST", "/completion", {**body, "stop": [stop]})[1]["stopping_word"] == stop


def test_prompts_of_llama_cpp(server: Server) -> None:
    body = {"n_predict": 4, "temperature": 0, "response_fields": ["content", "timings/prompt_n", "prompt"]}
    ids = ask(server, "POST", "/tokenize", {"content": "import os", "add_special": True})[1]["tokens"]
    plain = ask(server, "POST", "/tokenize", {"content": "import os"})[1]["tokens"]
    assert plain == ids[-len(plain) :] and len(plain) < len(ids)
    _, found = ask(
        server, "POST", "/completion", {**body, "prompt": [ids, "import os", {"prompt_string": "import os"}]}
    )
    assert [one["content"] for one in found] == [found[0]["content"]] * 3 and found[0].keys() == set(
        body["response_fields"]
    )
    _, mixed = ask(server, "POST", "/completion", {**body, "prompt": [*ids[:-1], "os"]})
    assert mixed["prompt"].endswith("os")
    _, uncached = ask(server, "POST", "/completion", {**body, "prompt": "x " * 40, "cache_prompt": False})
    _, again = ask(server, "POST", "/completion", {**body, "prompt": "x " * 40, "cache_prompt": False})
    assert uncached == again  # all tokens of the prompt were computed twice
    never = ask(
        server,
        "POST",
        "/completion",
        {
            "prompt": "import os\n",
            "n_predict": 8,
            "temperature": 0,
            "logit_bias": [["import", False], [" import", False]],
        },
    )
    assert "import" not in never[1]["content"]


def test_structures_of_llama_cpp(server: Server) -> None:
    body = {"prompt": "x", "n_predict": 60, "temperature": 1.0, "seed": 3}
    _, found = ask(server, "POST", "/completion", {**body, "grammar": 'root ::= "yes" | [0-9]{3} "."'})
    assert found["content"] == "yes" or (len(found["content"]) == 4 and found["content"][:3].isdecimal())
    _, found = ask(server, "POST", "/completion", {**body, "json_schema": SCHEMA})
    assert json.loads(found["content"]).keys() == {"a"}


@pytest.mark.parametrize(("path", "fields", "status", "words"), [
    ("/completion", {}, 400, "prompt"),
    ("/completion", {"prompt": []}, 400, "empty"),
    ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": "eA=="}}, 400, "multimodal_data"),
    ("/completion", {"prompt": "x", "wat": 1}, 400, "wat is not a known field"),
    ("/completion", {"prompt": "x", "grammar": "root ::= ("}, 400, "not valid GBNF"),
    ("/completion", {"prompt": "x", "grammar": "root ::= " + "(" * 5000}, 400, "nested too deeply"),
    ("/completion", {"prompt": "x", "n_predict": 1 << 20}, 400, "exceed the context"),
    ("/completion", {"prompt": "x", "n_probs": 99}, 400, "99"),
    ("/completion", {"prompt": "x", "mirostat": 2}, 400, "mirostat"),
    ("/completion", {"prompt": "x", "logit_bias": [[1]]}, 400, "logit_bias has [1]"),
    ("/completion", {"prompt": ["x", 1] * 300}, 400, "300 texts"),
    ("/completion", {"prompt": [1 << 40]}, 400, "token id"),
    ("/infill", {"input_prefix": "x"}, 400, "input_suffix"),
    ("/infill", {"input_prefix": "x", "input_suffix": "y", "input_extra": [{"filename": 1}]}, 400, "input_extra"),
    ("/infill", {"input_prefix": "x", "input_suffix": "y"}, 400, "fills no gaps"),
    ("/apply-template", {"messages": []}, 400, ""),
])  # fmt: skip
def test_bad_requests_to_llama_cpp(server: Server, path: str, fields: Any, status: int, words: str) -> None:
    found, body = ask(server, "POST", path, fields)
    assert found == status and body["error"]["code"] == status and words in body["error"]["message"], body


def test_the_server_as_llama_cpp_shows_it(server: Server) -> None:
    _, text = ask(server, "POST", "/apply-template", {"messages": HELLO})
    assert text == {"prompt": "user: hello\nassistant:"}
    props, slots = ask(server, "GET", "/props")[1], ask(server, "GET", "/slots")[1]
    assert props["total_slots"] == len(slots) == 4 and not any(slot["is_processing"] for slot in slots)
    _, found = ask(server, "POST", "/tokenize", {"content": "a 媽", "with_pieces": True})
    data = b"".join(p.encode() if isinstance(p := one["piece"], str) else bytes(p) for one in found["tokens"][:-1])
    assert data.startswith(b"a ")
    assert ask(server, "POST", "/detokenize", {"tokens": [t["id"] for t in found["tokens"]]})[1]["content"] == "a 媽"
    assert ask(server, "POST", "/tokenize", {"prompt": "x", "with_pieces": True})[0] == 400


# vLLM --------------------------------------------------------------------------------------------------


def test_the_rest_of_vllm(server: Server) -> None:
    assert ask(server, "GET", "/ping")[0] == ask(server, "POST", "/ping", {})[0] == 200
    assert ask(server, "GET", "/load")[1] == {"server_load": 0}
    assert ask(server, "GET", "/tokenizer_info")[1]["vocab_size"] == 4096
    for body, kind in (
        ({"messages": HELLO, "max_tokens": 2}, "chat.completion"),
        ({"prompt": "x", "max_tokens": 2}, "text_completion"),
        ({"input": "x", "pooling": "mean"}, "list"), ({"text_1": "x", "text_2": "y"}, "score"),
    ):  # fmt: skip
        status, found = ask(server, "POST", "/invocations", body)
        assert (status == 200 and found["object"] == kind) or (status == 400 and "score_template" in str(found)), found
    status, found = ask(server, "POST", "/invocations", {"wat": 1})
    assert status == 400 and "prompt" in found["error"]["message"]


def test_the_prefix_cache_is_reset(server: Server) -> None:
    body = {"prompt": "y " * 60, "max_tokens": 1, "temperature": 0}

    def cached() -> int:
        found = ask(server, "POST", "/v1/completions", body)[1]
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert (cached(), cached() > 0) == (0, True)
    before = ask(server, "POST", "/reset_prefix_cache")[1]["resets"]
    assert (cached(), cached() > 0) == (0, True)
    assert ask(server, "POST", "/reset_prefix_cache")[1]["resets"] == before + 1


@pytest.mark.nightly
def test_the_engine_sleeps_and_wakes(server: Server) -> None:
    body = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0}
    told = ask(server, "POST", "/v1/completions", body)[1]["choices"][0]["text"]
    assert ask(server, "POST", "/sleep?level=7")[0] == 400
    pid = server.engine_pid()
    assert ask(server, "POST", "/sleep?level=1")[1] == {"is_sleeping": True}
    assert server.engine_pids() == [] and ask(server, "GET", "/is_sleeping")[1] == {"is_sleeping": True}
    assert ask(server, "GET", "/health")[0] == 200 and ask(server, "GET", "/ready")[0] == 503
    assert ask(server, "POST", "/v1/completions", body)[0] == 503
    assert server.raw("GET", "/metrics", x_api_key=KEY)[0] == 200
    assert ask(server, "POST", "/wake_up")[1] == {"is_sleeping": False}
    assert server.engine_pid() != pid
    end = time.monotonic() + 20
    while ask(server, "GET", "/ready")[0] != 200:
        assert time.monotonic() < end
    assert ask(server, "POST", "/v1/completions", body)[1]["choices"][0]["text"] == told
