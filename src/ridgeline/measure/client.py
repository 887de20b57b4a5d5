"""Request streamed answers of an OpenAI server, and record when each token arrives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from ridgeline.errors import RequestError
from ridgeline.measure.backends import BACKENDS, Backend

KNOWS_TOKEN_IDS = ("ridgeline", "vllm")  # owners of models whose servers say which tokens are in an event
LONGEST_ERROR = 200  # characters


@dataclass(slots=True)
class Answer:
    """The result of one request. Times are nanoseconds of time.perf_counter_ns.

    arrival_ns: time when it was due. sent_ns: time when it was sent. times_ns: arrival of each token; tokens of one
    event have the same time. If a server does not say how many tokens an event has, there is one time for each event
    with text, or that of the end if no event has any. tokens: the server's count (usage); otherwise the requested
    number if its finish_reason is length; otherwise the number of events with text. prompt_tokens: the server's count,
    otherwise the requested one. error: why the answer is not complete.
    """

    arrival_ns: int
    prompt_tokens: int
    sent_ns: int = 0
    times_ns: list[int] = field(default_factory=list)
    tokens: int = 0
    counted_by: Literal["usage", "length", "events"] = "events"
    finish_reason: str | None = None
    finished_ns: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A server's model. owner: owner of the model. max_model_len: None if the server does not say it."""

    model: str
    owner: str
    max_model_len: int | None


class Client:
    """Sends requests to one server.

    base_url: URL without /v1. seconds: longest time of a request. endpoint: path, if it differs from the backend's.
    """

    def __init__(
        self, base_url: str, api_key: str | None, seconds: float, backend: Backend = BACKENDS["openai"],
        endpoint: str | None = None,
    ) -> None:  # fmt: skip
        self.backend, self._path = backend, endpoint or backend.path
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.url = base_url.rstrip("/").removesuffix("/v1")
        # trust_env: a proxy is no part of what is measured
        self.http = httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=unlimited, timeout=httpx.Timeout(seconds), trust_env=False
        )

    async def server(self, model: str | None) -> Server:
        """Return the model of that name, or the first one. Raises RequestError if there is no such server or model."""
        listed = await self.get("/v1/models")
        models = {str(m["id"]): m for m in (listed or {}).get("data", [])}
        if not models:
            raise RequestError(f"{self.url}/v1/models lists no model; is this an OpenAI server?")
        if model is not None and model not in models:
            raise RequestError(f"{self.url} does not serve {model}; it serves {', '.join(models)}")
        name = model or next(iter(models))
        found = models[name]
        return Server(name, str(found.get("owned_by", "")), found.get("max_model_len"))

    async def get(self, path: str) -> Any:
        """Return the JSON of a path; None if the server has no such path. Raises RequestError for other answers."""
        try:
            response = await self.http.get(path)
        except httpx.HTTPError as e:
            raise RequestError(f"{self.url} cannot be reached: {e or type(e).__name__}; see --base-url") from None
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise RequestError(f"{self.url}{path}: {_reason(response.status_code, response.content)}; see --api-key")
        try:
            return response.json()
        except ValueError:
            raise RequestError(f"{self.url}{path} is no JSON; is this an OpenAI server?") from None

    async def text(self, path: str) -> str | None:
        """Return the text of a path; None if the server does not answer it."""
        try:
            response = await self.http.get(path)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    def body(self, server: Server, ids: Sequence[int], max_tokens: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request: greedy, with an answer of full length."""
        told = {"return_token_ids": True} if server.owner in KNOWS_TOKEN_IDS else {}
        fixed = {"model": server.model, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                 "stream_options": {"include_usage": True}}  # fmt: skip
        return {**fixed, **self.backend.prompt(ids), **told, **extra}

    async def complete(self, body: Mapping[str, Any], answer: Answer) -> None:
        """Request a completion and record its events. Errors of the server are recorded and do not raise."""
        answer.sent_ns = time.perf_counter_ns()
        try:
            async with self.http.stream("POST", self._path, json=body) as response:
                if response.status_code != 200:
                    answer.error = _reason(response.status_code, await response.aread())
                    return
                await _listen(response, answer, self.backend.has_text, int(body.get("max_tokens", 0)))
        except httpx.HTTPError as e:
            answer.error = f"{type(e).__name__} {e}".strip()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            answer.error = f"an event that is none: {e}"


HasText = Callable[[Mapping[str, Any]], bool]


async def _listen(response: httpx.Response, answer: Answer, has_text: HasText, max_tokens: int) -> None:
    rest = b""
    async for data in response.aiter_raw():
        now = time.perf_counter_ns()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                if line[5:].strip() == b"[DONE]":
                    _close(answer, now, max_tokens)
                    return
                _take(json.loads(line[5:]), now, answer, has_text)
            if answer.error is not None:
                return
    answer.error = "the stream ended before its answer did"


def _close(answer: Answer, now: int, max_tokens: int) -> None:
    """Count the tokens of a finished answer."""
    if answer.counted_by == "events" and answer.finish_reason == "length":
        answer.tokens, answer.counted_by = max_tokens, "length"
        if max_tokens > len(answer.times_ns):  # texts that the server held back, or left out
            answer.times_ns.append(answer.finished_ns)
    answer.tokens = answer.tokens or len(answer.times_ns)
    if answer.counted_by == "events" and answer.finish_reason is None:
        answer.error = "the server broke the answer off: it has no finish_reason"
    elif not answer.tokens:
        answer.error = "an answer without a token; a server that knows no ignore_eos may want an --extra-body"
    elif not answer.times_ns:  # none of them had a text: they came by now
        answer.times_ns = [now]


def _take(event: Mapping[str, Any], now: int, answer: Answer, has_text: HasText) -> None:
    if (error := event.get("error")) is not None:
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)[:LONGEST_ERROR]
        return
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        count = len(ids) if ids is not None else int(has_text(choice))
        answer.times_ns += [now] * count
        if (reason := choice.get("finish_reason")) is not None:
            answer.finish_reason, answer.finished_ns = str(reason), now
    if (usage := event.get("usage")) is not None:
        answer.tokens, answer.counted_by = int(usage["completion_tokens"]), "usage"
        answer.prompt_tokens = int(usage.get("prompt_tokens", answer.prompt_tokens))


def _reason(status: int, content: bytes) -> str:
    """Return one line with a server's error."""
    try:
        text = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = content.decode(errors="replace")
    return f"status {status}: {' '.join(text.split())[:LONGEST_ERROR]}"
