"""From logits to one token for each sequence of a step, on the host.

The order, for each row: masks, bias, penalties (edits.py); temperature; top_k, top_p, min_p, typical_p (logits.py); one
draw. Ties go to the lower token id. A row's token and its log probabilities are the same, bit for bit, whatever the
other rows are.

Noise is counter-based: the number drawn for a token depends on the seed, the choice and the position alone, so a
neighbour in the batch, a restart or another order of work never changes it (Salmon et al. 2011, Philox).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.runtime.edits import Edits
from ridgeline.runtime.grammar import Grammar
from ridgeline.runtime.logits import Floats, Ints, draw, filter_scores, row_logprobs
from ridgeline.spec.request import SamplingParams, TokenLogprobs

PURPOSE_SAMPLE = 0  # other purposes (speculation, beams) will draw from other streams
# Scores that are worked on at once: bounds the workspace (float64: 2 MiB, a few times), and keeps it in the cache.
BLOCK = 2**18


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
    """

    params: SamplingParams
    noise: NoiseKey
    position: int
    eos: frozenset[int]
    edits: Edits | None

    @classmethod
    def start(
        cls, params: SamplingParams, prompt: Sequence[int], noise: NoiseKey, eos: Collection[int],
        output: Sequence[int] = (), grammar: Grammar | None = None,
    ) -> SampleRow:  # fmt: skip
        """A sequence after `prompt` and the tokens of `output`. eos: the model's end-of-sequence tokens. grammar: what
        the answer must follow.
        """
        ends = frozenset(() if params.ignore_eos else eos)
        edits = Edits.of(params, prompt, ends.union(params.stop_token_ids), grammar)
        row = cls(params, noise, len(prompt), ends, edits)
        for token in output:
            row.push(token)
        return row

    def push(self, token: int) -> None:
        """One more token of the answer. Costs the same at any length."""
        self.position += 1
        if self.edits is not None:
            self.edits.push(token)

    def is_end(self, token: int) -> bool:
        """Whether `token` ends the sequence."""
        return token in self.eos or token in self.params.stop_token_ids

    def stop_reason(self, token: int) -> int | None:
        """What to report of a token that ends the sequence: a stop token; None for an end-of-sequence token."""
        return None if token in self.eos else token

    def is_plain(self) -> bool:
        """Whether the token is simply the most likely one."""
        return self.params.temperature == 0 and self.edits is None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one row; logprobs if its parameters ask for them."""

    token: int
    logprobs: TokenLogprobs | None = None


def sample(logits: Floats, rows: Sequence[SampleRow]) -> list[SampledToken | RequestError]:
    """The next token of each row, or why there is none: the error is that row's alone.

    logits [n, vocabulary], float32; they are not changed.
    """
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} sequences")
    size = max(1, BLOCK // logits.shape[1])
    starts = range(0, len(rows), size)
    return [found for i in starts for found in _sample_block(logits[i : i + size], rows[i : i + size])]


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


def _sample_block(logits: Floats, rows: Sequence[SampleRow]) -> list[SampledToken | RequestError]:
    scores, errors = _scores(logits, rows)
    tokens = _choose(scores, rows)
    entries = _logprobs(logits, scores, tokens, [i for i in range(len(rows)) if i not in errors], rows)
    return [errors.get(i) or SampledToken(token, entries.get(i)) for i, token in enumerate(tokens.tolist())]


def _scores(logits: Floats, rows: Sequence[SampleRow]) -> tuple[Floats, dict[int, RequestError]]:
    """Edited scores, float64 unless nothing is to be changed; and the rows that cannot be served, zeroed."""
    broken = np.flatnonzero(~np.isfinite(logits.max(axis=1)))
    errors = {int(i): RequestError("the model's logits hold NaN or infinity") for i in broken}
    if all(row.is_plain() for row in rows):
        return logits, errors
    scores = np.array(logits, np.float64, order="C")
    scores[broken] = 0
    for i, (row, row_scores) in enumerate(zip(rows, scores, strict=True)):
        if row.edits is not None:
            try:
                row.edits.apply(row_scores)
            except RequestError as e:  # of its grammar
                errors.setdefault(i, e)
    empty = np.flatnonzero(scores.max(axis=1) == -np.inf)
    message = "allowed_token_ids, bad_token_ids, min_tokens and structured_outputs together leave no token"
    errors = {int(i): RequestError(message) for i in empty} | errors
    scores[empty] = 0
    return scores, errors


def _choose(scores: Floats, rows: Sequence[SampleRow]) -> Ints:
    """The token of each row [n]; scores become those that were drawn from."""
    best: Ints = scores.argmax(axis=1)
    temperatures = np.array([row.params.temperature for row in rows])
    if not temperatures.any():
        return best
    scores -= scores[np.arange(len(rows)), best][:, None]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
        scores /= np.where(temperatures > 0, temperatures, 1)[:, None]
    uniforms = np.zeros(len(rows))
    for i, row in enumerate(rows):
        if row.params.temperature > 0:
            filter_scores(scores[i], row.params)
            uniforms[i] = row.noise.uniform(row.position)
    return np.where(temperatures > 0, draw(scores, uniforms), best)


def _logprobs(
    logits: Floats, scores: Floats, tokens: Ints, valid: Sequence[int], rows: Sequence[SampleRow]
) -> dict[int, TokenLogprobs]:
    """Of the valid rows that ask for them, by row."""
    out: dict[int, TokenLogprobs] = {}
    for mode, source in (("raw", logits), ("processed", scores)):
        params = {i: rows[i].params for i in valid}
        asked = {i: p.logprobs for i, p in params.items() if p.logprobs is not None and p.logprobs_mode == mode}
        if asked:
            ids = list(asked)
            out.update(zip(ids, row_logprobs(source[ids], tokens[ids].tolist(), list(asked.values())), strict=True))
    return out
