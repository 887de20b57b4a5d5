"""Run the commands and the Python of the docs in this process: most of them take less time than starting Python."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from calibrated import kept_with
from packaging.requirements import Requirement
from typer.core import TyperCommand

from cpu.doc_blocks import LANGUAGES, SHELL, TYPED, Block, Command, commands
from cpu.doc_rules import SERVER_URL, How, Rule, rule_of
from cpu.serving import Server, serving
from ridgeline.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SAID_TO_CHAT = "Hello\n/stats\n/quit\n"  # the input of commands without a pipe, as a user would type it


class Parsed(Exception):
    """Raised by a stub when a command has parsed its arguments."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of the docs: a folder with their files, an empty one for programs, and a server on demand."""

    folder: Path
    programs: Path
    server: Callable[[], Server]

    def run(self, block: Block, *, slow: bool) -> int:
        """Run the commands of a block that are slow, or those that are not, and return their number.

        Raises ValueError for a block or command that cannot run, and any exception of its Python code.
        """
        if block.language not in LANGUAGES:
            raise ValueError(f"{block.name} is in `{block.language}`; a block is in one of: {', '.join(LANGUAGES)}")
        if block.language == "python":
            return self._python(block, slow)
        if block.language == "text" and (typed := TYPED.search(block.text)):
            raise ValueError(f"{block.name} is ```text, and has a command: {typed[0]}")
        if block.language == "json":
            json.loads(block.text)
        if block.language not in SHELL:
            return 0
        found = commands(block, self.folder, self.programs)
        if not found:
            raise ValueError(f"{block.name} has no command; output belongs in a block of ```text")
        chosen = [(one, rule) for one in found if (rule := rule_of(str(one))).slow == slow]
        for command, rule in chosen:
            with environment(command):
                self._run(command, rule)
        return len(chosen)

    def _python(self, block: Block, slow: bool) -> int:
        if (SERVER_URL in block.text) != slow:
            return 0
        code = compile(self._asked(block.text), block.name, "exec")
        exec(code, {"__name__": "__main__"})
        return 1

    def _asked(self, text: str) -> str:
        """Return the text with the address of the test's server instead of the address in the docs."""
        if "localhost:8000" not in text:
            return text
        return text.replace("localhost:8000", f"127.0.0.1:{self.server().port}")

    def _run(self, command: Command, rule: Rule) -> None:
        words = [self._asked(word) for word in (*command.words, *rule.more)]
        match rule.how:
            case How.RUN:
                ridgeline(words, command.stdin)
            case How.PARSE if words[0] == "ridgeline":
                only_parse(words)
            case How.PARSE:
                only_parse_script(words)
            case How.KEPT:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("ridgeline.cli.calibrate._measure", lambda: kept_with(1))
                    ridgeline(words)
            case How.SERVER:
                assert self.server().ask("GET", "/health")[0] == 200
            case How.SERVE:
                with serving(*words[2:]) as server:
                    assert server.ask("GET", "/health")[0] == 200
            case How.CURL:
                if shutil.which(words[0]) is None:
                    pytest.skip("no curl; apt install curl")
                done = subprocess.run([*words, "-sS", "--fail-with-body"], capture_output=True, text=True, check=False)
                assert done.returncode == 0 and done.stdout, done
            case How.RANKS:
                parse_ranks(words)
            case How.PIP:
                check_pip(words)
            case How.TOOL:
                check_tool(words)


@contextlib.contextmanager
def environment(command: Command) -> Iterator[None]:
    """Set the variables that are assigned before a command, as in NAME=1 command."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in command.env.items():
            patch.setenv(name, value)
        yield


def ridgeline(words: list[str], stdin: str = "") -> None:
    """Run a command of Ridgeline. Raises ValueError with the end of its output unless its exit status is 0."""
    typed = stdin or (SAID_TO_CHAT if words[1] == "chat" else "")
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        try:
            cli.main()
        except SystemExit as e:
            if not e.code:
                return
            said = [stream.seek(0) or stream.read().strip()[-2000:] for stream in (out, err)]
            raise ValueError(f"`{' '.join(words)}` exits with {e.code}: {' '.join(said)}") from None


def only_parse(words: list[str]) -> None:
    """Let a command of Ridgeline parse its arguments, and stop it where its work would begin."""
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TyperCommand, "invoke", lambda self, context: begun.append(context))
        ridgeline(words)
    assert begun, f"`{' '.join(words)}` starts no work"


def only_parse_script(words: list[str]) -> None:
    """Check the arguments of a script of bench/ in the same way."""
    read = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: object) -> None:
        read(self, *given)  # type: ignore[call-overload]
        raise Parsed

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", words[1:])
        patch.syspath_prepend(str(ROOT / "bench"))
        try:
            with pytest.raises(Parsed):
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        finally:  # the names of its neighbors are too common to stay in sys.modules
            for name in set(sys.modules) - before:
                if str(ROOT / "bench") in (getattr(sys.modules[name], "__file__", None) or ""):
                    del sys.modules[name]


def parse_ranks(words: list[str]) -> None:
    """Parse `torchrun OPTIONS -m MODULE ARGUMENTS` with torchrun's parser and with that of the module."""
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(words[1:])
    assert found.module and found.training_script == "ridgeline", words
    only_parse(["ridgeline", *found.training_script_args])


def check_pip(words: list[str]) -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    for word in words[2:]:
        if found := re.fullmatch(r"\.(?:\[(.*)\])?", word):
            unknown = set(filter(None, (found[1] or "").split(","))) - set(extras)
            assert not unknown, f"pyproject.toml has no extra {unknown}"
        elif not word.startswith("-"):
            Requirement(word)


def check_tool(words: list[str]) -> None:
    """Check that the files and the pytest marker of a command exist. Bash keeps a pattern that matches no file."""
    for word in words[1:]:
        if "/" in word or "*" in word:
            assert (ROOT / word).exists(), f"`{' '.join(words)}` names {word}, which does not exist"
    if words[0] == "pytest" and "-m" in words:
        markers = [line.split(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]]
        wanted = set(re.findall(r"\w+", words[words.index("-m") + 1])) - {"and", "or", "not"}
        assert wanted <= set(markers), f"pyproject.toml has no marker {', '.join(sorted(wanted - set(markers)))}"
