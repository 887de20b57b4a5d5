"""POST /api/generate, /api/chat and /api/embed: completions, chats and embeddings in the format of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from ridgeline.errors import RequestError
from ridgeline.serve.api import logprobs
from ridgeline.serve.api.answer import Piece, merge_calls, parsed_arguments
from ridgeline.serve.api.chat import Chat
from ridgeline.serve.api.completions import Completion
from ridgeline.serve.api.embeddings import embeddings
from ridgeline.serve.api.parsed import PieceEvents, parsed
from ridgeline.serve.api.tally import Tally
from ridgeline.serve.api.token_texts import TokenPosition, TokenTexts
from ridgeline.serve.api.types import ChatBody, CompletionBody, EmbeddingBody
from ridgeline.serve.dialects import ollama_types as t
from ridgeline.serve.http.errors import APIError, dumps, invalid
from ridgeline.serve.http.sse import Events
from ridgeline.serve.service import Service, Turn
from ridgeline.spec.request import OutputChunk, RequestOutput, TokenLogprobs

LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty", "frequency_penalty")


class Reply:
    """Answers a request of /api/chat or /api/generate, whose answers differ in where the text is."""

    def __init__(self, service: Service, body: t.GenerateBody | t.OllamaChatBody) -> None:
        """Raises APIError or RequestError for an invalid request."""
        self._service, self._body = service, body
        self._model, self._started = body.model, time.perf_counter()
        fields = _fields(service, body)
        chats = isinstance(body, t.OllamaChatBody) or not (body.raw or body.suffix or not service.knows_roles)
        try:
            if chats:
                self.work: Chat | Completion = Chat(service, ChatBody.model_validate(fields | _conversation(body)))
            else:
                self.work = Completion(service, CompletionBody.model_validate(fields | _text(body)), None)
        except ValidationError as e:
            raise invalid(e.errors(include_url=False)) from None

    async def open(self, *, stream: bool) -> Turn:
        """Send the request to the engine."""
        return await self.work.open(stream=stream)

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        found = await parsed(self.work)
        entries = self._logprobs(self._position(found.output.prompt_token_ids), found.answer.logprobs)
        return {
            **self.line(found.pieces, done=True), **entries, "done_reason": found.answer.finish_reason,
            **durations(found.output, found.tally),
        }  # fmt: skip

    def events(self, turn: Turn) -> Events:
        """Return the answer as lines of JSON."""
        return _Lines(self, turn, self._position(turn.requests[0].prompt_token_ids))

    def line(self, pieces: Sequence[Piece], *, done: bool) -> dict[str, Any]:
        """Return an object with parts of the answer."""
        text, thinking = "".join(p.content for p in pieces), "".join(p.reasoning for p in pieces)
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls := merge_calls(list(pieces)):
            more["tool_calls"] = [{"id": one["id"], "function": _called(one)} for one in calls]
        chat = isinstance(self._body, t.OllamaChatBody)
        part = {"message": {"role": "assistant", "content": text, **more}} if chat else {"response": text, **more}
        return {"model": self._model, "created_at": now(), **part, "done": done}

    def _position(self, prompt: Sequence[int]) -> TokenPosition:
        return TokenTexts(self._service.tokenizer).after(prompt)

    def _logprobs(self, position: TokenPosition, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        return {"logprobs": logprobs.of_chat(position, entries)["content"]} if entries else {}

    def part(self, pieces: Sequence[Piece], chunk: OutputChunk, position: TokenPosition) -> bytes:
        """Return the line of a chunk, b"" for one that adds nothing."""
        entries = self._logprobs(position, chunk.logprobs)
        return dumps({**self.line(pieces, done=False), **entries}) + b"\n" if pieces or entries else b""


class _Lines(PieceEvents):
    """Writes the lines of one answer (sse.Events)."""

    def __init__(self, reply: Reply, turn: Turn, position: TokenPosition) -> None:
        super().__init__(reply.work, turn)
        self._reply, self._position = reply, position

    def write(self, pieces: Sequence[Piece], chunk: OutputChunk) -> bytes:
        return self._reply.part(pieces, chunk, self._position)

    def end(self) -> bytes:
        assert self.last is not None and self.output is not None
        counted = durations(self.output, self.tally)
        return dumps({**self._reply.line((), done=True), "done_reason": self.last.finish_reason, **counted}) + b"\n"

    def failed(self, error: APIError) -> bytes:
        return dumps({"error": error.message}) + b"\n"


async def embed(service: Service, body: t.EmbedBody) -> dict[str, Any]:
    """Answer /api/embed. Raises RequestError, APIError, EngineDown."""
    started, cut = time.perf_counter(), None if body.truncate is False else -1
    fields = {
        "model": known(service, body.model),
        "input": body.input,
        "dimensions": body.dimensions,
        "pooling": body.pooling,
    }
    found = await embeddings(service, EmbeddingBody.model_validate(
        {**fields, "truncate_prompt_tokens": cut, "normalize": True}
    ))  # fmt: skip
    return {
        "model": body.model, "embeddings": [one["embedding"] for one in found["data"]],
        "total_duration": round((time.perf_counter() - started) * 1e9), "load_duration": 0,
        "prompt_eval_count": found["usage"]["prompt_tokens"],
    }  # fmt: skip


def loaded(body: t.GenerateBody | t.OllamaChatBody) -> dict[str, Any] | None:
    """Return the answer of a request without a prompt, which asks Ollama to load a model; None for any other.

    Raises RequestError for one that asks to unload it.
    """
    chat = isinstance(body, t.OllamaChatBody)
    if body.messages if isinstance(body, t.OllamaChatBody) else body.prompt or body.suffix:
        return None
    if body.keep_alive in (0, "0", "0s", "0m", "0h"):
        raise RequestError("this server keeps its model loaded; end the server to unload it")
    part = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": body.model, "created_at": now(), **part, "done": True, "done_reason": "load"}


def now(seconds: float | None = None) -> str:
    """Return a time, by default the present, in the format of RFC 3339."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat().replace("+00:00", "Z")


def known(service: Service, name: str) -> str:
    """Return a name of the model without the tag :latest, if the server does not have it with the tag."""
    return name if name in service.options.names else name.removesuffix(LATEST)


def durations(output: RequestOutput, tally: Tally) -> dict[str, int]:
    """Return the counts of tokens, and the durations in nanoseconds."""
    time_ns = {
        "total_duration": output.timing.total_s, "load_duration": 0.0,
        "prompt_eval_duration": output.timing.ttft_s - output.timing.queued_s,
        "eval_duration": output.timing.total_s - output.timing.ttft_s,
    }  # fmt: skip
    counts = {"prompt_eval_count": tally.prompt, "eval_count": tally.completion}
    return {name: round(seconds * 1e9) for name, seconds in time_ns.items()} | counts


def _called(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": parsed_arguments(function["arguments"])}


# Requests ----------------------------------------------------------------------------------------------


def _fields(service: Service, body: t.AskBody) -> dict[str, Any]:
    """Return the fields that completions and chats have in common. Raises RequestError."""
    options = body.options or t.Options()
    if (wanted := options.num_ctx) is not None and wanted > service.max_model_len:
        raise RequestError(f"num_ctx is {wanted}; this server's context is {service.max_model_len} tokens: lower it, "
                           "or raise --max-model-len of `ridgeline serve`")  # fmt: skip
    fields = {name: getattr(options, name) for name in SAME}
    fields |= {"model": known(service, body.model), "repetition_penalty": options.repeat_penalty}
    fields |= {"stream": body.stream is not False}
    fields["max_tokens"] = None if options.num_predict in (-1, -2) else options.num_predict
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    return fields


def _conversation(body: t.GenerateBody | t.OllamaChatBody) -> dict[str, Any]:
    """Return the fields of a chat."""
    fields: dict[str, Any] = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if isinstance(body.think, bool):
        fields["chat_template_kwargs"] = {"enable_thinking": body.think}
    elif body.think is not None:
        fields["reasoning_effort"] = body.think
    if isinstance(body, t.OllamaChatBody):
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        return {**fields, "messages": [_message(one) for one in body.messages or ()], "tools": tools or None}
    system = [{"role": "system", "content": body.system}] if body.system else []
    return {**fields, "messages": [*system, {"role": "user", "content": body.prompt}]}


def _message(message: t.OllamaMessage) -> dict[str, Any]:
    calls = [{"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
             for c in message.tool_calls or ()]  # fmt: skip
    more = {
        "tool_calls": calls or None, "reasoning_content": message.thinking, "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }  # fmt: skip
    given = {name: value for name, value in more.items() if value is not None}
    return {"role": message.role, "content": message.content or "", **given}


def _text(body: t.GenerateBody | t.OllamaChatBody) -> dict[str, Any]:
    """Return the fields of a completion. Raises RequestError for fields that need a chat template."""
    assert isinstance(body, t.GenerateBody)
    for name in ("system", "think"):
        if getattr(body, name):
            raise RequestError(f"{name} needs a chat template: leave it out, or leave raw and suffix out")
    count = (body.top_logprobs or 0) if body.logprobs else None
    return {"prompt": body.prompt or "", "suffix": body.suffix, "logprobs": count}
