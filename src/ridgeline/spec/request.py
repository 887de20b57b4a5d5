"""What a user asks of a model, and what comes back. Names follow vLLM where it has one."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 16_384
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens. Raises RequestError, naming the value and the limit, for anything out of range.

    The order of the filters: repetition penalty, temperature, top_k, top_p, min_p, then one draw. temperature 0 is
    greedy: the most likely token, the lowest id among equals.

    n: answers per prompt. max_tokens: None is up to the end of the context. top_k: 0 or -1 keeps all tokens.
    seed: None takes the model's seed and the request's place in the call, so that a run repeats.
    logprobs: how many of the most likely tokens to report at each position, from the unmodified distribution.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.stop_token_ids, list | tuple):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        for name in ("ignore_eos", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = type(value) is int and value >= low and (high is None or value <= high)
    if not ok:
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise RequestError(f"{name} is {value!r}; it must be a whole number {limit}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not ok or value > high or value < low or (open_low and value == low):  # type: ignore[operator]
        more = "greater than" if open_low else "at least"
        upper = f" and at most {high:g}" if math.isfinite(high) else ""
        raise RequestError(f"{name} is {value!r}; it must be a number {more} {low:g}{upper}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the token that was picked, and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class CompletionOutput:
    """One answer. finish_reason: "stop" at an end-of-sequence or stop token, "length" at max_tokens or context end."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: to the first token, per token after it (None for a single token), and in all."""

    ttft_s: float
    tpot_s: float | None
    total_s: float
    tokens_per_s: float


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers. prompt is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timing: Timing
    num_cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        completion = sum(len(o.token_ids) for o in self.outputs)
        return {
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


def _choice(output: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    if output.logprobs is not None:
        choice["logprobs"] = [
            {
                "token_id": p.token_id,
                "logprob": p.logprob,
                "top_logprobs": [{"token_id": t, "logprob": v} for t, v in p.top],
            }
            for p in output.logprobs
        ]
    return choice
