"""A toy of speculative sampling: a model and a draft of a few tokens, verified by the engine's own rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.sample.rejection import Distribution, Draft, choose

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
STATES, TOKENS, DEPTH = 5, 3, 2  # tokens of the vocabulary; tokens that are compared; drafts of a verification
LEAST = 5  # answers that a cell of chi-square should expect


def toy(seed: int) -> tuple[Floats, Floats]:
    """Return the probabilities of the next token after each token, of a model and of a draft, [STATES, STATES] each."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet([2.0] * STATES, STATES), rng.dirichlet([2.0] * STATES, STATES)


class Sampler:
    """Draws answers of the toy as the engine verifies drafts.

    number: stream of random numbers. with_bug: a rejected draft is drawn again from p, the classic mistake, and
    not from max(0, p - q).
    """

    def __init__(self, seed: int, number: int, *, with_bug: bool = False) -> None:
        self._p, self._q = ([Distribution(np.arange(STATES), row) for row in rows] for rows in toy(seed))
        self._rng, self._with_bug = np.random.default_rng((seed, number, with_bug)), with_bug

    def _draw(self, found: Distribution) -> int:
        sums = np.cumsum(found.probabilities)
        at = int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))
        return int(found.ids[min(at, found.ids.size - 1)])

    def verify(self, token: int, depth: int, *, moves: bool = True) -> list[int]:
        """Return the tokens of one verification after a token. moves: whether each token changes the distributions."""
        out: list[int] = []
        for _ in range(depth):
            p, draft = self._p[token], Draft(self._draw(self._q[token]), self._q[token])
            kept, found = choose(p, [draft], lambda _: self._rng.random(), self._again(p))
            out.append(found)
            if kept is None:
                return out
            token = found if moves else token
        return [*out, self._draw(self._p[token])]

    def _again(self, p: Distribution) -> Any:
        return (lambda rest: self._draw(p)) if self._with_bug else self._draw

    def counts(self, answers: int) -> Ints:
        """Return how often each answer of TOKENS tokens is drawn, [STATES ** TOKENS]."""
        found = np.zeros((STATES,) * TOKENS, np.int64)
        for _ in range(answers):
            ids = [0]
            while len(ids) <= TOKENS:
                ids += self.verify(ids[-1], DEPTH)
            found[tuple(ids[1 : TOKENS + 1])] += 1
        return found.ravel()


def deviations(counts: Ints, p: Floats) -> float:
    """Return the chi-square of answers against the model's own law, in standard deviations (Wilson, Hilferty 1931).

    Answers of which fewer than LEAST are expected are counted together.
    """
    expected = counts.sum() * (p[0][:, None, None] * p[:, :, None] * p[None]).ravel()
    rare = expected < LEAST
    wanted, found = (np.append(x[~rare], x[rare].sum()) for x in (expected, counts))
    square = float(((found - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    spread = 2 / (9 * (wanted.size - 1))
    return float(((square / (wanted.size - 1)) ** (1 / 3) - 1 + spread) / spread**0.5)
