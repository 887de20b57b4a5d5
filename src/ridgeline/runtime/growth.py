"""The tree of one sequence while an EAGLE head makes it, level by level.

A level is made from the logits after some nodes of the level before, its frontier, which get a row of the head each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from ridgeline.runtime.drafter import Ask
from ridgeline.sample.acceptance import confidences, draw_candidates
from ridgeline.sample.logits import Floats
from ridgeline.sample.rejection import Draft
from ridgeline.sample.tree import Path, begin, expand, keep_best, likely_paths, static_tree
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.trees import ROOT

# Shares of positions at which the first token that is drawn from a head's distribution is accepted by rejection
# sampling, the second one, and so on. The first four are those of an EAGLE-1 head for `pocket` at temperature 1; the
# others continue them.
DRAWN = (0.43, 0.11, 0.04, 0.03, 0.025, 0.02, 0.016, 0.013, 0.011, 0.01, 0.009, 0.008, 0.007, 0.006, 0.005, 0.004)


class Growth(ABC):
    """A tree that grows. ask: the sequence. width: most tokens after a node. levels: most levels.

    level: number of levels so far. tokens: token of each row of the head. parents: index of the row of its parent, for
    each row. fresh: number of rows that the next pass is for; they come last.
    """

    def __init__(self, ask: Ask, width: int, levels: int) -> None:
        self.ask, self.width, self.levels, self.level = ask, width, levels, 1
        self.tokens, self.parents, self.fresh = list[int](), list[int](), 0

    @property
    def known(self) -> int:
        """Return the number of known tokens."""
        return len(self.ask.tokens)

    @abstractmethod
    def goes_on(self) -> bool:
        """Give rows to the frontier; return whether there is one whose children can be among the drafts."""

    @abstractmethod
    def grow(self, logits: Floats) -> None:
        """Add a level. logits: [nodes of the frontier, vocabulary]. Raises RequestError for logits that are broken."""

    @abstractmethod
    def drafts(self) -> list[Draft]:
        """Return the tree, the best nodes first."""

    def _add_row(self, token: int, parent: int) -> int:
        """Give a node a row; return the index of it. parent: index of the row of its parent."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


class Dynamic(Growth):
    """A tree of EAGLE-2: the best `width` nodes of a level are its frontier, and the best nodes of all are the drafts.

    logits: [vocabulary], after the known tokens.
    """

    def __init__(self, ask: Ask, width: int, levels: int, acceptance: Acceptance, logits: Floats) -> None:
        super().__init__(ask, width, levels)
        self._acceptance, self._rows = acceptance, dict[int, int]()  # rows by node
        self._grown = begin(confidences(logits[None], ask.sampling.ahead(0), acceptance)[0], width)

    def goes_on(self) -> bool:
        grown, is_end, most = self._grown, self.ask.sampling.is_end, self.ask.depth
        if self.level == self.levels:
            return False
        frontier = [node for node in grown.frontier.tolist() if not is_end(int(grown.tokens[node]))]
        best = max((grown.scores[node] for node in frontier), default=-np.inf)
        if not frontier or (len(grown.scores) >= most and best <= np.partition(grown.scores, -most)[-most]):
            return False  # children are never better than their parents
        self._grown, self.fresh = replace(grown, frontier=np.array(frontier)), len(frontier)
        for node in frontier:
            parent = self._rows.get(int(grown.parents[node]), ROOT)
            self._rows[node] = self._add_row(int(grown.tokens[node]), parent)
        return True

    def grow(self, logits: Floats) -> None:
        found = confidences(logits, self.ask.sampling.ahead(self.level), self._acceptance)
        self._grown = expand(self._grown, found, self.width)
        self.level += 1

    def drafts(self) -> list[Draft]:
        tree, _ = keep_best(self._grown, self.ask.depth)
        return [Draft(token, parent=parent) for token, parent in zip(tree.tokens, tree.parents, strict=True)]


class Drawn(Growth):
    """A tree of a fixed shape whose tokens are drawn, for rejection sampling.

    Which tokens are verified must not depend on what was drawn (sample/rejection.py), so the best of them cannot be
    chosen as in EAGLE-2. logits: [vocabulary], after the known tokens.
    """

    def __init__(self, ask: Ask, width: int, levels: int, logits: Floats) -> None:
        super().__init__(ask, width, levels)
        self._paths = drawn_paths(width, ask.depth, levels)
        self._counts = Counter(path[:-1] for path in self._paths)
        self._frontier: list[Path] = [()]
        self._rows: dict[Path, int] = {}
        self._after: dict[Path, Sequence[Draft]] = {(): self._draw((), logits)}

    def goes_on(self) -> bool:
        found = [path for path in self._paths if len(path) == self.level and self._counts[path]]
        self._frontier = []
        for path in found:
            siblings = self._after.get(path[:-1], ())
            if path[-1] < len(siblings) and not self.ask.sampling.is_end(siblings[path[-1]].token):
                self._frontier.append(path)
                self._rows[path] = self._add_row(siblings[path[-1]].token, self._rows.get(path[:-1], ROOT))
        self.fresh = len(self._frontier)
        return self.fresh > 0

    def grow(self, logits: Floats) -> None:
        for path, x in zip(self._frontier, logits, strict=True):
            self._after[path] = self._draw(path, x)
        self.level += 1

    def drafts(self) -> list[Draft]:
        return static_tree(lambda path: self._after.get(path, ()), self._paths, self.ask.sampling.is_end)

    def _draw(self, path: Path, logits: Floats) -> Sequence[Draft]:
        """Return the drafts after a path."""
        return draw_candidates(logits, self.ask.sampling.ahead(len(path)), "rejection", self._counts[path])


@cache
def drawn_paths(width: int, size: int, levels: int) -> tuple[Path, ...]:
    """Return the likeliest paths of drawn tokens, at most `size`, of which at most `width` of a level have children."""
    found: list[Path] = []
    grown: list[list[Path]] = [[] for _ in range(levels)]  # paths with children, by their length
    for path in likely_paths([DRAWN[:width]] * levels, 16 * size):
        parent = path[:-1]
        if parent and parent not in found:
            continue
        with_children = grown[len(parent)]
        if parent not in with_children:
            if len(with_children) == width:
                continue
            with_children.append(parent)
        found.append(path)
        if len(found) == size:
            break
    return tuple(found)
