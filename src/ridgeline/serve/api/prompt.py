"""Render a chat's messages with a chat template."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.load.chat import chat_data
from ridgeline.load.chat_guard import Costly
from ridgeline.runtime.request import Rendered
from ridgeline.serve.api.answer import parsed_arguments
from ridgeline.serve.api.types import ChatMessage, TemplateBody
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.service import Service

_FIELDS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_RESERVED = frozenset({"self", "template"})  # names that Jinja and the tokenizer use themselves


async def rendered(service: Service, body: TemplateBody) -> Rendered:
    """Return the text of a conversation, rendered with the model's chat template or with the request's own one.

    Raises RequestError, TokenizerError, APIError.
    """
    own = body.chat_template
    if own is not None and not service.options.trust_request_chat_template:
        raise APIError(
            400, "chat_template is not allowed; start the server with --trust-request-chat-template to allow it",
            param="chat_template", code="untrusted_chat_template",
        )  # fmt: skip
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError("continue_final_message continues the last message, add_generation_prompt begins a new one; "
                           "set only one of them")  # fmt: skip
    mark = uuid.uuid4().hex if body.continue_final_message else None

    def here() -> str | tuple[str, str, Mapping[str, Any]]:
        tokenizer, arguments = service.frontend.tokenizer(), _arguments(body)
        variables = {**tokenizer.special_tokens, **arguments}
        messages = _messages(body.messages)
        data = chat_data(messages if mark is None else marked(messages, mark), **variables)
        if own is not None:  # untrusted code: it is not even compiled in this process
            return own, "of the request", data
        template = tokenizer.template_for(None, arguments["tools"] is not None)
        try:
            return template.render_here(data)
        except Costly:
            return template.source, template.name, data

    found = await service.off_loop(here)
    text = found if isinstance(found, str) else await service.helpers.render(*found)
    if mark is not None:
        text = until(text, mark, _messages(body.messages[-1:])[0]["content"])
    return Rendered(text, body.add_special_tokens)


def marked(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return the messages with a marker after the last one's content. Raises RequestError if that is not a text."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise RequestError(
            "continue_final_message needs a last message with a text as its content; add one, or leave it out"
        )
    # If the space after the marker is gone in the rendered text, the template strips contents.
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{mark} "}]


def until(text: str, mark: str, content: str) -> str:
    """Return a rendered conversation up to the marker, as transformers' continue_final_message does.

    content: the last message's content. Raises RequestError if the template does not write the content unchanged.
    """
    if mark not in text or content.strip() not in text:
        raise RequestError(
            "continue_final_message is not possible: the chat template changes the last message; leave it out"
        )
    index = text.rindex(mark)
    return text[:index] if text[index + len(mark) :].startswith(" ") else text[:index].rstrip()


def _arguments(body: TemplateBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if wrong := sorted(_RESERVED & set(variables)):
        raise RequestError(f"chat_template_kwargs has {wrong[0]!r}, which is a reserved name; leave it out")
    if wrong := sorted(_FIELDS & set(variables)):
        raise RequestError(f"chat_template_kwargs has {wrong[0]!r}; send it as a field of the request")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
    return {
        "add_generation_prompt": body.add_generation_prompt is not False and not body.continue_final_message,
        "tools": tools,
        "documents": body.documents,
        **variables,
    }


def _messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [_message(message.model_dump(), index) for index, message in enumerate(messages)]


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Join the text parts of a message's content, and parse the arguments of its tool calls."""
    if isinstance(message.get("content"), list):
        message["content"] = "\n".join(_text(part, index) for part in message["content"])
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise RequestError(f"messages[{index}].tool_calls must be a list of calls; correct it, or leave it out")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"messages[{index}].tool_calls has a call without a function name; give each call function.name"
            )
        if isinstance(function.get("arguments"), str):
            function["arguments"] = parsed_arguments(function["arguments"])
    return message


def _text(part: dict[str, Any], index: int) -> str:
    if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise RequestError(
            f"messages[{index}] has a part of type {part.get('type')!r:.40}; this server reads only text, so leave "
            "images, sound and files out"
        )
    return str(part["text"])
