"""Turn the fields of a request into SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.serve.api.sampling_fields import same_fields
from ridgeline.serve.api.types import Body, ChatBody, CompletionBody, Guided, ResponseFormat, SamplingBody
from ridgeline.spec.prompt import OPTION_KEYS
from ridgeline.spec.request import SamplingParams
from ridgeline.spec.structure import StructuredOutputs

# Fields of a body that are fields of SamplingParams as they are.
_SAME = same_fields(frozenset({"max_tokens", "logit_bias", "structured_outputs"}))


def completion_params(body: CompletionBody, defaults: Mapping[str, Any], max_tokens: int | None = 16) -> SamplingParams:
    """Return the parameters of a completion. max_tokens: the default. Raises RequestError.

    An echo of the prompt alone still samples one token, which is not sent.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of is {body.best_of}: answers are not ranked; set n and choose among them")
    fields: dict[str, Any] = {"max_tokens": max_tokens if body.max_tokens is None else body.max_tokens}
    if body.suffix:
        fields["suffix"] = (body.suffix,)
    if body.echo and body.max_tokens == 0:
        fields["max_tokens"] = 1
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields["prompt_logprobs"] = body.logprobs
    return _params(body, defaults, fields)


def chat_params(body: ChatBody, defaults: Mapping[str, Any], structure: StructuredOutputs | None) -> SamplingParams:
    """Return the parameters of a chat. structure: the one that tool_choice needs. Raises RequestError."""
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    fields: dict[str, Any] = {"max_tokens": longest}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise RequestError(f"top_logprobs is {body.top_logprobs}; set logprobs to true as well")
    if structure is not None:
        if _structure(body) is not None:
            raise RequestError(
                "tool_choice needs a call, response_format or structured_outputs something else: give one"
            )
        fields["structured_outputs"] = structure
    return _params(body, defaults, fields)


def _params(body: SamplingBody, defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> SamplingParams:
    check_stream(body.stream, body.stream_options)
    if body.stream and (body.prompt_logprobs is not None or "prompt_logprobs" in fields):
        raise RequestError("prompt_logprobs is not available in a stream: leave one of them out")
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    if (structure := _structure(body)) is not None:
        given["structured_outputs"] = structure
    return SamplingParams(**{**defaults, **given, **fields})


def check_stream(stream: bool | None, options: object) -> None:
    """Raise RequestError for stream_options without a stream."""
    if options is not None and not stream:
        raise RequestError("stream_options needs stream: true; set it, or leave stream_options out")


def prompt_options(body: Body) -> dict[str, Any]:
    """Return the fields of PromptOptions that a body sets."""
    return {name: value for name in OPTION_KEYS if (value := getattr(body, name, None)) is not None}


def _structure(body: SamplingBody) -> StructuredOutputs | None:
    by_format = response_structure(body.response_format) if body.response_format else None
    new = None if body.structured_outputs is None else body.structured_outputs.model_dump(by_alias=True)
    given = {
        "response_format": by_format,
        "structured_outputs": None if new is None else StructuredOutputs.of(new),
        "guided_*": _guided(body),
    }
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise RequestError(f"{' and '.join(named)} exclude each other; give one")
    return next(iter(named.values()), None)


def _guided(body: Guided) -> StructuredOutputs | None:
    """Return the structure of vLLM's older fields."""
    names = ("json", "regex", "choice", "grammar", "whitespace_pattern")
    given = {name: value for name in names if (value := getattr(body, f"guided_{name}")) is not None}
    return StructuredOutputs.of(given) if given else None


def response_structure(wanted: ResponseFormat) -> StructuredOutputs | None:
    """Return the structure of a response_format. Raises RequestError."""
    if wanted.schema_ is not None and wanted.type != "json_object":
        raise RequestError(f"response_format: schema goes with json_object, not with {wanted.type}; change type")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs.of({"json": wanted.schema_, "json_object": wanted.schema_ is None})
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise RequestError("response_format: the type json_schema needs json_schema.schema")
    return StructuredOutputs.of({"json": wanted.json_schema.schema_})


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal()) or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key!r:.40}; keys must be token ids")
    return int(key)
