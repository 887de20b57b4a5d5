"""Define the endpoints of Anthropic's, Ollama's and llama.cpp's APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from ridgeline import __version__
from ridgeline.serve.api import prompt
from ridgeline.serve.api.chat import Chat
from ridgeline.serve.api.described import ERRORS, answers
from ridgeline.serve.api.routes import Answering, as_json, respond, service_of
from ridgeline.serve.dialects import anthropic, llama_cpp, llama_cpp_more, ollama, ollama_models, vllm
from ridgeline.serve.dialects import anthropic_types as a
from ridgeline.serve.dialects import llama_cpp_types as c
from ridgeline.serve.dialects import ollama_types as o
from ridgeline.serve.dialects.idle import told
from ridgeline.serve.http.body import BodyRoute
from ridgeline.serve.http.sse import while_connected
from ridgeline.serve.options import ServeOptions

NDJSON = "application/x-ndjson"


def _router(tag: str, error: type[BaseModel]) -> APIRouter:
    """Return the router of an API, with the format of its errors."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": error, "description": text} for status, text in ERRORS.items()
    }
    return APIRouter(route_class=BodyRoute, tags=[tag], responses=responses)


to_anthropic = _router("Anthropic", a.AnthropicError)
to_ollama = _router("Ollama", o.OllamaError)
to_llama_cpp = _router("llama.cpp", c.LlamaError)


def dialect_routers(options: ServeOptions) -> list[APIRouter]:
    """Return the routers of all APIs besides OpenAI's, as far as the options enable them."""
    found = [to_anthropic, to_ollama, to_llama_cpp, vllm.router]
    found += [vllm.tokenizer_router] if options.enable_tokenizer_info_endpoint else []
    found += [vllm.adapter_router] if options.allow_runtime_lora_updating else []
    return found + ([vllm.dev_router] if options.server_dev_mode else [])


async def _answer(
    request: Request, body: BaseModel, work: Answering, stream: bool, media_type: str = "text/event-stream"
) -> Response:
    """Answer a request; the header Warning names its fields without effect."""
    return told(await respond(request, work, stream, media_type), body)


# Anthropic ---------------------------------------------------------------------------------------------

BLOCKS = (
    "With `stream`, the answer is Anthropic's named events, from `message_start` to `message_stop`; an error is the "
    "event `error`."
)


@to_anthropic.post("/v1/messages", responses={**answers(a.MessageAnswer, stream=BLOCKS)})
async def messages(body: a.MessagesBody, request: Request) -> Response:
    """Answer a conversation in the format of Anthropic's Messages API."""
    return await _answer(request, body, anthropic.Message(service_of(request), body), bool(body.stream))


@to_anthropic.post("/v1/messages/count_tokens", responses={**answers(a.CountAnswer)})
async def count_tokens(body: a.CountBody, request: Request) -> Response:
    """Return the number of tokens of a conversation."""
    chat = Chat(service_of(request), anthropic.as_chat(body))
    return told(as_json({"input_tokens": await chat.count()}), body)


# Ollama ------------------------------------------------------------------------------------------------


def _lines(model: type[BaseModel]) -> Mapping[int | str, dict[str, Any]]:
    """Return the `responses` of an endpoint that streams lines of JSON."""
    found = dict(answers(model)[200])
    text = "Unless `stream` is false, the answer is a line of JSON for each part of it; the last one has `done`."
    found["content"] = {NDJSON: {"schema": {"type": "string", "description": text}}}
    return {200: found}


async def _reply(request: Request, body: o.GenerateBody | o.OllamaChatBody) -> Response:
    service, stream = service_of(request), body.stream is not False
    service.check_model(ollama.known(service, body.model))
    if (line := ollama.loaded(body)) is not None:
        return told(as_json(line), body)
    return await _answer(request, body, ollama.Reply(service, body), stream, NDJSON)


@to_ollama.post("/api/generate", responses={**_lines(o.GenerateAnswer)})
async def generate(body: o.GenerateBody, request: Request) -> Response:
    """Continue a prompt, as a message of a user if the model has a chat template and `raw` is not set."""
    return await _reply(request, body)


@to_ollama.post("/api/chat", responses={**_lines(o.OllamaChatAnswer)})
async def chat(body: o.OllamaChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _reply(request, body)


@to_ollama.post("/api/embed", responses={**answers(o.EmbedAnswer)})
async def embed(body: o.EmbedBody, request: Request) -> Response:
    """Return a vector of length 1 for each text."""
    found = await while_connected(request, ollama.embed(service_of(request), body))
    return told(found if isinstance(found, Response) else as_json(found), body)


@to_ollama.get("/api/tags", responses={**answers(o.TagsAnswer)})
async def tags(request: Request) -> Response:
    """List the names of the model."""
    return as_json(ollama_models.tags(service_of(request)))


@to_ollama.get("/api/ps", responses={**answers(o.PsAnswer)})
async def ps(request: Request) -> Response:
    """Describe the model in memory."""
    return as_json(ollama_models.ps(service_of(request)))


@to_ollama.post("/api/show", responses={**answers(o.ShowAnswer)})
async def show(body: o.ShowBody, request: Request) -> Response:
    """Describe the model."""
    return told(as_json(ollama_models.show(service_of(request), body.model)), body)


@to_ollama.get("/api/version", responses={**answers(o.OllamaVersion)})
async def api_version() -> Response:
    """Return the version of Ridgeline."""
    return as_json({"version": __version__})


# llama.cpp ---------------------------------------------------------------------------------------------

EVENTS = "With `stream`, the answer is a sequence of events; the last one of each prompt has `stop`."


@to_llama_cpp.post("/completion", responses={**answers(c.LlamaAnswers, stream=EVENTS)})
@to_llama_cpp.post("/completions", responses={**answers(c.LlamaAnswers, stream=EVENTS)})
async def completion(body: c.LlamaCompletionBody, request: Request) -> Response:
    """Continue one or several prompts; several get a list of answers."""
    work = await llama_cpp.completion(service_of(request), body)
    return await _answer(request, body, work, bool(body.stream))


@to_llama_cpp.post("/infill", responses={**answers(c.LlamaAnswers, stream=EVENTS)})
async def infill(body: c.InfillBody, request: Request) -> Response:
    """Fill the gap between two texts, with a model that can."""
    work = await llama_cpp_more.infill(service_of(request), body)
    return await _answer(request, body, work, bool(body.stream))


@to_llama_cpp.post("/apply-template", responses={**answers(c.ApplyAnswer)})
async def apply_template(body: c.ApplyBody, request: Request) -> Response:
    """Return the text of a conversation."""
    service = service_of(request)
    service.check_model(body.model, adapters=True)
    return as_json({"prompt": (await prompt.rendered(service, body)).text})


@to_llama_cpp.get("/props", responses={**answers(c.PropsAnswer)})
async def props(request: Request) -> Response:
    """Describe the server and its model."""
    return as_json(llama_cpp_more.props(service_of(request)))


@to_llama_cpp.get("/slots", responses={**answers(c.SlotsAnswer)})
async def slots(request: Request) -> Response:
    """List the sequences that may run at once."""
    return as_json(llama_cpp_more.slots(service_of(request)))
