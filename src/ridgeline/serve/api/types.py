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

from ridgeline.spec.request import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N, MAX_PENALTY

MAX_FIELDS = 256  # of an object
MAX_IDS = 1 << 20  # token ids in a list: more than a context holds
MAX_ITEMS = 1 << 14  # of lists of objects and texts
MAX_STOP = 32  # texts that end an answer: each is looked for in every token's text
MAX_STOP_CHARS = 1024  # of each of them
MAX_VOCABULARY = 1 << 19  # token ids that are allowed, forbidden, favored or end an answer

MAX_REQUEST_ID = 128  # characters; it is written into every event

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
TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0})]
Ids = Annotated[list[TokenId], AtMost(MAX_IDS)]
TokenSet = Annotated[list[TokenId], AtMost(MAX_VOCABULARY), AfterValidator(lambda ids: list(dict.fromkeys(ids)))]
Biases = Annotated[dict[str, float], AtMost(MAX_VOCABULARY)]


def _short(stop: str | list[str]) -> str | list[str]:
    if (longest := max(map(len, [stop] if isinstance(stop, str) else stop), default=0)) > MAX_STOP_CHARS:
        raise ValueError(f"a text that ends the answer has {longest} characters; the limit is {MAX_STOP_CHARS}")
    return stop


Stop = Annotated[str | Annotated[list[str], AtMost(MAX_STOP)], AfterValidator(_short)]
BadWords = Annotated[list[str], AtMost(MAX_BAD_WORDS)]
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # what counters of 8 bytes hold
# Visible characters of ASCII, for it is a header too.
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID, pattern=r"^[!-~]+$")]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def told(**bounds: Any) -> Any:
    """Bounds that /openapi.json shows. SamplingParams and the frontend check them, whose errors say more."""
    return Field(json_schema_extra=bounds)


Answers = Annotated[Whole, told(minimum=1, maximum=MAX_N)]
NotNegative = Annotated[Whole, told(minimum=0)]
Positive = Annotated[Whole, told(minimum=1)]
TopLogprobs = Annotated[Whole, told(minimum=0, maximum=MAX_LOGPROBS)]
Penalty = Annotated[float, told(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)]
Share = Annotated[float, told(exclusiveMinimum=0, maximum=1)]
Probability = Annotated[float, told(minimum=0, maximum=1)]
AboveZero = Annotated[float, told(exclusiveMinimum=0)]
NotBelowZero = Annotated[float, told(minimum=0)]
TopK = Annotated[Whole, told(minimum=-1)]
Text = Annotated[str, told(minLength=1)]


def _shape(value: Any) -> str:
    """Which of `Prompts` a value means to be: its first element decides, and the others must be like it."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "lists" if isinstance(first, list) else "texts" if isinstance(first, str) else "ids"


Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Items[Text], told(minItems=1), Tag("texts")]
    | Annotated[Ids, told(minItems=1), Tag("ids")]
    | Annotated[Items[Annotated[Ids, told(minItems=1)]], told(minItems=1), Tag("lists")],
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
    """text, any JSON object, or one that follows a schema. schema: with json_object, as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class StructuredOutputsBody(Body):
    """Exactly one: a JSON schema, a regular expression, texts to choose from, a Lark grammar, any JSON object."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


class Guided(Body):
    """vLLM's older names of structured_outputs. guided_decoding_backend: there is one, so it changes nothing."""

    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Literal["auto", "guidance"] | None = None


class Truncated(Body):
    """truncate_prompt_tokens: keep at most so many tokens of a prompt; -1: as many as leave room for the answer.
    truncation_side: where tokens are dropped; default: left, at the start of the prompt.
    """

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class Ignored(Body):
    """Fields of OpenAI's API that change nothing here: no account, no storage, one tier."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingBody(Ignored, Guided, Truncated):
    """How to pick tokens; names, meanings and limits of SamplingParams (docs/generate.md).

    request_id: of the answer; the header X-Request-Id says it too, and wins. return_tokens_as_token_ids: tokens of
    logprobs are named "token_id:N".
    """

    model: str | None = None
    n: Answers | None = None
    temperature: NotBelowZero | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    typical_p: Share | None = None
    repetition_penalty: AboveZero | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenSet | None = None
    bad_token_ids: TokenSet | None = None
    bad_words: BadWords | None = None
    seed: NotNegative | None = None
    stop: Stop | None = None
    stop_token_ids: TokenSet | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    max_tokens: NotNegative | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: RequestId | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions. add_special_tokens: whether a text gets the tokens that the model expects around it, the
    BOS above all; default: true.
    """

    prompt: Prompts
    add_special_tokens: bool | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Answers | None = None


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
    """What a chat template is given.

    continue_final_message: the answer goes on with the last message instead of beginning one of its own.
    add_special_tokens: true adds the tokens that the model expects around a text to what the template writes, false
    none; default: a BOS where the model uses one and the template writes none. There is never a second BOS.
    """

    messages: Annotated[Items[ChatMessage], told(minItems=1)]
    tools: Items[Tool] | None = None
    documents: Items[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatBody(SamplingBody, TemplateBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
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
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


class EmbeddingBody(Ignored, Truncated):
    """POST /v1/embeddings. pooling: which hidden states make the vector. add_special_tokens: as in completions."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
