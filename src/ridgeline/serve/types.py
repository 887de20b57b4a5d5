"""What clients send, as OpenAI and vLLM name it. Every field is listed: one that is not known is an error.

None everywhere is the default, as in a request that leaves the field out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)

MAX_FIELDS = 256  # of an object
MAX_IDS = 1 << 20  # token ids in a list: more than a context holds
MAX_ITEMS = 1 << 14  # of lists of objects and texts
MAX_STOP = 32  # texts that end an answer: each is looked for in every token's text
MAX_STOP_CHARS = 1024  # of each of them
MAX_VOCABULARY = 1 << 19  # token ids that are allowed, forbidden, favoured or end an answer

T = TypeVar("T")


@dataclass(frozen=True)
class AtMost:
    """Of a list or dict: validation ends at the first wrong element, and at this length.

    A body of 16 MiB has millions of elements, and pydantic would keep an error for each.
    """

    length: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True, "max_length": self.length}


Items = Annotated[list[T], AtMost(MAX_ITEMS)]
Ids = Annotated[list[int], AtMost(MAX_IDS)]
TokenSet = Annotated[list[int], AtMost(MAX_VOCABULARY), AfterValidator(lambda ids: list(dict.fromkeys(ids)))]
Biases = Annotated[dict[str, float], AtMost(MAX_VOCABULARY)]


def _short(stop: str | list[str]) -> str | list[str]:
    if (longest := max(map(len, [stop] if isinstance(stop, str) else stop), default=0)) > MAX_STOP_CHARS:
        raise ValueError(f"a text that ends the answer has {longest} characters; the limit is {MAX_STOP_CHARS}")
    return stop


Stop = Annotated[str | Annotated[list[str], AtMost(MAX_STOP)], AfterValidator(_short)]
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # what counters of 8 bytes hold
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def _shape(value: Any) -> str:
    """Which of `Prompts` a value means to be: its first element decides, and the others must be like it."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "lists" if isinstance(first, list) else "texts" if isinstance(first, str) else "ids"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Items[str], Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Items[Ids], Tag("lists")],
    Discriminator(_shape),
]


class Body(BaseModel):
    """Base of all requests and their parts: unknown fields are errors, numbers are numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _not_endless(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:  # each that is not known would be an error of its own
            raise ValueError(f"the object has {len(given)} fields; the limit is {MAX_FIELDS}")
        return given


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
    choice: Items[str] | None = None
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
    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenSet | None = None
    bad_token_ids: TokenSet | None = None
    seed: Whole | None = None
    stop: Stop | None = None
    stop_token_ids: TokenSet | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    max_tokens: Whole | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Whole | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Whole | None = None
    best_of: Whole | None = None


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
    content: str | Items[dict[str, Any]] | None = None


class TemplateBody(Body):
    """What a chat template is given."""

    messages: Items[ChatMessage]
    tools: Items[Tool] | None = None
    documents: Items[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatBody(SamplingBody, TemplateBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
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
    messages: Items[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


class EmbeddingBody(Ignored):
    """POST /v1/embeddings. pooling: which hidden states make the vector."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None
    pooling: Literal["mean", "last"] | None = None
