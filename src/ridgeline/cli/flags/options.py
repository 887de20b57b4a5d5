"""Options that several commands share, with vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.errors import RequestError

if TYPE_CHECKING:
    from ridgeline.spec.request import Params

DEFAULT_MODEL = "pocket"  # of `generate`
_MODEL = "Model"
_SAMPLING = "Sampling"
_ENGINE = "Engine"


class Cache(StrEnum):
    """What is kept between tokens."""

    on = "on"
    off = "off"


class Batching(StrEnum):
    """Who runs together."""

    continuous = "continuous"
    static = "static"


def _model(*names: str, help: str) -> object:
    return typer.Option(*names, help=help, rich_help_panel=_MODEL)


def _engine(*names: str, help: str) -> object:
    return typer.Option(*names, help=help, rich_help_panel=_ENGINE)


def _sampling(*names: str, help: str) -> object:
    return typer.Option(*names, help=help, rich_help_panel=_SAMPLING)


Model = Annotated[
    str, _model("--model", "-m", help="A folder, a Hugging Face hub id, or pocket, which ships with Ridgeline.")
]
TokenizerName = Annotated[str | None, _model("--tokenizer", help="Folder or hub id, if not with the model.")]
SkipTokenizer = Annotated[bool, _model("--skip-tokenizer-init", help="Token ids in, token ids out.")]
Device = Annotated[str, _model("--device", help="auto, cpu, reference, cuda or cuda:N.")]
Threads = Annotated[int | None, _model("--threads", help="Of the CPU's kernels; default: one on each physical core.")]
DType = Annotated[str, _model("--dtype", help="Of the weight matrices: auto, float32, bfloat16, float16.")]
WeightFormat = Annotated[
    str,
    _model(
        "--weights",
        help="Matrices rounded to nearest: int8, int4 (groups of 32), int4-128; auto: as stored. The price is printed.",
    ),
]
MaxModelLen = Annotated[int | None, _model("--max-model-len", help="Longest context in tokens; default: the model's.")]
LoadFormat = Annotated[str, _model("--load-format", help="auto, safetensors, or dummy: random weights.")]
Revision = Annotated[str | None, _model("--revision", help="Branch, tag or commit on the hub.")]
Ops = Annotated[list[str] | None, _model("--ops", help="Diagnosis: OP=BACKEND, repeatable; see `ridgeline doctor`.")]

MaxNumSeqs = Annotated[int | None, _engine("--max-num-seqs", help="Sequences that run at once; default: chosen.")]
MaxNumBatchedTokens = Annotated[
    int | None,
    _engine("--max-num-batched-tokens", help="Tokens of one step; default: chosen."),
]
KVCacheDType = Annotated[
    str,
    _engine(
        "--kv-cache-dtype", help="Of attention's keys, values and latents: auto, float32, bfloat16, float16, int8."
    ),
]
BlockSize = Annotated[int | None, _engine("--block-size", help="Tokens of a page; default: 16.")]
CheckpointTokens = Annotated[
    int | None,
    _engine("--state-snapshot-tokens", help="From one kept state of recurrent layers to the next; default: chosen."),
]
KVCacheMemoryBytes = Annotated[
    int | None, _engine("--kv-cache-memory-bytes", help="For the pages; default: from the memory that is free.")
]
SwapSpaceBytes = Annotated[
    int | None, _engine("--swap-space-bytes", help="On the host, for pages that must make room; default: chosen.")
]
StepsInFlight = Annotated[int | None, _engine("--steps-in-flight", help="1 or 2; default: chosen.")]
NumSpeculativeTokens = Annotated[
    int | None,
    _engine(
        "--num-speculative-tokens",
        help="Most draft tokens that a sequence verifies in a step. Default: 0. Needs a proposer, which only "
        "LLM(proposer=...) in Python can set; without one, a number above 0 is refused.",
    ),
]
CacheMode = Annotated[
    Cache, _engine("--cache", help="on: paged state. off: naive sampling, the whole history at every token.")
]
BatchingMode = Annotated[
    Batching, _engine("--batching", help="static: whole batches, room for the longest context reserved; a baseline.")
]

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what the engine chose, and why, on stderr.")]

MaxTokens = Annotated[int | None, _sampling("--max-tokens", help="Longest answer; default: 128, or what fits.")]
MaxTokensChat = Annotated[
    int | None, _sampling("--max-tokens", help="Longest answer; default: what the context holds.")
]
Temperature = Annotated[float | None, _sampling("--temperature", help="0 is greedy; default: the model's, else 1.")]
TopP = Annotated[float | None, _sampling("--top-p", help="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int | None, _sampling("--top-k", help="Keep this many tokens; 0 keeps all.")]
MinP = Annotated[float | None, _sampling("--min-p", help="Keep tokens this likely, relative to the likeliest.")]
RepetitionPenalty = Annotated[float | None, _sampling("--repetition-penalty", help="Above 1: disfavor what occurred.")]
TypicalP = Annotated[float | None, _sampling("--typical-p", help="Keep the tokens of most typical information.")]
PresencePenalty = Annotated[float, _sampling("--presence-penalty", help="Above 0: disfavor what the answer holds.")]
FrequencyPenalty = Annotated[float, _sampling("--frequency-penalty", help="The same, for each time that it occurred.")]
LogitBias = Annotated[list[str] | None, _sampling("--logit-bias", help="ID=BIAS, added to a score; repeatable.")]
AllowedTokenIds = Annotated[list[int] | None, _sampling("--allowed-token-ids", help="Nothing else; repeatable.")]
BadTokenIds = Annotated[list[int] | None, _sampling("--bad-token-ids", help="Never produce this; repeatable.")]
BadWords = Annotated[
    list[str] | None,
    _sampling("--bad-words", help="A text that the answer may not contain, written with its usual tokens; repeatable."),
]
N = Annotated[int, _sampling("-n", "--n", help="Answers per prompt.")]
BeamWidth = Annotated[
    int | None,
    _sampling("--beam-width", help="Search for the likeliest answers, with so many beams, instead of drawing."),
]
LengthPenalty = Annotated[float, _sampling("--length-penalty", help="Of a search: above 0 favors longer answers.")]
EarlyStopping = Annotated[str, _sampling("--early-stopping", help="Of a search: true, false or never.")]
Seed = Annotated[int, _sampling("--seed", help="Of the noise, and of dummy weights.")]
StopTokenIds = Annotated[list[int] | None, _sampling("--stop-token-ids", help="End an answer here; repeatable.")]
Stop = Annotated[list[str] | None, _sampling("--stop", help="A text that ends an answer; repeatable.")]
IncludeStop = Annotated[bool, _sampling("--include-stop-str-in-output", help="Leave that text in the answer.")]
MinTokens = Annotated[int, _sampling("--min-tokens", help="The first so many tokens cannot end an answer.")]
IgnoreEos = Annotated[bool, _sampling("--ignore-eos", help="Go on past the end of the sequence.")]
Logprobs = Annotated[int | None, _sampling("--logprobs", help="Report the likeliest tokens per position (0 to 20).")]
PromptLogprobs = Annotated[int | None, _sampling("--prompt-logprobs", help="The same for the prompt's tokens.")]
LogprobsMode = Annotated[str, _sampling("--logprobs-mode", help="raw: the model's own; processed: as drawn from.")]
KeepSpecial = Annotated[bool, _sampling("--no-skip-special-tokens", help="Show special tokens in the text.")]


# Parameters of commands that are arguments of LLM by the same name.
_OF_LLM = (
    "tokenizer", "skip_tokenizer_init", "cache", "batching", "device", "dtype", "kv_cache_dtype", "max_model_len",
    "load_format", "revision", "seed", "weights", "threads",
)  # fmt: skip


def llm_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of LLM among a command's parameters; those of its engine are all there."""
    from ridgeline.settings import EngineOptions

    engine = EngineOptions(**{f.name: given.get(f.name) for f in fields(EngineOptions)})
    return {name: given[name] for name in _OF_LLM if name in given} | {"ops": parse_ops(given["ops"]), "engine": engine}


def answer_fields(given: Mapping[str, Any]) -> tuple[type[Params], dict[str, Any]]:
    """SamplingParams or BeamSearchParams, and its fields among a command's parameters that were not left open.

    The seed is not among them: the one of a command is the model's. Raises RequestError for an option of sampling in
    a search.
    """
    from ridgeline.spec.request import BeamSearchParams, SamplingParams

    early = str(given["early_stopping"]).lower()
    values = dict(given) | {
        "logit_bias": parse_logit_bias(given["logit_bias"]),
        "skip_special_tokens": not given["no_skip_special_tokens"],
        "early_stopping": {"true": True, "false": False}.get(early, early),
        "seed": None,
        "structured_outputs": None,
        "bad_token_sequences": None,
    }
    sampling, search = ({f.name for f in fields(kind)} for kind in (SamplingParams, BeamSearchParams))
    if given["beam_width"] is None:
        return SamplingParams, {name: values[name] for name in sampling if values[name] not in (None, [], {})}
    default = SamplingParams()
    for name in sorted(sampling - search):
        if values[name] not in (None, [], {}, getattr(default, name)):
            raise RequestError(f"--{name.replace('_', '-')} means nothing to --beam-width: a search draws no tokens")
    return BeamSearchParams, {name: values[name] for name in search if values[name] not in (None, [])}


def parse_ops(ops: list[str] | None) -> dict[str, str]:
    """`OP=BACKEND` pairs as a dict. Raises RequestError for anything else."""
    out = {}
    for item in ops or []:
        name, sign, backend = item.partition("=")
        if not (name and sign and backend):
            raise RequestError(f"--ops {item}: write OP=BACKEND, as in --ops attention=reference")
        out[name] = backend
    return out


def parse_logit_bias(items: list[str] | None) -> dict[int, float]:
    """`ID=BIAS` pairs as a dict. Raises RequestError for anything else."""
    out = {}
    for item in items or []:
        token, _, bias = item.partition("=")
        try:
            out[int(token)] = float(bias)
        except ValueError:
            raise RequestError(f"--logit-bias {item}: write ID=BIAS, as in --logit-bias 50256=-5") from None
    return out
