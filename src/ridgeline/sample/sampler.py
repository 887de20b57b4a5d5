"""From logits to one token for each sequence of a step, on the host.

The order, for each row: masks, bias, penalties (edits.py); temperature; top_k, top_p, min_p, typical_p (logits.py); one
draw. Ties go to the lower token id. A row's token and its log probabilities are the same, bit for bit, whatever the
other rows are.

Noise is counter-based: the number drawn for a token depends on the seed, the choice and the position alone, so a
neighbor in the batch, a restart or another order of work never changes it (Salmon et al. 2011, Philox).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.sample.edits import Edits
from ridgeline.sample.logits import Floats, Ints, draw, kept_ids, row_logprobs, top_k
from ridgeline.sample.masks import Grammar
from ridgeline.spec.request import SamplingParams, TokenLogprobs

PURPOSE_SAMPLE = 0  # other purposes (speculation, beams) will draw from other streams
# Scores that are worked on at once: bounds the workspace (float64: 2 MiB, a few times), and keeps it in the cache.
BLOCK = 2**18
BROKEN = "the model's logits hold NaN or infinity"
NOTHING_LEFT = "allowed_token_ids, bad_token_ids, bad_words, min_tokens and structured_outputs together leave no token"


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which stream of noise an answer draws from: a seed, and the answer's number under that seed."""

    seed: int
    choice: int

    def uniform(self, position: int, purpose: int = PURPOSE_SAMPLE) -> float:
        """A number in [0, 1) for one position."""
        key = np.array([self.seed, self.choice], np.uint64)
        noise = np.random.Philox(key=key, counter=[0, purpose, position, 0])
        return float(np.random.Generator(noise).random())


@dataclass(slots=True)
class SampleRow:
    """One sequence as the sampler sees it. `sample` only reads it; `push` tells it which token was taken.

    position: the place of the next token in the sequence. eos: the end-of-sequence tokens, unless they are ignored.
    ends: those and the stop tokens.
    """

    params: SamplingParams
    noise: NoiseKey
    position: int
    eos: frozenset[int]
    ends: frozenset[int]
    edits: Edits | None

    @classmethod
    def start(
        cls, params: SamplingParams, prompt: Sequence[int], noise: NoiseKey, eos: Collection[int],
        output: Sequence[int] = (), grammar: Grammar | None = None,
    ) -> SampleRow:  # fmt: skip
        """A sequence after `prompt` and the tokens of `output`. eos: the model's end-of-sequence tokens. grammar: what
        the answer must follow.
        """
        known = frozenset(() if params.ignore_eos else eos)
        ends = known.union(params.stop_token_ids)
        row = cls(params, noise, len(prompt), known, ends, Edits.of(params, prompt, ends, grammar))
        for token in output:
            row.push(token)
        return row

    def push(self, token: int) -> None:
        """One more token of the answer. Costs the same at any length."""
        self.position += 1
        if self.edits is not None:
            self.edits.push(token)

    def prepare(self) -> None:
        """Begin to make what the next token's logits will be edited with, before they are there."""
        if self.edits is not None:
            self.edits.prepare()

    def wait(self, seconds: float) -> bool:
        """Wait for what `prepare` began, but not longer; is it there? `sample` waits for it otherwise."""
        return self.edits is None or self.edits.wait(seconds)

    def is_end(self, token: int) -> bool:
        """Whether `token` ends the sequence."""
        return token in self.ends

    def stop_reason(self, token: int) -> int | None:
        """What to report of a token that ends the sequence: a stop token; None for an end-of-sequence token."""
        return None if token in self.eos else token

    def is_plain(self) -> bool:
        """Whether the token is simply the most likely one."""
        return self.params.temperature == 0 and self.edits is None

    def wants_best(self) -> bool:
        """Whether the most likely token is all that is asked for."""
        return self.is_plain() and self.params.logprobs is None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one row; logprobs if its parameters ask for them."""

    token: int
    logprobs: TokenLogprobs | None = None


class Best(NamedTuple):
    """Of each row of logits the first of the best tokens, or the first NaN, and what stands there: [n] each."""

    tokens: Ints
    logits: Floats

    @classmethod
    def of(cls, logits: Floats) -> Best:
        tokens = logits.argmax(axis=1)
        return cls(tokens, logits[np.arange(len(tokens)), tokens])


def take_best(best: Best) -> list[SampledToken | RequestError]:
    """`sample` of rows that want their best token and nothing more, where that is known already."""
    pairs = zip(best.tokens.tolist(), best.logits.tolist(), strict=True)
    return [SampledToken(token) if isfinite(logit) else RequestError(BROKEN) for token, logit in pairs]


def sample(logits: Floats, rows: Sequence[SampleRow]) -> list[SampledToken | RequestError]:
    """The next token of each row, or why there is none: the error is that row's alone.

    logits [n, vocabulary], float32; they are not changed.
    """
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} sequences")
    tokens, top = Best.of(logits)
    given = zip(logits, rows, tokens.tolist(), top.tolist(), strict=True)
    return [_sample(x, row, token) if isfinite(logit) else RequestError(BROKEN) for x, row, token, logit in given]


def prompt_logprobs(logits: Floats, next_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log probabilities of prompt tokens, from the unmodified distribution, and of the `count` most likely ones.

    logits [m, vocabulary] at m positions of a prompt; next_ids [m], the token after each. A prompt may come in chunks
    of any sizes.
    """
    size = max(1, BLOCK // logits.shape[1])
    entries = []
    for i in range(0, len(next_ids), size):
        tokens = next_ids[i : i + size]
        entries += row_logprobs(logits[i : i + size], tokens, [count] * len(tokens))
    return entries


def _sample(logits: Floats, row: SampleRow, token: int) -> SampledToken | RequestError:
    """The next token of one row. logits [vocabulary]; token: the best of them."""
    if row.wants_best():
        return SampledToken(token)
    params = row.params
    scores, ids = logits, None  # ids: of the scores, where not all are left
    if not row.is_plain():
        try:
            scores, ids = _edit(logits, row)
        except RequestError as e:  # of its grammar
            return e
        if scores.max() == -np.inf:
            return RequestError(NOTHING_LEFT)
        scores, ids, place = _choose(scores, ids, row)
        token = place if ids is None else int(ids[place])
    if params.logprobs is None:
        return SampledToken(token)
    source = logits if params.logprobs_mode == "raw" else _whole(scores, ids, logits.size)
    return SampledToken(token, row_logprobs(source[None], [token], [params.logprobs])[0])


def _edit(logits: Floats, row: SampleRow) -> tuple[Floats, Ints | None]:
    """The row's scores in float64, edited, and their ids; of one that is not edited only what its top_k leaves."""
    if row.edits is None and row.params.temperature > 0 and 0 < row.params.top_k < logits.size:
        ids = top_k(logits, row.params.top_k)
        return logits[ids].astype(np.float64), ids
    scores = logits.astype(np.float64)
    if row.edits is not None:
        row.edits.apply(scores)
    return scores, None


def _choose(scores: Floats, ids: Ints | None, row: SampleRow) -> tuple[Floats, Ints | None, int]:
    """The scores that are drawn from, their ids, and the place among them of the token that is taken."""
    params, best = row.params, int(scores.argmax())
    if params.temperature == 0:
        return scores, ids, best
    scores -= scores[best]
    if params.temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
            scores /= params.temperature
    kept = kept_ids(scores, params)
    if kept is not None:
        scores, ids = scores[kept], kept if ids is None else ids[kept]
    uniform = np.array([row.noise.uniform(row.position)])
    return scores, ids, int(draw(scores[None], uniform)[0])


def _whole(scores: Floats, ids: Ints | None, size: int) -> Floats:
    """Scores of the whole vocabulary: minus infinity for what was filtered out."""
    if ids is None:
        return scores
    out = np.full(size, -np.inf)
    out[ids] = scores
    return out
