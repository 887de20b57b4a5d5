"""How a command uses its streams: a full disk, a closed pipe, progress bars on a terminal, lines on stderr."""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import io
import json
import os
import resource
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import main
from ridgeline.cli.show.results import Results
from ridgeline.errors import RequestError
from ridgeline.plan.picture import keep
from ridgeline.serve.api import batch
from ridgeline.serve.engine.worker import ready
from ridgeline.serve.options import ServeOptions

COMMANDS = {
    "plan": "plan mistral-7b --hardware h100",
    "plan --json": "plan mistral-7b --hardware h100 --json",
    "inspect": "inspect mistral-7b",
    "explain": "explain pocket",
    "simulate": "simulate mistral-7b --num-requests 3",
    "doctor": "doctor --device cpu",
    "help": "--help",
    "generate": "generate hi --max-tokens 2",
    "generate --json": "generate hi --max-tokens 2 --json",
    "chat": "chat -m pocket --max-tokens 2",
    "bench": "bench latency -m pocket --batch-size 1 --input-len 2 --output-len 2 --num-iters 1",
}


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


Run = Callable[..., tuple[int, str]]
SLOW = ("bench",)
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in COMMANDS]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with a given stdout. Returns its status and its output on stderr."""

    def call(line: str, stdout: Any, stderr: Any = None) -> tuple[int, str]:
        errors = stderr or io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["ridgeline", *line.split()])
            patch.setattr(sys, "stdin", io.StringIO("def hello(name): return name\n"))
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", errors)
            with pytest.raises(SystemExit) as caught:
                main()
        return int(caught.value.code or 0), errors.getvalue()

    return call


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_is_one_line(run: Run, name: str) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        status, said = run(COMMANDS[name], full)
    lines = [line for line in said.splitlines() if line.startswith("ridgeline: ")]
    assert status == 2
    assert lines == ["ridgeline: the output cannot be written: No space left on device"]
    assert "Traceback" not in said and "Error" not in said


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_without_a_reader_ends_a_command_in_silence(run: Run, name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        status, said = run(COMMANDS[name], pipe)
    assert status == 0
    assert "Traceback" not in said and "Broken pipe" not in said and "ridgeline: " not in said


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the length of files in this context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_incomplete_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (output,) = LLM("pocket").generate("hi", SamplingParams(max_tokens=2))
    path = tmp_path / "o.jsonl"
    with Results(str(path), ["a-b-c"] * 3, ["one", "two", "three"]) as found:
        found.add(0, output)
        whole = path.read_bytes()
        with (
            full_disk(len(whole) + 10),
            pytest.raises(RequestError, match=r"cannot write to .*o\.jsonl: File too large"),
        ):
            found.add(1, output)
        assert path.read_bytes() == whole and found.done == {0}
        found.add(1, output)  # the disk has free space again
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == [0, 1]
    answers = tmp_path / "batch.jsonl"
    with batch._opened(answers) as file:
        batch._append(file, answers, b"x" * 20 + b"\n")
        with full_disk(30), pytest.raises(RequestError, match=r"batch\.jsonl: File too large; run the command again"):
            batch._append(file, answers, b"y" * 20 + b"\n")
    assert answers.read_bytes() == b"x" * 20 + b"\n"


def test_a_batch_on_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        async def start(self) -> None:
            pass

        async def close(self) -> None:
            pass

    async def result(service: Any, line: batch.Line) -> dict[str, Any]:
        return {"custom_id": line.id, "response": "x" * 40}

    monkeypatch.setattr(batch, "EngineClient", lambda *args: Client())
    monkeypatch.setattr(
        batch,
        "Service",
        lambda *args: SimpleNamespace(gate=SimpleNamespace(running=4), helpers=SimpleNamespace(close=lambda: None)),
    )
    monkeypatch.setattr(batch, "_result", result)
    lines, path = [batch.Line(f"{i}", "/v1/completions", {}) for i in range(8)], tmp_path / "o.jsonl"
    done: list[Any] = []
    call = batch.run_batch("m", {}, ServeOptions(["m"]), lines, path, on_ready=lambda s: None, on_done=done.append)
    with pytest.raises(RequestError, match="/dev/null is not a regular file"):
        batch.read_done(Path("/dev/null"))
    with (
        full_disk(200),
        pytest.raises(RequestError, match=r"cannot write to .*: File too large; run the command again"),
    ):
        asyncio.run(call)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == done and 0 < len(done) < 8


def test_a_picture_is_complete_or_missing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    path = tmp_path / "x.png"
    keep(Figure(), str(path))
    before = path.read_bytes()
    with full_disk(100), pytest.raises(RequestError, match=r"x\.png cannot be written: File too large"):
        keep(Figure(), str(path))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_simulate_shows_its_progress_on_a_terminal_only(run: Run) -> None:
    line = COMMANDS["simulate"]
    status, said = run(line, io.StringIO())
    assert (status, said) == (0, "")
    status, said = run(line, io.StringIO(), Terminal())
    assert status == 0 and "requests" in said and "3/3" in said


def test_a_long_prompt_shows_its_progress(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    line = f"generate {'x=1;' * 100} --max-tokens 2 --max-num-batched-tokens 32"
    quiet, text = io.StringIO(), io.StringIO()
    assert "prompt tokens" not in run(line, quiet)[1].split("prompt tokens, ")[0]
    status, said = run(line, text, Terminal())
    assert status == 0 and text.getvalue() == quiet.getvalue()
    assert said.count("prompt tokens ") >= 1 and "━" in said
    (prompts := tmp_path / "p.txt").write_text("x=1;" * 100)
    said = run(f"generate {prompts} -o {tmp_path / 'o.jsonl'} --max-tokens 2", io.StringIO(), Terminal())[1]
    assert "prompt tokens read" in said
    short = run("generate hi --max-tokens 2", io.StringIO(), Terminal())[1]
    assert "━" not in short
    talk = run("chat -m pocket --max-tokens 2 --max-num-batched-tokens 2", io.StringIO(), Terminal())[1]
    assert "━" in talk


def test_missing_kernels_are_reported_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("ridgeline.ops.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ridgeline._kernels", None)
    with pytest.raises(ImportError):
        importlib.import_module("ridgeline._kernels")
    told = "note: the kernels for this CPU are missing: numpy serves every op of device cpu"
    for line in (COMMANDS["generate"], COMMANDS["chat"]):
        status, said = run(line + " --device cpu", io.StringIO())
        assert status == 0 and said.count(told) == 1
        assert "several times slower; install a C++20 compiler, then install Ridgeline again" in said
    notes = ready(LLM("pocket", device="cpu")).notes  # the notes that `serve` prints
    assert sum(note.startswith(told.removeprefix("note: ")) for note in notes) == 1


def test_kernels_of_another_version_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """New sources with an extension that was compiled before: an editable install after a pull."""
    for name in [n for n in sys.modules if n.startswith("ridgeline.ops.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    old = types.ModuleType("ridgeline._kernels")
    old.__spec__ = importlib.machinery.ModuleSpec("ridgeline._kernels", None)
    monkeypatch.setitem(sys.modules, "ridgeline._kernels", old)
    status, said = run("generate hi --max-tokens 2 --device cpu", io.StringIO())
    assert status == 2 and "Traceback" not in said
    assert "the compiled kernels do not fit this version of Ridgeline: cannot import name" in said
    assert said.count("\n") == 1


def test_reprs_are_short() -> None:
    llm = LLM("pocket")
    assert len(repr(llm)) < 200 and "max_model_len=1024" in repr(llm)
    params = SamplingParams(n=4, max_tokens=50, logprobs=5, ignore_eos=True)
    (output,) = llm.generate("import os\n" * 50, params)
    assert len(repr(output)) < 400 and repr(output).startswith("RequestOutput(")
    assert "50 tokens" in repr(output.outputs[0]) and len(repr(output.outputs[0])) < 150
    chunk = list(llm.stream("import os", SamplingParams(max_tokens=3)))[-1]
    assert len(repr(chunk)) < 150 and "the last of its request" in repr(chunk)
