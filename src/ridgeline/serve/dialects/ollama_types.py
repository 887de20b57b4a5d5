"""Requests and answers of Ollama's API. A field that is not listed is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ridgeline.serve.api.sampling_fields import EightBytes, Stop
from ridgeline.serve.api.types import Body, Items, Text, Tool, TopLogprobs, told
from ridgeline.serve.api.types_answers import Answer
from ridgeline.serve.dialects.idle import idle

STAYS = "the model stays loaded until the server ends"
AT_START = "it is an option of `ridgeline serve`, not of a request"


def _no_images(images: list[str]) -> list[str]:
    if images:
        raise ValueError("this server reads only text; leave the images out")
    return images


Images = Annotated[list[str], AfterValidator(_no_images)]


class Options(Body):
    """Sampling, and settings of the machine, which have no effect here. num_predict: -1 and -2 mean up to the end of
    the context. num_ctx: at most the server's context.
    """

    temperature: float | None = None
    top_k: EightBytes | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: EightBytes | None = None
    stop: Stop | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: EightBytes | None = None
    num_ctx: Annotated[EightBytes, told(minimum=1)] | None = idle(AT_START)
    repeat_last_n: EightBytes | None = idle("penalties count the whole context")
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = idle("mirostat is not available")
    mirostat_eta: float | None = idle("mirostat is not available")
    tfs_z: float | None = idle("tail-free sampling is not available")
    penalize_newline: bool | None = idle("penalties count all tokens")
    num_keep: EightBytes | None = idle("nothing of a context is dropped")
    numa: bool | None = idle(AT_START)
    num_batch: EightBytes | None = idle(AT_START)
    num_gpu: EightBytes | None = idle(AT_START)
    main_gpu: EightBytes | None = idle(AT_START)
    low_vram: bool | None = idle(AT_START)
    f16_kv: bool | None = idle(AT_START)
    logits_all: bool | None = idle(AT_START)
    vocab_only: bool | None = idle(AT_START)
    use_mmap: bool | None = idle(AT_START)
    use_mlock: bool | None = idle(AT_START)
    embedding_only: bool | None = idle(AT_START)
    num_thread: EightBytes | None = idle(AT_START)


class AskBody(Body):
    """Fields of all requests for answers. stream: true by default. think: the chat template gets it."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: float | str | None = idle(STAYS)
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class GenerateBody(AskBody):
    """The body of POST /api/generate. raw: the prompt is sent without the chat template."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Images | None = None


class OllamaFunction(Body):
    """The function of a call. index: its position among the calls."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class OllamaCall(Body):
    """A call of a tool."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """A message of the conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Items[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(AskBody):
    """The body of POST /api/chat."""

    messages: Items[OllamaMessage] | None = None
    tools: Items[Tool] | None = None


class EmbedBody(Body):
    """The body of POST /api/embed. truncate: shorten a text that is too long, true by default. pooling: as in
    /v1/embeddings, for a model whose folder does not say it.
    """

    model: str
    input: Text | Annotated[Items[Text], told(minItems=1)]
    truncate: bool | None = None
    dimensions: Annotated[EightBytes, told(minimum=1)] | None = None
    pooling: Literal["cls", "mean", "last"] | None = None
    options: Options | None = idle("an embedding has no options")
    keep_alive: float | str | None = idle(STAYS)


class ShowBody(Body):
    """The body of POST /api/show."""

    model: str
    verbose: bool | None = idle("an answer has no longer form")


# Answers -----------------------------------------------------------------------------------------------


class OllamaTop(Answer):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTop):
    """A token of the answer. top_logprobs: the likeliest tokens in its position."""

    top_logprobs: list[OllamaTop]


class OllamaAnswer(Answer):
    """Fields of all answers. Durations are in nanoseconds; load_duration is 0, since the model is loaded."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[OllamaLogprob] | None = None


class GenerateAnswer(OllamaAnswer):
    """The answer of /api/generate."""

    response: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaReply(Answer):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChatAnswer(OllamaAnswer):
    """The answer of /api/chat."""

    message: OllamaReply


class EmbedAnswer(Answer):
    """The answer of /api/embed: a vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Details(Answer):
    """The format and size of the weights. parent_model: always empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    """A name of the model. digest: the SHA-256 of the model's description, its name and its device; the weights are not
    read for it. size: bytes of the weights.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class TagsAnswer(Answer):
    """The answer of /api/tags."""

    models: list[OllamaModel]


class RunningModel(Answer):
    """The model in memory. size_vram: bytes on a GPU. expires_at: a time that never comes."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: Details
    expires_at: str
    context_length: int


class PsAnswer(Answer):
    """The answer of /api/ps."""

    models: list[RunningModel]


class ShowAnswer(Answer):
    """The answer of /api/show. template: the chat template, in Jinja. parameters: the model's own."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Answer):
    """The version of Ridgeline."""

    version: str


class OllamaError(Answer):
    """An error in Ollama's format."""

    error: str = Field(min_length=1)
