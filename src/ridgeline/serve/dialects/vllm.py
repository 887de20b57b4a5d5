"""The endpoints of vLLM besides OpenAI's: for SageMaker, about the tokenizer and the load, to sleep and to wake."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Discriminator, Field, RootModel, Tag

from ridgeline.serve.api import routes
from ridgeline.serve.api import types_answers as answered
from ridgeline.serve.api.described import answers
from ridgeline.serve.api.types import Body, ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody
from ridgeline.serve.http.body import BodyRoute
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.service import Service

router = APIRouter(route_class=BodyRoute, tags=["vLLM"])
tokenizer_router = APIRouter(tags=["vLLM"])
adapter_router = APIRouter(route_class=BodyRoute, tags=["vLLM"])
dev_router = APIRouter(tags=["vLLM"])


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter. lora_path: a folder of the server, or a hub id."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


class AdaptersAnswer(answered.Answer):
    """adapters: the names of the adapters that are loaded."""

    adapters: list[str]


class LoadAnswer(answered.Answer):
    """server_load: answers that run or wait."""

    server_load: int


class TokenizerAnswer(answered.Answer):
    """The tokenizer. special_tokens: texts by name. chat_template: in Jinja; null without one."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, str]
    chat_template: str | None


class InvokedAnswer(
    RootModel[
        answered.CompletionAnswer
        | answered.ChatAnswer
        | answered.EmbeddingAnswer
        | answered.ScoreAnswer
        | answered.RerankAnswer
    ]
):
    """The answer of the endpoint for such a body: a completion, a chat, embeddings, scores or ranks."""


class SleepAnswer(answered.Answer):
    """Whether the engine sleeps."""

    is_sleeping: bool


class ResetAnswer(answered.Answer):
    """resets: how often the prefix cache was reset since the start."""

    resets: int


def _kind(body: Any) -> str:
    """Return which request a body is, from the field that only this one has."""
    kinds = {"messages": "chat", "input": "embedding", "text_1": "score", "query": "rerank"}
    fields = body if isinstance(body, dict) else {}
    return next((kind for field, kind in kinds.items() if field in fields), "completion")


Invocation = Annotated[
    Annotated[ChatBody, Tag("chat")] | Annotated[CompletionBody, Tag("completion")]
    | Annotated[EmbeddingBody, Tag("embedding")] | Annotated[ScoreBody, Tag("score")]
    | Annotated[RerankBody, Tag("rerank")],
    Discriminator(_kind),
]  # fmt: skip


@router.get("/ping", responses={**answers(answered.HealthAnswer)})
@router.post("/ping", responses={**answers(answered.HealthAnswer)})
async def ping(request: Request) -> Response:
    """Answer as /health, for SageMaker."""
    return await routes.health(request)


@router.post("/invocations", responses={**answers(InvokedAnswer, stream=routes.STREAM)})
async def invocations(body: Invocation, request: Request) -> Response:
    """Answer a completion, chat, embedding, score or rerank, for SageMaker: the body's fields say which."""
    match body:
        case ChatBody():
            return await routes.chat_completions(body, request)
        case EmbeddingBody():
            return await routes.post_embeddings(body, request)
        case ScoreBody():
            return await routes.post_score(body, request)
        case RerankBody():
            return await routes.post_rerank(body, request)
        case _:
            return await routes.completions(body, request)


@router.get("/load", responses={**answers(LoadAnswer)})
async def load(request: Request) -> Response:
    """Return the number of answers that run or wait."""
    return routes.as_json({"server_load": routes.service_of(request).gate.open})


@adapter_router.post("/v1/load_lora_adapter", responses={**answers(AdaptersAnswer)})
async def load_adapter(body: LoadAdapterBody, request: Request) -> Response:
    """Load an adapter, whose name is a model for later requests. No step runs while it is read."""
    return await _adapted(request, body.lora_name, body.lora_path)


@adapter_router.post("/v1/unload_lora_adapter", responses={**answers(AdaptersAnswer)})
async def unload_adapter(body: UnloadAdapterBody, request: Request) -> Response:
    """Drop an adapter. It is refused while requests use it."""
    return await _adapted(request, body.lora_name, None)


async def _adapted(request: Request, name: str, source: str | None) -> Response:
    service = routes.service_of(request)
    await service.adapt(name, source)
    return routes.as_json({"adapters": list(service.adapters)})


@tokenizer_router.get("/tokenizer_info", responses={**answers(TokenizerAnswer)})
async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer and the chat template."""
    service = routes.service_of(request)
    tokenizer = service.frontend.tokenizer()
    template = tokenizer.chat_template
    return routes.as_json({
        "tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.max_model_len, "special_tokens": tokenizer.special_tokens,
        "chat_template": template.source if template else None,
    })  # fmt: skip


@dev_router.post("/sleep", responses={**answers(SleepAnswer)})
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Response:
    """End the engine process, which frees its memory, until /wake_up. Both levels do the same: the weights are read
    again from their folder. Answers 409 while requests are open.
    """
    service = _idle(request)
    if service.client.state != "sleeping":
        await service.client.sleep()
    return _sleeps(service)


@dev_router.post("/wake_up", responses={**answers(SleepAnswer)})
async def wake_up(request: Request) -> Response:
    """Start the engine process again. Answers once the model is loaded."""
    service = routes.service_of(request)
    if service.client.state == "sleeping":
        await service.client.wake()
    return _sleeps(service)


@dev_router.get("/is_sleeping", responses={**answers(SleepAnswer)})
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps."""
    return _sleeps(routes.service_of(request))


@dev_router.post("/reset_prefix_cache", responses={**answers(ResetAnswer)})
async def reset_prefix_cache(request: Request) -> Response:
    """Let no later request use what is in the prefix cache now. Its pages are taken when new ones are needed."""
    service = routes.service_of(request)
    service.prefix_resets += 1
    return routes.as_json({"resets": service.prefix_resets})


def _idle(request: Request) -> Service:
    """Return the service. Raises APIError 409 while requests are open."""
    service = routes.service_of(request)
    if service.gate.open:
        raise APIError(409, f"{service.gate.open} answers run or wait; sleep once they have ended", code="busy")
    return service


def _sleeps(service: Service) -> Response:
    return routes.as_json({"is_sleeping": service.asleep})
