"""POST /v1/responses: a chat in the format of OpenAI's Responses API.

Nothing is stored, so a client sends the whole conversation with each request.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from pydantic import ValidationError

from ridgeline.errors import RequestError
from ridgeline.serve.api.answer import AnswerReader, Piece
from ridgeline.serve.api.chat import Chat
from ridgeline.serve.api.params import check_stream
from ridgeline.serve.api.parsed import parsed
from ridgeline.serve.api.response_items import Items
from ridgeline.serve.api.sampling_fields import RESPONSE_FIELDS
from ridgeline.serve.api.tally import Tally
from ridgeline.serve.api.types import ChatBody, Guided, Truncated
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.engine.client import Batch
from ridgeline.serve.http.errors import APIError, invalid
from ridgeline.serve.http.sse import Events, event
from ridgeline.serve.service import Service, Turn


class Response:
    """Answers one request. The constructor and `open` raise APIError or RequestError for an invalid request."""

    def __init__(self, service: Service, body: ResponseBody) -> None:
        self._body = body
        self._chat = Chat(service, as_chat(body))
        self._frame: dict[str, Any] = {
            "id": f"resp_{body.request_id or uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "model": service.answers_as(body.model), "error": None, "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature, "top_p": body.top_p, "max_output_tokens": body.max_output_tokens,
            "tool_choice": _plain(body.tool_choice) or "auto", "tools": [_plain(tool) for tool in body.tools or ()],
            "previous_response_id": None, "truncation": "disabled", "store": False,
            "text": {"format": _plain(body.text.format) if body.text and body.text.format else {"type": "text"}},
        }  # fmt: skip

    async def open(self, *, stream: bool) -> Turn:
        """Send the request to the engine."""
        return await self._chat.open(stream=stream)

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        found, items = await parsed(self._chat), Items()
        for piece in found.pieces:
            items.add(piece)
        items.close()
        return self._finished(items, found.answer.finish_reason, found.tally)

    def _finished(self, items: Items, reason: str | None, tally: Tally) -> dict[str, Any]:
        cut = reason == "length"
        return {
            **self._frame,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items.output,
            "usage": _usage(tally),
        }

    def events(self, turn: Turn) -> Events:
        """Return the answer as OpenAI's named, numbered events."""
        begun = {**self._frame, "status": "in_progress", "output": [], "usage": None}
        return _Events(begun, AnswerReader(self._chat.reading), Tally(turn.requests), self._finished)


class _Events:
    """Writes the events of one answer (sse.Events).

    begun: the response at the start. finished: makes the response at the end.
    """

    def __init__(
        self, begun: Mapping[str, Any], reader: AnswerReader, tally: Tally,
        finished: Callable[[Items, str | None, Tally], dict[str, Any]],
    ) -> None:  # fmt: skip
        self._begun, self._reader, self._tally, self._finished = begun, reader, tally, finished
        self._items, self._numbers = Items(), count()
        self._reason: str | None = None

    def begin(self) -> bytes:
        """Return the events before the first chunk."""
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._begun) for name in names)

    def chunks(self, batch: Batch) -> bytes:
        data = b""
        for _, chunk in batch:
            self._tally.take(chunk)
            self._reason = chunk.finish_reason or self._reason
            data += self._all_of(self._reader.push(chunk.text))
        return data

    def end(self) -> bytes:
        data = self._all_of(self._reader.flush())
        data += b"".join(self._event(kind, **fields) for kind, fields in self._items.close())
        kind = "response.incomplete" if self._reason == "length" else "response.completed"
        return data + self._event(kind, response=self._finished(self._items, self._reason, self._tally))

    def failed(self, error: APIError) -> bytes:
        fault = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self._begun, "status": "failed", "error": fault})

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _all_of(self, pieces: list[Piece]) -> bytes:
        return b"".join(self._event(kind, **fields) for piece in pieces for kind, fields in self._items.add(piece))


def as_chat(body: ResponseBody) -> ChatBody:
    """Convert the request to a chat's. Raises RequestError for fields that need a store, and APIError for values that a
    chat does not accept.
    """
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported: this server stores nothing; send the whole conversation")
    check_stream(body.stream, body.stream_options)
    if body.truncation == "auto":
        raise RequestError("truncation 'auto' is not supported; shorten the input or set truncate_prompt_tokens")
    if body.include or body.top_logprobs:
        raise RequestError("include and top_logprobs are not supported here; /v1/chat/completions has logprobs")
    given = body.text.format if body.text else None
    form = None
    if given is not None and given.type != "text":
        schema = {"schema": given.schema_, "name": given.name} if given.type == "json_schema" else None
        form = {"type": given.type, "json_schema": schema}
    try:
        return ChatBody.model_validate(_chat_fields(body, form))
    except ValidationError as e:
        raise invalid(e.errors(include_url=False)) from None


def _chat_fields(body: ResponseBody, form: dict[str, Any] | None) -> dict[str, Any]:
    choice = body.tool_choice
    return {
        "model": body.model, "messages": _messages(body), "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream, "priority": body.priority, "cache_salt": body.cache_salt,
        "structured_outputs": _plain(body.structured_outputs),
        **{name: getattr(body, name) for name in (*RESPONSE_FIELDS, *Guided.model_fields, *Truncated.model_fields)},
        "continue_final_message": body.continue_final_message, "add_special_tokens": body.add_special_tokens,
        "tools": [{"function": _plain(tool, {"type"})} for tool in body.tools] if body.tools else None,
        "tool_choice": choice if isinstance(choice, str | None) else {"function": {"name": choice.name}},
        "parallel_tool_calls": body.parallel_tool_calls, "response_format": form,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }  # fmt: skip


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    """Convert the items of a conversation to a chat's messages. Raises RequestError for an unknown type of item."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            content = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":
            raise RequestError(
                f"input[{index}] has type {kind!r:.40}; supported are message, function_call, function_call_output and "
                "reasoning"
            )
    return messages


def _plain(value: Any, without: set[str] | None = None) -> Any:
    if value is None or isinstance(value, str):
        return value
    return value.model_dump(by_alias=True, exclude_none=True, exclude=without)


def _usage(tally: Tally) -> dict[str, Any]:
    return {
        "input_tokens": tally.prompt,
        "input_tokens_details": {"cached_tokens": tally.cached},
        "output_tokens": tally.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tally.prompt + tally.completion,
    }
