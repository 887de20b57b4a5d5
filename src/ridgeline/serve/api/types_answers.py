"""Types of the endpoints' answers, for /openapi.json.

The endpoints do not build their answers from these types, which would be slow. A test compares the two.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of all answers and their parts. Answers have no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Fault(Answer):
    """An error. message: for people. code: for programs. param: the request's field that caused the error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """An error in OpenAI's format."""

    error: Fault


# Usage, log probabilities ------------------------------------------------------------------------------


class CachedTokens(Answer):
    """cached_tokens: number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptLogprob(Answer):
    """The log probability of a prompt token."""

    logprob: float


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # one dict per prompt token, by token id; null for the first


class CompletionLogprobs(Answer):
    """Log probabilities of a completion's tokens.

    text_offset: position in the choice's text where the token's text begins, in characters. tokens: texts of the
    tokens. top_logprobs: log probabilities of the likeliest tokens, by text.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Answer):
    """A candidate token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer and its log probability. top_logprobs: the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


# Completions and chats ---------------------------------------------------------------------------------


FinishReason = Literal["stop", "length", "tool_calls"]


class Choice(Answer):
    """An answer. stop_reason: the stop string or stop token that ended it. token_ids: present with return_token_ids."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class CompletionChoice(Choice):
    """A continuation of a prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Head(Answer):
    """Fields of all answers. system_fingerprint: equal requests with a seed give equal texts while it is the same."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionAnswer(Head):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CalledFunction(Answer):
    """The function of a tool call. arguments: JSON as a string."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A tool call."""

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
    """A message of the assistant."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(Head):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


# Responses ---------------------------------------------------------------------------------------------


class OutputText(Answer):
    """A text part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Answer):
    """A text part of the reasoning."""

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
    """The reasoning of the model."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed"]
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    """A function call."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed"]
    call_id: str
    name: str
    arguments: str


class ReasoningTokens(Answer):
    """reasoning_tokens: always 0, since reasoning tokens are not counted separately."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Numbers of tokens of a request."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(Answer):
    """The reason why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answer):
    """The answer of /v1/responses."""

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
    """A vector: a list of numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(Answer):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Answer):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedDocument(Answer):
    """The text of a document."""

    text: str


class Ranked(Answer):
    """A document of the request, and how well it fits the query. index: its position in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(Answer):
    """The answer of /v1/rerank: documents, the best one first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class TokenPiece(Answer):
    """A token and its text, or its bytes where they end inside a character."""

    id: int
    piece: str | list[int]


class TokenizeAnswer(Answer):
    """The answer of /tokenize. token_strs: texts of the tokens, with return_token_strs."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """The answer of /detokenize. content: a copy of prompt, under llama.cpp's name."""

    prompt: str
    content: str


class RenderAnswer(Answer):
    """The answer of /v1/chat/completions/render. count: number of tokens."""

    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int


# The server --------------------------------------------------------------------------------------------


class ModelAnswer(Answer):
    """A served name of the model, or an adapter. root: its first name. parent: the model's name, for an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | None


class ModelsAnswer(Answer):
    """All served names of the model, and the adapters."""

    object: Literal["list"]
    data: list[ModelAnswer]


class HealthAnswer(BaseModel):
    """The state of the server. engine: the state of the engine. restarts: number of restarts of the engine process."""

    status: Literal["ok"]
    engine: str
    restarts: int


class VersionAnswer(Answer):
    """The version of Ridgeline."""

    version: str


class LiveAnswer(BaseModel):
    """The server at this moment. Times are in seconds. Counters start at 0 with each engine process. Most fields are
    absent while there is no engine. replicas: one entry for each engine of --replicas, [] for a single engine. memory:
    bytes that the two processes and the pages of state have in RAM, and the most of the pages.
    """

    model: str
    device: str
    max_model_len: int
    chat: bool
    roles: bool
    example: dict[str, Any] | None = None
    engine: dict[str, Any]
    replicas: list[dict[str, Any]]
    requests: dict[str, int] | None = None
    pages: list[dict[str, Any]] | None = None
    memory: dict[str, int] | None = None
    tokens: dict[str, int] | None = None
    window_s: float | None = None
    ttft_s: dict[str, float] | None = None
    tpot_s: dict[str, float] | None = None
    roof: dict[str, float] | None = None
    step: dict[str, float | None] | None = None


class PlanAnswer(BaseModel):
    """The model, machine, precision and settings from which `ridgeline bench serve` predicts."""

    model: dict[str, Any]
    machine: dict[str, Any]
    precision: dict[str, Any]
    page_tokens: int
    settings: dict[str, Any]
    drafts: dict[str, Any] | None = None
