"""From a chat's messages to what the model's template is given, and to its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.serve.answer import parsed_arguments
from ridgeline.serve.service import Service
from ridgeline.serve.types import ChatMessage, TemplateBody

_FIELDS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_RESERVED = frozenset({"self", "template"})  # Python's and the tokenizer's own names, which templates cannot have


def render(service: Service, body: TemplateBody) -> str:
    """The text of a conversation in the model's format. Raises RequestError, TokenizerError."""
    return service.frontend.tokenizer().render_chat(_messages(body.messages), **_arguments(body))


def encode(service: Service, body: TemplateBody) -> list[int]:
    """Its ids, as the model reads them. Raises as `render`."""
    return service.frontend.tokenizer().encode_chat(_messages(body.messages), **_arguments(body))


def _arguments(body: TemplateBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if wrong := sorted(_RESERVED & set(variables)):
        raise RequestError(f"chat_template_kwargs has {wrong[0]!r}, a name that no template can read; leave it out")
    if wrong := sorted(_FIELDS & set(variables)):
        raise RequestError(f"chat_template_kwargs has {wrong[0]!r}; give it as a field of its own")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
    return {
        "add_generation_prompt": body.add_generation_prompt is not False,
        "tools": tools,
        "documents": body.documents,
        **variables,
    }


def _messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [_message(message.model_dump(), place) for place, message in enumerate(messages)]


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Parts of text as one text; arguments of calls as objects."""
    if isinstance(message.get("content"), list):
        message["content"] = "\n".join(_text(part, place) for part in message["content"])
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise RequestError(f"messages[{place}].tool_calls is no list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"messages[{place}].tool_calls has a call without a function's name")
        if isinstance(function.get("arguments"), str):
            function["arguments"] = parsed_arguments(function["arguments"])
    return message


def _text(part: dict[str, Any], place: int) -> str:
    if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise RequestError(f"messages[{place}] has a part of type {part.get('type')!r:.40}; only text can be read")
    return str(part["text"])
