"""The endpoints: each checks a body, and hands it to what answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from ridgeline import __version__
from ridgeline.runtime.request import TextToEncode
from ridgeline.serve.api import prompt, responses
from ridgeline.serve.api import types_answers as t
from ridgeline.serve.api.chat import Chat
from ridgeline.serve.api.completions import Completion
from ridgeline.serve.api.described import answers, text
from ridgeline.serve.api.embeddings import embeddings
from ridgeline.serve.api.live import live, plan
from ridgeline.serve.api.metrics import exposition
from ridgeline.serve.api.token_texts import TokenTexts
from ridgeline.serve.api.types import (
    MAX_IDS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RenderBody,
    TokenizeBody,
)
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.http.body import BodyRoute
from ridgeline.serve.http.errors import APIError, dumps, dumps_object
from ridgeline.serve.http.request_ids import named
from ridgeline.serve.http.sse import Events, EventStream, while_connected
from ridgeline.serve.service import Service, Turn

MAX_TEXT = 1 << 22  # characters of an answer of /detokenize
STREAM = (
    "With `stream`: events `data: {...}`, each a part of the answer: `choices` with a text or a delta; the last one is "
    "`data: [DONE]`."
)
NAMED_STREAM = "With `stream`: OpenAI's events `response.*`, the last one with the whole response."

router = APIRouter(route_class=BodyRoute)


class Answering(Protocol):
    """A request that can be answered whole or piece by piece."""

    async def open(self, *, stream: bool) -> Turn: ...

    async def answer(self) -> dict[str, Any]: ...

    def events(self, turn: Turn) -> Events: ...


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(value: Any) -> Response:
    return _raw(dumps(value))


def _raw(data: bytes) -> Response:
    return Response(data, media_type="application/json")


async def respond(request: Request, work: Answering, stream: bool) -> Response:
    """Answer, as long as the client is there."""
    if not stream:
        whole = await while_connected(request, work.answer())
        return whole if isinstance(whole, Response) else _json(whole)
    turn = await work.open(stream=True)
    return EventStream(turn, work.events(turn), _service(request).delivery.observe)


@router.post("/v1/completions", tags=["OpenAI"], responses={**answers(t.CompletionAnswer, stream=STREAM)})
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts: texts or token ids, one or many."""
    return await respond(request, Completion(_service(request), named(body, request)), bool(body.stream))


@router.post("/v1/chat/completions", tags=["OpenAI"], responses={**answers(t.ChatAnswer, stream=STREAM)})
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation through the model's chat template."""
    return await respond(request, Chat(_service(request), named(body, request)), bool(body.stream))


@router.post("/v1/responses", tags=["OpenAI"], responses={**answers(t.ResponseAnswer, stream=NAMED_STREAM)})
async def post_responses(body: ResponseBody, request: Request) -> Response:
    """The same as a chat, in items; nothing is stored."""
    return await respond(request, responses.Response(_service(request), named(body, request)), bool(body.stream))


@router.post("/v1/chat/completions/render", tags=["Tokens"], responses={**answers(t.RenderAnswer)})
async def render(body: RenderBody, request: Request) -> Response:
    """What the model would read of a conversation: text and token ids."""
    service = _service(request)
    service.check_model(body.model)
    text = await prompt.rendered(service, body)
    ids = await service.tokenize(TextToEncode(text.text, True, text.add_special_tokens))
    _check_count(ids)
    facts = {"prompt": text.text, "count": len(ids), "max_model_len": service.max_model_len}
    return await service.off_loop(lambda: _raw(dumps_object({**facts, "prompt_token_ids": ids})))


@router.post("/v1/embeddings", tags=["OpenAI"], responses={**answers(t.EmbeddingAnswer)})
async def post_embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Vectors of length 1: the mean of a text's hidden states, or the last one."""
    return await while_connected(request, _embeddings(_service(request), body))


async def _embeddings(service: Service, body: EmbeddingBody) -> Response:
    return _json(await embeddings(service, body))


def _check_count(ids: Sequence[int]) -> None:
    """Raise APIError for more token ids than an answer may have."""
    if len(ids) > MAX_IDS:
        raise APIError(400, f"the text has {len(ids)} tokens; this endpoint tells {MAX_IDS} at most: send less at once")


@router.post("/tokenize", tags=["Tokens"], responses={**answers(t.TokenizeAnswer)})
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    service = _service(request)
    service.check_model(body.model)
    tokenizer = service.frontend.tokenizer()
    if (body.prompt is None) == (not body.messages):
        raise APIError(400, "give either a prompt or messages")
    if body.prompt is not None:
        ids = await service.tokenize(TextToEncode(body.prompt, False, body.add_special_tokens is not False))
    else:
        given = await prompt.rendered(service, body)
        ids = await service.tokenize(TextToEncode(given.text, True, given.add_special_tokens))
    _check_count(ids)
    facts = {"count": len(ids), "max_model_len": service.max_model_len}

    def answer() -> Response:
        strings = TokenTexts(tokenizer).all_of(ids) if body.return_token_strs else None
        return _raw(dumps_object({**facts, "tokens": ids, "token_strs": strings}))

    return await service.off_loop(answer)


@router.post("/detokenize", tags=["Tokens"], responses={**answers(t.DetokenizeAnswer)})
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids."""
    service = _service(request)
    service.check_model(body.model)
    tokenizer, skip = service.frontend.tokenizer(), bool(body.skip_special_tokens)

    def answer() -> Response:
        ids = service.frontend.check_ids(body.tokens) if body.tokens else []
        stream, pieces, size = tokenizer.detokenizer(skip), [], 0
        for token in ids:
            pieces.append(stream.push(token))
            size += len(pieces[-1])
            if size > MAX_TEXT:
                raise APIError(
                    400, f"the text of these tokens exceeds {MAX_TEXT} characters; send fewer tokens at once"
                )
        return _json({"prompt": "".join([*pieces, stream.flush()])})

    return await service.off_loop(answer)


@router.get("/v1/models", tags=["OpenAI"], responses={**answers(t.ModelsAnswer)})
async def models(request: Request) -> Response:
    """The model, under all its names."""
    service = _service(request)
    return _json({"object": "list", "data": [_model(service, name) for name in service.options.names]})


@router.get("/v1/models/{name:path}", tags=["OpenAI"], responses={**answers(t.ModelAnswer)})
async def model(name: str, request: Request) -> Response:
    """One of its names."""
    service = _service(request)
    service.check_model(name)
    return _json(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "ridgeline", "root": service.name,
        "max_model_len": service.max_model_len,
    }  # fmt: skip


@router.get("/health", tags=["Server"], responses={**answers(t.HealthAnswer)})
async def health(request: Request) -> Response:
    """200 while there is an engine that can answer. Otherwise 503: `http` is ok, since this is an answer; `engine` is
    "silent" (it gives no sign of life) or "restarting".
    """
    client = _service(request).client
    facts = {"http": "ok", "engine": client.health, "restarts": client.restarts}
    if client.up:
        return _json({"status": "ok", **facts})
    silent = f"gives no sign of life (for {client.watch.silent_s:.1f} s)"
    text = f"the HTTP process runs; the engine {silent if client.health == 'silent' else f'is {client.health}'}"
    error = APIError(503, text, code="engine_down", retry_after=2)
    return Response(
        dumps({"status": "unavailable", **facts, **error.body()}), 503, error.headers(), media_type="application/json"
    )


@router.get("/ready", tags=["Server"], responses={**answers(t.HealthAnswer)})
async def ready(request: Request) -> Response:
    """200 while new requests are welcome: not while the server drains, nor while the queue is full."""
    service = _service(request)
    if service.draining:
        raise APIError(503, "the server is stopping", code="draining", retry_after=30)
    if service.gate.open >= service.gate.capacity:
        raise APIError(503, "the queue is full", code="queue_full", retry_after=1)
    return await health(request)


@router.get("/version", tags=["Server"], responses={**answers(t.VersionAnswer)})
async def version() -> Response:
    """The program's version."""
    return _json({"version": __version__})


@router.get("/metrics", tags=["Server"], response_class=PlainTextResponse, responses={**text()})
async def metrics(request: Request) -> Response:
    """Counters in Prometheus' format, with vLLM's names where it has one."""
    counters = await exposition(_service(request))
    return PlainTextResponse(counters, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/live", tags=["Server"], responses={**answers(t.LiveAnswer)})
async def get_live(request: Request) -> Response:
    """Requests, pages, rates and latencies of this moment: what the page at / draws."""
    return _json(await live(_service(request)))


@router.get("/plan", tags=["Server"], responses={**answers(t.PlanAnswer)})
async def get_plan(request: Request) -> Response:
    """Model, machine and settings, as the planner and the simulator take them: `bench serve` predicts from it."""
    return _json(plan(_service(request)))
