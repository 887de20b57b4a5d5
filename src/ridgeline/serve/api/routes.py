"""Define the endpoints. Each parses its body and passes it to the code that answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
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
from ridgeline.serve.api.scores import rerank, score
from ridgeline.serve.api.token_texts import TokenTexts
from ridgeline.serve.api.types import (
    MAX_IDS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RenderBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.http.body import BodyRoute
from ridgeline.serve.http.errors import APIError, dumps, dumps_object
from ridgeline.serve.http.request_ids import named
from ridgeline.serve.http.sse import Events, EventStream, while_connected
from ridgeline.serve.service import Service, Turn

MAX_TEXT = 1 << 22  # characters in an answer of /detokenize
STREAM = (
    "With `stream`, the answer is a sequence of events `data: {...}`. Each has a part of the answer in `choices`, as a "
    "text or a delta. The last event is `data: [DONE]`."
)
NAMED_STREAM = "With `stream`, the answer is OpenAI's events `response.*`. The last event has the whole response."

router = APIRouter(route_class=BodyRoute)


class Answering(Protocol):
    """A request that can be answered in one response or as a stream."""

    async def open(self, *, stream: bool) -> Turn: ...

    async def answer(self) -> Any: ...

    def events(self, turn: Turn) -> Events: ...


def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.app.state.service
    return service


def as_json(value: Any) -> Response:
    """Return a response with a value as JSON."""
    return _raw(dumps(value))


def _raw(data: bytes) -> Response:
    return Response(data, media_type="application/json")


async def respond(request: Request, work: Answering, stream: bool, media_type: str = "text/event-stream") -> Response:
    """Answer in one response or as a stream. Stop if the client disconnects. media_type: the type of a stream."""
    if not stream:
        whole = await while_connected(request, work.answer())
        return whole if isinstance(whole, Response) else as_json(whole)
    opening = work.open(stream=True)
    turn = await (while_connected(request, opening) if service_of(request).shares else opening)
    if isinstance(turn, Response):  # the client left while its request waited for its turn
        return turn
    return EventStream(turn, work.events(turn), service_of(request).delivery.observe, media_type)


@router.post("/v1/completions", tags=["OpenAI"], responses={**answers(t.CompletionAnswer, stream=STREAM)})
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one or several prompts, given as texts or token ids."""
    return await respond(request, Completion(service_of(request), named(body, request)), bool(body.stream))


@router.post("/v1/chat/completions", tags=["OpenAI"], responses={**answers(t.ChatAnswer, stream=STREAM)})
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, formatted with the model's chat template."""
    return await respond(request, Chat(service_of(request), named(body, request)), bool(body.stream))


@router.post("/v1/responses", tags=["OpenAI"], responses={**answers(t.ResponseAnswer, stream=NAMED_STREAM)})
async def post_responses(body: ResponseBody, request: Request) -> Response:
    """Answer a conversation in the format of OpenAI's Responses API. Nothing is stored."""
    return await respond(request, responses.Response(service_of(request), named(body, request)), bool(body.stream))


@router.post("/v1/chat/completions/render", tags=["Tokens"], responses={**answers(t.RenderAnswer)})
async def render(body: RenderBody, request: Request) -> Response:
    """Format a conversation with the chat template; return the text and its token ids."""
    service = service_of(request)
    service.check_model(body.model, adapters=True)
    text = await prompt.rendered(service, body)
    ids = await service.tokenize(TextToEncode(text.text, True, text.add_special_tokens))
    _check_count(ids)
    facts = {"prompt": text.text, "count": len(ids), "max_model_len": service.max_model_len}
    return await service.off_loop(lambda: _raw(dumps_object({**facts, "prompt_token_ids": ids})))


@router.post("/v1/embeddings", tags=["OpenAI"], responses={**answers(t.EmbeddingAnswer)})
async def post_embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Return a vector for each input, from its hidden states."""
    service = service_of(request)
    return await while_connected(request, _dumped(service, embeddings(service, body)))


@router.post("/v1/score", tags=["Embeddings"], responses={**answers(t.ScoreAnswer)})
@router.post("/score", tags=["Embeddings"], responses={**answers(t.ScoreAnswer)})
async def post_score(body: ScoreBody, request: Request) -> Response:
    """Return a score for each pair of texts: of the model's head, or the similarity of two embeddings."""
    service = service_of(request)
    return await while_connected(request, _dumped(service, score(service, body)))


@router.post("/v1/rerank", tags=["Embeddings"], responses={**answers(t.RerankAnswer)})
@router.post("/v2/rerank", tags=["Embeddings"], responses={**answers(t.RerankAnswer)})
@router.post("/rerank", tags=["Embeddings"], responses={**answers(t.RerankAnswer)})
async def post_rerank(body: RerankBody, request: Request) -> Response:
    """Order documents by how well they fit a query. Return the best ones first, with scores."""
    service = service_of(request)
    return await while_connected(request, _dumped(service, rerank(service, body)))


async def _dumped(service: Service, answer: Awaitable[dict[str, Any]]) -> Response:
    """Write a long answer as JSON in a thread, so that the event loop can deliver chunks of other requests."""
    found = await answer
    return await service.off_loop(lambda: as_json(found))


def _check_count(ids: Sequence[int]) -> None:
    """Raise APIError if there are more token ids than an answer may have."""
    if len(ids) > MAX_IDS:
        raise APIError(400, f"the text has {len(ids)} tokens; this endpoint returns {MAX_IDS} at most: shorten it")


@router.post("/tokenize", tags=["Tokens"], responses={**answers(t.TokenizeAnswer)})
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a prompt or of a conversation."""
    service = service_of(request)
    service.check_model(body.model, adapters=True)
    tokenizer = service.frontend.tokenizer()
    if sum((body.prompt is not None, body.content is not None, bool(body.messages))) != 1:
        raise APIError(400, "give exactly one of prompt, messages and content")
    if body.content is None and (body.add_special is not None or body.with_pieces):
        raise APIError(400, "add_special and with_pieces go with content; prompt and messages have add_special_tokens "
                            "and return_token_strs")  # fmt: skip
    if body.content is not None:
        ids = await service.tokenize(TextToEncode(body.content, False, bool(body.add_special)))
    elif body.prompt is not None:
        ids = await service.tokenize(TextToEncode(body.prompt, False, body.add_special_tokens is not False))
    else:
        given = await prompt.rendered(service, body)
        ids = await service.tokenize(TextToEncode(given.text, True, given.add_special_tokens))
    _check_count(ids)
    facts = {"count": len(ids), "max_model_len": service.max_model_len}

    def answer() -> Response:
        strings = TokenTexts(tokenizer).all_of(ids) if body.return_token_strs else None
        tokens = TokenTexts(tokenizer).pieces_of(ids) if body.with_pieces else ids
        return _raw(dumps_object({**facts, "tokens": tokens, "token_strs": strings}))

    return await service.off_loop(answer)


@router.post("/detokenize", tags=["Tokens"], responses={**answers(t.DetokenizeAnswer)})
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids."""
    service = service_of(request)
    service.check_model(body.model, adapters=True)
    tokenizer, skip = service.frontend.tokenizer(), bool(body.skip_special_tokens)

    def answer() -> Response:
        ids = service.frontend.check_ids(body.tokens) if body.tokens else []
        stream, pieces, size = tokenizer.detokenizer(skip), [], 0
        for token in ids:
            pieces.append(stream.push(token))
            size += len(pieces[-1])
            if size > MAX_TEXT:
                raise APIError(
                    400, f"the text of these tokens has more than {MAX_TEXT} characters; send fewer tokens at once"
                )
        text = "".join([*pieces, stream.flush()])
        return as_json({"prompt": text, "content": text})

    return await service.off_loop(answer)


@router.get("/v1/models", tags=["OpenAI"], responses={**answers(t.ModelsAnswer)})
async def models(request: Request) -> Response:
    """List the served names of the model, and the adapters."""
    service = service_of(request)
    names = (*service.options.names, *service.adapters)
    return as_json({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{name:path}", tags=["OpenAI"], responses={**answers(t.ModelAnswer)})
async def model(name: str, request: Request) -> Response:
    """Describe the model under one of its served names."""
    service = service_of(request)
    service.check_model(name, adapters=True)
    return as_json(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "ridgeline", "root": service.name,
        "max_model_len": service.max_model_len, "parent": service.name if name in service.adapters else None,
    }  # fmt: skip


@router.get("/health", tags=["Server"], responses={**answers(t.HealthAnswer)})
async def health(request: Request) -> Response:
    """Answer 200 while the engine can answer requests or sleeps, else 503.

    `engine` is its state: "ready", "sleeping", "silent" (no heartbeat) or "restarting". `http` is always "ok".
    """
    client = service_of(request).client
    facts = {"http": "ok", "engine": client.health, "restarts": client.restarts}
    if client.up or service_of(request).asleep:
        return as_json({"status": "ok", **facts})
    silent = f"has sent no heartbeat for {client.silent_s:.1f} s"
    text = f"the HTTP process runs, but the engine {silent if client.health == 'silent' else f'is {client.health}'}"
    error = APIError(503, text, code="engine_down", retry_after=2)
    return Response(
        dumps({"status": "unavailable", **facts, **error.body()}), 503, error.headers(), media_type="application/json"
    )


@router.get("/ready", tags=["Server"], responses={**answers(t.HealthAnswer)})
async def ready(request: Request) -> Response:
    """Answer 200 while new requests are accepted, else 503: the server is stopping, the queue is full, or the engine
    cannot answer.
    """
    service = service_of(request)
    if service.asleep:
        raise APIError(503, "the engine sleeps; POST /wake_up wakes it", code="sleeping", retry_after=30)
    if service.draining:
        raise APIError(503, "the server is stopping", code="draining", retry_after=30)
    if service.gate.open >= service.gate.capacity:
        raise APIError(503, "the queue is full; try again in a second", code="queue_full", retry_after=1)
    return await health(request)


@router.get("/version", tags=["Server"], responses={**answers(t.VersionAnswer)})
async def version() -> Response:
    """Return the version of Ridgeline."""
    return as_json({"version": __version__})


@router.get("/metrics", tags=["Server"], response_class=PlainTextResponse, responses={**text()})
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus' format, with vLLM's names where vLLM has the same metric."""
    counters = await exposition(service_of(request))
    return PlainTextResponse(counters, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/live", tags=["Server"], responses={**answers(t.LiveAnswer)})
async def get_live(request: Request) -> Response:
    """Return the requests, pages, rates and latencies of this moment, which the page at / shows."""
    return as_json(await live(service_of(request)))


@router.get("/plan", tags=["Server"], responses={**answers(t.PlanAnswer)})
async def get_plan(request: Request) -> Response:
    """Return the model, machine and settings from which `ridgeline bench serve` predicts."""
    return as_json(plan(service_of(request)))
