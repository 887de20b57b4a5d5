"""What clients send, as OpenAI and vLLM name it. Every field is listed: one that is not known is an error.

None everywhere is the default, as in a request that leaves the field out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Base of all requests and their parts: unknown fields are errors, numbers are numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    """include_usage: one more event at the end, with the tokens used. continuous_usage_stats: in every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchema(Body):
    """The schema of a response_format. strict changes nothing: a schema is always followed."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """text, any JSON object, or one that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputsBody(Body):
    """Exactly one: a JSON schema, a regular expression, texts to choose from, a Lark grammar, any JSON object."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Ignored(Body):
    """Fields of OpenAI's API that change nothing here: no account, no storage, one tier."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingBody(Ignored):
    """How to pick tokens; names, meanings and limits of SamplingParams (docs/generate.md)."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class Function(Body):
    """A function that the model may call; parameters: a JSON schema."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The one tool to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatMessage(BaseModel):
    """One message. Templates may know fields of their own, so all are handed on to them."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


class TemplateBody(Body):
    """What a chat template is given."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatBody(SamplingBody, TemplateBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class RenderBody(TemplateBody):
    """POST /v1/chat/completions/render."""

    model: str | None = None


class TokenizeBody(TemplateBody):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class EmbeddingBody(Ignored):
    """POST /v1/embeddings. pooling: which hidden states make the vector."""

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
