"""Split an answer's text into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.serve.api.reasoning import ThinkParser
from ridgeline.serve.api.tools import PARSERS, Call, ToolParser, calls_of

# text: no tool calls. auto: tool calls in the model's own format. required: a list of tool calls that follows a JSON
# schema. named: the whole answer is the arguments of one function.
Mode = Literal["text", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A parsed part of an answer: content, reasoning, and tool calls in the form of a chat's delta."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """How to parse a request's answers.

    parser: name of the tool parser for mode auto. function: name of the function for mode named. thinks: True if the
    answer may contain reasoning. inside: True if the prompt ends inside the reasoning.
    """

    mode: Mode = "text"
    parser: str | None = None
    function: str = ""
    thinks: bool = False
    inside: bool = False


class AnswerReader:
    """Parses one answer. called: True once a tool call was found."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._think = ThinkParser(reading.inside) if reading.thinks else None
        self._tools: ToolParser | None = None
        if reading.mode == "auto" and reading.parser is not None:
            self._tools = PARSERS[reading.parser]()
        self._held = ""
        self._count = 0

    @property
    def called(self) -> bool:
        return self._count > 0

    @property
    def is_plain(self) -> bool:
        """Return whether every text is content, as it is."""
        return self._think is None and self._tools is None and self._reading.mode in ("text", "auto")

    def push(self, text: str) -> list[Piece]:
        """Add generated text; return the parts that are complete."""
        reasoning, content = self._think.push(text) if self._think else ("", text)
        return [p for p in (Piece(reasoning=reasoning), self._read(content)) if p != Piece()]

    def flush(self) -> list[Piece]:
        """Return the remaining parts at the end of the answer."""
        reasoning, content = self._think.flush() if self._think else ("", "")
        pieces = [Piece(reasoning=reasoning), self._read(content), self._finish()]
        return [p for p in pieces if p != Piece()]

    def _read(self, text: str) -> Piece:
        mode = self._reading.mode
        if not text:
            return Piece()
        if mode == "named":
            first = {} if self._count else {"type": "function", "id": Call("", "").id}
            name = {} if self._count else {"name": self._reading.function}
            self._count = 1
            return Piece(calls=({"index": 0, **first, "function": {**name, "arguments": text}},))
        if mode == "required":
            self._held += text
            return Piece()
        if self._tools is None:
            return Piece(content=text)
        content, calls = self._tools.push(text)
        return Piece(content=content, calls=self._deltas(calls))

    def _finish(self) -> Piece:
        if self._reading.mode == "required":
            calls = calls_of(self._held)
            return Piece(content="" if calls else self._held, calls=self._deltas(calls))
        if self._tools is None:
            return Piece()
        content, calls = self._tools.flush()
        return Piece(content=content, calls=self._deltas(calls))

    def _deltas(self, calls: list[Call]) -> tuple[Mapping[str, Any], ...]:
        first, self._count = self._count, self._count + len(calls)
        return tuple(
            {
                "index": i,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls, first)
        )


def merge_calls(pieces: list[Piece]) -> list[dict[str, Any]]:
    """Return the tool calls of a whole answer, joined from their pieces."""
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for call in piece.calls:
            rest = {name: value for name, value in call.items() if name != "index"}
            known = found.get(call["index"])
            if known is None:
                found[call["index"]] = {**rest, "function": dict(call["function"])}
            else:
                known["function"]["arguments"] += call["function"]["arguments"]
    return [found[i] for i in sorted(found)]


def parsed_arguments(text: str) -> Any:
    """Parse the arguments of a tool call that a client sends back, as chat templates expect objects.

    A text that is not JSON is returned unchanged.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
