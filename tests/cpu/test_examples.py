"""Run each program of examples/ as a user does, on the built-in models and on a server."""

from __future__ import annotations

import importlib.util
import io
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpu.serving import Server, serving, write_template

Run = Callable[..., str]  # takes the name of an example and its words, and returns what it prints
EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"langchain_chat": "langchain_openai", "llama_index_chat": "llama_index.llms"}  # not in the extra `dev`


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_template(tmp_path_factory.mktemp("template"))
    with serving("pocket", "--chat-template", template, "--tool-call-parser", "hermes") as running:
        yield running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_each_example_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.stem}"' in source, f"no test runs {path.name}"


def test_a_batch_is_answered_in_its_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import\n\ndef f(x):\n"))
    rows = [json.loads(line) for line in run("offline_batch", "--max-tokens", "4").splitlines()]
    assert [row["prompt"] for row in rows] == ["import", "def f(x):"]
    assert all(row["answer"] for row in rows)


def test_extracted_fields_follow_the_schema(run: Run) -> None:
    name, year = run("structured_extraction").splitlines()
    assert name.startswith("name: ") and 0 <= int(year.removeprefix("year: ")) <= 3000


def test_an_agent_calls_its_tool_with_valid_arguments(run: Run, server: Server) -> None:
    called, *rest = run("agent", "--url", server.url).splitlines()
    arguments, result = called.removeprefix("called multiply(").rsplit("): ", 1)
    given = json.loads(arguments)
    assert int(result) == given["a"] * given["b"]
    assert any(line.startswith("answer: ") for line in rest)


def test_a_model_compared_with_itself_does_not_differ(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("import os\nimport sys\n" * 20)
    lines = run("evaluation", "pocket", "--text", str(text), "--against", "pocket").splitlines()
    assert lines[0].startswith("perplexity: ")
    assert lines[1:] == ["divergence from the original: 0.00e+00 nats per token", "same most likely token: 100.00%"]


def test_two_models_answer_side_by_side(run: Run) -> None:
    said = run("compare_models", "pocket", "pocket-draft", "import")
    assert "prompt: 'import'" in said and "pocket: '" in said and said.count("ms per token") == 2


@pytest.mark.filterwarnings("ignore")  # the libraries warn
@pytest.mark.parametrize("name", ["langchain_chat", "llama_index_chat"])
def test_a_library_gets_answers(run: Run, server: Server, name: str) -> None:
    if importlib.util.find_spec(NEEDS[name].split(".")[0]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    assert len(run(name, "--url", server.url, "--model", "pocket").splitlines()) >= 2
