"""Sample one token for each sequence of a step, on the host.

The order, for each row: masks, bias, penalties (edits.py, dry.py); temperature; filters (filters.py); one draw. Ties
go to the lower token id. A row's token and its log probabilities do not depend on the other rows, bit for bit.

Noise is counter-based: the number that is added to a token's score (noise.py) depends only on the seed, the answer, the
position, the token id and the purpose. A neighbor in the batch, a restart or another order of work never changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.ops.draws import LEAST_TEMPERATURE
from ridgeline.ops.noise import Key
from ridgeline.sample.drawing import draw, draw_logits, likely, random_words
from ridgeline.sample.edits import Edits
from ridgeline.sample.filters import Filter, filters_of, keep_top_k, keep_top_p, kept_ids
from ridgeline.sample.logits import Floats, Ints, exp_scores, nucleus, row_logprobs, top_k
from ridgeline.sample.masks import Grammar
from ridgeline.sample.noise import PURPOSE_SAMPLE
from ridgeline.sample.rejection import Distribution, point_mass, softmax
from ridgeline.spec.request import SamplingParams, TokenLogprobs

# Number of scores that are processed at once: it bounds the workspace (2 MiB of float64, a few times).
BLOCK = 2**18
LIKELY = -10.0  # scores from which on tokens are counted as likely: 4.5e-5 of the best one's probability
REST_ERROR = 1e-5  # relative, in a sum of weights in float32 by blocks, which is off by less than 1e-6
SUM_ERROR = 1e-9  # relative, in sums of weights in float64 in another order
BROKEN = "the model's logits hold NaN or infinity"
NOTHING_LEFT = "allowed_token_ids, bad_token_ids, bad_words, min_tokens and structured_outputs together leave no token"


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Names a stream of noise: a seed, and the number of the answer under that seed."""

    seed: int
    choice: int

    def key(self, position: int, purpose: int, index: int = 0) -> Key:
        """Return 256 random bits for one position (Philox, Salmon et al. 2011). index: counts draws for one purpose."""
        return random_words((self.seed, self.choice), (1, purpose, position, index))

    def uniform(self, position: int, purpose: int, index: int = 0) -> float:
        """Return a number in [0, 1) for one position."""
        return (self.key(position, purpose, index)[0] >> 11) * 2.0**-53


@dataclass(slots=True)
class SampleRow:
    """One sequence in the sampler. `sample` only reads it; `push` adds the token that was taken.

    position: the position of the next token. eos: the end-of-sequence tokens, unless they are ignored. ends: the
    end-of-sequence tokens and the stop tokens. filters: the filters that params turn on. origin: this row at the end of
    its prompt, from which `again` starts; None: this row is not that of an answer.
    """

    params: SamplingParams
    noise: NoiseKey
    position: int
    eos: frozenset[int]
    ends: frozenset[int]
    edits: Edits | None
    filters: tuple[Filter, ...]
    origin: SampleRow | None = None

    @classmethod
    def start(
        cls, params: SamplingParams, prompt: Sequence[int], noise: NoiseKey, eos: Collection[int],
        output: Sequence[int] = (), grammar: Grammar | None = None,
    ) -> SampleRow:  # fmt: skip
        """Return the row of a sequence after `prompt` and the tokens of `output`.

        eos: the model's end-of-sequence tokens. grammar: the structure that the answer must follow.
        """
        known = frozenset(() if params.ignore_eos else eos)
        ends = known.union(params.stop_token_ids)
        edits = Edits.of(params, prompt, ends, grammar)
        origin = cls(params, noise, len(prompt), known, ends, edits, filters_of(params))
        return origin._start(noise, output)

    def again(self, noise: NoiseKey, output: Sequence[int] = ()) -> SampleRow:
        """Return the row of an answer to the same prompt with the same parameters, after the tokens of `output`.

        Large tables are shared, so that many answers take little more time and memory than one.
        """
        assert self.origin is not None, "this row has no prompt"
        return self.origin._start(noise, output)

    def _start(self, noise: NoiseKey, output: Sequence[int]) -> SampleRow:
        edits = None if self.edits is None else self.edits.start()
        row = replace(self, noise=noise, edits=edits, origin=self)
        for token in output:
            row.push(token)
        return row

    def push(self, token: int) -> None:
        """Add the next token of the answer. This costs the same at any length."""
        self.position += 1
        if self.edits is not None:
            self.edits.push(token)

    def ahead(self, count: int) -> SampleRow:
        """Return the row at a position `count` tokens later, without edits and log probabilities: it draws drafts."""
        params = self.params if self.params.logprobs is None else replace(self.params, logprobs=None)
        return replace(self, params=params, position=self.position + count, edits=None, origin=None)

    def prepare(self) -> None:
        """Begin to make the mask of the next token before its logits are there."""
        if self.edits is not None:
            self.edits.prepare()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the mask; return whether it is ready. Otherwise `sample` waits for it."""
        return self.edits is None or self.edits.wait(seconds)

    def is_end(self, token: int) -> bool:
        """Return whether `token` ends the sequence."""
        return token in self.ends

    def stop_reason(self, token: int) -> int | None:
        """Return the stop token that ended the sequence; None for an end-of-sequence token."""
        return None if token in self.eos else token

    def is_plain(self) -> bool:
        """Return whether the next token is simply the most likely one."""
        return self.params.temperature == 0 and self.edits is None

    def is_unfiltered(self) -> bool:
        """Return whether the next token is drawn from all tokens, by their logits and a temperature alone."""
        return self.edits is None and not self.filters and self.params.temperature > LEAST_TEMPERATURE

    def wants_best(self) -> bool:
        """Return whether only the most likely token is needed, and no log probabilities."""
        return self.is_plain() and self.params.logprobs is None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one row, with its log probabilities if the row's parameters request them."""

    token: int
    logprobs: TokenLogprobs | None = None


class Best(NamedTuple):
    """The best token of each row and its logit, [n] each: the lowest id of equals, or the first NaN."""

    tokens: Ints
    logits: Floats

    @classmethod
    def of(cls, logits: Floats) -> Best:
        """Find the best tokens of logits [n, vocabulary]."""
        tokens = logits.argmax(axis=1)
        return cls(tokens, logits[np.arange(len(tokens)), tokens])


# Takes a row's scores (float64, the largest 0), their ids (None: all) and the row; returns the index of its token.
Pick = Callable[[Floats, "Ints | None", SampleRow], int]


def draw_index(scores: Floats, ids: Ints | None, row: SampleRow) -> int:
    """Draw the next token of a row with its own noise: the Pick of every row without drafts."""
    return draw(scores, ids, row.noise.key(row.position, PURPOSE_SAMPLE))


def take_best(best: Best) -> list[SampledToken | RequestError]:
    """Return what `sample` returns for rows that need only their best token, if it is known already."""
    pairs = zip(best.tokens.tolist(), best.logits.tolist(), strict=True)
    return [SampledToken(token) if isfinite(logit) else RequestError(BROKEN) for token, logit in pairs]


def sample(
    logits: Floats, rows: Sequence[SampleRow], picks: Sequence[Pick] | None = None
) -> list[SampledToken | RequestError]:
    """Return the next token of each row, or the error of a row that has none.

    logits [n, vocabulary], float32; they are not changed. picks [n]: how each row with a temperature above 0 takes its
    token; None: it is drawn.
    """
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} sequences")
    tokens, top = Best.of(logits)
    picks = [draw_index] * len(rows) if picks is None else picks
    given = zip(logits, rows, tokens.tolist(), top.tolist(), picks, strict=True)
    return [
        _sample(x, row, token, pick) if isfinite(logit) else RequestError(BROKEN)
        for x, row, token, logit, pick in given
    ]


def distribution(logits: Floats, row: SampleRow) -> Distribution:
    """Return the distribution from which `sample` draws a row's next token, after edits, temperature and filters.

    logits [vocabulary]; they are not changed. Raises RequestError where `sample` returns one.
    """
    best = int(logits.argmax())
    if not isfinite(logits[best]):
        raise RequestError(BROKEN)
    if row.is_plain():
        return point_mass(best)
    if (found := _nucleus_first(logits, float(logits[best]), row)) is not None:
        return softmax(*found)
    scores, ids = _edit(logits, row)
    if row.params.temperature == 0:
        return point_mass(int(scores.argmax()))
    return softmax(*_filter(scores, ids, row))


def prompt_logprobs(logits: Floats, next_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return log probabilities of prompt tokens and of the `count` most likely tokens at each position.

    They are from the unmodified distribution. logits [m, vocabulary] at m positions of a prompt; next_ids [m]: the
    token after each. A prompt may be given in chunks of any sizes.
    """
    size = max(1, BLOCK // logits.shape[1])
    entries = []
    for i in range(0, len(next_ids), size):
        tokens = next_ids[i : i + size]
        entries += row_logprobs(logits[i : i + size], tokens, [count] * len(tokens))
    return entries


def _sample(logits: Floats, row: SampleRow, token: int, pick: Pick) -> SampledToken | RequestError:
    """Return the next token of one row. logits [vocabulary]; token: the best of them."""
    if row.wants_best():
        return SampledToken(token)
    params = row.params
    if row.is_unfiltered() and pick is draw_index and params.logprobs is None:
        key = row.noise.key(row.position, PURPOSE_SAMPLE)
        return SampledToken(draw_logits(logits, float(logits[token]), params.temperature, key))
    scores, ids = logits, None  # ids: the token ids of the scores; None: all are there
    if (found := _nucleus_first(logits, float(logits[token]), row)) is not None:
        scores, ids = found
        token = int(ids[pick(scores, ids, row)])
    elif not row.is_plain():
        try:
            scores, ids = _edit(logits, row)
        except RequestError as e:  # its grammar failed, or no token is left
            return e
        if params.temperature == 0:
            index = int(scores.argmax())
        else:
            scores, ids = _filter(scores, ids, row)
            index = pick(scores, ids, row)
        token = index if ids is None else int(ids[index])
    if params.logprobs is None:
        return SampledToken(token)
    source = logits if params.logprobs_mode == "raw" else _whole(scores, ids, logits.size)
    return SampledToken(token, row_logprobs(source[None], [token], [params.logprobs])[0])


def _edit(logits: Floats, row: SampleRow) -> tuple[Floats, Ints | None]:
    """Return the row's scores in float64 after its edits, and their ids; None: all.

    If top_k is the first thing that acts, only the scores that it keeps are copied. Raises RequestError if no token is
    left, or if a grammar failed.
    """
    first = row.edits is None and row.params.temperature > 0 and row.filters[:1] == (keep_top_k,)
    if first and 0 < row.params.top_k < logits.size:
        ids = top_k(logits, row.params.top_k)
        return logits[ids].astype(np.float64), ids
    scores = logits.astype(np.float64)
    if row.edits is not None:
        row.edits.apply(scores)
        if scores.max() == -np.inf:
            raise RequestError(NOTHING_LEFT)
    return scores, None


def _nucleus_first(logits: Floats, top: float, row: SampleRow) -> tuple[Floats, Ints] | None:
    """Return the scores that are drawn from, the largest 0, and their ids, if top_p is the first thing that acts.

    Only likely tokens are computed in float64; the result is that of all tokens. top: the largest logit. Returns None
    if something else acts first, if the likely tokens do not decide which are kept, or without kernels.
    """
    temperature = row.params.temperature
    if row.edits is not None or row.filters[:1] != (keep_top_p,) or temperature <= LEAST_TEMPERATURE:
        return None
    found = likely(logits, top, temperature, LIKELY)
    if found is None:
        return None
    ids, rest = found
    scores = (logits[ids].astype(np.float64) - top) / temperature
    weights = exp_scores(scores)
    likely_mass = weights.sum()
    total = likely_mass + rest
    mass, error = row.params.top_p * total, REST_ERROR * rest + SUM_ERROR * total
    if not likely_mass > mass + error:  # also for a total that is NaN
        return None
    kept = nucleus(scores, weights, row.params.top_p, total)
    held = weights[kept]
    whole = held.sum()
    if min(abs(whole - mass), abs(whole - held.min() - mass)) < error:
        return None  # the rounding of the total could decide whether a token is kept
    left, which = _keep(scores[kept], ids[kept], row, row.filters[1:])
    assert which is not None
    return left, which


def _filter(scores: Floats, ids: Ints | None, row: SampleRow) -> tuple[Floats, Ints | None]:
    """Return the scores that are drawn from, the largest 0, and their ids. The given scores are changed."""
    scores -= scores.max()
    if row.params.temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature makes all other scores minus infinity
            scores /= row.params.temperature
    return _keep(scores, ids, row, row.filters)


def _keep(scores: Floats, ids: Ints | None, row: SampleRow, filters: tuple[Filter, ...]) -> tuple[Floats, Ints | None]:
    """Return the scores that some filters keep, the largest 0, and their ids. scores: after the temperature."""
    kept = kept_ids(scores, row.params, partial(row.noise.uniform, row.position), filters) if filters else None
    if kept is not None:
        scores, ids = scores[kept], kept if ids is None else ids[kept]
        scores -= scores.max()  # XTC removes the best
    return scores, ids


def _whole(scores: Floats, ids: Ints | None, size: int) -> Floats:
    """Return scores of the whole vocabulary: minus infinity for tokens that were filtered out."""
    if ids is None:
        return scores
    out = np.full(size, -np.inf)
    out[ids] = scores
    return out
