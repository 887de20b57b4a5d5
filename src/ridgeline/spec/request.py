"""Define what a user asks of a model, and what the model answers. Names follow vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.errors import RequestError
from ridgeline.spec.breakers import TokenBreaker, largest
from ridgeline.spec.parameters import (
    Biases,
    Breakers,
    Choice,
    Flag,
    Number,
    Stage,
    Structure,
    Texts,
    TokenIds,
    TokenSequences,
    Whole,
    check_declared,
    declare,
    declared,
    described,
    required,
)
from ridgeline.spec.structure import StructuredOutputs

MAX_LOGPROBS = 20
MAX_N = 16_384
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
# Bad words are looked for at every token. A word becomes two sequences, a character at most four tokens.
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 1024, 8192
MAX_BAD_SEQUENCES, MAX_BAD_TOKENS = 4096, 1 << 17
MAX_DRY_BREAKERS, MAX_DRY_BREAKER_CHARACTERS = 32, 40  # each text is looked for in every token of the vocabulary
MAX_SUFFIX_CHARACTERS = 1 << 24
MAX_BEAM_WIDTH = 64  # a step ranks this many candidates squared, and every beam is a sequence with its own state
MAX_LENGTH_PENALTY = 10.0  # keeps any length to this power within a float
MAX_SEED = 2**63 - 1
FinishReason = Literal["stop", "length", "error"]
LogprobsMode = Literal["raw", "processed"]
Remasking = Literal["low_confidence", "random", "top_margin", "entropy", "origin"]
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens. Raises RequestError, which names the value and the limit, for anything out of range.

    docs/generate.md states the order in which the parameters act. At temperature 0 the most likely token after masks,
    bias and penalties is taken; of equal ones, the one with the lowest id. Lists may be given for tuples, and a mapping
    for logit_bias.
    """

    # fmt: off
    n: int = declare(1, Whole(
        low=1, high=MAX_N, stage=Stage.ANSWER, label="Number of answers", start=1,
        help="Number of answers for each prompt.",
    ))
    max_tokens: int | None = declare(16, Whole(
        low=1, optional=True, stage=Stage.ANSWER, label="Max tokens", start=128,
        none="up to the end of the context", help="Largest number of tokens in an answer.",
    ))
    min_tokens: int = declare(0, Whole(
        low=0, stage=Stage.MASK,
        help="Number of tokens before which no token and no stop string can end an answer.",
    ))
    allowed_token_ids: tuple[int, ...] | None = declare(None, TokenIds(
        stage=Stage.MASK, none="all token ids", help="Sample only from these token ids.",
    ))
    bad_token_ids: tuple[int, ...] = declare((), TokenIds(
        stage=Stage.MASK, help="Never sample these token ids.",
    ))
    bad_words: tuple[str, ...] = declare((), Texts(
        stage=Stage.MASK, most=MAX_BAD_WORDS, characters=MAX_BAD_CHARACTERS, visible=True,
        help="Texts that an answer must not contain. Only their usual token ids are excluded, as by vLLM: the model "
        "can still write a text with other tokens.",
    ))
    bad_token_sequences: tuple[tuple[int, ...], ...] = declare((), TokenSequences(
        stage=Stage.MASK, most=MAX_BAD_SEQUENCES, tokens=MAX_BAD_TOKENS, flag=False, api=False,
        help="Sequences of token ids that an answer must not contain.",
    ))
    structured_outputs: StructuredOutputs | None = declare(None, Structure(
        stage=Stage.MASK, flag=False,
        help="Structure that an answer must follow: a JSON schema, a regular expression, a grammar or a choice.",
    ))
    logit_bias: tuple[tuple[int, float], ...] = declare((), Biases(
        stage=Stage.BIAS, most=MAX_BIAS, help="Numbers to add to the logits of tokens, by token id.",
    ))
    repetition_penalty: float = declare(1.0, Number(
        stage=Stage.PENALTY, low=0.0, open_low=True, recommended=True, label="Repetition penalty", step=0.05,
        help="Factor against tokens of the prompt and the answer: positive logits are divided by it, negative ones "
        "multiplied (arXiv:1909.05858). 1 changes nothing; raise it against repetitions.",
    ))
    presence_penalty: float = declare(0.0, Number(
        stage=Stage.PENALTY, low=-MAX_PENALTY, high=MAX_PENALTY, label="Presence penalty", step=0.1,
        help="Number to subtract from the logits of tokens that the answer contains.",
    ))
    frequency_penalty: float = declare(0.0, Number(
        stage=Stage.PENALTY, low=-MAX_PENALTY, high=MAX_PENALTY, label="Frequency penalty", step=0.1,
        help="Number to subtract from the logit of a token for each time that the answer contains it.",
    ))
    dry_multiplier: float = declare(0.0, Number(
        stage=Stage.PENALTY, low=0.0, label="DRY multiplier", step=0.1,
        help="Strength of the DRY penalty. A token that would continue a repetition of L tokens loses dry_multiplier "
        "times dry_base to the power L - dry_allowed_length. 0 turns DRY off; 0.8 is usual.",
    ))
    dry_base: float = declare(1.75, Number(
        stage=Stage.PENALTY, low=1.0, label="DRY base", step=0.05,
        help="Factor by which the DRY penalty grows with each token of a repetition.",
    ))
    dry_allowed_length: int = declare(2, Whole(
        stage=Stage.PENALTY, low=1, label="DRY allowed length",
        help="Length in tokens up to which DRY allows a repetition.",
    ))
    dry_penalty_last_n: int = declare(-1, Whole(
        stage=Stage.PENALTY, low=-1,
        help="Number of last tokens, of prompt and answer, in which DRY looks for repetitions. -1: all; 0: none.",
    ))
    dry_sequence_breakers: tuple[str, ...] = declare(("\n", ":", '"', "*"), Texts(
        stage=Stage.PENALTY, most=MAX_DRY_BREAKERS, longest=MAX_DRY_BREAKER_CHARACTERS,
        help="Texts at which a repetition ends for DRY: it is counted from the last of them in the sequence.",
    ))
    dry_token_breakers: tuple[TokenBreaker, ...] = declare((), Breakers(
        stage=Stage.PENALTY, flag=False, api=False,
        help="Sequence breakers as token ids, for use without a tokenizer.",
    ))
    temperature: float = declare(1.0, Number(
        stage=Stage.TEMPERATURE, low=0.0, recommended=True, label="Temperature", step=0.1,
        help="Number by which the logits are divided: lower is more predictable. 0 takes the most likely token.",
    ))
    top_n_sigma: float = declare(0.0, Number(
        stage=Stage.FILTER, low=-1.0, label="Top n sigma", step=0.1,
        help="Keep tokens whose logit is at most this many standard deviations of all logits below the largest "
        "(arXiv:2411.07641). 0 or less keeps all; 1 is usual.",
    ))
    top_k: int = declare(0, Whole(
        stage=Stage.FILTER, low=-1, recommended=True, label="Top k",
        help="Keep this number of the most likely tokens. 0 or -1 keeps all.",
    ))
    top_p: float = declare(1.0, Number(
        stage=Stage.FILTER, low=0.0, high=1.0, open_low=True, recommended=True, label="Top p", step=0.05,
        help="Keep the fewest most likely tokens that together have this probability. 1 keeps all.",
    ))
    min_p: float = declare(0.0, Number(
        stage=Stage.FILTER, low=0.0, high=1.0, recommended=True, label="Min p", step=0.01,
        help="Keep tokens with at least this share of the probability of the most likely token. 0 keeps all.",
    ))
    typical_p: float = declare(1.0, Number(
        stage=Stage.FILTER, low=0.0, high=1.0, open_low=True, recommended=True, label="Typical p", step=0.05,
        help="Keep the fewest tokens that together have this probability, first those whose information is closest to "
        "the entropy (arXiv:2202.00666). 1 keeps all.",
    ))
    xtc_probability: float = declare(0.0, Number(
        stage=Stage.FILTER, low=0.0, high=1.0, label="XTC probability", step=0.1,
        help="Probability that XTC acts at a token. It then removes all tokens of at least xtc_threshold, except "
        "the least likely of them. 0 turns XTC off; 0.5 is usual.",
    ))
    xtc_threshold: float = declare(0.1, Number(
        stage=Stage.FILTER, low=0.0, high=1.0, label="XTC threshold", step=0.05,
        help="Probability from which XTC may remove a token. Above 0.5 XTC removes none.",
    ))
    seed: int | None = declare(None, Whole(
        stage=Stage.DRAW, low=0, high=MAX_SEED, label="Seed",
        none="the model's seed, and the number of the request in its call",
        help="Random seed of the request: the same seed gives the same answer.",
    ))
    stop: tuple[str, ...] = declare((), Texts(
        stage=Stage.END, help="Texts that end an answer as soon as they are complete.",
    ))
    include_stop_str_in_output: bool = declare(False, Flag(
        stage=Stage.END, help="Keep the text that ended an answer in it.",
    ))
    stop_token_ids: tuple[int, ...] = declare((), TokenIds(
        stage=Stage.END, help="Token ids that end an answer, besides the model's end-of-sequence tokens.",
    ))
    ignore_eos: bool = declare(False, Flag(
        stage=Stage.END, help="Continue after an end-of-sequence token.",
    ))
    remasking: Remasking = declare("low_confidence", Choice(
        stage=Stage.PASSES, values=("low_confidence", "random", "top_margin", "entropy", "origin"),
        help="Order in which a diffusion model keeps the tokens of a pass: by probability, at random, by the distance "
        "of the best to the second, by entropy, or each with a chance that follows the time of the pass (origin).",
    ))
    denoising_passes: int | None = declare(None, Whole(
        stage=Stage.PASSES, low=1, none="as many as the block has tokens",
        help="Number of passes in which a diffusion model fills a block. Fewer are faster, and answers get worse.",
    ))
    confidence_threshold: float | None = declare(None, Number(
        stage=Stage.PASSES, low=0.0, high=1.0, none="as many tokens in a pass as denoising_passes says",
        help="Probability from which a diffusion model keeps a token of a pass; the likeliest one is always kept "
        "(arXiv:2505.22618). 0.9 is usual.",
    ))
    confidence_factor: float | None = declare(None, Number(
        stage=Stage.PASSES, low=0.0, none="as many tokens in a pass as denoising_passes says",
        help="A diffusion model keeps the n likeliest tokens of a pass, for the largest n with (n + 1) (1 - p) below "
        "this number, where p is the least of their probabilities (arXiv:2505.22618).",
    ))
    entropy_bound: float | None = declare(None, Number(
        stage=Stage.PASSES, low=0.0, none="as many tokens in a pass as denoising_passes says",
        help="A diffusion model keeps the tokens of a pass with the least entropies, for the most tokens whose "
        "entropies without the largest sum to at most this number of nats (arXiv:2505.24857). 0.1 is usual.",
    ))
    edit_threshold: float | None = declare(None, Number(
        stage=Stage.PASSES, low=0.0, high=1.0, none="a token that was kept stays",
        help="Probability above which a later pass of a diffusion model replaces a token of its open block by another "
        "one. A block is done once a pass changes nothing, which takes a pass more (LLaDA2.1, arXiv:2602.08676).",
    ))
    block_length: int | None = declare(None, Whole(
        stage=Stage.PASSES, low=1, none="the whole answer",
        help="Tokens of a block of an answer, if a diffusion model sees whole sequences: blocks are filled in order.",
    ))
    cfg_scale: float = declare(0.0, Number(stage=Stage.PASSES, low=0.0, help=(
        "Strength of guidance of a diffusion model that sees whole sequences: logits move away from those without the "
        "prompt, and each pass takes two (LLaDA, arXiv:2502.09992). 0 turns guidance off.")))
    suffix: tuple[str, ...] = declare((), Texts(
        stage=Stage.PASSES, most=1, characters=MAX_SUFFIX_CHARACTERS, api=False,
        help="Text after the answer: a diffusion model that sees whole sequences fills the gap before it.",
    ))
    suffix_token_ids: tuple[int, ...] = declare((), TokenIds(
        stage=Stage.PASSES, flag=False, api=False, help="Token ids after the answer, instead of a suffix."))
    num_speculative_tokens: int | None = declare(None, Whole(
        stage=Stage.SPEED, low=0, flag=False, none="as many as --num-speculative-tokens says",
        help="Largest number of draft tokens that a step verifies for an answer, if the engine has drafts. 0 turns "
        "drafts off for this request.",
    ))
    logprobs: int | None = declare(None, Whole(
        stage=Stage.REPORT, low=0, high=MAX_LOGPROBS, api=False, none="no report",
        help="Number of most likely tokens whose log probabilities are reported at each position, besides the token "
        "that was taken.",
    ))
    prompt_logprobs: int | None = declare(None, Whole(
        stage=Stage.REPORT, low=0, high=MAX_LOGPROBS, none="no report",
        help="Number of most likely tokens whose log probabilities are reported at each prompt token.",
    ))
    logprobs_mode: LogprobsMode = declare("raw", Choice(
        stage=Stage.REPORT, values=("raw", "processed"),
        help="Distribution that logprobs are from: raw is the model's own, processed is the one that was sampled from.",
    ))
    skip_special_tokens: bool = declare(True, Flag(
        stage=Stage.REPORT, help="Leave special tokens out of the text.", negative="Keep special tokens in the text.",
    ))
    # fmt: on

    def __post_init__(self) -> None:
        check_declared(self, SAMPLING)
        if self.structured_outputs is not None and self.ignore_eos:
            raise RequestError("ignore_eos with structured_outputs: nothing may follow a structure that is complete")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.bad_token_ids):
            raise RequestError(
                f"allowed_token_ids is {list(self.allowed_token_ids)!r:.100}, which less bad_token_ids leaves none"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for a token id that a model with `vocab_size` tokens does not have."""
        ids: dict[str, Sequence[int]] = {
            "logit_bias": [t for t, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_token_ids": self.bad_token_ids,
            "suffix_token_ids": self.suffix_token_ids,
            "stop_token_ids": self.stop_token_ids,
            "bad_token_sequences": [t for sequence in self.bad_token_sequences for t in sequence],
            "dry_token_breakers": largest(self.dry_token_breakers),
        }
        for name, tokens in ids.items():
            _check_known(name, tokens, vocab_size)


SAMPLING = declared(SamplingParams)
SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n{described(SAMPLING)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search for the most likely answers: names and meanings of transformers' `generate`.

    Raises RequestError, which names the value and the limit, for anything out of range.
    """

    # fmt: off
    beam_width: int = required(Whole(
        stage=Stage.SEARCH, low=1, high=MAX_BEAM_WIDTH, none="no beam search",
        help="Search for the most likely answers, with this number of beams, instead of sampling.",
    ))
    n: int | None = declare(None, Whole(
        stage=Stage.SEARCH, low=1, none="beam_width",
        help="Number of answers that are returned, best first (num_return_sequences).",
    ))
    max_tokens: int | None = declare(16, Whole(
        stage=Stage.SEARCH, low=1, optional=True,
        none="up to the end of the context", help="Largest number of tokens in an answer.",
    ))
    length_penalty: float = declare(1.0, Number(
        stage=Stage.SEARCH, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY,
        help="An answer's score is its log probability divided by its length to this power: 0 is the log probability "
        "itself, 1 the mean per token. Higher values favor longer answers.",
    ))
    early_stopping: EarlyStopping = declare(False, Choice(
        stage=Stage.SEARCH, values=(True, False, "never"),
        help="When to stop once beam_width answers have ended. true: at once. false: when the best unfinished answer, "
        "at its present length, scores no better than the worst finished one. never: when no unfinished answer can "
        "beat the worst finished one.",
    ))
    stop_token_ids: tuple[int, ...] = declare((), TokenIds(
        stage=Stage.SEARCH, help="Token ids that end an answer, besides the model's end-of-sequence tokens.",
    ))
    ignore_eos: bool = declare(False, Flag(
        stage=Stage.SEARCH, help="Continue after an end-of-sequence token.",
    ))
    skip_special_tokens: bool = declare(True, Flag(
        stage=Stage.SEARCH, help="Leave special tokens out of the text.", negative="Keep special tokens in the text.",
    ))
    # fmt: on

    def __post_init__(self) -> None:
        check_declared(self, BEAM_SEARCH)
        if self.n is not None and self.n > self.beam_width:
            raise RequestError(f"n is {self.n}; it must be at most beam_width, {self.beam_width}")

    @property
    def answers(self) -> int:
        """Return how many answers are returned."""
        return self.beam_width if self.n is None else self.n

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for a token id that a model with `vocab_size` tokens does not have."""
        _check_known("stop_token_ids", self.stop_token_ids, vocab_size)


BEAM_SEARCH = declared(BeamSearchParams)
BeamSearchParams.__doc__ = f"{BeamSearchParams.__doc__}\n{described(BEAM_SEARCH)}"


Params = SamplingParams | BeamSearchParams  # how to answer a prompt


def _check_known(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise RequestError(f"{name} has {max(tokens)}; this model's token ids are 0..{vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the token there, and of the most likely tokens, best first.

    top: pairs of token id and log probability. Tokens of probability zero are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    finish_reason: "stop" at an end-of-sequence token, a stop token or a stop string; "length" at max_tokens or the end
    of the context; "error" if no token could be picked, with the reason in `error`. stop_reason: the stop token or the
    stop string that ended the answer, else None. score: the score of a beam search, else None.
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
    """How long a request took, in seconds.

    ttft_s: from arrival to the first token. tpot_s: per token after the first; None if there is one token. total_s:
    from arrival to the last token. queued_s: from arrival to the first step.
    """

    ttft_s: float
    tpot_s: float | None
    total_s: float
    tokens_per_s: float
    queued_s: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers.

    prompt: the text; None if token ids were given. num_cached_tokens: number of prompt tokens that were found in the
    prefix cache. prompt_logprobs: None unless requested; otherwise an entry for each prompt token, and None for the
    first one, which nothing predicts. num_preempted: number of preemptions of its answers. num_passes: passes of a
    diffusion model over blocks of its answers; 0 for other models.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timing: Timing
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_preempted: int = 0
    num_passes: int = 0

    def __repr__(self) -> str:
        prompt = _counted(self.prompt_token_ids, "prompt token")
        answers = ", ".join(map(repr, self.outputs[:2])) + (", ..." if len(self.outputs) > 2 else "")
        return f"RequestOutput({prompt}, {_counted(self.outputs, 'answer')}: [{answers}], {self.timing.total_s:.3f} s)"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
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
        if self.num_passes:
            out["timing"]["passes"] = self.num_passes
        if self.prompt_logprobs is not None:
            out["prompt_logprobs"] = [p and _logprobs(p) for p in self.prompt_logprobs]
        return out


@dataclass(slots=True)
class OutputChunk:
    """A piece of one answer, as it is streamed.

    index: number of the answer. text: new text; it never ends inside a character, so it may come later than its
    tokens. finish_reason, stop_reason, error: as in CompletionOutput, on the answer's last chunk. output: the whole
    result, on the last chunk of the last answer.
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


REPR_CHARACTERS = 40  # number of characters of a text that a repr shows


def _short(text: str) -> str:
    """Return the beginning of a text, quoted."""
    return repr(text) if len(text) <= REPR_CHARACTERS else f"{text[:REPR_CHARACTERS]!r}..."


def _counted(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _ending(answer: CompletionOutput | OutputChunk) -> str:
    """Return how an answer ended, or an empty text."""
    if answer.error is not None:
        return f", error: {_short(answer.error)}"
    return f", {answer.finish_reason}" if answer.finish_reason else ""


def _choice(output: CompletionOutput) -> dict[str, Any]:
    choice = {name: getattr(output, name) for name in ("index", "text", "token_ids", "finish_reason")}
    for name in ("stop_reason", "error", "score"):
        if (value := getattr(output, name)) is not None:
            choice[name] = value
    if output.logprobs is not None:
        choice["logprobs"] = [_logprobs(p) for p in output.logprobs]
    return choice


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": t, "logprob": v} for t, v in entry.top]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top_logprobs": top}
