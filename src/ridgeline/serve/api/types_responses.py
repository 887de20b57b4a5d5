"""Fields of requests to /v1/responses. A field that the server cannot honor is an error that names the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ridgeline.serve.api.sampling_fields import RESPONSE_FIELDS, with_sampling
from ridgeline.serve.api.types import (
    Body,
    Function,
    Guided,
    Ignored,
    Items,
    Positive,
    Priority,
    RequestId,
    StructuredOutputsBody,
    TopLogprobs,
    Truncated,
)


class ResponseTool(Function):
    """A function that the model may call. Unlike in a chat, its fields are not nested under `function`."""

    type: Literal["function"] = "function"


class ResponseToolChoice(Body):
    """The function that the model must call."""

    type: Literal["function"] = "function"
    name: str


class TextFormat(Body):
    """The format of the text: free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text. verbosity is ignored."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """Options of the reasoning. effort: passed to the chat template. summary is ignored."""

    effort: str | None = None
    summary: str | None = None


class StreamOptions(Body):
    """Options of a stream. include_obfuscation: only false, since events are not padded to hide their lengths."""

    include_obfuscation: Literal[False] | None = None


@with_sampling(*RESPONSE_FIELDS)
class ResponseBody(Ignored, Guided, Truncated):
    """The body of POST /v1/responses."""

    if TYPE_CHECKING:  # the decorator adds the fields of the parameters

        def __getattr__(self, name: str) -> Any: ...

    model: str | None = None
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: TopLogprobs | None = None
    include: Items[str] | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputsBody | None = None
    request_id: RequestId | None = None
