"""Fill the answer of one sequence, block after block, by passes over the open block.

The open block is the tokens after the last whole block, and masks up to the block's end. A pass predicts all masks.
Some predictions are kept, and the others become masks again. Once no mask is left, the block is done and the next one
opens; with token editing, passes go on until one changes nothing. A preemption or other company changes nothing: the
state is here, and noise depends on the seed, the answer, the pass and the position alone.

In a model that sees whole sequences, a pass computes all tokens: the prompt, the answer so far, the open block, and
masks for the rest of the answer; a suffix may follow. So the length of the answer is a part of the question. Blocks
begin at the end of the prompt, and are as long as `block_length` says. With a block cache (Fast-dLLM,
arXiv:2505.22618), only the first pass over a block computes all tokens: later ones compute the block, and with `prefix`
all after it, and read the rows of the others as the first pass left them. If these are lost, the first pass is computed
once more, with the tokens that it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import numpy as np

from ridgeline.diffusion.commit import SCHEDULES, above, by_time, surest, within_entropy, within_factor
from ridgeline.diffusion.confidence import CONFIDENCES, Laws
from ridgeline.diffusion.edit import is_settled, replaced
from ridgeline.errors import RequestError
from ridgeline.ops.noise import Key
from ridgeline.sample.logit_rows import LogitRows
from ridgeline.sample.logits import Floats, row_logprobs
from ridgeline.sample.noise import PURPOSE_ORDER
from ridgeline.sample.sampler import BROKEN, NOTHING_LEFT, NoiseKey, SampledToken, SampleRow, sample
from ridgeline.sched.work import Result, Work
from ridgeline.spec.diffusion import MaskedDiffusion
from ridgeline.spec.request import SamplingParams, TokenLogprobs
from ridgeline.spec.sight import BEYOND

ELEMENTS = 1 << 22  # logits that are worked on at once


@dataclass(frozen=True, slots=True)
class PassNoise(NoiseKey):
    """Noise of one pass over a block. The first pass has the noise of an autoregressive model."""

    number: int = 0

    def key(self, position: int, purpose: int, index: int = 0) -> Key:
        return NoiseKey.key(self, position, purpose, index + (self.number << 32))


@dataclass(slots=True)
class Block:
    """The open block. start: its first position. tokens: mask tokens included. masks: indices of those, ascending.

    fixed: number of its first tokens that are of the prompt. size: masks at first. edits: passes since it has no mask.
    first: all tokens of the first pass, in a whole sequence.
    """

    start: int
    tokens: list[int]
    masks: list[int]
    counts: list[int]
    fixed: int = 0
    size: int = 0
    number: int = 0  # of the next pass
    edits: int = 0
    first: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of a pass for the block's token `index`.

    entry: its log probabilities, if they are wanted. confidence: larger ones are kept first. probability: the chance of
    the token found.
    """

    index: int
    found: SampledToken
    entry: TokenLogprobs | None
    confidence: float
    probability: float


class Denoiser:
    """Fills the answer of one sequence; see the top of the file.

    block: tokens of a block, or BEYOND. row: the row of the answer at the end of its prompt. passes: passes that were
    computed. max_length: tokens of the prompt and the longest answer. wanted: the first and the end of the tokens of a
    whole sequence whose logits `take` expects; None: those of the open block, and of the token before it. part: if the
    pass computes a part of a whole sequence, the position of its first token, and the number of rows that it reads;
    `wanted` counts from there.
    """

    def __init__(self, model: MaskedDiffusion, block: int, row: SampleRow, prompt: int, max_length: int) -> None:
        self._model, self._block, self._row = model, block, row
        self._prompt, self._max_length = prompt, max_length
        bounded = row.params.entropy_bound is not None
        self._confidence = CONFIDENCES["entropy" if bounded else row.params.remasking]
        self._edits = Edits(row, model.mask_token)
        processed = row.params.logprobs_mode == "processed"
        self._drawn = row.params if processed else replace(row.params, logprobs=None)  # parameters of a draw
        self._open = Block(-1, [], [], [])
        self._whole = block >= BEYOND
        self._unguided: LogitRows | None = None  # logits of the pass without the prompt, for `cfg_scale`
        self.wanted: tuple[int, int] | None = None
        self.part: tuple[int, int] | None = None
        self._kept_rows = -1  # the epoch in which the first pass over the open block has left its rows
        self._before: Floats | None = None  # logits [1, vocabulary] of the last token before the block
        self.passes = 0

    @property
    def first(self) -> tuple[int, ...]:
        """Return all tokens of the first pass over the open block, in a whole sequence."""
        return self._open.first

    def open_block(self, tokens: Sequence[int], epoch: int = 0) -> tuple[int, ...]:
        """Return the open block of a sequence, or of a whole sequence the tokens that the next pass computes.

        tokens: the prompt, and the answer so far. epoch: it changes when the sequence loses its rows.
        """
        start = len(tokens) if self._whole else len(tokens) // self._block * self._block
        if start + len(self._open.tokens) <= len(tokens) or start != self._open.start:
            self._begin(start, list(tokens[start:]))
        if not self._whole:
            return tuple(self._open.tokens)
        whole = self._sequence(tokens)
        if self._open.number == 0:
            self._open.first, self._kept_rows = whole, -1
        self.part = None
        if self._model.block_cache == "none":
            return whole
        return self._part(whole) if self._kept_rows == epoch else self._open.first

    def _part(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of a later pass with a block cache, and set `part` and `wanted`.

        They begin with the token whose logits predict the block's first one.
        """
        assert self.wanted is not None
        (first, end), count = self.wanted, len(self._open.tokens)
        self.part, self.wanted = (first, len(whole)), (0, count)
        return whole[first : end + self._model.predicts_next if self._model.block_cache == "dual" else None]

    def _begin(self, start: int, known: list[int]) -> None:
        """Open the block at `start`, whose first tokens are known."""
        size, passes = self._block, self._row.params.denoising_passes
        if self._whole:
            rest = self._max_length - start
            size = min(self._row.params.block_length or rest, rest)
        masks = list(range(len(known), size))
        counts = [1] * len(masks) if passes is None else SCHEDULES[self._model.schedule](len(masks), passes)
        self._open = Block(start, known + [self._model.mask_token] * len(masks), masks, counts, len(known), len(masks))

    def _sequence(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return all tokens of the next pass, and set `wanted`. With guidance, one of two passes sees no prompt."""
        start, mask = self._open.start, self._model.mask_token
        end = start + len(self._open.tokens)
        self.wanted = (start - self._model.predicts_next, end - self._model.predicts_next)
        known = list(tokens)
        suffix = self._row.params.suffix_token_ids
        if self._row.params.cfg_scale and self._unguided is None:
            known[: self._prompt] = [mask] * self._prompt
            suffix = (mask,) * len(suffix)
        return (*known, *self._open.tokens, *[mask] * (self._max_length - end), *suffix)

    def take(self, logits: LogitRows, work: Work) -> Result:
        """Take the logits of a pass; return all new tokens if the block is done, and no tokens otherwise.

        logits: a row for the last token before the block, if the work has it, and for each of its own.
        """
        if self._whole:
            if self._model.block_cache != "none" and self.part is None:
                self._kept_rows = work.epoch
                if self._open.number:  # only its rows were wanted
                    return Result()
            self.passes += 1
            guided = self._guided(logits)
            return Result() if guided is None else self._keep(guided, 0)
        has_before = len(work.tokens) > work.num_draft
        if has_before and self._model.predicts_next:
            self._before = logits.read(0, 1).copy()
        if not work.num_draft:
            return Result()
        self.passes += 1
        return self._keep(logits, has_before - self._model.predicts_next)

    def _guided(self, logits: LogitRows) -> LogitRows | None:
        """Return logits away from those without the prompt (LLaDA's `cfg_scale`); None if these were just computed."""
        scale = self._row.params.cfg_scale
        if not scale:
            return logits
        if self._unguided is None:
            self._unguided = logits.keep()
            return None
        without, self._unguided = self._unguided, None

        def read(first: int, end: int) -> Floats:
            some = logits.read(first, end)
            plain = without.read(first, first + len(some))
            some = some[: len(plain)]
            return np.asarray(plain + (scale + 1) * (some - plain), np.float32)

        return LogitRows(logits.count, read, logits.keep)

    def _keep(self, own: LogitRows, first: int) -> Result:
        """Keep some predictions of a pass. first: the row that predicts the block's first token; -1: none does."""
        block, threshold = self._open, self._row.params.edit_threshold
        had_masks, known = bool(block.masks), []
        if threshold is not None:
            known = [i for i in range(block.fixed, len(block.tokens)) if i not in block.masks]
        predictions = self._predict(own, first, (*block.masks, *known))
        if isinstance(predictions, RequestError):
            return Result(error=predictions)
        changes = self._kept(predictions[: len(block.masks)])
        if threshold is not None:
            changes += self._replaced(predictions[len(block.masks) :], threshold)
        for one in changes:
            self._commit(one)
        filled = {one.index for one in changes}
        block.masks = [i for i in block.masks if i not in filled]
        block.number += 1
        block.edits += not had_masks
        if threshold is not None and not is_settled(had_masks, bool(changes), block.edits):
            return Result()
        return self._result()

    def _predict(self, own: LogitRows, first: int, indices: Sequence[int]) -> list[Prediction] | RequestError:
        """Return what the logits of a pass predict for the block's tokens at `indices`, in this order."""
        found: dict[int, Prediction] = {}
        for at, piece in self._pieces(own, first, indices):
            chosen = [i for i in indices if 0 <= i - at < len(piece)]
            per = max(1, ELEMENTS // piece.shape[1])
            for one in range(0, len(chosen), per):
                some = chosen[one : one + per]
                predictions = self._predict_some(piece[[i - at for i in some]], some)
                if isinstance(predictions, RequestError):
                    return predictions
                found |= zip(some, predictions, strict=True)
        return [found[i] for i in indices]

    def _pieces(self, own: LogitRows, first: int, indices: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        """Yield logits that predict tokens of the block: the index of the first of them, and a row for each."""
        if not indices:
            return
        least = min(indices)
        if least + first < 0:
            assert self._before is not None, "the token before the block was not computed"
            yield 0, self._before
            least = 1
        for at, piece in own.pieces(least + first, max(indices) + first + 1):
            yield at - first, piece

    def _predict_some(self, raw: Floats, indices: Sequence[int]) -> list[Prediction] | RequestError:
        """Return what rows of logits predict for the block's tokens at `indices`."""
        scores, positions = raw.copy(), [self._open.start + i for i in indices]
        best = scores.max(axis=1)
        self._edits.apply(scores, [at - self._prompt for at in positions])
        for top, left in zip(best.tolist(), scores.max(axis=1).tolist(), strict=True):
            if not isfinite(top):
                return RequestError(BROKEN)
            if left == -inf:
                return RequestError(NOTHING_LEFT)
        row, noise = self._row, self._noise()
        drawn = sample(
            scores, [SampleRow(self._drawn, noise, at, row.eos, row.ends, None, row.filters) for at in positions]
        )
        tokens: list[SampledToken] = []
        for one in drawn:
            if isinstance(one, RequestError):
                return one
            tokens.append(one)
        laws, ids = Laws.of(scores), np.array([one.token for one in tokens])
        uniforms = np.array([noise.uniform(at, PURPOSE_ORDER) for at in positions])
        confidences, chances = self._confidence(laws, ids, uniforms).tolist(), laws.chances(ids).tolist()
        entries = self._entries(raw, tokens)
        return [Prediction(*one) for one in zip(indices, tokens, entries, confidences, chances, strict=True)]

    def _entries(self, raw: Floats, tokens: Sequence[SampledToken]) -> Sequence[TokenLogprobs | None]:
        """Return the log probabilities of tokens, if they are wanted. raw: their logits."""
        wanted = self._row.params.logprobs
        if wanted is None:
            return [None] * len(tokens)
        if self._drawn.logprobs is not None:
            return [one.logprobs for one in tokens]
        return row_logprobs(raw, [one.token for one in tokens], [wanted] * len(tokens))

    def _noise(self) -> PassNoise:
        noise = self._row.noise
        return PassNoise(noise.seed, noise.choice, self._open.number)

    def _kept(self, masked: Sequence[Prediction]) -> list[Prediction]:
        """Return which predictions of masked tokens are kept."""
        params, block = self._row.params, self._open
        if not masked:
            return []
        if params.confidence_threshold is not None:
            kept = above([one.probability for one in masked], params.confidence_threshold)
        elif params.confidence_factor is not None:
            kept = within_factor([one.probability for one in masked], params.confidence_factor)
        elif params.entropy_bound is not None:
            kept = within_entropy([-one.confidence for one in masked], params.entropy_bound)
        elif params.remasking == "origin":
            kept = self._by_time(masked)
        else:
            kept = surest([one.confidence for one in masked], block.counts[block.number])
        return [masked[i] for i in kept]

    def _by_time(self, masked: Sequence[Prediction]) -> list[int]:
        """Return what passes keep from now on, up to the first one that keeps any: the others would change nothing."""
        block, passes = self._open, self._row.params.denoising_passes or self._open.size
        while True:
            noise = self._noise()
            uniforms = [noise.uniform(block.start + one.index, PURPOSE_ORDER) for one in masked]
            if kept := by_time(uniforms, block.number, passes):
                return kept
            block.number += 1

    def _replaced(self, known: Sequence[Prediction], threshold: float) -> list[Prediction]:
        """Return which predictions replace tokens that the block has."""
        tokens = [self._open.tokens[one.index] for one in known]
        found, chances = [one.found.token for one in known], [one.probability for one in known]
        return [known[i] for i in replaced(tokens, found, chances, threshold)]

    def _commit(self, one: Prediction) -> None:
        self._open.tokens[one.index] = one.found.token
        if one.entry is not None:
            self._open.logprobs[one.index] = one.entry

    def _result(self) -> Result:
        """Return the new tokens if all of them are known up to the end of the block, or up to the answer's end."""
        block = self._open
        first = max(self._prompt, block.start) - block.start if block.start < self._prompt else 0
        stop = min(len(block.tokens), self._max_length - block.start)
        known = min(block.masks, default=len(block.tokens))
        new = block.tokens[first : min(stop, known)]
        end = next((i for i, token in enumerate(new) if self._row.is_end(token)), None)
        if end is not None:
            new = new[: end + 1]
        elif known < stop:
            return Result()
        entries = () if self._row.params.logprobs is None else tuple(block.logprobs[first + i] for i in range(len(new)))
        return Result(tuple(new), end is not None, entries)


class Edits:
    """The changes of scores that do not depend on other tokens: masks and biases."""

    def __init__(self, row: SampleRow, mask_token: int | None) -> None:
        params: SamplingParams = row.params
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, np.int64)
        single = [sequence[0] for sequence in params.bad_token_sequences]
        masks = [] if mask_token is None else [mask_token]
        self._bad = np.array([*masks, *params.bad_token_ids, *single], np.int64)
        self._ends, self._min_tokens = np.array(sorted(row.ends), np.int64), params.min_tokens
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)

    def apply(self, scores: Floats, indices: Sequence[int]) -> None:
        """Edit scores [n, vocabulary] of the answer's tokens at `indices` in place; a mask token is never left."""
        if self._allowed is not None:
            kept = scores[:, self._allowed]
            scores.fill(-np.inf)
            scores[:, self._allowed] = kept
        scores[:, self._biased] += self._bias
        scores[:, self._bad] = -np.inf
        early = [i for i, index in enumerate(indices) if index < self._min_tokens]
        if early:
            scores[np.array(early)[:, None], self._ends] = -np.inf
