"""Define what clients send, with OpenAI's and vLLM's names. A field that is not listed is an error.

The default of every field is None, as if the request left it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ridgeline.serve.api.sampling_fields import AtMost, EightBytes, TokenId, with_sampling
from ridgeline.spec.request import MAX_LOGPROBS, MAX_N

MAX_FIELDS = 256  # fields of an object
MAX_IDS = 1 << 20  # token ids in a list: more than any context
MAX_ITEMS = 1 << 14  # elements of a list of objects or texts
MAX_REQUEST_ID = 128  # characters: the id is written into every event

T = TypeVar("T")


Items = Annotated[list[T], AtMost(MAX_ITEMS)]
Ids = Annotated[list[TokenId], AtMost(MAX_IDS)]
# Visible ASCII characters, since the id is a header, too.
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID, pattern=r"^[!-~]+$")]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def told(**bounds: Any) -> Any:
    """Return bounds that /openapi.json shows. SamplingParams and the frontend check them; their errors say more."""
    return Field(json_schema_extra=bounds)


Answers = Annotated[EightBytes, told(minimum=1, maximum=MAX_N)]
NotNegative = Annotated[EightBytes, told(minimum=0)]
Positive = Annotated[EightBytes, told(minimum=1)]
TopLogprobs = Annotated[EightBytes, told(minimum=0, maximum=MAX_LOGPROBS)]
Text = Annotated[str, told(minLength=1)]


def _shape(value: Any) -> str:
    """Return the tag of `Prompts` for a value: its first element decides, and the others must have its type."""
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
    """The base of all requests and their parts: unknown fields are errors, and no type is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _not_endless(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:  # each unknown field would be an error of its own
            raise ValueError(f"the object has {len(given)} fields; the limit is {MAX_FIELDS}: send fewer")
        return given


class StreamOptions(Body):
    """include_usage: send the token counts in one more event at the end. continuous_usage_stats: in every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchema(Body):
    """The schema of a response_format. strict has no effect: a schema is always followed."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """A text, any JSON object, or one that follows a schema. schema: with json_object, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class StructuredOutputsBody(Body):
    """Exactly one of: a JSON schema, a regular expression, texts to choose from, a Lark grammar, any JSON object."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


class Guided(Body):
    """vLLM's older names of structured_outputs. guided_decoding_backend has no effect: there is one backend."""

    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Literal["auto", "guidance"] | None = None


class Truncated(Body):
    """truncate_prompt_tokens: keep at most this many tokens of a prompt; -1: all that leave room for the answer.
    truncation_side: where tokens are dropped; default: left, at the start of the prompt.
    """

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class Ignored(Body):
    """Fields of OpenAI's API that have no effect: the server has no accounts, no storage and one tier."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


@with_sampling()
class SamplingBody(Ignored, Guided, Truncated):
    """How to pick tokens: the parameters of SamplingParams (docs/generate.md), and fields of every request.

    max_tokens: may be 0 in a completion with echo, which then returns the prompt alone. request_id: id of the answer;
    the header X-Request-Id wins over it. return_tokens_as_token_ids: name the tokens of logprobs "token_id:N".
    """

    if TYPE_CHECKING:  # the decorator adds the fields of the parameters

        def __getattr__(self, name: str) -> Any: ...

    model: str | None = None
    max_tokens: NotNegative | None = None
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
    """POST /v1/completions. add_special_tokens: whether the tokens that the model expects around a text, such as BOS,
    are added to it; default: true.
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
    """One message. All its fields are passed to the chat template, which may use more than these."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Items[dict[str, Any]] | None = None


class TemplateBody(Body):
    """Fields that a chat template gets.

    continue_final_message: the answer continues the last message instead of beginning a new one.
    add_special_tokens: true adds the tokens that the model expects around a text to the template's text, false adds
    none; default: a BOS if the model uses one and the template writes none. A second BOS is never added.
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
    """The body of POST /tokenize: a prompt or messages; or, as in llama.cpp, content, to which add_special adds the
    tokens that the model expects around a text, false by default. with_pieces: tokens are objects with id and piece.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: Literal[True] | None = None
    with_pieces: bool | None = None
    messages: Items[ChatMessage] = Field(default_factory=list)
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


class EmbeddingBody(Ignored, Truncated):
    """POST /v1/embeddings.

    pooling: the hidden states that become the vector; by default as the model's folder says. normalize: whether vectors
    have length 1. prompt, prompt_name: a text before each input, or its name in the model's folder. add_special_tokens:
    as in completions.
    """

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    pooling: Literal["cls", "mean", "last"] | None = None
    normalize: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None


class Scored(Ignored, Truncated):
    """Fields of requests for scores.

    score_template, score_no, score_yes: for a model that writes text: a text with {query} and {document}, and the two
    tokens that may follow.
    """

    model: str | None = None
    score_template: str | None = None
    score_no: str | None = None
    score_yes: str | None = None


class ScoreBody(Scored):
    """POST /v1/score. text_1, text_2: one text for all of the other list, or two lists of equal length."""

    text_1: Text | Items[Text]
    text_2: Text | Items[Text]


class Document(Body):
    """A document of a request, as an object."""

    text: Text


class RerankBody(Scored):
    """POST /v1/rerank. top_n: number of results; by default all. return_documents: whether results have the texts."""

    query: Text
    documents: Items[Text | Document]
    top_n: Positive | None = None
    return_documents: bool | None = None
