"""POST /v1/chat/completions: answer a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.runtime.request import Rendered, TextToEncode
from ridgeline.serve.api import logprobs
from ridgeline.serve.api.answer import AnswerReader, Piece, Reading, merge_calls
from ridgeline.serve.api.choices import ChoiceEvents, token_ids
from ridgeline.serve.api.completions import collect
from ridgeline.serve.api.params import chat_params, prompt_options
from ridgeline.serve.api.prompt import rendered
from ridgeline.serve.api.reasoning import OPEN
from ridgeline.serve.api.tally import Tally, head
from ridgeline.serve.api.token_texts import TokenPosition, TokenTexts
from ridgeline.serve.api.tools import SPECIAL_MARKS, required_schema
from ridgeline.serve.api.types import ChatBody, NamedTool
from ridgeline.serve.http.errors import dumps
from ridgeline.serve.http.sse import Events
from ridgeline.serve.service import Service, Turn
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, TokenLogprobs
from ridgeline.spec.structure import StructuredOutputs

PLAIN = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null%b}'


class Chat:
    """Answers one request. The constructor and `open` raise APIError or RequestError for an invalid request.

    reading: how to parse the answers. It is final after `open`.
    """

    def __init__(self, service: Service, body: ChatBody) -> None:
        service.check_model(body.model, adapters=True)
        self._service, self._body = service, body
        reading, structure = _reading(body)
        thinks = service.reasoning_parser is not None and structure is None
        self.reading = replace(reading, parser=service.tool_parser, thinks=thinks)
        special = reading.mode == "auto" and service.tool_parser in SPECIAL_MARKS and body.skip_special_tokens is None
        shown = body.model_copy(update={"skip_special_tokens": False}) if special else body
        self._params = chat_params(shown, service.defaults(), structure)
        self._texts = TokenTexts(
            service.tokenizer, skip_special_tokens=self._params.skip_special_tokens,
            as_ids=bool(body.return_tokens_as_token_ids),
        )  # fmt: skip
        self._head = head(
            "chat.completion", "chatcmpl", service.answers_as(body.model), service.fingerprint, body.request_id
        )

    async def open(self, *, stream: bool) -> Turn:
        """Send the request to the engine."""
        body, reading = self._body, prompt_options(self._body)
        reading.pop("add_special_tokens", None)  # the rendered prompt already has them
        return await self._service.open(
            self._prompts, 1, self._params,
            operation="chat", priority=body.priority, reading=reading, stream=stream,
            model=body.model,
        )  # fmt: skip

    async def _prompts(self) -> list[Rendered]:
        body = self._body.model_copy(update={"tools": None}) if self._body.tool_choice == "none" else self._body
        text = await rendered(self._service, body)
        # Structured outputs apply from the first token, so such an answer cannot continue reasoning that the prompt
        # began.
        if self.reading.thinks and self._params.structured_outputs is None:
            self.reading = replace(self.reading, inside=text.text.rstrip().endswith(OPEN))
        return [text]

    async def count(self) -> int:
        """Return the number of tokens of the rendered conversation. Raises the errors of `open`."""
        (text,) = await self._prompts()
        return len(await self._service.tokenize(TextToEncode(text.text, True, text.add_special_tokens)))

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        turn = await self.open(stream=False)
        try:
            (output,), tally = await collect(turn)
        finally:
            turn.close()
        return await self._service.off_loop(lambda: self._whole(output, tally))

    def _whole(self, output: RequestOutput, tally: Tally) -> dict[str, Any]:
        choices = [self._choice(answer, output.prompt_token_ids) for answer in output.outputs]
        more: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = logprobs.plain(output.prompt_logprobs or ())
        if self._body.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        return {**self._head, "choices": choices, "usage": tally.usage(), **more}

    def _choice(self, answer: CompletionOutput, prompt: Sequence[int]) -> dict[str, Any]:
        reader = AnswerReader(self.reading)
        pieces = [*reader.push(answer.text), *reader.flush()]
        content = "".join(p.content for p in pieces)
        reasoning = "".join(p.reasoning for p in pieces)
        calls = merge_calls(pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning and self._body.include_reasoning is not False:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {
            "index": answer.index, "message": message,
            "logprobs": self._logprobs(self._texts.after(prompt), answer.logprobs),
            "finish_reason": self._reason(answer.finish_reason, bool(calls)), "stop_reason": answer.stop_reason,
        }  # fmt: skip
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _logprobs(self, position: TokenPosition, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if entries is None else logprobs.of_chat(position, entries)

    def _reason(self, reason: str | None, called: bool) -> str | None:
        return "tool_calls" if reason == "stop" and called and self.reading.mode != "named" else reason

    def events(self, turn: Turn) -> Events:
        """Return the answer as events. If the request fails, the last event has the error."""
        answers: dict[int, tuple[AnswerReader, TokenPosition]] = {}
        prompt = turn.requests[0].prompt_token_ids
        head = {**self._head, "object": "chat.completion.chunk"}
        return ChoiceEvents(
            head, self._body.stream_options, Tally(turn.requests), Tally.usage,
            lambda _, chunk: self._plain(chunk, answers) or [dumps(d) for d in self._deltas(chunk, answers, prompt)],
        )  # fmt: skip

    def _plain(self, chunk: OutputChunk, answers: Mapping[int, tuple[AnswerReader, TokenPosition]]) -> list[bytes]:
        """Return what `_deltas` returns for most chunks, in a quarter of the time. [] for all others."""
        if not chunk.text or chunk.finish_reason is not None or chunk.logprobs or chunk.index not in answers:
            return []
        if not answers[chunk.index][0].is_plain:
            return []
        return [PLAIN % (chunk.index, dumps(chunk.text), token_ids(chunk) if self._body.return_token_ids else b"")]

    def _deltas(
        self, chunk: OutputChunk, answers: dict[int, tuple[AnswerReader, TokenPosition]], prompt: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Return the choices of a chunk. Each becomes an event."""
        choices = []

        def add(delta: Mapping[str, Any]) -> dict[str, Any]:
            choices.append({"index": chunk.index, "delta": delta, "logprobs": None, "finish_reason": None})
            return choices[-1]

        if chunk.index not in answers:
            answers[chunk.index] = AnswerReader(self.reading), self._texts.after(prompt)
            add({"role": "assistant", "content": ""})
        reader, position = answers[chunk.index]
        pieces = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            pieces += reader.flush()
        for piece in pieces:
            if delta := self._delta(piece):
                add(delta)
        if chunk.logprobs or self._body.return_token_ids:
            last = choices[-1] if choices else add({})
            last["logprobs"] = self._logprobs(position, chunk.logprobs or None)
            if self._body.return_token_ids:
                last["token_ids"] = list(chunk.token_ids)
        if chunk.finish_reason is not None:
            last = add({})
            last["finish_reason"] = self._reason(chunk.finish_reason, reader.called)
            last["stop_reason"] = chunk.stop_reason
        return choices

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.content:
            delta["content"] = piece.content
        if piece.reasoning and self._body.include_reasoning is not False:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = list(piece.calls)
        return delta


def _reading(body: ChatBody) -> tuple[Reading, StructuredOutputs | None]:
    """Return how to parse the answers, and the structure that they must follow because of tool_choice.

    Raises RequestError for tools or a tool_choice that are invalid.
    """
    choice, tools = body.tool_choice, [tool.function for tool in body.tools or ()]
    names = [tool.name for tool in tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"tools has two functions named {repeated[0]!r:.100}; names must be unique")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name!r:.100}, which is not in tools; add it, or name another"
            )
        wanted = tools[names.index(choice.function.name)]
        schema = json.dumps(wanted.parameters or {"type": "object"})
        return Reading("named", function=wanted.name), StructuredOutputs(json=schema)
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice is 'required', but tools is empty; add tools, or leave tool_choice out")
        schema = json.dumps(required_schema(tools, body.parallel_tool_calls is not False))
        return Reading("required"), StructuredOutputs(json=schema)
    return Reading("auto" if tools and choice != "none" else "text"), None
