"""Adapters of a server: named as a model, listed, loaded and dropped while it serves, and there after a restart."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.serving import Server, serving, until
from oracle.adapters import write_adapter
from ridgeline import LLM, SamplingParams
from ridgeline.cli.flags.serving import ServedFlags, ServerFlags, adapter_arguments, modules_of, serve_options
from ridgeline.errors import RequestError

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # peft's own
]
PROMPT, TOKENS = "def add(a, b):", 12


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(base / name, seed) for seed, name in enumerate(("one", "two", "three"), 1)}


@pytest.fixture(scope="module")
def wanted(adapters: dict[str, str]) -> dict[str, str]:
    """The text of each adapter, and of the model itself, by LLM."""
    llm, names = LLM("pocket", lora_modules=adapters, threads=1), ["", *adapters]
    params = SamplingParams(**{**llm.default_sampling_fields(), "max_tokens": TOKENS, "temperature": 0.0})
    found = llm.generate([PROMPT] * 4, params, lora=names)
    texts = {name: output.outputs[0].text for name, output in zip(names, found, strict=True)}
    assert len(set(texts.values())) == 4, "the adapters change nothing"
    return texts


@pytest.fixture(scope="module")
def server(adapters: dict[str, str]) -> Iterator[Server]:
    given = [f"{name}={adapters[name]}" for name in ("one", "two")]
    with serving(
        "pocket", "--lora-modules", *given, "--max-loras", "3", "--threads", "1", "--allow-runtime-lora-updating"
    ) as server:
        yield server


def text_of(server: Server, model: str) -> str:
    status, answer = server.post("/v1/completions", model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    assert status == 200, answer
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def models_of(server: Server) -> dict[str, Any]:
    return {entry["id"]: entry["parent"] for entry in server.ask("GET", "/v1/models")[1]["data"]}


def test_a_request_names_an_adapter_as_its_model(server: Server, wanted: dict[str, str]) -> None:
    assert models_of(server) == {"pocket": None, "one": "pocket", "two": "pocket"}
    for name in ("one", "pocket", "two", "one"):  # the prefix cache has the prompt of others
        assert text_of(server, name) == wanted["" if name == "pocket" else name]
    status, answer = server.post("/v1/embeddings", model="one", input="text", pooling="mean")
    assert (status, answer["error"]["code"]) == (400, "model_not_supported")
    status, answer = server.post("/v1/completions", model="three", prompt=PROMPT)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "pocket, one, two" in answer["error"]["message"]
    assert server.post("/tokenize", model="one", prompt=PROMPT)[0] == 200


def test_adapters_come_and_go_and_are_there_after_a_restart(
    server: Server, adapters: dict[str, str], wanted: dict[str, str]
) -> None:
    def change(verb: str, **fields: Any) -> tuple[int, Any]:
        return server.post(f"/v1/{verb}_lora_adapter", **fields)

    assert change("load", lora_name="three", lora_path=adapters["three"])[0] == 200
    assert text_of(server, "three") == wanted["three"]
    assert change("load", lora_name="three", lora_path=adapters["three"])[0] == 400
    assert change("load", lora_name="pocket", lora_path=adapters["three"])[0] == 400
    status, answer = change("load", lora_name="four", lora_path=adapters["three"])
    assert status == 400 and "max_loras" in answer["error"]["message"]
    assert change("unload", lora_name="two")[1] == {"adapters": ["one", "three"]}
    assert change("unload", lora_name="two")[0] == 404
    status, answer = change("load", lora_name="bad", lora_path="/absent/folder")
    assert status == 400 and "absent" in answer["error"]["message"]
    os.kill(server.engine_pid(), signal.SIGKILL)
    until(lambda: server.ask("GET", "/health")[0] == 503)
    until(lambda: server.ask("GET", "/health")[0] == 200)
    assert models_of(server) == {"pocket": None, "one": "pocket", "three": "pocket"}
    assert text_of(server, "three") == wanted["three"] and text_of(server, "pocket") == wanted[""]
    assert change("load", lora_name="two", lora_path=adapters["two"])[0] == 200
    assert text_of(server, "two") == wanted["two"]


def test_the_endpoints_are_closed_by_default(tmp_path: Path) -> None:
    from ridgeline.serve.dialects.routes import dialect_routers
    from ridgeline.serve.options import ServeOptions

    def paths(**given: Any) -> str:
        return json.dumps(
            [route.path for router in dialect_routers(ServeOptions(("m",), **given)) for route in router.routes]
        )

    assert "lora_adapter" not in paths()
    assert "/v1/load_lora_adapter" in paths(allow_runtime_lora_updating=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_modules": ["a"]}, "'a': give NAME=PATH"),
        ({"lora_modules": ["a="]}, "give NAME=PATH"),
        ({"lora_modules": ["a=x", "a=y"]}, "the name 'a' is given twice"),
        ({"lora_modules": ["pocket=x"]}, "the name 'pocket' is given twice"),
        ({"lora_modules": ["a=x", "b=y"], "max_loras": 1}, "max-loras is 1, but --lora-modules names 2"),
        ({"allow_runtime_lora_updating": True}, "needs room for adapters; give --max-loras"),
    ],
)
def test_flags_that_cannot_be(given: dict[str, Any], message: str) -> None:
    server = ServerFlags(allow_runtime_lora_updating=given.pop("allow_runtime_lora_updating", False))
    served = ServedFlags(**given)
    with pytest.raises(RequestError, match=message):
        adapter_arguments(served, serve_options(served, server, 0))
    assert modules_of(["a=b=c"], []) == {"a": "b=c"}
