"""What a user asks of a model, and what comes back. Names follow vLLM where it has one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ridgeline.errors import RequestError
from ridgeline.spec.checks import check_flag, check_number, check_sizes, check_whole, ids_of, pairs_of, texts_of
from ridgeline.spec.structure import StructuredOutputs

MAX_LOGPROBS = 20
MAX_N = 16_384
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
# Bad words are looked for at every token. A word becomes two sequences, a character at most four tokens.
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 1024, 8192
MAX_BAD_SEQUENCES, MAX_BAD_TOKENS = 4096, 1 << 17
MAX_BEAM_WIDTH = 64  # a step ranks this many candidates squared, and every beam is a sequence with state of its own
MAX_LENGTH_PENALTY = 10.0  # keeps any length to this power within a float
FinishReason = Literal["stop", "length", "error"]
LogprobsMode = Literal["raw", "processed"]
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens. Raises RequestError, naming the value and the limit, for anything out of range.

    The order: masks (allowed_token_ids, bad_token_ids, bad_words, min_tokens), logit_bias, repetition penalty, presence
    and frequency penalties, temperature, top_k, top_p, min_p, typical_p, then one draw. temperature 0 is greedy: the
    most likely token after masks, bias and penalties, the lowest id among equals.

    n: answers per prompt. max_tokens: None is up to the end of the context. min_tokens: the first so many tokens of an
    answer cannot end it. top_k: 0 or -1 keeps all tokens. typical_p: keep the tokens whose information is closest to
    the expected, up to this probability (arXiv:2202.00666). presence_penalty, frequency_penalty: subtracted from the
    score of a token that is in the answer, once and for each time; repetition_penalty: divides positive scores of
    tokens in prompt or answer, multiplies negative ones (arXiv:1909.05858). logit_bias: token id -> what is added to
    its score; kept as sorted pairs. allowed_token_ids: None is all. bad_token_ids: never produced.
    bad_words: texts that no answer may contain, as vLLM understands them: each becomes the token ids of the word and of
    the word after a space, and the last id of such a sequence may not follow the others. A model can still spell a word
    with other tokens. bad_token_sequences: the same, given as sequences of token ids.
    seed: None takes the model's seed and the request's place in the call, so that a run repeats.
    stop: texts that end an answer as soon as they are complete (one text, or a list), left out of it unless
    include_stop_str_in_output.
    logprobs: how many of the most likely tokens to report at each position, from the distribution named by
    logprobs_mode: "raw" is the model's own, "processed" is what was drawn from (at temperature 0: after masks, bias
    and penalties). prompt_logprobs: the same for each prompt token, always raw.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        check_whole("n", self.n, 1, MAX_N)
        self._check_structure()
        self._check_filters()
        self._check_tokens()
        self._check_ends()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise RequestError(f"logprobs_mode is {self.logprobs_mode!r}; it must be raw or processed")
        if self.seed is not None:
            check_whole("seed", self.seed, 0, 2**63 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            check_flag(name, getattr(self, name))

    def _check_structure(self) -> None:
        given: Any = self.structured_outputs
        if isinstance(given, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(given))
        elif given is not None and not isinstance(given, StructuredOutputs):
            raise RequestError(f"structured_outputs is {given!r:.100}; it must be an object, see StructuredOutputs")
        if given is not None and self.ignore_eos:
            raise RequestError("ignore_eos with structured_outputs: nothing may follow a structure that is complete")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for a token id that a model with `vocab_size` tokens does not have."""
        allowed = self.allowed_token_ids or ()
        ids = {"logit_bias": [t for t, _ in self.logit_bias], "allowed_token_ids": allowed,
               "bad_token_ids": self.bad_token_ids, "stop_token_ids": self.stop_token_ids,
               "bad_token_sequences": [t for sequence in self.bad_token_sequences for t in sequence]}  # fmt: skip
        for name, tokens in ids.items():
            _known(name, tokens, vocab_size)

    def _check_filters(self) -> None:
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_whole("top_k", self.top_k, -1)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)

    def _check_tokens(self) -> None:
        object.__setattr__(self, "logit_bias", pairs_of("logit_bias", self.logit_bias))
        for token, bias in self.logit_bias:
            check_whole("logit_bias: a token id", token, 0)
            check_number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        for name in ("bad_token_ids", "stop_token_ids"):
            object.__setattr__(self, name, ids_of(name, getattr(self, name)))
        self._check_bad_words()
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", ids_of("allowed_token_ids", self.allowed_token_ids))
            if not set(self.allowed_token_ids) - set(self.bad_token_ids):
                raise RequestError(
                    f"allowed_token_ids is {list(self.allowed_token_ids)!r:.100}, which less bad_token_ids leaves none"
                )

    def _check_bad_words(self) -> None:
        object.__setattr__(self, "bad_words", texts_of("bad_words", self.bad_words))
        given: Any = self.bad_token_sequences
        if not isinstance(given, list | tuple):
            raise RequestError(f"bad_token_sequences is {given!r:.100}; it must be a list of lists of token ids")
        object.__setattr__(self, "bad_token_sequences", tuple(ids_of("bad_token_sequences", ids) for ids in given))
        if any(not word.strip() for word in self.bad_words) or () in self.bad_token_sequences:
            raise RequestError("bad_words and bad_token_sequences may hold no empty word")
        check_sizes("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_CHARACTERS)
        check_sizes("bad_token_sequences", self.bad_token_sequences, MAX_BAD_SEQUENCES, MAX_BAD_TOKENS)

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        object.__setattr__(self, "stop", texts_of("stop", self.stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search for the most likely answers: names and meanings of transformers' `generate`.

    Raises RequestError, naming the value and the limit, for anything out of range.

    beam_width: how many unfinished answers are followed at once (num_beams). n: how many answers are returned, best
    first (num_return_sequences); None is beam_width. max_tokens: None is up to the end of the context.
    length_penalty: an answer's score is its log probability over its length in tokens to this power: 0 is the log
    probability itself, 1 the mean per token; more favors longer answers, less shorter ones.
    early_stopping: when to stop, once beam_width answers have ended. True: at once. False: when the best unfinished one
    scores no better at its present length than the worst of them. "never": when none can become better, by the length
    that would suit it best; the slowest.
    stop_token_ids: token ids that end an answer, as the model's own end-of-sequence tokens do unless ignore_eos.
    """

    beam_width: int
    n: int | None = None
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.n is not None:
            check_whole("n", self.n, 1)
            if self.n > self.beam_width:
                raise RequestError(f"n is {self.n}; it must be at most beam_width, {self.beam_width}")
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        known = {bool: (True, False), str: ("never",)}.get(type(self.early_stopping), ())
        if self.early_stopping not in known:
            raise RequestError(f"early_stopping is {self.early_stopping!r}; it must be true, false or 'never'")
        object.__setattr__(self, "stop_token_ids", ids_of("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            check_flag(name, getattr(self, name))

    @property
    def answers(self) -> int:
        """How many answers are returned."""
        return self.beam_width if self.n is None else self.n

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for a token id that a model with `vocab_size` tokens does not have."""
        _known("stop_token_ids", self.stop_token_ids, vocab_size)


Params = SamplingParams | BeamSearchParams  # how to answer a prompt


def _known(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise RequestError(f"{name} has {max(tokens)}; this model's token ids are 0..{vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the token that stands there, and of the most likely ones, best first.

    top: fewer than asked for where fewer have a probability above zero.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    finish_reason: "stop" at an end-of-sequence token, a stop token or a stop string; "length" at max_tokens or the end
    of the context; "error" if no token could be picked, with the reason in `error`. stop_reason: the stop token or the
    stop string that ended it, else None. score: of an answer that was searched for (BeamSearchParams).
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    score: float | None = None

    def __repr__(self) -> str:
        ids = _counted(self.token_ids, "token")
        return f"CompletionOutput({self.index}: {ids}, {_short(self.text)}{_ending(self)})"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: to the first token, per token after it (None for a single token), and in all; until its first step."""

    ttft_s: float
    tpot_s: float | None
    total_s: float
    tokens_per_s: float
    queued_s: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers. prompt is None where token ids were given. num_preempted: how often an answer's pages
    were taken for others, and given back later.

    prompt_logprobs: None unless asked for; else an entry for each prompt token, None for the first, which nothing
    predicts.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timing: Timing
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_preempted: int = 0

    def __repr__(self) -> str:
        prompt = _counted(self.prompt_token_ids, "prompt token")
        answers = ", ".join(map(repr, self.outputs[:2])) + (", ..." if len(self.outputs) > 2 else "")
        return f"RequestOutput({prompt}, {_counted(self.outputs, 'answer')}: [{answers}], {self.timing.total_s:.3f} s)"

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        completion = sum(len(o.token_ids) for o in self.outputs)
        out: dict[str, Any] = {
            "choices": [_choice(o) for o in self.outputs],
            "usage": {
                "prompt_tokens": len(self.prompt_token_ids),
                "cached_tokens": self.num_cached_tokens,
                "completion_tokens": completion,
            },
            "timing": {
                "ttft_s": self.timing.ttft_s,
                "tpot_s": self.timing.tpot_s,
                "total_s": self.timing.total_s,
                "tokens_per_s": self.timing.tokens_per_s,
            },
        }
        if self.prompt_logprobs is not None:
            out["prompt_logprobs"] = [p and _logprobs(p) for p in self.prompt_logprobs]
        return out


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """What one answer grew by, as it comes.

    index: which of the answers. text: never with a broken character, so it may lag behind the tokens. finish_reason,
    stop_reason, error: as in CompletionOutput, on the answer's last chunk. output: the whole result, on the last chunk
    of the last answer.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    output: RequestOutput | None = None

    def __repr__(self) -> str:
        last = ", the last of its request" if self.output is not None else ""
        ids = _counted(self.token_ids, "token")
        return f"OutputChunk({self.index}: {ids}, {_short(self.text)}{_ending(self)}{last})"


REPR_CHARACTERS = 40  # of a text, in a repr


def _short(text: str) -> str:
    """The text's beginning, quoted."""
    return repr(text) if len(text) <= REPR_CHARACTERS else f"{text[:REPR_CHARACTERS]!r}..."


def _counted(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _ending(answer: CompletionOutput | OutputChunk) -> str:
    """How an answer ended, where it has."""
    if answer.error is not None:
        return f", error: {_short(answer.error)}"
    return f", {answer.finish_reason}" if answer.finish_reason else ""


def _choice(output: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    for name in ("stop_reason", "error", "score"):
        if (value := getattr(output, name)) is not None:
            choice[name] = value
    if output.logprobs is not None:
        choice["logprobs"] = [_logprobs(p) for p in output.logprobs]
    return choice


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top_logprobs": [{"token_id": t, "logprob": v} for t, v in entry.top],
    }
