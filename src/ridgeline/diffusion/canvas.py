"""Fill the answer of one sequence, canvas after canvas (DiffusionGemma).

A canvas begins as random tokens after the known ones. A pass predicts all of its tokens at once. Tokens that are nearly
independent are drawn and kept, the others are drawn again at random from the whole vocabulary, and the next pass also
reads the mean embeddings of this prediction. A canvas is done when passes agree on its most likely tokens and are sure
of them, or after the last pass. Its result is the most likely tokens of the last pass. A preemption or other company
changes nothing: the state is here, and noise depends on the seed, the answer, the pass and the position alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ridgeline.diffusion.commit import within_entropy
from ridgeline.diffusion.confidence import Laws, entropy
from ridgeline.diffusion.denoiser import ELEMENTS, Edits, PassNoise
from ridgeline.errors import RequestError
from ridgeline.sample.logits import Floats, row_logprobs
from ridgeline.sample.noise import PURPOSE_CANVAS
from ridgeline.sample.sampler import BROKEN, NOTHING_LEFT, SampleRow, sample
from ridgeline.sched.work import Result, Work
from ridgeline.spec.diffusion import CanvasDiffusion

NONE, NO_NOISE = np.zeros(0, np.int64), np.zeros(0)  # an entropy needs neither tokens nor noise


class Softens(Protocol):
    """Computes mean embeddings: distributions [n, vocabulary], float32 -> [n, hidden size], float32."""

    @property
    def width(self) -> int:
        """Return the hidden size."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        ...

    def __call__(self, chances: Floats) -> Floats: ...


class CanvasDenoiser:
    """Fills the answer of one sequence; see the top of the file.

    row: the row of the answer at the end of its prompt. max_length: tokens of the prompt and the longest answer.
    soften: computes mean embeddings. passes: passes that were computed. signal: float32 [canvas, hidden size], which
    the next pass reads.
    """

    def __init__(self, model: CanvasDiffusion, row: SampleRow, max_length: int, soften: Softens) -> None:
        self._model, self._row, self._max_length, self._soften = model, row, max_length, soften
        self._most = row.params.denoising_passes or model.passes
        bound = row.params.entropy_bound
        self._bound = model.entropy_bound if bound is None else bound
        self._edits = Edits(row, None)
        self._start, self._prompt, self._number = -1, row.position, 0
        self._tokens: list[int] = []
        self._found: list[list[int]] = []  # the most likely tokens of the last passes, the latest one last
        self._zeros = np.zeros((model.canvas, soften.width), np.float32)
        self.signal = self._zeros
        self.passes = 0

    def open_block(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the open canvas of a sequence. tokens: the prompt, and the answer so far."""
        if self._start != len(tokens):
            self._start, self._number, self._found, self.signal = len(tokens), 0, [], self._zeros
            self._tokens = [self._random(i) for i in range(self._model.canvas)]
        return tuple(self._tokens)

    def _noise(self) -> PassNoise:
        return PassNoise(self._row.noise.seed, self._row.noise.choice, self._number)

    def _random(self, index: int) -> int:
        """Return a random token of the vocabulary for the canvas's token `index` in the next pass."""
        uniform = self._noise().uniform(self._start + index, PURPOSE_CANVAS)
        return int(uniform * self._soften.vocab_size)

    def take(self, logits: Floats, work: Work) -> Result:
        """Return the result of a pass: the canvas's tokens if it is done, else none. logits: [canvas, vocabulary]."""
        if not work.num_draft:
            return Result()
        self.passes += 1
        left, model = self._most - self._number, self._model
        temperature = np.float32(model.t_min + (model.t_max - model.t_min) * (left / self._most))
        scores, first = np.array(logits, np.float32), self._start - self._prompt
        self._edits.apply(scores, range(first, first + len(scores)))
        if error := _broken(logits, scores):
            return Result(error=error)
        scores /= temperature
        entropies = [value for laws in _laws(scores) for value in (-entropy(laws, NONE, NO_NOISE)).tolist()]
        best = [int(token) for token in scores.argmax(-1)]
        is_stable = len(self._found) >= model.stable_passes and all(tokens == best for tokens in self._found)
        is_done = left == 1 or (is_stable and sum(entropies) / len(entropies) < model.confident)
        if is_done:
            return self._result(best, logits)
        error = self._draw_again(scores, entropies)
        if error is not None:
            return Result(error=error)
        self._found = [*self._found, best][-model.stable_passes :] if model.stable_passes else []
        chances = (np.divide(laws.weights, laws.totals[:, None], dtype=np.float32) for laws in _laws(scores))
        self.signal = np.concatenate([self._soften(some) for some in chances])
        return Result()

    def _draw_again(self, scores: Floats, entropies: Sequence[float]) -> RequestError | None:
        """Draw the tokens of the next pass: from this prediction where they are kept, and else at random."""
        row, kept = self._row, set(within_entropy(entropies, self._bound))
        params, noise = replace(row.params, logprobs=None), self._noise()
        rows = [SampleRow(params, noise, self._start + i, row.eos, row.ends, None, row.filters) for i in sorted(kept)]
        found = dict(zip(sorted(kept), sample(scores[sorted(kept)], rows), strict=True))
        self._number += 1
        for i in range(len(self._tokens)):
            if (drawn := found.get(i)) is None:
                self._tokens[i] = self._random(i)
            elif isinstance(drawn, RequestError):
                return drawn
            else:
                self._tokens[i] = drawn.token
        return None

    def _result(self, best: Sequence[int], logits: Floats) -> Result:
        """Return the canvas's tokens up to the answer's end."""
        new = list(best[: self._max_length - self._start])
        end = next((i for i, token in enumerate(new) if self._row.is_end(token)), None)
        if end is not None:
            new = new[: end + 1]
        wanted = self._row.params.logprobs
        if wanted is None:
            return Result(tuple(new), end is not None)
        return Result(tuple(new), end is not None, tuple(row_logprobs(logits[: len(new)], new, [wanted] * len(new))))


def _laws(scores: Floats) -> Iterator[Laws]:
    """Yield the laws of some rows of scores [n, vocabulary] at a time: those of a whole canvas take much memory."""
    per = max(1, ELEMENTS // scores.shape[1])
    for at in range(0, len(scores), per):
        yield Laws.of(scores[at : at + per])


def _broken(logits: Floats, scores: Floats) -> RequestError | None:
    """Return the error of logits that are not finite, or of which no token is left."""
    best = logits.max(-1)
    if not np.isfinite(best).all():
        return RequestError(BROKEN)
    return RequestError(NOTHING_LEFT) if (scores.max(-1) == -np.inf).any() else None
