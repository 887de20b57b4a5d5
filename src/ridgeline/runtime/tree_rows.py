"""Record passes of an EAGLE head over the rows of trees, by the numbers of sequences, rows and proposing rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.ops.api import Array
from ridgeline.runtime.chain import EagleChain, Passed
from ridgeline.runtime.graphs import Inputs, Passes, Tree, cut, fill, make_room
from ridgeline.runtime.layout import Slices
from ridgeline.runtime.padding import Tokens


class TreeInputs(NamedTuple):
    """Inputs of one pass over T rows. tokens: rows of n sequences, with those of each side by side.

    tree: positions and paths [T]. read: indices [T] of the features that rows read (`Features.array`). last: indices of
    the rows that propose.
    """

    tokens: Tokens
    tree: Tree
    read: Sequence[int]
    last: Sequence[int]


class _Graph(NamedTuple):
    """A recorded pass."""

    inputs: Inputs
    read: Array
    last: Array
    passed: Passed
    run: Callable[[], None]


class TreeRows:
    """Holds recorded passes of one head. has_recorded: the last `run` also recorded, which takes longer."""

    def __init__(self, passes: Passes, chain: EagleChain) -> None:
        self._passes, self._chain, self.has_recorded = passes, chain, False
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        if passes.refusal is None:
            recorder, most = passes.recorder, passes.most
            of_tokens = [recorder.input(passes.most_tokens) for _ in range(4)]
            self._inputs = Inputs(*of_tokens, *(recorder.input(most) for _ in range(3)))
            kinds = recorder.input, recorder.words, recorder.input, recorder.input
            self._more = [make(passes.most_tokens) for make in kinds]  # slots, paths, read, last

    def run(self, given: TreeInputs) -> Passed | None:
        """Run a pass; None if it must run unrecorded."""
        n, total, passes = len(given.tokens.rows), len(given.tokens.tokens), self._passes
        self.has_recorded = False
        if passes.refusal is not None or n > passes.most or not n < total <= passes.most_tokens:
            return None
        key = n, total, len(given.last)
        graph = self._graphs.pop(key, None)
        if graph is None:
            self.has_recorded = True
            return self._record(key, given)
        self._graphs[key] = graph  # the last of the dict is the one that was used last
        self._fill(graph.inputs, graph.read, graph.last, given)
        graph.run()
        return graph.passed

    def _fill(self, inputs: Inputs, read: Array, last: Array, given: TreeInputs) -> None:
        recorder = self._passes.recorder
        fill(recorder, inputs, given.tokens, given.tree)
        recorder.assign(read, given.read)
        recorder.assign(last, given.last)

    def _record(self, key: tuple[int, int, int], given: TreeInputs) -> Passed | None:
        n, total, proposing = key
        passes, chain, tokens = self._passes, self._chain, given.tokens
        slots, paths, read = (passes.recorder.first(x, total) for x in self._more[:3])
        last = passes.recorder.first(self._more[3], proposing)
        inputs = cut(passes, self._inputs, n, total)._replace(slots=slots, paths=paths)
        self._fill(inputs, read, last, given)
        slices = Slices.plain(np.array(tokens.rows), np.array(tokens.starts), np.array(tokens.lengths))
        features = chain.features
        assert features is not None

        def work() -> Sequence[Array]:
            passed = chain.run(passes.step(slices, inputs), features.take(read), last)
            assert passed.features is not None
            return [passed.logits, passed.features]

        found = passes.record(work)
        if found is None:
            return None
        passed = Passed(*found.results)
        make_room(self._graphs, total, passes.sizes)
        self._graphs[key] = _Graph(inputs, read, last, passed, found.run)
        return passed
