"""From a chat's messages to what the model's template is given, and to its ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.frontend import Rendered
from ridgeline.load.chat import chat_data
from ridgeline.load.chat_guard import Costly
from ridgeline.serve.answer import parsed_arguments
from ridgeline.serve.errors import APIError
from ridgeline.serve.service import Service
from ridgeline.serve.types import ChatMessage, TemplateBody

_FIELDS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_RESERVED = frozenset({"self", "template"})  # Python's and the tokenizer's own names, which templates cannot have


async def rendered(service: Service, body: TemplateBody) -> Rendered:
    """The text of a conversation in the model's format, or in that of the request's own template.

    Raises RequestError, TokenizerError, APIError.
    """
    own = body.chat_template

    def here() -> Rendered | tuple[str, str, Mapping[str, Any]]:
        tokenizer, arguments = service.frontend.tokenizer(), _arguments(body)
        variables = {**tokenizer.special_tokens, **arguments}
        if own is not None:  # a stranger's program, which is not even compiled here
            return own, "of the request", chat_data(_messages(body.messages), **variables)
        template = tokenizer.template_for(None, arguments["tools"] is not None)
        data = chat_data(_messages(body.messages), **variables)
        try:
            return Rendered(template.render_here(data))
        except Costly:
            return template.source, template.name, data

    if own is not None and not service.options.trust_request_chat_template:
        raise APIError(
            400, "chat_template is only taken where the server was started with --trust-request-chat-template",
            param="chat_template", code="untrusted_chat_template",
        )  # fmt: skip
    found = await service.off_loop(here)
    return found if isinstance(found, Rendered) else Rendered(await service.helpers.render(*found))


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
