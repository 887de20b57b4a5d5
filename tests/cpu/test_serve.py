"""The server, tested with OpenAI's client: its answers are those of `LLM.generate`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from cpu.serving import Server, serving, write_template
from ridgeline import LLM, SamplingParams

PROMPTS = ["def fibonacci(n):", "import os\n", "class Stack:\n    def push(self, x):", "for i in range(10"]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_template(tmp_path_factory.mktemp("template"))
    args = ("pocket", "--chat-template", template, "--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with serving(*args, "--served-model-name", "pocket", "--served-model-name", "gpt-x") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def wanted(llm: LLM, prompt: Any, **params: Any) -> Any:
    (output,) = llm.generate([prompt], SamplingParams(**{**llm.default_sampling_fields(), **params}))
    return output


def test_completions_equal_generate(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="pocket", prompt=PROMPTS, n=2, seed=7, max_tokens=20, temperature=0.8)
    outputs = [wanted(llm, p, n=2, seed=7, max_tokens=20, temperature=0.8) for p in PROMPTS]
    choices = [c for o in outputs for c in o.outputs]
    assert [c.text for c in answer.choices] == [c.text for c in choices]
    assert [c.index for c in answer.choices] == list(range(8))
    assert [c.finish_reason for c in answer.choices] == [c.finish_reason for c in choices]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in choices)
    assert answer.model == "pocket"


def test_streams_equal_generate(client: openai.OpenAI, llm: LLM) -> None:
    stream = client.completions.create(
        model="gpt-x", prompt=PROMPTS[:2], n=2, seed=3, max_tokens=30, stop=["\n\n"], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, reasons, usage = ["", "", "", ""], ["", "", "", ""], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage or usage
    outputs = [wanted(llm, p, n=2, seed=3, max_tokens=30, stop=["\n\n"]) for p in PROMPTS[:2]]
    choices = [c for o in outputs for c in o.outputs]
    assert texts == [c.text for c in choices]
    assert reasons == [c.finish_reason for c in choices]
    assert usage is not None
    assert usage.completion_tokens == sum(len(c.token_ids) for c in choices)


def test_concurrent_streams_equal_generate(server: Server, llm: LLM) -> None:
    """48 streams start at different times, some clients disconnect, and other requests do not stream."""
    params = [{"seed": i, "max_tokens": 8 + i % 40, "temperature": i % 3 / 2} for i in range(48)]
    sampling = [SamplingParams(**{**llm.default_sampling_fields(), **p}) for p in params]
    outputs = llm.generate([PROMPTS[i % 4] for i in range(48)], sampling)

    async def one(client: openai.AsyncOpenAI, i: int) -> list[int]:
        await asyncio.sleep(0.004 * (i % 16))  # some clients arrive while others are being answered
        extra = {"return_token_ids": True}
        given: dict[str, Any] = {"model": "pocket", "prompt": PROMPTS[i % 4], **params[i], "extra_body": extra}
        if i % 4 == 0:
            answer = await client.completions.create(**given)
            return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]
        ids: list[int] = []
        stream = await client.completions.create(**given, stream=True)
        async for chunk in stream:
            ids += chunk.choices[0].token_ids
            if i % 16 == 1 and len(ids) > 5:
                await stream.close()
                break
        return ids

    async def main() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(48)))

    for i, found in enumerate(asyncio.run(main())):
        whole = outputs[i].outputs[0].token_ids
        assert found == (whole[: len(found)] if i % 16 == 1 else whole), i
    server.until("vllm:num_requests_running", 0)
    server.until("ridgeline:pages_used", 0)
    server.until("ridgeline:answers_open", 0)


def test_parameters_reach_the_sampler(client: openai.OpenAI, llm: LLM) -> None:
    same: dict[str, Any] = {
        "max_tokens": 16,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "top_p": 0.9,
    }
    ours = {
        "min_p": 0.02,
        "top_k": 40,
        "repetition_penalty": 1.2,
        "typical_p": 0.9,
        "min_tokens": 3,
        "ignore_eos": True,
    }
    bias = {"40": 3.0, "41": -100.0}
    answer = client.completions.create(
        model="pocket", prompt=PROMPTS[0], temperature=1.1, logit_bias=bias, extra_body=ours, **same
    )
    params = {**same, **ours, "temperature": 1.1, "logit_bias": {40: 3.0, 41: -100.0}}
    assert answer.choices[0].text == wanted(llm, PROMPTS[0], **params).outputs[0].text


def test_logprobs_and_echo(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="pocket", prompt=PROMPTS[2], echo=True, logprobs=3, **GREEDY)
    output = wanted(llm, PROMPTS[2], logprobs=3, prompt_logprobs=3, **GREEDY)
    found = answer.choices[0].logprobs
    entries = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    assert found is not None and found.token_logprobs and found.top_logprobs and found.tokens
    assert found.token_logprobs == [e and e.logprob for e in entries]
    assert answer.choices[0].text == PROMPTS[2] + output.outputs[0].text == "".join(found.tokens[1:])
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    offsets = zip(found.text_offset or (), found.tokens, strict=True)
    assert all(answer.choices[0].text[at:].startswith(token) for at, token in list(offsets)[1:])  # after the BOS
    silent = client.completions.create(
        model="pocket", prompt=PROMPTS[2], echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert silent.choices[0].text == PROMPTS[2]
    assert silent.choices[0].logprobs is not None
    assert silent.choices[0].logprobs.token_logprobs == found.token_logprobs[: len(output.prompt_token_ids)]


def test_chat(client: openai.OpenAI, server: Server, llm: LLM) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]},
    ]
    text = "system: Be brief.\nuser: two\nparts\nassistant:"
    answer = client.chat.completions.create(
        model="pocket", messages=messages, logprobs=True, top_logprobs=2, max_completion_tokens=12, temperature=0
    )
    output = wanted(llm, text, max_tokens=12, temperature=0, logprobs=2)
    assert answer.choices[0].message.content == output.outputs[0].text
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert [c.logprob for c in content or ()] == [e.logprob for e in output.outputs[0].logprobs]
    assert b"".join(bytes(c.bytes or ()) for c in content or ()).decode() == output.outputs[0].text
    status, rendered = server.post("/v1/chat/completions/render", messages=messages)
    assert (status, rendered["prompt"], rendered["prompt_token_ids"]) == (200, text, output.prompt_token_ids)
    stream = client.chat.completions.create(
        model="pocket", messages=messages, n=2, max_tokens=12, temperature=0, stream=True
    )
    texts, roles = ["", ""], [None, None]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] = choice.delta.role or roles[choice.index]  # type: ignore[call-overload]
    assert (texts, roles) == ([output.outputs[0].text] * 2, ["assistant"] * 2)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: openai.OpenAI, stream: bool) -> None:
    """A grammar makes the model write a tool call."""

    def ask(**given: Any) -> tuple[str, list[Any], str | None]:
        messages: Any = [{"role": "user", "content": "weather"}]
        tools: Any = [TOOL]
        common: dict[str, Any] = {"model": "pocket", "messages": messages, "tools": tools, "max_tokens": 200, **given}
        if not stream:
            (choice,) = client.chat.completions.create(**common).choices
            calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]  # type: ignore[union-attr]
            return choice.message.content or "", calls, choice.finish_reason
        with client.chat.completions.stream(**common) as events:
            for _ in events:
                pass
            final = events.get_final_completion().choices[0]
        found = [(c.function.name, c.function.arguments) for c in final.message.tool_calls or ()]
        return final.message.content or "", found, final.finish_reason

    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    grammar = f"start: {json.dumps('I look. ')} {json.dumps(CALL)} {json.dumps(CALL)}"
    text, calls, reason = ask(extra_body={"structured_outputs": {"grammar": grammar}})
    assert (text, reason) == ("I look. ", "tool_calls")
    assert [(n, json.loads(a)) for n, a in calls] == [("weather", {"city": "Rome", "days": 2})] * 2
    text, calls, reason = ask(tool_choice="required", parallel_tool_calls=False)
    assert (text, reason) == ("", "tool_calls")
    assert calls and all(name == "weather" and jsonschema_rs.is_valid(schema, json.loads(a)) for name, a in calls)
    text, calls, reason = ask(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert (text, len(calls), reason) == ("", 1, "stop")
    assert jsonschema_rs.is_valid(schema, json.loads(calls[0][1]))
    text, calls, _ = ask(tool_choice="none", extra_body={"structured_outputs": {"grammar": grammar}})
    assert (text, calls) == ("I look. " + CALL * 2, [])


def test_reasoning(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    structure = {"structured_outputs": {"choice": ["<think>\nhm <b></think>\n\nYes </think>"]}}
    given: dict[str, Any] = {"model": "pocket", "messages": messages, "extra_body": structure, "max_tokens": 60}
    message = client.chat.completions.create(**given).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm <b>", "Yes </think>")  # type: ignore[attr-defined]
    thought = said = ""
    for chunk in client.chat.completions.create(**given, stream=True):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        said += delta.content or ""
    assert (thought, said) == ("hm <b>", "Yes </think>")


def test_structured_outputs(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    messages: Any = [{"role": "user", "content": "x"}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = client.chat.completions.create(
        model="pocket", messages=messages, response_format=form, max_tokens=200, n=3, seed=1, temperature=1.5
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert jsonschema_rs.is_valid(schema, json.loads(choice.message.content or ""))
    for structure, pattern in (
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", 'n"o']}, 'yes|n"o'),
        ({"grammar": 'start: "a" b*\nb: "b"\n'}, "ab*"),
    ):
        text = client.completions.create(
            model="pocket", prompt="x", max_tokens=40, seed=2, extra_body={"structured_outputs": structure}
        )
        assert re.fullmatch(pattern, text.choices[0].text), structure


@pytest.mark.parametrize(
    "structure", [{"regex": "((("}, {"json": "{"}, {"grammar": "nothing"}, {"json": {"type": "no"}}, {}, {"choice": []}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_structure_is_a_bad_request(server: Server, structure: Any, stream: bool) -> None:
    status, answer = server.post("/v1/completions", prompt="x", structured_outputs=structure, stream=stream)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert "structured_outputs" in answer["error"]["message"]


def test_embeddings(client: openai.OpenAI, server: Server, llm: LLM) -> None:
    import numpy as np

    answer = client.embeddings.create(
        model="pocket", input=["def f():", "a much longer text"], extra_body={"pooling": "mean"}
    )  # in base64
    _, plain = server.post("/v1/embeddings", input=["def f():"], encoding_format="float", pooling="mean")
    assert np.allclose(answer.data[0].embedding, plain["data"][0]["embedding"], atol=1e-6)
    assert all(abs(np.linalg.norm(d.embedding) - 1) < 1e-5 for d in answer.data)
    # The head applied to the last vector gives the model's logits, except for the vector's length.
    _, last = server.post("/v1/embeddings", input="def f():", pooling="last")
    head = np.asarray(llm.loaded.model.weights["embed.weight"]).astype(np.float64)
    ours = head @ np.array(last["data"][0]["embedding"])
    logits = llm.logits([llm.encode("def f():")])[0][-1].astype(np.float64)
    assert np.allclose(ours / np.linalg.norm(ours), logits / np.linalg.norm(logits), atol=1e-4)


def test_tokenize_and_detokenize(server: Server, llm: LLM) -> None:
    _, there = server.post("/tokenize", prompt=PROMPTS[2], return_token_strs=True)
    assert there["tokens"] == llm.encode(PROMPTS[2])
    assert "".join(there["token_strs"]) == "<|endoftext|>" + PROMPTS[2]
    assert server.post("/detokenize", tokens=there["tokens"], skip_special_tokens=True)[1] == {
        "prompt": PROMPTS[2], "content": PROMPTS[2],
    }  # fmt: skip


def test_models_version_and_health(client: openai.OpenAI, server: Server) -> None:
    assert [m.id for m in client.models.list()] == ["pocket", "gpt-x"]
    assert client.models.retrieve("gpt-x").id == "gpt-x"
    assert server.ask("GET", "/health")[1]["engine"] == "ready"
    assert server.ask("GET", "/ready")[0] == 200
    assert server.ask("GET", "/version")[0] == 200
    _, spec = server.ask("GET", "/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings"} <= set(spec["paths"])
    assert server.raw("GET", "/docs")[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "x", "foo": 1}, 400, "foo"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "max_tokens": 10**9}, 400, "context"),
        ({"prompt": "x", "n": 16_000}, 400, "at once"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [10**6]}, 400, "vocabulary"),
        ({"prompt": "\ud800"}, 400, "surrogate"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ({"prompt": "x", "best_of": 4}, 400, "best_of"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, 400, "stream"),
        ({"prompt": "x", "model": "gpt-9"}, 404, "gpt-9"),
        (b"{", 400, "JSON"),
        (b"\xff\xfe", 400, ""),
        (b"[" * 100_000, 400, ""),
        (b"", 400, ""),
    ],
)
def test_errors_have_openais_format(server: Server, body: Any, status: int, words: str) -> None:
    found, answer = server.ask("POST", "/v1/completions", body)
    assert (found, set(answer), set(answer["error"])) == (status, {"error"}, {"message", "type", "param", "code"})
    assert words in answer["error"]["message"]


def test_responses(client: openai.OpenAI, llm: LLM) -> None:
    text = "system: Be brief.\nuser: hi\nassistant:"
    plain = client.responses.create(
        model="pocket", input="hi", instructions="Be brief.", max_output_tokens=12, temperature=0
    )
    output = wanted(llm, text, max_tokens=12, temperature=0).outputs[0]
    assert (plain.output_text, plain.status) == (output.text, "incomplete")
    assert plain.usage is not None and plain.usage.output_tokens == len(output.token_ids)
    stream = client.responses.create(
        model="pocket", input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        max_output_tokens=12, temperature=0, stream=True,
    )  # fmt: skip
    events = list(stream)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == output.text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == output.text
    tool: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    for asked in (False, True):
        given: dict[str, Any] = {"model": "pocket", "input": "weather", "tools": [tool], "tool_choice": "required"}
        given |= {"parallel_tool_calls": False}
        if asked:
            with client.responses.stream(**given) as running:
                for _ in running:
                    pass
                called = running.get_final_response()
        else:
            called = client.responses.create(**given)
        (item,) = called.output
        assert item.type == "function_call" and item.name == "weather" and called.status == "completed"
        assert jsonschema_rs.is_valid(tool["parameters"], json.loads(item.arguments))
    with pytest.raises(openai.BadRequestError, match="stores nothing"):
        client.responses.create(model="pocket", input="x", previous_response_id="resp_1")
