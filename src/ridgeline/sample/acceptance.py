"""Accept draft tokens in one of three ways, and draw drafts that suit it.

same: a draft is accepted if it is what the model samples there, so that drafts change no token. Drafts are drawn with
the noise of the answer itself, which makes them agree often. rejection: rejection.py; answers have the model's
distribution, but other tokens than without drafts. typical: a draft is accepted if it is likely enough, which changes
the distribution of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.ops.draws import LEAST_TEMPERATURE, NO_TRIAL, Draw
from ridgeline.ops.noise import gumbel
from ridgeline.sample.drawing import draw
from ridgeline.sample.filters import keep_min_p, keep_top_k, keep_top_p
from ridgeline.sample.logits import Floats, Ints
from ridgeline.sample.noise import PURPOSE_ACCEPT, PURPOSE_DRAFT, PURPOSE_RESIDUAL, PURPOSE_SAMPLE
from ridgeline.sample.rejection import Distribution, Draft, choose, draw_siblings, is_typical, softmax
from ridgeline.sample.sampler import BROKEN, Pick, SampleRow, distribution, draw_index, sample
from ridgeline.sample.tree import best
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.trees import ROOT, children, depths

# The filters of the op DRAW.
_OF_DRAW = frozenset({keep_top_k, keep_top_p, keep_min_p})


@dataclass(frozen=True, slots=True)
class Rejection:
    """Takes the token of a row by rejection sampling. drafts: the drafts at its position; siblings in a tree."""

    drafts: Sequence[Draft]

    def __call__(self, scores: Floats, ids: Ints | None, row: SampleRow) -> int:
        """Return the index of the token among the scores."""
        noise, at = row.noise, row.position

        def drawn(left: Distribution) -> int:
            key = noise.key(at, PURPOSE_RESIDUAL)
            return int(left.ids[draw(left.scores(), left.ids, key)])

        p = softmax(scores, ids)
        _, token = choose(p, self.drafts, lambda number: noise.uniform(at, PURPOSE_ACCEPT, number), drawn)
        return int(np.searchsorted(p.ids, token))


@dataclass(frozen=True, slots=True)
class Typical:
    """Takes the first draft of a row that is likely enough; if there is none, it draws the token.

    tokens: the drafts at its position.
    """

    tokens: Sequence[int]

    def __call__(self, scores: Floats, ids: Ints | None, row: SampleRow) -> int:
        """Return the index of the token among the scores."""
        p = softmax(scores, ids)
        taken = next((token for token in self.tokens if is_typical(p, token)), None)
        return draw_index(scores, ids, row) if taken is None else int(np.searchsorted(p.ids, taken))


def pick_of(acceptance: Acceptance, drafts: Sequence[Draft]) -> Pick:
    """Return how a row takes its token. drafts: the drafts at its position, in the order in which they are tried."""
    if not drafts or acceptance == "same":
        return draw_index
    return Rejection(drafts) if acceptance == "rejection" else Typical([draft.token for draft in drafts])


def confidences(logits: Floats, row: SampleRow, acceptance: Acceptance) -> Floats:
    """Return how likely each token is to be accepted at a position, as log probabilities [n, vocabulary].

    logits [n, vocabulary]: after n drafts for the position before, of a draft model. row: as in `draw_draft`. With
    `same` and a temperature above 0 they are those of the sums of score and noise, since the model samples with the
    same noise. Raises RequestError where there is no token.
    """
    if row.params.temperature > 0:
        return np.stack([_sampled_confidences(x, row, acceptance) for x in logits])
    top = logits.max(1, keepdims=True)
    if not np.isfinite(top).all():
        raise RequestError(BROKEN)
    found: Floats = logits - (top + np.log(np.exp(logits - top).sum(1, keepdims=True)))
    return found


def _sampled_confidences(logits: Floats, row: SampleRow, acceptance: Acceptance) -> Floats:
    """Return the confidences [vocabulary] of a row with a temperature above 0. logits [vocabulary]."""
    q = distribution(logits, row)
    sums = q.scores()
    if acceptance == "same":
        sums += gumbel(row.noise.key(row.position, PURPOSE_SAMPLE), q.ids)
    top = float(sums.max())
    found = np.full(logits.size, -np.inf)
    found[q.ids] = sums - (top + np.log(np.exp(sums - top).sum()))
    return found


def draw_candidates(logits: Floats, row: SampleRow, acceptance: Acceptance, count: int) -> list[Draft]:
    """Return up to `count` different drafts for one position, in the order in which they are tried; see `draw_draft`.

    With `rejection` each is drawn from what the ones before it left. Otherwise they are the tokens of the largest
    `confidences`.
    """
    if row.params.temperature > 0 and acceptance == "rejection":
        return draw_siblings(distribution(logits, row), count, row.noise.key(row.position, PURPOSE_DRAFT))
    scores = logits if row.params.temperature == 0 else _sampled_confidences(logits, row, acceptance)
    if not isfinite(scores.max()):
        raise RequestError(BROKEN)
    return [Draft(token) for token in best(scores, count).tolist()]


def draw_draft(logits: Floats, row: SampleRow, acceptance: Acceptance) -> Draft:
    """Draw a draft token from the logits [vocabulary] of a draft model. Raises RequestError where there is none.

    row: the answer's row at the draft's position; its parameters apply to the draft model too. With `rejection` the
    draft has noise of its own, and its distribution. Otherwise it has the noise with which the model will sample.
    """
    if acceptance != "rejection" or row.params.temperature == 0:
        found = sample(logits[None], [row])[0]
        if isinstance(found, RequestError):
            raise found
        return Draft(found.token)
    q = distribution(logits, row)
    return Draft(int(q.ids[draw(q.scores(), q.ids, row.noise.key(row.position, PURPOSE_DRAFT))]), q)


def draw_ahead(row: SampleRow, acceptance: Acceptance, count: int) -> Draw | None:
    """Return how the op DRAW takes the draft that `draw_draft` draws `count` positions after a row's.

    Returns None where the op cannot: for filters that it does not have, and for `rejection`, which needs the
    distribution.
    """
    params = row.params
    if params.temperature == 0:
        return Draw()
    if acceptance == "rejection" or params.temperature <= LEAST_TEMPERATURE or not _OF_DRAW.issuperset(row.filters):
        return None
    key = row.noise.key(row.position + count, PURPOSE_SAMPLE)
    return Draw(key, params.temperature, max(params.top_k, 0), params.top_p, params.min_p)


def draw_verified(
    row: SampleRow, drafts: Sequence[int], parents: Sequence[int], acceptance: Acceptance
) -> list[Draw] | None:  # fmt: skip
    """Return how the op ACCEPT takes the token after a row, and after each of its drafts; None where it cannot.

    Drafts are point masses. parents: the parent of each draft in a tree; (): a chain. With `same`, and for a row that
    is greedy, no draft is tried, so that the op DRAW does the same.
    """
    levels = depths(parents) if parents else range(len(drafts))
    draws = [draw_ahead(row, "same", count) for count in (0, *(level + 1 for level in levels))]
    known = [draw for draw in draws if draw is not None]
    if len(known) < len(draws):
        return None
    if acceptance == "same" or row.params.temperature == 0:
        return known
    trials = [NO_TRIAL] * len(known)
    for node in range(ROOT, len(drafts)):
        siblings, depth = children(parents, len(drafts), node), 0 if node == ROOT else levels[node] + 1
        if not siblings:
            continue
        at, noise = row.position + depth, row.noise
        trials[node + 1] = trials[node + 1]._replace(first=siblings[0] - node, is_typical=acceptance == "typical")
        if acceptance == "rejection":
            known[node + 1] = known[node + 1]._replace(key=noise.key(at, PURPOSE_RESIDUAL))
        for number, child in enumerate(siblings):
            after = siblings[number + 1] - child if number + 1 < len(siblings) else 0
            uniform = noise.uniform(at, PURPOSE_ACCEPT, number)
            trials[child + 1] = trials[child + 1]._replace(following=after, token=drafts[child], uniform=uniform)
    return [draw._replace(trial=trial) for draw, trial in zip(known, trials, strict=True)]
