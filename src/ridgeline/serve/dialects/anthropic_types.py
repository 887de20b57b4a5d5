"""Requests and answers of Anthropic's Messages API. A field that is not listed is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ridgeline.serve.api.types import Body, Items, Positive, told
from ridgeline.serve.api.types_answers import Answer
from ridgeline.serve.dialects.idle import idle

CACHED = "prefixes of prompts are always cached"
T = TypeVar("T")
NOT_READ = ("image", "document", "search_result", "container_upload")


def _readable(block: Any) -> Any:
    """Raise ValueError for a block that is not text, with a message that says so."""
    if isinstance(block, dict) and (kind := block.get("type")) in NOT_READ:
        raise ValueError(f"a block of type {kind}: this server reads only text; leave the block out")
    return block


def _form(value: Any) -> str:
    """Return the tag of `Texts` for a value, so that an error is about the form that it has."""
    return "text" if isinstance(value, str) else "blocks"


Texts = Annotated[Annotated[str, Tag("text")] | Annotated[Items[T], Tag("blocks")], Discriminator(_form)]


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = idle(CACHED)
    citations: list[Any] | None = idle("answers have no citations")


class ThinkingBlock(Body):
    """The reasoning of an earlier answer, which the chat template gets as reasoning_content."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = idle("reasoning is not signed")


class ToolUseBlock(Body):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = idle(CACHED)


ResultBlock = Annotated[TextBlock, BeforeValidator(_readable)]


class ToolResultBlock(Body):
    """The result of a tool. is_error: the text is given to the model with "Error: " before it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = idle(CACHED)


Block = Annotated[
    Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")],
    BeforeValidator(_readable),
]


class TurnBody(Body):
    """A message of the conversation. A last message of the assistant is continued by the answer."""

    role: Literal["user", "assistant", "system"]
    content: Texts[Block]


class CustomTool(Body):
    """A tool that the client runs. input_schema: a JSON schema of its input."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = idle(CACHED)
    input_examples: list[Any] | None = idle("chat templates have no examples of inputs")
    eager_input_streaming: bool | None = idle("inputs are always streamed as they come")


class ToolChoice(Body):
    """Whether the answer may (auto), must (any, tool) or must not (none) call a tool. name: the tool, with tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons; the chat template gets it as enable_thinking. display: omitted leaves it out."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = idle("max_tokens bounds reasoning and answer together")
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Body):
    """effort: passed to the chat template as reasoning_effort. format: the structure of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[Items[TurnBody], told(minItems=1)]
    system: Texts[TextBlock] | None = None
    tools: Items[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = idle(CACHED)


class MessagesBody(CountBody):
    """The body of POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = idle("the server has no accounts")
    service_tier: str | None = idle("the server has one tier")


# Answers -----------------------------------------------------------------------------------------------


class AnswerText(Answer):
    """A text of the answer."""

    type: Literal["text"]
    text: str


class AnswerThinking(Answer):
    """Reasoning of the model. signature: always empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(Answer):
    """A call of a tool. A call whose input is not complete has it as the text INVALID_JSON."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(Answer):
    """Numbers of tokens. input_tokens: tokens of the prompt that were not in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageAnswer(Answer):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class CountAnswer(Answer):
    """The number of tokens of a conversation."""

    input_tokens: int


class AnthropicFault(Answer):
    """An error. type: for programs."""

    type: str
    message: str


class AnthropicError(Answer):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicFault
