"""Find the fenced blocks of a Markdown page, and read the commands in them as bash does."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SHELL = ("", "sh", "bash", "shell", "console")
LANGUAGES = (*SHELL, "python", "json", "text")  # text: output, which no user types
FENCE = re.compile(r" *(`{3,}|~{3,})(.*)")
PROMPT = "$ "
# commands that must not be in a block of text
TYPED = re.compile(r"^(\$ |(ridgeline|python|pip|curl|pytest|torchrun) )", re.MULTILINE)
# Bash 4 calls this function for every program that it does not find, and it finds only `cat`. A record is
# NUL-terminated fields: the number of words, the words, the piped input, the environment.
RECORD = """
command_not_found_handle() {
  local input=
  [ -p /dev/stdin ] && input=$(cat)
  printf '%s\\0' "$#" "$@" "$input" "$(/usr/bin/env)" >> "$RECORDS"
}
"""
OF_BASH = {"PWD", "OLDPWD", "SHLVL", "PATH", "RECORDS", "_"}


def find_bash() -> str | None:
    """Return the path of bash if it is version 4 or later. The bash of macOS is version 3.2."""
    path = shutil.which("bash")
    if path is None:
        return None
    found = subprocess.run([path, "-c", "echo $BASH_VERSINFO"], capture_output=True, text=True, check=True)
    return path if int(found.stdout) >= 4 else None


BASH = find_bash()


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. line: the line of its opening fence, from 1. language: the word after the fence."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def script(self) -> str:
        """Return the commands of a block of shell: its lines after `$ ` if there are any, otherwise all lines."""
        lines = self.text.splitlines()
        if self.language == "console" or (lines and lines[0].startswith(PROMPT)):
            lines = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its arguments, its piped input, and the assignments that precede it."""

    words: tuple[str, ...]
    stdin: str
    env: Mapping[str, str]

    def __str__(self) -> str:
        return " ".join(self.words)


def blocks(name: str, text: str) -> Iterator[Block]:
    """Return all blocks of a page. Raises ValueError for a block that is never closed."""
    opened: tuple[int, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.fullmatch(line)
        if opened is None:
            if found:
                opened, inside = (number, found[1], found[2].strip()), []
        elif found and found[1].startswith(opened[1]) and not found[2].strip():
            yield Block(name, opened[0], opened[2], "\n".join(inside) + "\n")
            opened = None
        else:
            inside.append(line)
    if opened is not None:
        raise ValueError(f"{name}:{opened[0]}: the block is never closed")


def commands(block: Block, folder: Path, programs: Path) -> list[Command]:
    """Return the commands that bash would start: quotes, pipes, comments and file patterns are read as bash reads them.

    folder: the folder in which bash runs, so that patterns and redirections find files. programs: an empty folder for
    `cat`, the only program that really runs. Raises ValueError with bash's error message if it complains.
    """
    assert BASH is not None
    cat, records = programs / "cat", programs / "records"
    if not cat.exists():
        cat.symlink_to(shutil.which("cat") or "/bin/cat")
    records.write_bytes(b"")
    env = {"PATH": str(programs), "RECORDS": str(records)}
    done = subprocess.run(
        [BASH, "-c", RECORD + block.script()], cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    if done.stderr or done.returncode:
        raise ValueError(f"{block.name}: bash exits with {done.returncode} and says: {done.stderr.strip()}")
    return list(_read(records.read_bytes().decode()))


def _read(records: str) -> Iterator[Command]:
    fields = iter(records.split("\0")[:-1])
    for count in fields:
        words = tuple(next(fields) for _ in range(int(count)))
        stdin = next(fields)
        env = dict(line.split("=", 1) for line in next(fields).splitlines())
        yield Command(words, stdin, {name: value for name, value in env.items() if name not in OF_BASH})
