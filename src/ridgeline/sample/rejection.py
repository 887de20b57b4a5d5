"""Modified rejection sampling: verify draft tokens so that answers have exactly the model's distribution.

Let p be the model's distribution at a position and q the one that a draft d was drawn from (Leviathan et al.,
arXiv:2211.17192; Chen et al., arXiv:2302.01318, who exchange the letters). The draft is accepted with probability
min(1, p(d) / q(d)). Otherwise the token is drawn from max(0, p - q), renormalized. So the token has distribution p:
min(p, q) of it comes from accepted drafts, the rest from max(0, p - q). Any q is allowed. Two conditions remain:

- The draft was really drawn from the q that is given, or q is None. Then the draft is a point mass, which is exact for
  any draft, and is accepted with probability p(d).
- Whether a draft is verified may depend on the tokens before it, but not on the draft. A proposer that drops a draft
  because of what was drawn must give None.

In a tree (arXiv:2305.09781) the children of a node are tried in turn. A rejected one changes p into max(0, p - q),
renormalized, and the next one is compared with that. If siblings were drawn without replacement, the q of each is
without the siblings before it.

p and q are distributions after penalties, grammar, temperature and filters: those that tokens are drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.ops.draws import TYPICAL_DELTA, TYPICAL_EPSILON
from ridgeline.ops.noise import Key, gumbel
from ridgeline.sample.logits import Floats, Ints, exp_scores

SUM_ERROR = 1e-6  # of the probabilities of a distribution that a proposer gives


class Distribution(NamedTuple):
    """Probabilities of some token ids. ids [n]: ascending. probabilities [n]: float64, their sum is 1."""

    ids: Ints
    probabilities: Floats

    def check(self, vocab_size: int) -> None:
        """Raise ValueError for what is no distribution over the tokens of a vocabulary."""
        ids, probabilities = self
        if not ids.size or ids.shape != probabilities.shape or ids.ndim != 1:
            raise ValueError(f"a distribution has ids {ids.shape} and probabilities {probabilities.shape}")
        if ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
            raise ValueError(f"the ids of a distribution are not ascending token ids below {vocab_size}")
        if not ((probabilities >= 0).all() and abs(probabilities.sum() - 1) < SUM_ERROR):
            raise ValueError("the probabilities of a distribution are negative, or their sum is not 1")

    def of(self, token: int) -> float:
        """Return the probability of a token."""
        at = int(np.searchsorted(self.ids, token))
        return float(self.probabilities[at]) if at < self.ids.size and self.ids[at] == token else 0.0

    def scores(self) -> Floats:
        """Return logarithms of weights [n], the largest 0."""
        with np.errstate(divide="ignore"):
            scores: Floats = np.log(self.probabilities / self.probabilities.max())
        return scores


class Draft(NamedTuple):
    """A draft token. q: the distribution that it was drawn from; None: a point mass.

    parent: in a tree, the index of the draft that it follows (spec/trees.py); None: the one before it.
    """

    token: int
    q: Distribution | None = None
    parent: int | None = None


Uniform = Callable[[int], float]  # number of a sibling -> a number in [0, 1)
Draw = Callable[[Distribution], int]  # draws a token with noise that nothing else uses


def softmax(scores: Floats, ids: Ints | None) -> Distribution:
    """Return the distribution of scores [n], the largest 0. ids [n]: their token ids; None: 0 to n - 1."""
    weights = exp_scores(scores)
    weights /= weights.sum()
    return Distribution(np.arange(scores.size) if ids is None else ids, weights)


def point_mass(token: int) -> Distribution:
    """Return the distribution that has one token only."""
    return Distribution(np.array([token]), np.ones(1))


def accepts(p: Distribution, draft: Draft, uniform: float) -> bool:
    """Return whether a draft is accepted: with probability min(1, p / q)."""
    q = 1.0 if draft.q is None else draft.q.of(draft.token)
    return uniform * q < p.of(draft.token)


def residual(p: Distribution, draft: Draft) -> Distribution:
    """Return max(0, p - q), renormalized, from which the token in place of a rejected draft is drawn."""
    q = point_mass(draft.token) if draft.q is None else draft.q
    return _normal(p.ids, np.maximum(p.probabilities - _aligned(q, p.ids), 0), p)


def without(q: Distribution, token: int) -> Distribution:
    """Return q without a token, renormalized: the distribution of the next sibling."""
    return _normal(q.ids, np.where(q.ids == token, 0.0, q.probabilities), q)


def draw_siblings(q: Distribution, count: int, key: Key) -> list[Draft]:
    """Draw different tokens in turn from q, each from what the ones before it left; fewer if q has fewer.

    key: names the noise. The largest sums of score and Gumbel noise, in order, are such a draw (Kool et al.,
    arXiv:1903.06059), and the first one is what a single draw gives.
    """
    possible = np.flatnonzero(q.probabilities > 0)
    q = Distribution(q.ids[possible], q.probabilities[possible])
    sums = q.scores() + gumbel(key, q.ids)
    drafts: list[Draft] = []
    for token in q.ids[np.argsort(-sums, kind="stable")[:count]].tolist():
        drafts.append(Draft(token, q))
        q = without(q, token)
    return drafts


def choose(p: Distribution, drafts: Sequence[Draft], uniform: Uniform, draw: Draw) -> tuple[int | None, int]:
    """Return which of the drafts for one position is accepted, and the token there; (None, token) if none is.

    drafts: siblings, in the order in which they were drawn.
    """
    for number, draft in enumerate(drafts):
        if accepts(p, draft, uniform(number)):
            return number, draft.token
        p = residual(p, draft)
    return None, draw(p)


def is_typical(p: Distribution, token: int) -> bool:
    """Return whether Medusa's typical acceptance takes a draft. It changes the distribution of answers."""
    possible = p.probabilities[p.probabilities > 0]
    entropy = -float((possible * np.log(possible)).sum())
    return p.of(token) > min(TYPICAL_EPSILON, TYPICAL_DELTA * float(np.exp(-entropy)))


def _aligned(q: Distribution, ids: Ints) -> Floats:
    """Return the probabilities of `ids` [m], ascending, under q."""
    if q.ids.size == ids.size and np.array_equal(q.ids, ids):
        return q.probabilities
    at = np.minimum(np.searchsorted(q.ids, ids), q.ids.size - 1)
    return np.where(q.ids[at] == ids, q.probabilities[at], 0.0)


def _normal(ids: Ints, weights: Floats, otherwise: Distribution) -> Distribution:
    """Return the distribution of weights without the zeros; `otherwise` if rounding leaves no weight."""
    kept = np.flatnonzero(weights)
    if not kept.size:
        return otherwise
    return Distribution(ids[kept], weights[kept] / weights[kept].sum())
