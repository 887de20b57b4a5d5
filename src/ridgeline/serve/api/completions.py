"""POST /v1/completions: continue prompts."""

from __future__ import annotations

from typing import Any

from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.request import Prompt
from ridgeline.serve.api import logprobs
from ridgeline.serve.api.answer import Reading
from ridgeline.serve.api.choices import ChoiceEvents, token_ids
from ridgeline.serve.api.params import completion_params, prompt_options
from ridgeline.serve.api.tally import Tally, head
from ridgeline.serve.api.token_texts import TokenPosition, TokenTexts
from ridgeline.serve.api.types import CompletionBody
from ridgeline.serve.http.errors import dumps
from ridgeline.serve.http.sse import Events
from ridgeline.serve.service import Service, Turn, as_prompts
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput

PLAIN = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null%b}'


class Completion:
    """Answers one request. The constructor and `open` raise APIError or RequestError for an invalid request."""

    reading = Reading()  # an answer is text, with no reasoning and no tool calls

    def __init__(self, service: Service, body: CompletionBody, max_tokens: int | None = 16) -> None:
        """max_tokens: tokens of an answer by default; None: up to the end of the context."""
        service.check_model(body.model, adapters=True)
        self._service, self._body = service, body
        self._params = completion_params(body, service.defaults(), max_tokens)
        self._texts = TokenTexts(
            service.tokenizer, skip_special_tokens=self._params.skip_special_tokens,
            as_ids=bool(body.return_tokens_as_token_ids),
        )  # fmt: skip
        self._prompts = as_prompts(body.prompt)
        self._head = head(
            "text_completion", "cmpl", service.answers_as(body.model), service.fingerprint, body.request_id
        )
        self._silent = bool(body.echo) and body.max_tokens == 0  # the answer is the prompt alone

    async def open(self, *, stream: bool) -> Turn:
        """Send the request to the engine."""
        body = self._body
        return await self._service.open(
            self._fitting, len(self._prompts), self._params,
            operation="text_completion", priority=body.priority, reading=prompt_options(body), stream=stream,
            model=body.model,
        )  # fmt: skip

    async def _fitting(self) -> list[Prompt]:
        """Return the prompts. Raises RequestError for a list of ids that is too long, before its ids are checked."""
        for prompt in self._prompts:
            if isinstance(prompt, list) and self._body.truncate_prompt_tokens is None:
                self._service.frontend.check_length(prompt, self._params)
        return self._prompts

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        turn = await self.open(stream=False)
        try:
            outputs, tally = await collect(turn)
        finally:
            turn.close()
        return await self._service.off_loop(lambda: self._whole(outputs, tally))

    def _whole(self, outputs: list[RequestOutput], tally: Tally) -> dict[str, Any]:
        choices = [
            self._choice(prompt_index, output, answer)
            for prompt_index, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": self._usage(tally)}

    def _usage(self, tally: Tally) -> dict[str, Any]:
        if self._silent:  # the engine always generates at least one token
            tally.completion = 0
        return tally.usage()

    def _choice(self, prompt_index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        text, entries = answer.text, list(answer.logprobs or ())
        echoed = self._echo(output.prompt, output.prompt_token_ids) if self._body.echo else ""
        if self._silent:
            text, entries = "", []
        choice: dict[str, Any] = {
            "index": prompt_index * self._params.n + answer.index,
            "text": echoed + text,
            "logprobs": None,
            "finish_reason": "length" if self._silent else answer.finish_reason,
            "stop_reason": None if self._silent else answer.stop_reason,
        }
        if self._body.logprobs is not None:
            ids, before = output.prompt_token_ids, list(output.prompt_logprobs or ()) if self._body.echo else []
            begin = self._texts.after(() if self._body.echo else ids)
            choice["logprobs"] = logprobs.of_completion(begin, [*before, *entries], ids[0], over=not self._silent)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.plain(output.prompt_logprobs or ())
        if self._body.return_token_ids:
            choice["token_ids"] = [] if self._silent else answer.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _echo(self, prompt: str | None, ids: list[int]) -> str:
        if prompt is not None or self._service.tokenizer is None:
            return prompt or ""
        return self._service.tokenizer.decode(ids)

    def events(self, turn: Turn) -> Events:
        """Return the answer as events. If the request fails, the last event has the error."""
        positions: dict[int, TokenPosition] = {}

        def deltas(prompt_index: int, chunk: OutputChunk) -> list[bytes]:
            index = prompt_index * self._params.n + chunk.index
            if index in positions and self._is_plain(chunk):
                return self._plain(index, chunk)
            choice = self._delta(turn.requests[prompt_index], index, chunk, positions)
            return [] if choice is None else [dumps(choice)]

        return ChoiceEvents(self._head, self._body.stream_options, Tally(turn.requests), self._usage, deltas)

    def _is_plain(self, chunk: OutputChunk) -> bool:
        """Return whether a chunk that is not an answer's first adds text and nothing else."""
        return chunk.finish_reason is None and not chunk.logprobs and not self._silent

    def _plain(self, index: int, chunk: OutputChunk) -> list[bytes]:
        """Return what `_delta` returns for most chunks, in a quarter of the time."""
        ids = token_ids(chunk) if self._body.return_token_ids else b""
        return [PLAIN % (index, dumps(chunk.text), ids)] if chunk.text or ids else []

    def _delta(
        self, prompt: GenerationRequest, index: int, chunk: OutputChunk, positions: dict[int, TokenPosition]
    ) -> dict[str, Any] | None:
        body = self._body
        text = "" if self._silent else chunk.text
        if index not in positions:
            positions[index] = self._texts.after(prompt.prompt_token_ids)
            if body.echo:
                text = self._echo(prompt.prompt, list(prompt.prompt_token_ids)) + text
        entries = None if self._silent else chunk.logprobs
        if not (text or entries or chunk.finish_reason or body.return_token_ids):
            return None
        choice: dict[str, Any] = {
            "index": index, "text": text, "logprobs": None,
            "finish_reason": chunk.finish_reason and ("length" if self._silent else chunk.finish_reason),
            "stop_reason": None if self._silent else chunk.stop_reason,
        }  # fmt: skip
        if body.logprobs is not None and entries:
            over = chunk.finish_reason is not None
            choice["logprobs"] = logprobs.of_completion(positions[index], entries, 0, over)
        if body.return_token_ids:
            choice["token_ids"] = [] if self._silent else list(chunk.token_ids)
        return choice


async def collect(turn: Turn) -> tuple[list[RequestOutput], Tally]:
    """Wait for all results and return them in the order of the prompts. Raises APIError for an answer that failed."""
    tally, found = Tally(turn.requests), dict[int, RequestOutput]()
    while batch := await turn.batch():
        for prompt_index, chunk in batch:
            tally.take(chunk, whole=True)
            if chunk.output is not None:
                found[prompt_index] = chunk.output
    return [found[prompt_index] for prompt_index in range(len(turn.requests))], tally
