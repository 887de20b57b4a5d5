"""Fields of requests, with the names of OpenAI and vLLM. A field that is not listed here is an error.

The default of a field is None, which means that the request does not set the field.
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

MAX_FIELDS = 256  # fields of an object
MAX_IDS = 1 << 20  # token ids in a list, more than any context length
MAX_ITEMS = 1 << 14  # objects or texts in a list
MAX_STOP = 32  # stop texts: each new token's text is searched for all of them
MAX_STOP_CHARS = 1024  # characters of a stop text
MAX_VOCABULARY = 1 << 19  # token ids in logit_bias, allowed_token_ids, bad_token_ids or stop_token_ids

MAX_REQUEST_ID = 128  # characters of a request id, which every event contains

T = TypeVar("T")


@dataclass(frozen=True)
class AtMost:
    """Limits the length of a list or dict, and stops its validation at the first invalid element.

    Otherwise pydantic would keep an error for each of the millions of elements in a body of 16 MiB.
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
        raise ValueError(f"a stop text has {longest} characters; the limit is {MAX_STOP_CHARS}")
    return stop


Stop = Annotated[str | Annotated[list[str], AtMost(MAX_STOP)], AfterValidator(_short)]
BadWords = Annotated[list[str], AtMost(MAX_BAD_WORDS)]
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # a signed integer of 8 bytes
# Visible ASCII characters only, since the id is also sent as a header.
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID, pattern=r"^[!-~]+$")]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def told(**bounds: Any) -> Any:
    """Show bounds in /openapi.json without checking them. SamplingParams checks them, with better error messages."""
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
    """Return which type of `Prompts` a value has. Its first element decides; the others must have the same type."""
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
    """Base of all requests and their parts. Unknown fields are errors, and values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _not_endless(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:  # each unknown field would be an error
            raise ValueError(f"the object has {len(given)} fields; the limit is {MAX_FIELDS}")
        return given


class StreamOptions(Body):
    """Options of a stream. include_usage: add an event with the numbers of tokens at the end. continuous_usage_stats:
    add the numbers of tokens to every event.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchema(Body):
    """The schema of a response_format. strict changes nothing, since answers always follow the schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer: text, any JSON object, or JSON that follows a schema.

    schema: a schema for json_object, as in llama.cpp.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class StructuredOutputsBody(Body):
    """A structure that the answer must have. Set exactly one of json (a JSON schema), regex, choice (a list of texts),
    grammar (Lark) and json_object (any JSON object).
    """

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


class Guided(Body):
    """vLLM's older names of structured_outputs. guided_decoding_backend changes nothing, since there is one backend."""

    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Literal["auto", "guidance"] | None = None


class Truncated(Body):
    """Truncation of prompts. truncate_prompt_tokens: keep at most this number of tokens; -1 keeps what leaves room for
    the answer. truncation_side: drop tokens at the start (left, the default) or at the end (right).
    """

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class Ignored(Body):
    """Fields of OpenAI's API that are accepted and ignored: the server has no accounts, no storage and one tier."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingBody(Ignored, Guided, Truncated):
    """Sampling parameters with the names, meanings and limits of SamplingParams (docs/generate.md), and options of the
    answer.

    request_id: id of the request; the header X-Request-Id overrides it. return_tokens_as_token_ids: name the tokens of
    logprobs "token_id:N".
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
    """The body of POST /v1/completions. add_special_tokens: add the tokens that the model expects around a text, such
    as BOS; default: true.
    """

    prompt: Prompts
    add_special_tokens: bool | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Answers | None = None


class Function(Body):
    """A function that the model may call. parameters: a JSON schema."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which is always a function."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatMessage(BaseModel):
    """A message. Further fields are passed to the chat template, which may read them."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Items[dict[str, Any]] | None = None


class TemplateBody(Body):
    """The input of a chat template.

    continue_final_message: continue the last message instead of beginning a new one. add_special_tokens: true adds the
    tokens that the model expects around a text, false adds none; by default a BOS is added if the model uses one and
    the template writes none. There is never a second BOS.
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
    """The body of POST /v1/chat/completions."""

    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class RenderBody(TemplateBody):
    """The body of POST /v1/chat/completions/render."""

    model: str | None = None


class TokenizeBody(TemplateBody):
    """The body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] = Field(default_factory=list)
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


class EmbeddingBody(Ignored, Truncated):
    """The body of POST /v1/embeddings. pooling: take the mean of the hidden states, or the last one.
    add_special_tokens: as in /v1/completions.
    """

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
