"""The endpoints behave as /openapi.json describes: answers match it, and Schemathesis finds no violation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.serving import Server, serving, write_template
from ridgeline.serve.api import types_answers as t
from ridgeline.serve.dialects import anthropic_types as a
from ridgeline.serve.dialects import llama_cpp_types as c
from ridgeline.serve.dialects import ollama_types as o
from ridgeline.serve.dialects import vllm as v

MESSAGES = [{"role": "user", "content": "x"}]
FEW = {"max_tokens": 3, "temperature": 0}
LESS = {"num_predict": 3}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}
MAX_ITEMS = 64  # largest list that Schemathesis makes; one of 2^20 elements takes a minute and a gigabyte
EXAMPLES = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a short context, so that answers without a limit are short too."""
    template = write_template(tmp_path_factory.mktemp("template"))
    with serving("pocket", "--chat-template", template, "--quiet", "--max-num-seqs", "4", "--max-model-len", "64",
                 "--max-body-bytes", "65536", "--enable-tokenizer-info-endpoint") as server:  # fmt: skip
        yield server


ANSWERS: tuple[tuple[type[t.BaseModel], str, dict[str, Any] | None], ...] = (
    (t.CompletionAnswer, "/v1/completions", {"prompt": "x", **FEW}),
    (t.CompletionAnswer, "/v1/completions", {
        "prompt": ["x", "y"], "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True,
        **FEW,
    }),
    (t.ChatAnswer, "/v1/chat/completions", {"messages": MESSAGES, **FEW}),
    (t.ChatAnswer, "/v1/chat/completions", {
        "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True,
        **FEW,
    }),
    (t.ChatAnswer, "/v1/chat/completions", {
        "messages": MESSAGES, "tools": [{"function": TOOL}], "tool_choice": "required", "max_tokens": 40,
    }),
    (t.ResponseAnswer, "/v1/responses", {"input": "x", "max_output_tokens": 3}),
    (t.ResponseAnswer, "/v1/responses", {
        "input": "x", "tools": [TOOL], "tool_choice": {"name": "f"}, "max_output_tokens": 40, "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
    }),
    (t.EmbeddingAnswer, "/v1/embeddings", {"input": ["x", "y"], "pooling": "mean"}),
    (t.EmbeddingAnswer, "/v1/embeddings", {"input": "x", "encoding_format": "base64", "pooling": "mean"}),
    (t.TokenizeAnswer, "/tokenize", {"prompt": "x", "return_token_strs": True}),
    (t.TokenizeAnswer, "/tokenize", {"messages": MESSAGES}),
    (t.DetokenizeAnswer, "/detokenize", {"tokens": [5, 6]}),
    (t.RenderAnswer, "/v1/chat/completions/render", {"messages": MESSAGES}),
    (t.ModelsAnswer, "/v1/models", None),
    (t.ModelAnswer, "/v1/models/pocket", None),
    (t.HealthAnswer, "/health", None),
    (t.HealthAnswer, "/ready", None),
    (t.VersionAnswer, "/version", None),
    (t.LiveAnswer, "/live", None),
    (t.PlanAnswer, "/plan", None),
    (a.MessageAnswer, "/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    (a.CountAnswer, "/v1/messages/count_tokens", {"messages": MESSAGES}),
    (o.GenerateAnswer, "/api/generate", {"model": "pocket", "prompt": "x", "stream": False, "options": LESS}),
    (o.OllamaChatAnswer, "/api/chat", {
        "model": "pocket", "messages": MESSAGES, "stream": False, "options": LESS, "logprobs": True, "top_logprobs": 1,
    }),
    (o.EmbedAnswer, "/api/embed", {"model": "pocket", "input": "x", "pooling": "mean"}),
    (o.TagsAnswer, "/api/tags", None),
    (o.PsAnswer, "/api/ps", None),
    (o.ShowAnswer, "/api/show", {"model": "pocket"}),
    (o.OllamaVersion, "/api/version", None),
    (c.LlamaAnswers, "/completion", {"prompt": ["x", "y"], "n_predict": 3, "n_probs": 1}),
    (c.PropsAnswer, "/props", None),
    (c.SlotsAnswer, "/slots", None),
    (c.ApplyAnswer, "/apply-template", {"messages": MESSAGES}),
    (v.LoadAnswer, "/load", None),
    (v.InvokedAnswer, "/invocations", {"prompt": "x", **FEW}),
    (v.TokenizerAnswer, "/tokenizer_info", None),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "body"), ANSWERS)
def test_answers_are_as_described(
    server: Server, kind: type[t.BaseModel], path: str, body: dict[str, Any] | None
) -> None:
    status, data, _ = server.raw("GET" if body is None else "POST", path, body)
    assert status == 200, data
    found = kind.model_validate_json(data)
    asked = {name for name, field in kind.model_fields.items() if field.is_required()}
    assert asked <= found.model_fields_set
    schema = server.ask("GET", "/openapi.json")[1]
    name = "/v1/models/{name}" if path == "/v1/models/pocket" else path
    told = schema["paths"][name]["get" if body is None else "post"]["responses"]["200"]["content"]["application/json"]
    assert told["schema"]["$ref"].endswith(f"/{kind.__name__}")


def test_errors_are_as_described(server: Server) -> None:
    for method, path, body, status in (
        ("POST", "/v1/completions", {}, 400), ("GET", "/nothing", None, 404), ("PUT", "/tokenize", {}, 405),
        ("POST", "/tokenize", {"prompt": "x" * 70_000}, 413),
    ):  # fmt: skip
        found, data, headers = server.raw(method, path, body)
        t.ErrorAnswer.model_validate_json(data)
        assert found == status
        if status == 405:
            assert headers["allow"] == "POST"


def bounded(schema: Any) -> Any:
    """Return the description with short lists."""
    if isinstance(schema, dict):
        return {k: min(v, MAX_ITEMS) if k == "maxItems" else bounded(v) for k, v in schema.items()}
    return [bounded(v) for v in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize(
    "phases", [pytest.param("fuzzing", marks=pytest.mark.slow), pytest.param("coverage", marks=pytest.mark.nightly)]
)
def test_schemathesis_finds_nothing(phases: str, server: Server, tmp_path: Path) -> None:
    """Run all checks but one: a body with the right schema may still be refused, because a schema cannot express the
    vocabulary, the context, the meaning of a grammar, and which fields can be combined.
    """
    description, schema = tmp_path / "openapi.json", server.ask("GET", "/openapi.json")[1]
    description.write_text(json.dumps(bounded(schema)))
    run = subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), "run", str(description),
         "--url", f"http://127.0.0.1:{server.port}", "--phases", phases,
         "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color",
         "--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:]
    count = sum(map(len, schema["paths"].values()))
    assert count >= 20 and f"{count} selected" in run.stdout and f"Tested: {count}" in run.stdout, run.stdout[-3000:]
    status, _ = server.post("/v1/completions", prompt="x", **FEW)
    assert status == 200 and server.metric("ridgeline:engine_restarts_total") == 0
