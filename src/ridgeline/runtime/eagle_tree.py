"""Propose trees of drafts with an EAGLE head, as EAGLE-2 does (arXiv:2406.16858).

A tree grows level by level (growth.py): the head runs a row for each node of the frontier, and the best tokens after
these are the next level. A node's score is the product of the head's confidences on its path. In the end the nodes with
the best scores are the drafts.

The rows of the nodes are in the slots after those of the known tokens, in the order of the levels. A pass runs all of
them again, so that each row reads its ancestors alone, as drafts do that the target verifies (ops/api.py:PagedLayout).
They are garbage afterwards: once drafts are accepted, their rows are computed from the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.nn.heads import Eagle3Head, EagleHead
from ridgeline.nn.model import Model
from ridgeline.ops.draws import Draw, pack_draws
from ridgeline.runtime.chain import Passed
from ridgeline.runtime.drafter import Ask, Place, Span
from ridgeline.runtime.eagle_drafter import EagleDrafter
from ridgeline.runtime.growth import Drawn, Dynamic, Growth
from ridgeline.runtime.layout import Ints, Slices
from ridgeline.runtime.padding import Tokens
from ridgeline.runtime.tree_rows import TreeInputs, TreeRows
from ridgeline.sample.logits import Floats
from ridgeline.sample.rejection import Draft
from ridgeline.spec.trees import head_levels, head_rows, paths


class EagleTrees(EagleDrafter):
    """Proposes trees with an EAGLE head."""

    def __init__(self, head: EagleHead | Eagle3Head, target: Model, place: Place) -> None:
        rows = max(place.num_drafts, head_rows(place.tree, place.num_drafts))
        super().__init__(head, target, place._replace(num_drafts=rows))
        self.tree, self._recorded_tokens = place.tree, place.num_drafts + 1
        self._tree_rows = TreeRows(self._passes, self._eagle)

    def levels(self, drafts: int) -> int:
        """Return how many passes a tree of so many drafts takes at most."""
        return min(head_levels(self.tree, drafts), 1 + self._max_tokens // self.tree)

    def draft(self, asks: Sequence[Ask], *, follow: bool = True) -> list[list[Draft]]:
        """Return the drafts of each sequence, the best ones first; see Drafter."""
        self.is_usual, self.rounds = True, 0
        self._prepare(asks, follow)
        found: list[list[Draft]] = [[] for _ in asks]
        spans, going = self._missing(asks)
        if not going:
            return found
        trees: dict[int, Growth] = {}
        for i, logits in zip(going, self._first(spans), strict=True):
            try:
                trees[i] = self._start(asks[i], logits)
            except RequestError:  # the logits are broken
                continue
        self.rounds, growing = 1, list(trees.values())
        while growing := [tree for tree in growing if tree.goes_on()]:
            self.rounds += 1
            growing = [tree for part in self._parts(growing) for tree in self._grow(part)]
        for i, tree in trees.items():
            found[i] = tree.drafts()
        return found

    def _start(self, ask: Ask, logits: Floats) -> Growth:
        """Return the first level of a tree. logits: [vocabulary], after the known tokens."""
        levels = self.levels(ask.depth)
        if self._acceptance == "rejection" and ask.sampling.params.temperature > 0:
            return Drawn(ask, self.tree, levels, logits)
        return Dynamic(ask, self.tree, levels, self._acceptance, logits)

    def _first(self, spans: Sequence[Span]) -> Floats:
        """Run the rows of known tokens; return the logits [n, vocabulary] after each sequence."""
        if max(len(span.tokens) for span in spans) <= self._recorded_tokens:
            made = self._recorded(spans, [pack_draws([Draw()] * len(spans))])
            if made is not None:
                return self._chain.spread(self._memory.get(made.logits))
        passed = self._forward(spans, np.cumsum([len(span.tokens) for span in spans]) - 1)
        assert passed is not None
        return self._chain.spread(self._memory.get(passed.logits))

    def _parts(self, growing: Sequence[Growth]) -> list[list[Growth]]:
        """Return trees in groups whose rows fit into a pass."""
        parts: list[list[Growth]] = []
        left = 0
        for tree in growing:
            if len(tree.tokens) > left:
                parts.append([])
                left = self._max_tokens
            parts[-1].append(tree)
            left -= len(tree.tokens)
        return parts

    def _grow(self, growing: Sequence[Growth]) -> list[Growth]:
        """Run the rows of some trees, and add a level to each; return those whose logits are not broken."""
        logits, at, left = self._run_rows(growing), 0, list[Growth]()
        for tree in growing:
            at += tree.fresh
            try:
                tree.grow(logits[at - tree.fresh : at])
            except RequestError:
                continue
            left.append(tree)
        return left

    def _run_rows(self, growing: Sequence[Growth]) -> Floats:
        """Run all rows of some trees; return the logits [n, vocabulary] after the rows of their frontiers."""
        lengths = np.array([len(tree.tokens) for tree in growing])
        starts, none = np.array([tree.known - 1 for tree in growing]), np.zeros_like(lengths)
        bits = np.array([bit for tree in growing for bit in paths(tree.parents)])
        slices = Slices(np.array([tree.ask.row for tree in growing]), starts, lengths, lengths, none, none, bits)
        tokens = np.minimum([token for tree in growing for token in tree.tokens], self._most_id)
        read, last, written = self._places(growing)
        passed = self._run_recorded(slices, bits, tokens, read, last)
        if passed is None:
            passed = self._run_unrecorded(slices, tokens, read, last)
        assert passed.features is not None
        logits = self._chain.spread(self._memory.get(passed.logits))
        self._features.put(written, passed.features)
        return logits

    def _run_recorded(self, slices: Slices, bits: Ints, tokens: Ints, read: Ints, last: Ints) -> Passed | None:
        """Run rows from a recording; None if they must run unrecorded."""
        positions, turned = slices.positions(), None
        if (tables := self._chain.frequency_tables) is not None:
            turned = tables.rows(np.zeros_like(positions), positions).tolist()
        rows, starts, lengths = (x.tolist() for x in (slices.rows, slices.starts, slices.lengths))
        given = Tokens(rows, starts, lengths, tokens.tolist(), turned)
        tree = positions.tolist(), bits.tolist()
        passed = self._tree_rows.run(TreeInputs(given, tree, read.tolist(), last.tolist()))
        self.is_usual &= not self._tree_rows.has_recorded
        return passed

    def _run_unrecorded(self, slices: Slices, tokens: Ints, read: Ints, last: Ints) -> Passed:
        step, integers = self._step(slices, tokens), self._memory.integers
        return self._chain.run(step, self._features.take(integers(read)), integers(last))

    def _places(self, growing: Sequence[Growth]) -> tuple[Ints, Ints, Ints]:
        """Return the indices of features that rows read, of the rows of frontiers among all rows, and of the features
        that these leave.

        The feature that a row leaves is kept at the position after its slot; that of the last known row at the
        position of the last known token.
        """
        read, last, written, end = list[Ints](), list[Ints](), list[Ints](), 0
        for tree in growing:
            count, end = len(tree.tokens), end + len(tree.tokens)
            slots = self._features.at(tree.ask.row, tree.known - 1, tree.known + count)
            read.append(slots[np.array(tree.parents) + 1])
            last.append(np.arange(end - tree.fresh, end))
            written.append(slots[count + 1 - tree.fresh :])
        return np.concatenate(read), np.concatenate(last), np.concatenate(written)
