"""`ridgeline chat` from a pipe, and in a terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from oracle.data import shared_data
from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import app

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
CHAT = ["chat", "--temperature", "0", "--model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(shared_data() / "models/stories260K", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str, *options: str) -> list[str]:
    """Run a conversation from a pipe and return what it prints: [stdout, stderr]."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    app([*CHAT, *options], standalone_mode=False)
    out, err = capsys.readouterr()
    return [out, err]


def test_a_conversation_from_a_pipe(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "Once upon a time\nThere was\n/stats\n/reset\n/stats\nOnce upon a time\n/foo\n/quit\nnever\n"
    out, err = talk(monkeypatch, capsys, lines, folder, "--max-tokens", "20", "--system", "Lily.")
    llm, params = LLM(folder), SamplingParams(max_tokens=20, temperature=0)
    first = "Lily. Once upon a time "
    (a,) = llm.generate(first, params)
    (b,) = llm.generate(f"{first}{a.outputs[0].text} There was ", params)
    answers = out.splitlines()
    assert answers[0] == answers[-1] == a.outputs[0].text
    assert b.outputs[0].text.splitlines()[0] in out
    assert "from the prefix cache" in err
    assert int(re.findall(r"(\d+) from the prefix", err)[0]) >= 16
    assert "No answer yet." in err
    assert "/foo is no command." in err
    assert ">>>" not in out  # without a terminal, there is no prompt
    assert "\nnever" not in out


def test_a_full_context_is_said_and_never_cut(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "Once upon a time there was a dog\n" * 3 + "/reset\nOnce\n"
    out, err = talk(monkeypatch, capsys, lines, folder, "--max-tokens", "12", "--max-model-len", "48")
    assert re.search(r"exceed the context of 48|leaves no room in the context of 48", err)
    assert "/reset starts a new conversation." in err
    assert out.splitlines()[-1]


def test_a_bad_option_is_one_line(folder: str) -> None:
    for options, message in ((["--top-p", "3"], "top_p is 3.0"), (["--max-model-len", "0"], "max_model_len")):
        run = subprocess.run(
            [sys.executable, "-m", "ridgeline", *CHAT, folder, *options], input="", capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert run.returncode == 2
        assert message in run.stderr
        assert run.stderr.count("\n") == 1


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self.main, other = pty.openpty()
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline", *command], stdin=other, stdout=other, stderr=other, env=env,
            start_new_session=True, preexec_fn=lambda: _own(other),
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 30) -> None:
        """Read until new output matches."""
        end, start = time.monotonic() + seconds, len(self.seen)
        while not re.search(pattern, self.seen[start:]):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen[start:]!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.main, 65536).decode(errors="replace")
                except OSError:  # raised when the program has ended
                    assert re.search(pattern, self.seen[start:]), f"no {pattern!r} in {self.seen[start:]!r}"

    def until_idle(self, seconds: float = 60) -> None:
        """Wait until the program waits for keys: readline shows its prompt earlier, and a signal in between is lost."""
        end = time.monotonic() + seconds
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < end, f"still busy after {seconds} s"
            time.sleep(0.005)

    def send(self, text: str) -> None:
        os.write(self.main, text.encode())

    def end(self, key: str, seconds: float = 20) -> int:
        """Press a key until the program ends, and return its exit status.

        The key is sent repeatedly: a program that shows a prompt may not wait for keys yet, and may discard earlier
        ones.
        """
        last = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < last, f"still running after {seconds} s"
            self.send(key)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
        return self.process.returncode


def _own(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(folder: str) -> Iterator[Terminal]:
    t = Terminal(*CHAT, folder)
    yield t
    t.process.kill()
    t.process.wait()
    os.close(t.main)


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(terminal: Terminal) -> None:
    terminal.until(r">>> ")
    terminal.until_idle()
    terminal.send("\x03")
    terminal.until(r"Ctrl-D or /quit")
    terminal.send("Once upon a time\n")  # the answer fills the context, which takes a second or more
    terminal.until(r"time\r\n.*[a-z]+ [a-z]+")
    terminal.send("\x03")
    terminal.until(r"\(stopped\)\r\n>>> ")
    terminal.send("/stats\n")
    terminal.until(r"No answer yet")  # the answer that was stopped has no result
    terminal.send("/reset\n")
    terminal.until(r"starts anew[^>]*>>> ")
    assert terminal.end("\x04") == 0
    assert "Traceback" not in terminal.seen


def test_a_missing_template_is_reported_before_the_first_message() -> None:
    model = Path(shared_data() / "models/stories260K")
    run = subprocess.run(
        [sys.executable, "-m", "ridgeline", *CHAT, str(model)],
        input="hi\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "no chat template" in run.stderr
    assert run.stderr.count("\n") == 1


def test_stats_say_what_drafts_gained(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-tokens", "40", "--speculative", "ngram", "--draft-depth", "fixed")
    _, err = talk(monkeypatch, capsys, "One two one two one two\n/stats\n", folder, *flags)
    assert "drafts: ngram, depth " in err and "tokens as without drafts" in " ".join(err.split())
