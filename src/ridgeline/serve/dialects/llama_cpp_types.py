"""Requests and answers of llama.cpp's server. A field that is not listed is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, RootModel, Tag

from ridgeline.serve.api.sampling_fields import AtMost, EightBytes, TokenId, with_sampling
from ridgeline.serve.api.types import MAX_IDS, Body, Items, TemplateBody, TopLogprobs
from ridgeline.serve.api.types_answers import Answer
from ridgeline.serve.dialects.idle import idle

ORDER = "the order of sampling is fixed (docs/generate.md)"
SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "presence_penalty", "frequency_penalty",
    "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "ignore_eos", "stop",
)  # fmt: skip


def _no_media(given: Any) -> None:
    raise ValueError("this server reads only text; leave multimodal_data out")


class PromptString(Body):
    """A text as an object. multimodal_data: refused."""

    prompt_string: str
    multimodal_data: Annotated[Any, AfterValidator(_no_media)] = None


Mixed = Annotated[list[TokenId | str], AtMost(MAX_IDS)]  # token ids and texts of one prompt


def _form(value: Any) -> str:
    """Return the tag of a prompt, so that an error is about the form that it has."""
    return {str: "text", list: "list", int: "id"}.get(type(value), "object")


OneOfSeveral = Annotated[
    Annotated[TokenId, Tag("id")] | Annotated[str, Tag("text")] | Annotated[Mixed, Tag("list")]
    | Annotated[PromptString, Tag("object")],
    Discriminator(_form),
]  # fmt: skip
LlamaPrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[OneOfSeveral], AtMost(MAX_IDS), Tag("list")]
    | Annotated[PromptString, Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str | int) else _form(value)),
]  # fmt: skip


@with_sampling(*SAME)
class LlamaBody(Body):
    """Fields of /completion and /infill. n_predict: tokens of the answer; -1 and -2: up to the end of the context.
    n_probs: the number of likely tokens to return at each position; post_sampling_probs: as probabilities after
    sampling. cache_prompt: false neither uses nor feeds the prefix cache. logit_bias: pairs of a token id or a text and
    a bias, or an object; false excludes the token. response_fields: the only fields of the answer; a/b is a field of a
    field.
    """

    if TYPE_CHECKING:  # the decorator adds the fields of the parameters

        def __getattr__(self, name: str) -> Any: ...

    model: str | None = None
    n_predict: EightBytes | None = None
    seed: EightBytes | None = None
    repeat_penalty: float | None = None
    logit_bias: Items[list[Any]] | dict[str, float | Literal[False]] | None = None
    stream: bool | None = None
    n_probs: TopLogprobs | None = None
    post_sampling_probs: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    response_fields: Items[str] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = idle("mirostat is not available")
    mirostat_eta: float | None = idle("mirostat is not available")
    repeat_last_n: EightBytes | None = idle("penalties count the whole context")
    dynatemp_range: Literal[0] | None = None
    dynatemp_exponent: float | None = idle("dynamic temperature is not available")
    samplers: Items[str] | str | None = idle(ORDER)
    min_keep: EightBytes | None = idle(ORDER)
    n_keep: EightBytes | None = idle("nothing of a context is dropped")
    n_discard: EightBytes | None = idle("nothing of a context is dropped")
    id_slot: EightBytes | None = idle("requests are not bound to slots")
    backend_sampling: bool | None = idle("there is one sampler")


class LlamaCompletionBody(LlamaBody):
    """The body of POST /completion. prompt: one, or a list of several: each a text, or token ids and texts mixed."""

    prompt: LlamaPrompt


class Extra(Body):
    """A file that the answer may refer to."""

    filename: str | None = None
    text: str


class InfillBody(LlamaBody):
    """The body of POST /infill: the text before the gap and the text after it. prompt: how the answer begins."""

    input_prefix: str
    input_suffix: str
    input_extra: Items[Extra] | None = None
    prompt: str | None = None


class ApplyBody(TemplateBody):
    """The body of POST /apply-template."""

    model: str | None = None


# Answers -----------------------------------------------------------------------------------------------


class Timings(Answer):
    """How long an answer took. prompt_n: tokens of the prompt that were computed; cache_n: those that were cached."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaAnswer(Answer):
    """An answer of /completion or /infill. id_slot: always -1. truncated: always false."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[dict[str, Any]] | None = None


class LlamaAnswers(RootModel[LlamaAnswer | dict[str, Any] | list[LlamaAnswer | dict[str, Any]]]):
    """An answer, or a list of answers for a list of prompts. With response_fields, they have these fields alone."""


class PropsAnswer(Answer):
    """The server and its model. total_slots: sequences that run at once."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class SlotAnswer(Answer):
    """One of the sequences that may run at once."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class SlotsAnswer(RootModel[list[SlotAnswer]]):
    """The sequences that may run at once."""


class ApplyAnswer(Answer):
    """The text of a conversation."""

    prompt: str


class LlamaFault(Answer):
    """An error. code: the HTTP status."""

    code: int
    message: str
    type: str


class LlamaError(Answer):
    """An error in llama.cpp's format."""

    error: LlamaFault
