"""Draft trees against brute force: every path is enumerated, and the best ones are chosen."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

from ridgeline.sample.rejection import Draft
from ridgeline.sample.tree import (
    Tree,
    all_paths,
    begin,
    best,
    best_of_rows,
    expand,
    keep_best,
    likely_paths,
    static_tree,
)
from ridgeline.spec.trees import ROOT, depths


def log_probs(*path: int, vocab: int = 7, seed: int = 0) -> np.ndarray:
    """Return the log probabilities after a path, which depend on all of it."""
    scores = np.random.default_rng([seed, len(path), *path]).normal(0, 2, vocab)
    return scores - np.log(np.exp(scores).sum())


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for i, (token, parent) in enumerate(zip(*tree, strict=True)):
        assert ROOT <= parent < i
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


def score(path: tuple[int, ...], seed: int) -> float:
    return float(sum(log_probs(*path[:i], seed=seed)[token] for i, token in enumerate(path)))


def grow(width: int, levels: int, seed: int) -> tuple[object, list[tuple[int, ...]]]:
    grown = begin(log_probs(seed=seed), width)
    for _ in range(levels - 1):
        paths = paths_of(Tree(tuple(grown.tokens.tolist()), tuple(grown.parents.tolist())))
        grown = expand(grown, np.stack([log_probs(*paths[i], seed=seed) for i in grown.frontier]), width)
    return grown, paths_of(Tree(tuple(grown.tokens.tolist()), tuple(grown.parents.tolist())))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 6, 20, 60])
def test_a_tree_of_full_width_has_the_best_of_all_paths(count: int, seed: int) -> None:
    grown, _ = grow(7 * 7, 3, seed)
    tree, kept = keep_best(grown, count)
    every = [path for n in (1, 2, 3) for path in product(range(7), repeat=n)]
    wanted = sorted(every, key=lambda path: -score(path, seed))[:count]
    assert paths_of(tree) == wanted  # best first, so that a tree cut to its first nodes is the best of that size
    assert grown.scores[kept] == pytest.approx([score(path, seed) for path in paths_of(tree)])
    assert depths(tree.parents) == tuple(len(path) - 1 for path in paths_of(tree))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("width", [1, 2, 4])
def test_each_level_expands_the_best_nodes_of_the_level_before(width: int, seed: int) -> None:
    _, found = grow(width, 4, seed)
    wanted: set[tuple[int, ...]] = set()
    level: list[tuple[int, ...]] = [()]
    for _ in range(4):
        tops = {path: np.argsort(-log_probs(*path, seed=seed))[:width].tolist() for path in level}
        below = [(*path, token) for path in level for token in tops[path]]
        wanted |= set(below)
        level = sorted(below, key=lambda path: -score(path, seed))[:width]
    assert set(found) == wanted
    assert len(found) == width + 3 * width * width
    if width == 1:
        assert paths_of(keep_best(grow(1, 4, seed)[0], 9)[0])[-1] == found[-1]


def test_equal_scores_keep_parents() -> None:
    """A certain child has the score of its parent: the parent is kept first."""
    certain = np.array([0.0, -np.inf, -np.inf])
    grown = expand(expand(begin(certain, 2), certain[None], 2), certain[None], 2)
    assert grown.tokens.tolist() == [0, 0, 0]
    assert keep_best(grown, 2)[0] == Tree((0, 0), (ROOT, 0))
    assert keep_best(grown, 0)[0] == Tree((), ())
    flat = np.full(4, np.log(0.25))
    assert begin(flat, 2).tokens.tolist() == [0, 1]
    assert best(flat, 9).tolist() == [0, 1, 2, 3]
    assert best(np.full(4, -np.inf), 2).tolist() == []
    nothing = expand(begin(flat, 2), np.full((2, 4), -np.inf), 2)
    assert nothing.frontier.tolist() == []
    assert len(nothing.tokens) == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_best_tokens_are_those_of_a_full_sort(seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 9, 50).astype(np.float32)
    for count in (1, 7, 49, 50, 51):
        assert best(x, count).tolist() == sorted(range(50), key=lambda i: (-x[i], i))[:count]
    several = np.random.default_rng(seed).integers(0, 9, (4, 20)).astype(np.float32)
    several[2, 3:] = -np.inf
    for count in (1, 5, 20, 21):
        found = [(row, token) for row, x in enumerate(several) for token in best(x, count).tolist()]
        assert list(zip(*(x.tolist() for x in best_of_rows(several, count)), strict=True)) == found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 10, 40, 500])
def test_likely_paths_are_the_best_of_all(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    accuracies = [rng.random(n).tolist() for n in (5, 4, 3)]  # not sorted by rank
    value = {p: prod(accuracies[d][r] for d, r in enumerate(p)) for p in all_paths((5, 4, 3))}
    found = likely_paths(accuracies, size)
    assert len(found) == min(size, len(value)) == len(set(found))
    assert sum(value[p] for p in found) == pytest.approx(sum(sorted(value.values(), reverse=True)[:size]))
    assert all(p[:-1] in ((), *found[:i]) for i, p in enumerate(found))
    assert likely_paths([[0.5, 0.0], [0.0]], 9) == ((0,),)


def test_a_static_tree_has_the_tokens_of_its_paths() -> None:
    assert all_paths((2, 1, 2)) == ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1))
    tops = [[5, 3, 1, 4], [2, 0, 6, 1], [0, 4, 5, 2]]
    given = [[Draft(token, parent=9) for token in top] for top in tops]
    paths = ((0,), (2,), (0, 1), (2, 0), (0, 1, 3))
    tree = static_tree(lambda path: given[len(path)], paths, lambda token: False)
    assert [draft.parent for draft in tree] == [ROOT, ROOT, 0, 1, 2]
    as_tree = Tree(tuple(draft.token for draft in tree), tuple(draft.parent or 0 for draft in tree))
    assert paths_of(as_tree) == [tuple(tops[d][r] for d, r in enumerate(path)) for path in paths]
    ended = static_tree(lambda path: given[len(path)], paths, lambda token: token == 5)
    assert ended == [Draft(5, parent=ROOT), Draft(1, parent=ROOT), Draft(2, parent=1)]
    rare = [given[0][:1], given[1]]
    assert static_tree(lambda path: rare[len(path)], ((0,), (1,), (0, 1), (1, 0)), lambda token: False) == [
        Draft(5, parent=ROOT), Draft(0, parent=0),
    ]  # fmt: skip
    for wrong in (((0, 0), (0,)), ((0,), (0,)), ((),)):
        with pytest.raises(ValueError, match="path"):
            static_tree(lambda path: given[len(path)], wrong, lambda token: False)
