"""From a request's fields to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.serve.types import ChatBody, CompletionBody, ResponseFormat, SamplingBody
from ridgeline.spec.request import SamplingParams, StructuredOutputs

# Fields of a body that are fields of SamplingParams by the same name.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "allowed_token_ids", "bad_token_ids", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "prompt_logprobs",
    "logprobs_mode",
)  # fmt: skip


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Raises RequestError. An echo of the prompt alone still takes one token, which is not told."""
    if body.suffix:
        raise RequestError("suffix is not supported: these models continue a text, they do not fill a gap in it")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of is {body.best_of}: answers are not ranked; ask for n and choose")
    fields: dict[str, Any] = {"max_tokens": 16 if body.max_tokens is None else body.max_tokens}
    if body.echo and body.max_tokens == 0:
        fields["max_tokens"] = 1
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields["prompt_logprobs"] = body.logprobs
    return _params(body, defaults, fields)


def chat_params(body: ChatBody, defaults: Mapping[str, Any], structure: StructuredOutputs | None) -> SamplingParams:
    """structure: what a choice of tools asks for. Raises RequestError."""
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    fields: dict[str, Any] = {"max_tokens": longest}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise RequestError(f"top_logprobs is {body.top_logprobs}; it needs logprobs: true")
    if structure is not None:
        if _structure(body) is not None:
            raise RequestError("tool_choice asks for a call, response_format or structured_outputs for something else")
        fields["structured_outputs"] = structure
    return _params(body, defaults, fields)


def _params(body: SamplingBody, defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> SamplingParams:
    if body.stream and (body.prompt_logprobs is not None or "prompt_logprobs" in fields):
        raise RequestError("the prompt's log probabilities come with whole answers only: leave stream out")
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    if (structure := _structure(body)) is not None:
        given["structured_outputs"] = structure
    return SamplingParams(**{**defaults, **given, **fields})


def _structure(body: SamplingBody) -> StructuredOutputs | None:
    by_format = response_structure(body.response_format) if body.response_format else None
    if body.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise RequestError("response_format and structured_outputs both say what the answer is like; give one")
    return StructuredOutputs.of(body.structured_outputs.model_dump(by_alias=True, exclude_none=True))


def response_structure(wanted: ResponseFormat) -> StructuredOutputs | None:
    """What a response_format asks for. Raises RequestError."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise RequestError("response_format: json_schema needs json_schema.schema")
    return StructuredOutputs.of({"json": wanted.json_schema.schema_})


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal()) or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key!r:.40}; keys are token ids")
    return int(key)
