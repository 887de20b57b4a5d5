"""Read prompts from the command line, a file or stdin, each with the options in its line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.errors import RequestError

if TYPE_CHECKING:
    from ridgeline.runtime.request import Prompt

SUFFIXES = (".txt", ".jsonl")
CACHE_SALT, PRIORITY, SAMPLING_PARAMS = "cache_salt", "priority", "sampling_params"


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. where: its file and line, for messages; empty for a text from the command line.

    cache_salt: only prompts with the same salt share the prefix cache. sampling_params: fields of SamplingParams that
    override the command's; their names are checked, their values are not. priority: lower is more urgent.
    """

    prompt: Prompt
    where: str = ""
    cache_salt: str = ""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0

    def say(self, message: object) -> str:
        """Return a message about this prompt."""
        return f"{self.where}: {message}" if self.where else str(message)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a command. many: they come from a file or stdin, so the output is a list even of one."""

    rows: Sequence[Row]
    many: bool


def read_prompts(argument: str | None) -> Prompts:
    """Return the text itself, the lines of a .txt file, the objects of a .jsonl file, or either from stdin (`-`).

    Raises RequestError, with the line's number, for an unreadable file or a bad line.
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
    return Prompts([Row(argument)], many=False)


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise RequestError(f"{source} is not UTF-8: byte {e.start} is {data[e.start]:#04x}") from None


def _parse(text: str, source: str) -> list[Row]:
    """Parse JSON Lines if the name ends so or the first line is a JSON object or string; else one prompt per line."""
    # Not splitlines(): a prompt may contain other characters that Python treats as line ends.
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(f"{source} holds no prompt")
    if source.lower().endswith(".jsonl") or (source == "stdin" and _is_row(lines[0][1])):
        return [_row(line, f"{source}:{i}") for i, line in lines]
    return [Row(line, f"{source}:{i}") for i, line in lines]


def _is_row(line: str) -> bool:
    """Return whether a line is a JSON object or a JSON string."""
    try:
        return isinstance(json.loads(line), dict | str)
    except (ValueError, RecursionError):
        return False


def _row(line: str, where: str) -> Row:
    from ridgeline.runtime.request import PROMPT_KEYS

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{where}: not JSON: {e}") from None
    if isinstance(value, str):
        return Row(value, where)
    more = (CACHE_SALT, PRIORITY, SAMPLING_PARAMS)
    if not isinstance(value, dict) or sum(key in PROMPT_KEYS for key in value) != 1:
        raise RequestError(
            f"{where}: write a string, or an object with exactly one of {', '.join(PROMPT_KEYS)} and perhaps "
            f"{', '.join(more)}"
        )
    if unknown := sorted(value.keys() - {*PROMPT_KEYS, *more}):
        raise RequestError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join((*PROMPT_KEYS, *more))}")
    for key, kind, text in (
        ("prompt", str, "a text"), ("prompt_token_ids", list, "a list of token ids"), ("messages", list, "a list"),
        (CACHE_SALT, str, "a text"), (PRIORITY, int, "a whole number, lower is more urgent"),
        (SAMPLING_PARAMS, dict, "an object"),
    ):  # fmt: skip
        if key in value and type(value[key]) is not kind:
            raise RequestError(f"{where}: {key} is {value[key]!r:.100}; it must be {text}")
    salt, priority = value.pop(CACHE_SALT, ""), value.pop(PRIORITY, 0)
    params = _sampling_params(value.pop(SAMPLING_PARAMS, {}), where)
    return Row(value, where, salt, params, priority)


def _sampling_params(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields, if their names are known. The keys of logit_bias are texts in JSON, and become ints."""
    from ridgeline.spec.request import BeamSearchParams, SamplingParams

    known = {f.name: None for kind in (SamplingParams, BeamSearchParams) for f in fields(kind)}
    for name in params:
        if name not in known:
            raise RequestError(f"{where}: unknown key {name!r} in {SAMPLING_PARAMS}; known are {', '.join(known)}")
    bias = params.get("logit_bias")
    if isinstance(bias, dict):
        return {**params, "logit_bias": {int(k) if k.isdecimal() else k: v for k, v in bias.items()}}
    return dict(params)
