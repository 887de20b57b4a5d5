"""Prompts from the command line, from a file, or from stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.errors import RequestError

if TYPE_CHECKING:
    from ridgeline.frontend import Prompt

SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True)
class Prompts:
    """What to answer. many: from a file or stdin, so the output is a list even if it holds one."""

    items: Sequence[Prompt]
    many: bool


def read_prompts(argument: str | None) -> Prompts:
    """The text itself; or the lines of a .txt file, the objects of a .jsonl file, or either from stdin (`-`).

    Raises RequestError, with the line's number, for an unreadable file or a line that is not understood.
    """
    if argument in (None, "-") and sys.stdin is None:
        raise RequestError("no prompt: stdin is closed; give a text, or a .txt or .jsonl file")
    if argument is None and sys.stdin.isatty():
        raise RequestError("no prompt: give a text, a .txt or .jsonl file, or - for stdin")
    if argument in (None, "-"):
        return Prompts(_parse(_decode(sys.stdin.buffer.read(), "stdin"), "stdin"), many=True)
    assert argument is not None
    path = Path(argument)
    if path.suffix.lower() in SUFFIXES and "\n" not in argument:
        try:
            data = path.read_bytes()
        except OSError as e:
            raise RequestError(f"cannot read prompts from {argument}: {e.strerror}") from None
        return Prompts(_parse(_decode(data, argument), argument), many=True)
    if len(argument) < 256 and "\n" not in argument and path.is_file():
        raise RequestError(f"{argument} is a file, but prompts are read from .txt and .jsonl files only")
    return Prompts([argument], many=False)


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise RequestError(f"{source} is not UTF-8: byte {e.start} is {data[e.start]:#04x}") from None


def _parse(text: str, source: str) -> list[Prompt]:
    """JSON Lines if the name says so or the first line is a JSON object or string; otherwise one prompt per line."""
    # Not splitlines(): a prompt may hold the other characters that Python takes for line ends.
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(f"{source} holds no prompt")
    if source.lower().endswith(".jsonl") or (source == "stdin" and _is_row(lines[0][1])):
        return [_object(line, f"{source}:{i}") for i, line in lines]
    return [line for _, line in lines]


def _is_row(line: str) -> bool:
    """A JSON object, or a JSON string: the first line says what stdin holds."""
    try:
        return isinstance(json.loads(line), dict | str)
    except (ValueError, RecursionError):
        return False


def _object(line: str, where: str) -> Prompt:
    from ridgeline.frontend import PROMPT_KEYS

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{where}: not JSON: {e}") from None
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in PROMPT_KEYS:
        raise RequestError(f"{where}: write a string, or an object with exactly one of {', '.join(PROMPT_KEYS)}")
    return value
