"""Choose the draft tokens of a tree: Medusa's static trees (arXiv:2401.10774) and EAGLE-2's dynamic ones (2406.16858).

All functions are pure. Nodes come in the order of their scores, the best first, so that the first n of them are the
best tree of n nodes. Where scores are equal, the smaller token or the earlier node counts as the better one, so that a
tree never depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ridgeline.sample.rejection import Draft
from ridgeline.spec.trees import ROOT

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Path = tuple[int, ...]  # ranks from the first draft token on: (0, 2) is the third best after the best one


class Tree(NamedTuple):
    """Draft tokens, and the index of each one's parent among them: ROOT, or smaller than its own."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


def best(log_probs: Floats, count: int) -> Ints:
    """Return the tokens with the largest log probabilities [vocabulary], best first; fewer if there are not `count`.

    Tokens of probability zero are left out.
    """
    if count < 1:
        return np.zeros(0, np.int64)
    least = np.partition(log_probs, -count)[-count] if count < log_probs.size else -np.inf
    found = np.flatnonzero((log_probs >= least) & (log_probs > -np.inf))
    order: Ints = found[np.argsort(-log_probs[found], kind="stable")[:count]]
    return order


def best_of_rows(log_probs: Floats, count: int) -> tuple[Ints, Ints]:
    """Return (rows, tokens) of the best `count` tokens of each row of log probabilities [n, vocabulary]; see `best`.

    They are sorted by row, and the best token of a row comes first.
    """
    n, size = log_probs.shape
    least = np.partition(log_probs, size - count, axis=1)[:, size - count, None] if 0 < count < size else -np.inf
    rows, tokens = np.nonzero((log_probs >= least) & (log_probs > -np.inf))
    order = np.lexsort((tokens, -log_probs[rows, tokens], rows))
    rank = np.arange(rows.size) - np.searchsorted(rows, np.arange(n))[rows]
    order = order[rank < count]
    return rows[order], tokens[order]


# ---- static trees ----------------------------------------------------------------------------------------------------


def all_paths(counts: Sequence[int]) -> tuple[Path, ...]:
    """Return every path of a Cartesian tree: the best counts[d] tokens of head d after every path of length d."""
    return tuple(path for d in range(1, len(counts) + 1) for path in product(*(range(n) for n in counts[:d])))


def likely_paths(accuracies: Sequence[Sequence[float]], size: int) -> tuple[Path, ...]:
    """Return the paths that are expected to be accepted most often, at most `size`, parents before children.

    accuracies: how often the token of rank r of head d is the right one, accuracies[d][r], measured on held-out text.
    The expectation of a path is the product of its ranks' accuracies (section 2.3.3 of the paper).
    """
    ranks = [sorted(range(len(row)), key=lambda r: (-row[r], r)) for row in accuracies]
    found: list[Path] = []
    waiting: list[tuple[float, int, Path, float]] = []  # (-expectation, length, path, expectation of its parent)

    def push(parent: Path, index: int, of_parent: float) -> None:
        """Add the child of a path whose accuracy is the index-th best."""
        head = len(parent)
        if head < len(ranks) and index < len(ranks[head]):
            rank = ranks[head][index]
            heappush(waiting, (-of_parent * accuracies[head][rank], head, (*parent, rank), of_parent))

    push((), 0, 1.0)
    while waiting and len(found) < size:
        value, _, path, of_parent = heappop(waiting)
        if value == 0.0:
            break
        found.append(path)
        push(path, 0, -value)
        push(path[:-1], ranks[len(path) - 1].index(path[-1]) + 1, of_parent)
    return tuple(found)


def static_tree(
    after: Callable[[Path], Sequence[Draft]], paths: Sequence[Path], is_end: Callable[[int], bool]
) -> list[Draft]:
    """Return the tree of given paths for one sequence.

    Args:
        after: returns the tokens after a path by rank. Paths with other ranks are left out, with those below them.
        paths: parents before children.
        is_end: returns whether nothing follows a token.

    Raises:
        ValueError: for a path without its parent, and for one that is there twice.
    """
    found: list[Draft] = []
    index: dict[Path, int | None] = {(): ROOT}
    for path in paths:
        if path[:-1] not in index or path in index:
            raise ValueError(f"the path {path} comes before its parent, or twice")
        parent, rank = index[path[:-1]], path[-1]
        is_over = parent is None or (parent != ROOT and is_end(found[parent].token))
        top = () if is_over else after(path[:-1])
        if parent is None or rank >= len(top):
            index[path] = None
            continue
        index[path] = len(found)
        found.append(top[rank]._replace(parent=parent))
    return found


# ---- dynamic trees ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Grown:
    """A tree while it grows, level by level.

    tokens, parents, scores: one entry for each node; a score is the log of the product of confidences on its path.
    frontier: indices of the nodes below which the tree grows next.
    """

    tokens: Ints
    parents: Ints
    scores: Floats
    frontier: Ints


def begin(log_probs: Floats, width: int) -> Grown:
    """Return the first level: the best `width` tokens by log probabilities [vocabulary]."""
    tokens = best(log_probs, width)
    scores = log_probs[tokens].astype(np.float64)
    return Grown(tokens, np.full(len(tokens), ROOT, np.int64), scores, np.arange(len(tokens)))


def expand(grown: Grown, log_probs: Floats, width: int) -> Grown:
    """Return the tree with one more level: the best `width` tokens below each node of the frontier.

    log_probs: [nodes of the frontier, vocabulary]. The best `width` of the new nodes by score are the next frontier.
    """
    rows, tokens = best_of_rows(log_probs, width)
    parents = grown.frontier[rows]
    scores = grown.scores[parents] + log_probs[rows, tokens].astype(np.float64)
    first, order = len(grown.tokens), np.argsort(-scores, kind="stable")[:width]
    return Grown(
        np.concatenate((grown.tokens, tokens)), np.concatenate((grown.parents, parents)),
        np.concatenate((grown.scores, scores)), first + np.sort(order),
    )  # fmt: skip


def keep_best(grown: Grown, count: int) -> tuple[Tree, Ints]:
    """Return the tree of the `count` best nodes by score, best first, and their indices in the grown tree.

    A node's score is never above its parent's, and grown nodes come after their parents: so the parents are kept as
    well, and come first. The first n of these nodes are the best tree of n nodes.
    """
    kept = np.argsort(-grown.scores, kind="stable")[: max(0, count)]
    index = np.full(len(grown.tokens) + 1, ROOT)
    index[kept] = np.arange(len(kept))  # the entry of ROOT, which is the last one, stays
    return Tree(tuple(grown.tokens[kept].tolist()), tuple(index[grown.parents[kept]].tolist())), kept
