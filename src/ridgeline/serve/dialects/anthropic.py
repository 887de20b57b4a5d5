"""POST /v1/messages: a chat in the format of Anthropic's Messages API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ridgeline.serve.api.answer import Piece
from ridgeline.serve.api.chat import Chat
from ridgeline.serve.api.parsed import PieceEvents, parsed
from ridgeline.serve.api.tally import Tally
from ridgeline.serve.api.types import ChatBody
from ridgeline.serve.dialects import anthropic_types as t
from ridgeline.serve.http.errors import APIError, invalid
from ridgeline.serve.http.shapes import shaped
from ridgeline.serve.http.sse import Events, event
from ridgeline.serve.service import Service, Turn
from ridgeline.spec.request import CompletionOutput, OutputChunk

PATH = "/v1/messages"
EMPTY = {"text": {"type": "text", "text": ""}, "thinking": {"type": "thinking", "thinking": "", "signature": ""}}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Message:
    """Answers one request. The constructor and `open` raise APIError or RequestError for an invalid request."""

    def __init__(self, service: Service, body: t.MessagesBody) -> None:
        self._chat = Chat(service, as_chat(body))
        self._shows = not (body.thinking and (body.thinking.type == "disabled" or body.thinking.display == "omitted"))
        name = service.answers_as(body.model)
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": name}
        self._head: dict[str, Any] = {**head, "content": [], "stop_reason": None, "stop_sequence": None}

    async def open(self, *, stream: bool) -> Turn:
        """Send the request to the engine."""
        return await self._chat.open(stream=stream)

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        found, blocks = await parsed(self._chat), Blocks(self._shows)
        for piece in found.pieces:
            blocks.add(piece)
        blocks.close()
        usage = used(found.tally)
        return {**self._head, "content": blocks.content, **ending(found.answer, blocks.called), "usage": usage}

    def events(self, turn: Turn) -> Events:
        """Return the answer as Anthropic's named events."""
        return _Events(self._chat, turn, self._head, Blocks(self._shows))


class Blocks:
    """Collects the blocks of an answer. shows: whether reasoning is a block; called: whether a tool was called."""

    def __init__(self, shows: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self.called, self._shows = False, shows
        self._open: Any = None  # the kind of the open block, or the index of its call
        self._input = ""  # the input of an open call, as JSON

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Add a part of the answer; return its events."""
        events: list[dict[str, Any]] = []
        if piece.reasoning and self._shows:
            events += self._grow("thinking", "thinking", piece.reasoning)
        if piece.content:
            events += self._grow("text", "text", piece.content)
        for call in piece.calls:
            if self._open != call["index"]:
                begun = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                events += self._begin(call["index"], begun)
            self.called = True
            self._input += call["function"]["arguments"]
            events.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        return events

    def close(self) -> list[dict[str, Any]]:
        """Close the open block; return its events."""
        if self._open is None:
            return []
        if isinstance(self._open, int):
            self.content[-1]["input"] = _object(self._input)
        self._open, self._input = None, ""
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _begin(self, kind: str | int, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self.close()
        self._open = kind
        self.content.append(block)
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _grow(self, kind: str, field: str, text: str) -> list[dict[str, Any]]:
        events = [] if self._open == kind else self._begin(kind, dict(EMPTY[kind]))
        self.content[-1][field] += text
        return [*events, self._delta({"type": f"{kind}_delta", field: text})]

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


class _Events(PieceEvents):
    """Writes the events of one answer (sse.Events)."""

    def __init__(self, chat: Chat, turn: Turn, head: Mapping[str, Any], blocks: Blocks) -> None:
        super().__init__(chat, turn)
        self._head, self._blocks = head, blocks

    def begin(self) -> bytes:
        return _all({"type": "message_start", "message": {**self._head, "usage": used(self.tally)}}, {"type": "ping"})

    def write(self, pieces: Sequence[Piece], chunk: OutputChunk) -> bytes:
        return _all(*(one for piece in pieces for one in self._blocks.add(piece)))

    def end(self) -> bytes:
        assert self.last is not None
        closing = self._blocks.close()
        delta, usage = ending(self.last, self._blocks.called), used(self.tally)
        return _all(*closing, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"})

    def failed(self, error: APIError) -> bytes:
        return _all(shaped(error, PATH))


def _all(*events: Mapping[str, Any]) -> bytes:
    return b"".join(event(one, one["type"]) for one in events)


def _object(text: str) -> dict[str, Any]:
    """Return the input of a call, which is not complete if the answer ended at max_tokens."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def ending(end: CompletionOutput | OutputChunk, called: bool) -> dict[str, Any]:
    """Return why an answer ended, in Anthropic's words."""
    text = end.stop_reason if isinstance(end.stop_reason, str) else None
    why = "stop_sequence" if text is not None else "tool_use" if called else "end_turn"
    return {"stop_reason": "max_tokens" if end.finish_reason == "length" else why, "stop_sequence": text}


def used(tally: Tally) -> dict[str, int]:
    """Return the numbers of tokens."""
    return {
        "input_tokens": tally.prompt - tally.cached, "output_tokens": tally.completion,
        "cache_read_input_tokens": tally.cached, "cache_creation_input_tokens": 0,
    }  # fmt: skip


# Requests ----------------------------------------------------------------------------------------------


def as_chat(body: t.CountBody) -> ChatBody:
    """Convert the request to a chat's. Raises APIError for values that a chat does not accept."""
    choice, config, last = body.tool_choice, body.output_config, body.messages[-1:]
    messages = [message for turn in body.messages for message in _messages(turn)]
    fields: dict[str, Any] = {
        "model": body.model, "messages": [*_system(body.system), *messages],
        "continue_final_message": bool(last and last[0].role == "assistant" and not _calls(last[0])),
        "tools": [{"function": _function(tool)} for tool in body.tools] if body.tools else None,
        "reasoning_effort": config.effort if config else None,
    }  # fmt: skip
    if choice is not None:
        fields["tool_choice"] = CHOICES.get(choice.type, {"function": {"name": choice.name}})
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if config and config.format:
        schema = config.format.schema_
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if body.thinking:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if isinstance(body, t.MessagesBody):
        fields |= {name: getattr(body, name) for name in ("stream", "temperature", "top_p", "top_k")}
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as e:
        raise invalid(e.errors(include_url=False)) from None


def _function(tool: t.CustomTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {name: value for name, value in given.items() if value is not None}


def _system(given: str | list[t.TextBlock] | None) -> list[dict[str, Any]]:
    return [] if given is None else [{"role": "system", "content": _content(given)}]


def _content(given: str | Sequence[t.TextBlock]) -> str | list[dict[str, Any]]:
    return given if isinstance(given, str) else [{"type": "text", "text": block.text} for block in given]


def _calls(turn: t.TurnBody) -> list[dict[str, Any]]:
    return [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": json.dumps(b.input)}}
        for b in turn.content
        if isinstance(b, t.ToolUseBlock)
    ]


def _messages(turn: t.TurnBody) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that a message has: each result of a tool is one of its own, before the texts."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    for block in turn.content:
        if isinstance(block, t.ToolResultBlock):
            text = "Error: " * bool(block.is_error)
            text += given if isinstance(given := block.content or "", str) else "\n".join(one.text for one in given)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    texts, calls = [b for b in turn.content if isinstance(b, t.TextBlock)], _calls(turn)
    thought = "".join(b.thinking for b in turn.content if isinstance(b, t.ThinkingBlock))
    if not (texts or calls or thought):
        return
    message: dict[str, Any] = {"role": turn.role, "content": _content(texts) if texts else ""}
    yield message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {})
