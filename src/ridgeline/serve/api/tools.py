"""Parse tool calls in a model's text, in the formats of Hermes and Qwen, Llama 3, and Mistral.

A call is returned once it is complete. Text that looks like a call but is not valid is returned unchanged as text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ridgeline.serve.api.marks import MarkScanner

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
MISTRAL, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
LLAMA = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


Found = tuple[str, list[Call]]  # text, and complete calls


class ToolParser(Protocol):
    """Parses one answer piece by piece."""

    def push(self, text: str) -> Found: ...

    def flush(self) -> Found:
        """Return the rest at the end of the answer."""
        ...


class HermesParser:
    """Parses <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, after any text."""

    def __init__(self) -> None:
        self._scanner, self._inside, self._buffer = MarkScanner(HERMES_OPEN), False, ""
        self._called = False
        self._spaces: str | None = None  # white space after a call, until other text follows; None: it is not held

    def push(self, text: str) -> Found:
        content, calls = "", list[Call]()
        while text:
            before, after = self._scanner.push(text)
            if self._inside:
                self._buffer += before
            else:
                content += self._outside(before)
            if after is None:
                break
            if self._inside:
                found = calls_of(self._buffer)
                calls += found
                self._called = self._called or bool(found)
                content += "" if found else HERMES_OPEN + self._buffer + HERMES_CLOSE
                self._buffer = ""
            self._inside = not self._inside
            self._spaces = "" if self._called and not self._inside else None  # line ends between calls are dropped
            self._scanner, text = MarkScanner(HERMES_CLOSE if self._inside else HERMES_OPEN), after
        return content, calls

    def flush(self) -> Found:
        rest = self._buffer + self._scanner.flush()
        if not self._inside:
            return self._outside(rest), []
        found = calls_of(rest)  # models may leave out the last </tool_call>
        return ("" if found else HERMES_OPEN + rest), found

    def _outside(self, text: str) -> str:
        """Return the text to show for a text outside of calls. It does not depend on how the answer is split."""
        if self._spaces is None:
            return text
        text = self._spaces + text
        self._spaces = None if text.strip() else text
        return "" if self._spaces is not None else text


class MistralParser:
    """Parses [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call."""

    def __init__(self) -> None:
        self._scanner, self._inside, self._buffer = MarkScanner(MISTRAL), False, ""

    def push(self, text: str) -> Found:
        if self._inside:
            self._buffer += text
            return "", []
        before, after = self._scanner.push(text)
        if after is not None:
            self._inside, self._buffer = True, after
        return before, []

    def flush(self) -> Found:
        if not self._inside:
            return self._scanner.flush(), []
        parts = [part for part in self._buffer.split(MISTRAL) if part.strip()]
        found = [calls_of(part) or _named(part) for part in parts]
        if not parts or not all(found):
            return MISTRAL + self._buffer, []
        return "", [call for calls in found for call in calls]


class LlamaParser:
    """Parses an answer that is {"name": ..., "parameters": {...}}, or several of these separated by semicolons, with or
    without <|python_tag|> before them.
    """

    def __init__(self) -> None:
        self._buffer, self._content = "", False

    def push(self, text: str) -> Found:
        if self._content:
            return text, []
        self._buffer += text
        start = self._buffer.lstrip()
        if not start or start[0] == "{" or LLAMA.startswith(start[: len(LLAMA)]):
            return "", []
        self._content, text, self._buffer = True, self._buffer, ""
        return text, []

    def flush(self) -> Found:
        rest, self._buffer = self._buffer, ""
        found = calls_of(rest.strip().removeprefix(LLAMA))
        return ("" if found else rest), found


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser, "mistral": MistralParser}
# Formats whose markers are special tokens, which only appear in the text with skip_special_tokens=False.
SPECIAL_MARKS = frozenset({"llama3_json", "mistral"})
_SIGNS = {HERMES_OPEN: "hermes", MISTRAL: "mistral", LLAMA: "llama3_json"}


def suggested(template: str | None) -> str | None:
    """Return the name of the parser for a model with this chat template, or None."""
    return next((name for sign, name in _SIGNS.items() if template is not None and sign in template), None)


def calls_of(text: str) -> list[Call]:
    """Parse calls in JSON: one object, a list of objects, or objects separated by line ends or semicolons.

    Any other text has no calls.
    """
    decoder, calls, at = json.JSONDecoder(), list[Call](), 0
    text = text.strip()
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            calls += [_call(item) for item in (value if isinstance(value, list) else [value])]
            while at < len(text) and text[at] in "; \n\t\r":
                at += 1
    except (ValueError, RecursionError, TypeError, KeyError):
        return []
    return calls


def _call(item: Any) -> Call:
    arguments = item["arguments"] if "arguments" in item else item["parameters"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(item["name"], str) or not isinstance(arguments, dict):
        raise TypeError
    return Call(item["name"], json.dumps(arguments, ensure_ascii=False))


def _named(text: str) -> list[Call]:
    """Parse name[ARGS]{...}."""
    name, _, arguments = text.partition(MISTRAL_ARGUMENTS) if MISTRAL_ARGUMENTS in text else text.partition("{")
    if MISTRAL_ARGUMENTS not in text:
        arguments = "{" + arguments
    return calls_of(json.dumps({"name": name.strip(), "arguments": arguments}))


def required_schema(tools: Sequence[Any], parallel: bool) -> dict[str, Any]:
    """Return a JSON schema for a list of at least one call. parallel: allow more than one."""
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": tool.parameters or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, "items": {"anyOf": one}, **most}
