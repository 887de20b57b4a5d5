"""What the endpoints answer, as /openapi.json describes it. Answers are written without these: a test compares them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of all answers and their parts: there are no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Fault(Answer):
    """What went wrong. param: the field. code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every error, in the shape of OpenAI's."""

    error: Fault


# Usage, log probabilities ------------------------------------------------------------------------------


class CachedTokens(Answer):
    """cached_tokens: of the prompt, found in the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptLogprob(Answer):
    """The log probability of a prompt token."""

    logprob: float


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class CompletionLogprobs(Answer):
    """Of each token: where its text begins in the text of the choice, its log probability, its text, and the likeliest
    tokens by their texts.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Answer):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Of the tokens of a message."""

    content: list[TokenLogprob]
    refusal: None


# Completions and chats ---------------------------------------------------------------------------------


FinishReason = Literal["stop", "length", "tool_calls"]


class Choice(Answer):
    """token_ids: only where return_token_ids asks for them. stop_reason: the stop text or the stop token."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class CompletionChoice(Choice):
    """One continuation."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Head(Answer):
    """What all answers begin with. system_fingerprint: the same one and the same request give the same text."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionAnswer(Head):
    """Of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CalledFunction(Answer):
    """arguments: JSON, as text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """One message."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(Head):
    """Of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


# Responses ---------------------------------------------------------------------------------------------


class OutputText(Answer):
    """A text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Answer):
    """A thought."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    """A message."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    """Thoughts."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed"]
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed"]
    call_id: str
    name: str
    arguments: str


class ReasoningTokens(Answer):
    """reasoning_tokens: always 0."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(Answer):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answer):
    """Of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, Any]
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    max_output_tokens: int | None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    previous_response_id: None
    truncation: Literal["disabled"]
    store: bool
    text: dict[str, Any]
    usage: ResponseUsage | None


# Tokens, vectors ---------------------------------------------------------------------------------------


class Embedding(Answer):
    """A vector of length 1; in base64 its float32 numbers, little end first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    """Of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeAnswer(Answer):
    """Of /tokenize. token_strs: only where return_token_strs asks for them."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """Of /detokenize."""

    prompt: str


class RenderAnswer(Answer):
    """Of /v1/chat/completions/render."""

    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int


# The server --------------------------------------------------------------------------------------------


class ModelAnswer(Answer):
    """A name of the model. root: its first one."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelsAnswer(Answer):
    """All names of the model."""

    object: Literal["list"]
    data: list[ModelAnswer]


class HealthAnswer(BaseModel):
    """restarts: of the engine's process."""

    status: Literal["ok"]
    engine: str
    restarts: int


class VersionAnswer(Answer):
    """The program's version."""

    version: str


class LiveAnswer(BaseModel):
    """Times are seconds; the counters begin with the engine's process. Without an engine most fields are absent."""

    model: str
    device: str
    max_model_len: int
    chat: bool
    roles: bool
    example: dict[str, Any] | None = None
    engine: dict[str, Any]
    requests: dict[str, int] | None = None
    pages: list[dict[str, Any]] | None = None
    tokens: dict[str, int] | None = None
    window_s: float | None = None
    ttft_s: dict[str, float] | None = None
    tpot_s: dict[str, float] | None = None
    roof: dict[str, float] | None = None
    step: dict[str, float | None] | None = None


class PlanAnswer(BaseModel):
    """Model, machine, precision and settings, as `ridgeline bench serve` predicts from them."""

    model: dict[str, Any]
    machine: dict[str, Any]
    precision: dict[str, Any]
    page_tokens: int
    settings: dict[str, Any]
