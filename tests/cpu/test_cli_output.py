"""`ridgeline generate -o`: the file stays valid after any interruption, and the same command completes it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ridgeline
from oracle.data import shared_data
from ridgeline import LLM, BeamSearchParams, SamplingParams
from ridgeline.cli.main import app, main
from ridgeline.cli.show.results import Results
from ridgeline.engine import Session
from ridgeline.errors import RequestError
from ridgeline.spec.request import RequestOutput

SOURCE = Path(ridgeline.__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
NAMES = ("Tom", "Lily", "Ben")
NINE = "\n".join(json.dumps({"prompt": "Once upon a time, " * (i % 3) + f"{NAMES[i % 3]} saw {i}"}) for i in range(9))
SAMPLED = ("--max-tokens", "12", "-n", "2", "--temperature", "1.2", "--max-num-seqs", "5")
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
Answers = dict[int, list[list[int]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, signals included."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def call(*args: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Done(args, int(caught.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def model() -> Path:
    return shared_data() / "models" / "stories260K"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text(NINE)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Return every line of the file, which must be complete."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def answers(path: Path) -> Answers:
    """Return the tokens of each prompt's answers; every prompt occurs at most once."""
    found = lines(path)
    by_index = {line["index"]: [choice["token_ids"] for choice in line["choices"]] for line in found}
    assert len(by_index) == len(found)
    return by_index


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the file of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "p.jsonl").write_text(NINE)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", [*map(str, ("ridgeline", "generate", "-m", model, folder / "p.jsonl", *SAMPLED)),
                                    "-o", str(folder / "o.jsonl")])  # fmt: skip
        main()
    assert caught.value.code == 0
    return (folder / "o.jsonl").read_bytes()


@pytest.fixture
def whole(undisturbed: bytes, tmp_path: Path) -> Path:
    """Return a copy of that file."""
    path = tmp_path / "whole.jsonl"
    path.write_bytes(undisturbed)
    return path


def test_a_line_for_each_prompt(whole: Path, model: Path, prompts: Path) -> None:
    llm = LLM(str(model))
    params = SamplingParams(n=2, max_tokens=12, temperature=1.2)
    expected = llm.generate([json.loads(line)["prompt"] for line in prompts.read_text().splitlines()], params)
    assert answers(whole) == {i: [c.token_ids for c in out.outputs] for i, out in enumerate(expected)}
    for line in lines(whole):
        assert list(line) == ["index", "fingerprint", "choices", "usage", "timing"]
        assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{8}){2}", line["fingerprint"])
    assert len({line["fingerprint"].split("-")[1] for line in lines(whole)}) == 1
    assert len({line["fingerprint"] for line in lines(whole)}) == 9


def test_the_lines_on_stderr(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    found = run("generate", "-m", model, prompts, "-o", tmp_path / "o", "--max-tokens", "4", "--max-num-seqs", "1")
    memory, engine, total, pages = found.stderr.splitlines()
    assert re.fullmatch(r"memory: .* in 32 pages of 16 tokens, .* of weights, .* of workspace", memory)
    assert engine == "engine: contexts of 512 tokens, at most 1 sequences and 512 tokens a step"
    assert re.fullmatch(r"9 prompts with \d+ tokens, 36 new tokens in [\d.]+ s: [\d,.]+ tokens/s", total)
    assert re.fullmatch(r"pages: peak 2 of 32; prefix hits: \d+% of prompt tokens; preemptions: 0", pages)
    verbose = run("generate", "-m", model, "Once", "-v", "--max-tokens", "1", "--max-num-seqs", "3").stderr
    assert re.search(r"^max_num_seqs +3 +as given +--max-num-seqs$", verbose, re.MULTILINE)
    assert re.search(r"^weights +\S+ [KM]iB$", verbose, re.MULTILINE)


@pytest.mark.parametrize("keep", [0, 1, 200, 3000, -1, -2, -40])
def test_the_same_command_continues_an_incomplete_file(
    keep: int, run: Run, whole: Path, model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Whatever remains of the file, even an incomplete line, the sampled tokens equal those of an undisturbed run."""
    path = tmp_path / "o.jsonl"
    data = whole.read_bytes()
    path.write_bytes(data[:keep])
    left = path.read_bytes().count(b"\n")
    found = run("generate", "-m", model, prompts, "-o", path, *SAMPLED)
    assert found.returncode == 0, found.stderr
    assert answers(path) == answers(whole)
    assert path.read_bytes().startswith(b"".join(data.splitlines(True)[:left]))
    assert found.stderr.startswith(f"{path}: {left} of 9 prompts are complete\n") == (left > 0)


def test_a_complete_file_needs_no_model(
    run: Run, whole: Path, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = whole.read_bytes()
    monkeypatch.setattr(LLM, "__init__", None)
    found = run("generate", "-m", model, prompts, "-o", whole, *SAMPLED, "--block-size", "8")
    assert (found.returncode, found.stderr) == (0, f"{whole}: 9 of 9 prompts are complete\n")
    assert whole.read_bytes() == before


def test_prompts_may_be_appended(run: Run, whole: Path, model: Path, prompts: Path) -> None:
    before = whole.read_bytes()
    prompts.write_text(prompts.read_text() + '\n"Sue"')
    assert run("generate", "-m", model, prompts, "-o", whole, *SAMPLED).returncode == 0
    assert sorted(answers(whole)) == list(range(10))
    assert whole.read_bytes().startswith(before)


REFUSED: dict[str, tuple[Callable[[Path, Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "temperature": (lambda p, o: None, ("--temperature", "1"), ("o.jsonl:1 ", "sampling parameters", "p.jsonl:")),
    "seed": (lambda p, o: None, ("--seed", "1"), ("o.jsonl:1 ", "--seed")),
    "dtype": (lambda p, o: None, ("--dtype", "bfloat16"), ("o.jsonl:1 ", "another model")),
    "a prompt": (lambda p, o: p.write_text(p.read_text().replace("saw 4", "saw 5")), (), ("another prompt", ":5 now")),
    "fewer prompts": (lambda p, o: p.write_text(p.read_text().partition("\n")[0]), (), ("index", "there are only 1")),
    "a line of others": (lambda p, o: o.write_bytes(b"{}\n" + o.read_bytes()), (), ("o.jsonl:1 ", "not an answer")),
    "no JSON": (lambda p, o: o.write_bytes(o.read_bytes() + b"x\n"), (), ("o.jsonl:10 ", "not an answer")),
    "another end": (lambda p, o: o.write_bytes(o.read_bytes() + b"my notes"), (), ("o.jsonl:10 ", "not an answer")),
    "no choices": (lambda p, o: o.write_bytes(b'{"index": 0, "fingerprint": "a-b-c"}\n'), (), ("o.jsonl:1 ", "not an")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_of_other_runs_are_left_alone(
    name: str, run: Run, whole: Path, model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, args, parts = REFUSED[name]
    path = whole.rename(tmp_path / "o.jsonl")
    change(prompts, path)
    before = path.read_bytes()
    monkeypatch.setattr(LLM, "__init__", None)
    found = run("generate", "-m", model, prompts, "-o", path, *SAMPLED, *args)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert all(part in found.stderr for part in (*parts, "another -o, or remove the file")), found.stderr
    assert path.read_bytes() == before


def test_another_model_is_recognized_by_its_weights(
    run: Run, whole: Path, model: Path, prompts: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    assert run("generate", "-m", copy, prompts, "-o", whole, *SAMPLED).returncode == 0
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read()[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert "another model" in run("generate", "-m", copy, prompts, "-o", whole, *SAMPLED).stderr


def test_files_that_cannot_be_written(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        found = run("generate", "-m", model, prompts, "-o", path, *SAMPLED)
        assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
        return found.stderr

    assert "No such file" in refused(tmp_path / "absent" / "o.jsonl")
    assert "directory" in refused(tmp_path)
    assert "/dev/null is not a regular file" in refused(Path("/dev/null"))
    path = tmp_path / "o.jsonl"
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run" in refused(path)


def test_failed_prompts_are_reported_and_retried(run: Run, model: Path, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    # only the end of the sequence is allowed, and it may not occur yet
    bad = {"allowed_token_ids": [2], "min_tokens": 1}
    prompts.write_text('"Tom"\n' + json.dumps({"prompt": "Lily", "sampling_params": bad}) + '\n"Ben"\n')
    for _ in range(2):
        found = run("generate", "-m", model, prompts, "-o", path, "--max-tokens", "3")
        assert found.returncode == 1
        assert f"1 of 3 prompts failed; run the same command to try them again. {prompts}:2: after 0 " in found.stderr
        assert sorted(answers(path)) == [0, 1, 2]
        (failed,) = (line for line in lines(path) if line["index"] == 1)
        assert (failed["choices"][0]["finish_reason"], bool(failed["choices"][0]["error"])) == ("error", True)
    assert sorted(tmp_path.iterdir()) == [path, prompts]


def test_failed_answers_are_replaced(run: Run, whole: Path, model: Path, prompts: Path) -> None:
    expected = answers(whole)
    data = lines(whole)
    data[3]["choices"][1] |= {"finish_reason": "error", "token_ids": []}
    whole.write_text("".join(json.dumps(line) + "\n" for line in data) + '{"index": 4')
    whole.chmod(0o640)
    found = run("generate", "-m", model, prompts, "-o", whole, *SAMPLED)
    assert found.returncode == 0, found.stderr
    assert answers(whole) == expected
    assert whole.stat().st_mode & 0o777 == 0o640


def test_rows_may_have_their_own_parameters(run: Run, model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "Tom", "sampling_params": {"max_tokens": 2}},
        {"prompt": "Tom" * 20, "cache_salt": "a"},
        {"prompt": "Tom" * 20, "priority": -1, "cache_salt": "b"},
        {"prompt": "Tom" * 20, "priority": -2, "cache_salt": "b", "sampling_params": {"logit_bias": {"9": 100}}},
    ]
    prompts, path = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    args = ("--temperature", "0", "--max-tokens", "4", "--ignore-eos", "--max-num-seqs", "1")
    assert run("generate", "-m", model, prompts, "-o", path, *args).returncode == 0
    assert [line["index"] for line in lines(path)] == [3, 2, 0, 1]  # one at a time, the highest priority first
    by_index = {line["index"]: line for line in lines(path)}
    assert [by_index[i]["usage"]["completion_tokens"] for i in range(4)] == [2, 4, 4, 4]
    assert [by_index[i]["usage"]["cached_tokens"] > 0 for i in range(4)] == [False, False, True, False]
    assert answers(path)[3] == [[9] * 4]


BAD_ROWS: dict[str, tuple[str, ...]] = {
    '{"prompt": "a", "temperature": 0}': ("unknown key 'temperature'", "sampling_params"),
    '{"prompt": "a", "sampling_params": {"temprature": 0}}': ("'temprature'", "temperature"),
    '{"prompt": "a", "sampling_params": {"top_p": 2}}': ("top_p is 2",),
    '{"prompt": "a", "sampling_params": 3}': ("sampling_params is 3", "object"),
    '{"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}': ("logit_bias",),
    '{"prompt": "a", "priority": 0.5}': ("priority is 0.5", "whole number"),
    '{"prompt": "a", "cache_salt": 1}': ("cache_salt is 1", "text"),
    '{"prompt": "a", "messages": []}': ("exactly one of",),
    '{"prompt_token_ids": "a"}': ("prompt_token_ids is 'a'", "list"),
}  # fmt: skip


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_named_before_the_model_is_loaded(
    row: str, run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.jsonl").write_text(f'"Tom"\n\n{row}\n')
    monkeypatch.setattr(LLM, "__init__", None)
    found = run("generate", "-m", model, tmp_path / "p.jsonl", "-o", tmp_path / "o")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert found.stderr.startswith(f"ridgeline: {tmp_path}/p.jsonl:3: ")
    assert all(part in found.stderr for part in BAD_ROWS[row]), found.stderr


def test_a_prompt_that_is_too_long_is_named(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"Tom"\n\n{"prompt_token_ids": [' + "5," * 600 + "5]}\n")
    found = run("generate", "-m", model, tmp_path / "p.jsonl", "-o", tmp_path / "o")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert all(part in found.stderr for part in ("p.jsonl:3: ", "601 tokens", "512"))


def test_the_noise_depends_on_the_index_of_a_prompt(model: Path) -> None:
    """The tests above rely on this: a request's index determines its random numbers."""
    llm = LLM(str(model))
    params = SamplingParams(temperature=1.5, max_tokens=8, n=2)

    def tokens(names: list[str], **options: Any) -> list[list[int]]:
        return [c.token_ids for out in llm.generate(names, params, **options) for c in out.outputs]

    whole = tokens(["Tom", "Tom", "Ben"])
    assert whole[:2] != whole[2:4]
    assert tokens(["Ben", "Tom"], indices=[2, 1]) == [*whole[4:], *whole[2:4]]
    with pytest.raises(RequestError, match="2 prompts, but 1 indices"):
        llm.generate(["Tom", "Ben"], params, indices=[1])


# ---- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["load", "step", "line"])
def test_signals_at_chosen_moments(
    moment: str, number: signal.Signals, run: Run, whole: Path, model: Path, prompts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A signal during loading, during a step, and right after a line was written; then the same command completes the
    file.
    """
    path, add, step, load = tmp_path / "o.jsonl", Results.add, Session.step, LLM.__init__
    with monkeypatch.context() as patch:

        def add_then(self: Results, index: int, output: RequestOutput) -> None:
            add(self, index, output)
            signal.raise_signal(number)

        def step_then(self: Session) -> None:
            step(self)
            if path.read_bytes().count(b"\n") > 2:
                signal.raise_signal(number)

        def load_then(self: LLM, *args: Any, **kwargs: Any) -> None:
            load(self, *args, **kwargs)
            signal.raise_signal(number)

        if moment == "load":
            patch.setattr(LLM, "__init__", load_then)
        else:
            patch.setattr(*(Results, "add", add_then) if moment == "line" else (Session, "step", step_then))
        found = run("generate", "-m", model, prompts, "-o", path, *SAMPLED)
    assert found.returncode == 128 + number
    done = len(lines(path))
    assert done == {"load": 0, "line": 1}.get(moment, done)
    said = f"ridgeline: interrupted: {done} of 9 prompts are complete; run the same command to continue\n"
    assert found.stderr.endswith(said)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run("generate", "-m", model, prompts, "-o", path, *SAMPLED).returncode == 0
    assert answers(path) == answers(whole)


def test_an_interrupt_without_a_file_keeps_the_printed_answers(
    run: Run, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Session.step
    steps = 0

    def step_then(self: Session) -> None:
        nonlocal steps
        step(self)
        if (steps := steps + 1) == 6:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Session, "step", step_then)
    found = run("generate", "-m", model, prompts, "--max-tokens", "2", "--max-num-seqs", "2", "--ignore-eos")
    assert found.returncode == 130
    assert found.stdout.count(">>> ") == 6
    assert found.stderr.endswith("ridgeline: interrupted: 6 of 9 prompts are complete\n")


def start(*args: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ridgeline", *map(str, args)]
    return subprocess.Popen(command, env=ENV, stdin=subprocess.DEVNULL, text=True, **options)


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for a condition while the process runs."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_an_interrupt_while_a_library_is_imported(model: Path, prompts: Path, tmp_path: Path) -> None:
    args = ("generate", "-m", model, prompts, "-o", tmp_path / "o.jsonl", "--device", "reference")
    process = start(*args, stderr=subprocess.PIPE)
    until(process, lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    stderr = process.communicate()[1]
    assert (process.returncode, stderr.count("\n")) == (130, 1), stderr
    assert "interrupted: 0 of 9 prompts are complete" in stderr


def test_a_process_that_is_killed(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    args = ("generate", "-m", model, prompts, "--max-tokens", "60", "--ignore-eos")
    process = start(*args, "-o", path, "--max-num-seqs", "2", stderr=subprocess.DEVNULL)
    until(process, lambda: path.exists() and path.read_bytes().count(b"\n") >= 2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 2 <= path.read_bytes().count(b"\n") < 9
    for each in (path, whole):
        assert run(*args, "-o", each).returncode == 0
    assert answers(path) == answers(whole)


def test_a_reader_that_closes_the_pipe_early(model: Path, prompts: Path) -> None:
    """`| head -1` over a file of prompts gives no error."""
    args = ("generate", "-m", model, prompts, "--json", "--max-tokens", "40", "--ignore-eos", "--max-num-seqs", "1")
    process = start(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert json.loads(process.stdout.readline())["usage"]["completion_tokens"] == 40
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (0, "")
    process.stderr.close()


def test_answers_go_to_a_file_although_a_terminal_shows_the_bar(model: Path, prompts: Path, tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    with (tmp_path / "o.txt").open("wb") as out:
        process = start("generate", "-m", model, prompts, "--max-tokens", "3", stdout=out, stderr=end)
        os.close(end)
        shown = b""
        while True:
            try:
                piece = os.read(terminal, 1 << 16)
            except OSError:  # raised when the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(terminal)
    assert process.wait() == 0
    assert (tmp_path / "o.txt").read_text().count(">>> ") == 9
    assert b"9/9" in shown
    assert b">>> " not in shown


def test_beam_search_from_the_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(shared_data() / "models/stories260K")
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=8, length_penalty=0.5, early_stopping="never")
    (wanted,) = LLM(model).generate("Once upon", params)
    options = ["--beam-width", "4", "--max-tokens", "8", "--length-penalty", "0.5", "--early-stopping", "never"]
    app(["generate", "--model", model, "Once upon", "--json", "--n", "2", *options], standalone_mode=False)
    (found, best) = json.loads(capsys.readouterr().out)["choices"], wanted.outputs
    assert [(c["text"], c["score"]) for c in found] == [(a.text, a.score) for a in best]
    app(["generate", "--model", model, "Once upon", *options], standalone_mode=False)
    assert capsys.readouterr().out.strip() == best[0].text.strip()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Once upon", "sampling_params": {"beam_width": 2}}\n"The dog"\n')
    app(["generate", "--model", model, str(rows), "-o", str(tmp_path / "out.jsonl"), *options], standalone_mode=False)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    for bad, message in (
        (["--temperature", "0.5"], "--temperature has no effect with --beam-width"),
        (["--n", "5"], "n is 5; it must be at most beam_width, 4"),
        (["--early-stopping", "maybe"], "early_stopping is 'maybe'"),
    ):
        with pytest.raises(RequestError, match=message):
            app(["generate", "--model", model, "Once", *options, *bad], standalone_mode=False)
    rows.write_text('{"prompt": "Once upon", "sampling_params": {"top_p": 0.5}}\n')
    with pytest.raises(RequestError, match=r"rows\.jsonl:1: top_p is no parameter of BeamSearchParams"):
        app(["generate", "--model", model, str(rows), *options], standalone_mode=False)
