"""Fill the answer of one sequence, canvas after canvas (DiffusionGemma).

A canvas begins as random tokens after the known ones. A pass predicts all of its tokens at once. Tokens that are nearly
independent are drawn and kept, the others are drawn again at random from the whole vocabulary, and the next pass also
reads the mean embeddings of this prediction. A canvas is done when passes agree on its most likely tokens and are sure
of them, or after the last pass. Its result is the most likely tokens of the last pass. A preemption or other company
changes nothing: the state is here, and noise depends on the seed, the answer, the pass and the position alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ridgeline.diffusion.commit import within_entropy
from ridgeline.diffusion.confidence import Laws, entropy
from ridgeline.diffusion.denoiser import ELEMENTS, Edits, PassNoise
from ridgeline.errors import RequestError
from ridgeline.sample.logit_rows import LogitRows
from ridgeline.sample.logits import Floats, row_logprobs
from ridgeline.sample.noise import PURPOSE_CANVAS
from ridgeline.sample.sampler import BROKEN, NOTHING_LEFT, SampledToken, SampleRow, sample
from ridgeline.sched.work import Result, Work
from ridgeline.spec.diffusion import CanvasDiffusion
from ridgeline.spec.request import TokenLogprobs

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

    def take(self, logits: LogitRows, work: Work) -> Result:
        """Return the result of a pass: the canvas's tokens if it is done, else none. logits: a row for each of them."""
        if not work.num_draft:
            return Result()
        self.passes += 1
        left, model, found = self._most - self._number, self._model, Predicted()
        temperature = np.float32(model.t_min + (model.t_max - model.t_min) * (left / self._most))
        for first, piece in logits.pieces():
            if error := self._predict(found, first, piece, temperature, is_last=left == 1):
                return Result(error=error)
        best, entropies = found.best, found.entropies
        is_stable = len(self._found) >= model.stable_passes and all(tokens == best for tokens in self._found)
        if left == 1 or (is_stable and sum(entropies) / len(entropies) < model.confident):
            return self._result(found)
        self._number += 1
        kept = set(within_entropy(entropies, self._bound))
        for i in range(len(self._tokens)):
            drawn = found.drawn[i] if i in kept else self._random(i)
            if isinstance(drawn, RequestError):
                return Result(error=drawn)
            self._tokens[i] = drawn if isinstance(drawn, int) else drawn.token
        self._found = [*self._found, best][-model.stable_passes :] if model.stable_passes else []
        self.signal = np.concatenate([*found.signal, *map(self._soften, found.waiting)])
        return Result()

    def _predict(
        self, found: Predicted, first: int, logits: Floats, temperature: np.float32, *, is_last: bool
    ) -> RequestError | None:
        """Add what some rows of logits predict. first: the index of the first row's token. is_last: in the last pass.

        A token is drawn if it is among those of little entropy so far: of these, some stay after all rows were read.
        """
        scores, at = np.array(logits, np.float32), self._start - self._prompt + first
        self._edits.apply(scores, range(at, at + len(scores)))
        if error := _broken(logits, scores):
            return error
        scores /= temperature
        for laws in _laws(scores):
            found.entropies += (-entropy(laws, NONE, NO_NOISE)).tolist()
            if not is_last:
                found.mix(np.divide(laws.weights, laws.totals[:, None], dtype=np.float32), self._soften)
        found.best += [int(token) for token in scores.argmax(-1)]
        if (wanted := self._row.params.logprobs) is not None:
            found.entries += row_logprobs(logits, found.best[first:], [wanted] * len(scores))
        if not is_last:
            row, params = self._row, replace(self._row.params, logprobs=None)
            kept, noise = sorted(i for i in within_entropy(found.entropies, self._bound) if i >= first), self._noise()
            rows = [SampleRow(params, noise, self._start + i, row.eos, row.ends, None, row.filters) for i in kept]
            found.drawn |= zip(kept, sample(scores[[i - first for i in kept]], rows) if kept else (), strict=True)
        return None

    def _result(self, found: Predicted) -> Result:
        """Return the canvas's tokens up to the answer's end."""
        new = found.best[: self._max_length - self._start]
        end = next((i for i, token in enumerate(new) if self._row.is_end(token)), None)
        if end is not None:
            new = new[: end + 1]
        return Result(tuple(new), end is not None, tuple(found.entries[: len(new)]))


@dataclass(slots=True)
class Predicted:
    """The prediction of a pass for the tokens of a canvas so far.

    best: the most likely tokens. entropies: in nats. drawn: tokens of little entropy, by index. signal: mean embeddings
    of the first tokens, pieces [n, hidden size]. waiting: distributions of the tokens after these, one array or none.
    entries: log probabilities of the most likely tokens, if they are wanted.
    """

    best: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    drawn: dict[int, SampledToken | RequestError] = field(default_factory=dict)
    signal: list[Floats] = field(default_factory=list)
    waiting: list[Floats] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)

    def mix(self, chances: Floats, soften: Softens) -> None:
        """Add distributions [n, vocabulary] to those that wait, and compute mean embeddings where enough wait.

        Their number in one product is always the same, since its rounding depends on it.
        """
        waiting, per = np.concatenate([*self.waiting, chances]), max(1, ELEMENTS // chances.shape[1])
        whole = len(waiting) // per * per
        self.signal += [soften(waiting[at : at + per]) for at in range(0, whole, per)]
        self.waiting = [waiting[whole:].copy()] if whole < len(waiting) else []


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
