"""Record the rounds of a draft model or an EAGLE head: several passes, each over the best tokens of the one before.

Between two rounds nothing goes through Python: a recording holds all of them, and each reads its tokens and features
where the round before left them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.ops.api import Array
from ridgeline.ops.driver import Recorder
from ridgeline.runtime.chain import Chain, Passed
from ridgeline.runtime.features import Features
from ridgeline.runtime.graphs import MOST_GRAPHS, MOST_SEQUENCES, MOST_TOKENS, Inputs, Passes, cut, fill
from ridgeline.runtime.layout import Slices
from ridgeline.runtime.padding import Tokens, more_drafting


class Rounds(NamedTuple):
    """Results of recorded rounds, valid until the next ones.

    best, best_logits: for each round the best token after each of n sequences, and its logit, [n]. logits: logits of
    the last round, [n, vocabulary of the drafts]. features: [n, hidden_size], which the next round would read; None if
    the drafts come from a model.
    """

    best: Sequence[Array]
    best_logits: Sequence[Array]
    logits: Array
    features: Array | None

    def of_first(self, recorder: Recorder, n: int) -> Rounds:
        """Return the results of the first n sequences."""
        best, best_logits = ([recorder.first(x, n) for x in arrays] for arrays in (self.best, self.best_logits))
        features = None if self.features is None else recorder.first(self.features, n)
        return Rounds(best, best_logits, recorder.first(self.logits, n), features)


class First(NamedTuple):
    """Inputs of the rounds of n sequences.

    first: the tokens of the first round. later: frequency rows [n] of each later round; None if there are none.
    features: indices in `Features.array` for all tokens of the first round; None if the drafts come from a model.
    """

    first: Tokens
    later: Sequence[Sequence[int]] | None
    features: Sequence[int] | None

    def with_more(self, lengths: Sequence[int], row: int, features: Features | None) -> First:
        """Return these sequences, and more with the given lengths. row: their row of the page tables."""
        later = None if self.later is None else [[*rows, *[0] * len(lengths)] for rows in self.later]
        indices = self.features
        if indices is not None and features is not None:
            indices = [*indices, *features.zeros(sum(lengths)).tolist()]
        return First(self.first.with_more(lengths, row), later, indices)


class _Later(NamedTuple):
    """Arrays [n] that a round after the first reads besides the tokens of the round before."""

    positions: Array
    frequency_rows: Array


class _Graph(NamedTuple):
    """Recorded rounds. owners: rows of the sequences. features: indices of the features that the first round reads."""

    inputs: Inputs
    owners: Array
    features: Array
    later: Sequence[_Later]
    made: Rounds
    run: Callable[[], None]


class DraftRounds:
    """Holds recorded rounds of one chain, by the numbers of sequences, tokens of the first round, and rounds.

    has_recorded: the last `run` also recorded, which takes longer.
    """

    def __init__(self, passes: Passes, chain: Chain) -> None:
        self._passes, self._chain, self.has_recorded = passes, chain, False
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self._later: list[_Later] = []
        if passes.refusal is None:
            recorder, most = passes.recorder, passes.most
            of_tokens = [recorder.input(MOST_TOKENS) for _ in range(4)]
            self._inputs = Inputs(*of_tokens, *(recorder.input(most) for _ in range(3)))
            self._owners, self._features = recorder.input(most), recorder.input(MOST_TOKENS)

    def run(self, given: First, rounds: int) -> Rounds | None:
        """Run the next tokens of n sequences, and then the best token of each, so that there are `rounds` passes.

        Returns None if they must run unrecorded.
        """
        n, total, self.has_recorded = len(given.first.rows), len(given.first.tokens), False
        passes = self._passes
        if passes.refusal is not None or n > MOST_SEQUENCES or total > MOST_TOKENS:
            return None
        more = () if (n, total, rounds) in self._graphs else more_drafting(n, total, passes.most, MOST_TOKENS)
        given = given.with_more(more, passes.spare, self._chain.features) if more else given
        key = len(given.first.rows), len(given.first.tokens), rounds
        graph = self._graphs.pop(key, None)
        self.has_recorded = graph is None
        if graph is None:
            made = self._record(given, rounds)
        else:
            self._graphs[key] = graph  # the last of the dict is the one that was used last
            self._fill(graph.inputs, graph.owners, graph.features, graph.later, given)
            graph.run()
            made = graph.made
        return made.of_first(passes.recorder, n) if made and more else made

    def _fill(self, inputs: Inputs, owners: Array, features: Array, later: Sequence[_Later], given: First) -> None:
        recorder, first = self._passes.recorder, given.first
        fill(recorder, inputs, first)
        if given.features is not None:
            recorder.assign(features, given.features)
        if later:
            recorder.assign(owners, first.rows)
        ends = [start + length for start, length in zip(first.starts, first.lengths, strict=True)]
        for i, one in enumerate(later):
            recorder.assign(one.positions, [end + i for end in ends])
            if given.later is not None:
                recorder.assign(one.frequency_rows, given.later[i])

    def _record(self, given: First, rounds: int) -> Rounds | None:
        rows, starts, lengths, tokens, _ = given.first
        n, total, passes, chain = len(rows), len(tokens), self._passes, self._chain
        recorder = passes.recorder
        while len(self._later) < rounds - 1:
            self._later.append(_Later(recorder.input(passes.most), recorder.input(passes.most)))
        inputs, owners = cut(passes, self._inputs, n, total), recorder.first(self._owners, n)
        later = [_Later(*(recorder.first(x, n) for x in one)) for one in self._later[: rounds - 1]]
        indices = recorder.first(self._features, total)
        self._fill(inputs, owners, indices, later, given)
        ends = np.array(starts) + np.array(lengths)

        def work() -> Sequence[Array]:
            slices = Slices.plain(np.array(rows), np.array(starts), np.array(lengths))
            features = chain.features.take(indices) if chain.features else None
            passed = chain.run(passes.step(slices, inputs), features, inputs.last if total > n else None)
            best = [self._best(passed)]
            ones, order = (recorder.first(x, n) for x in passes.single)
            for i, one in enumerate(later):
                slices = Slices.plain(np.array(rows), ends + i, np.ones(n, np.int64))
                each = Inputs(owners, best[-1][0], one.positions, one.frequency_rows, one.positions, ones, order)
                passed = chain.run(passes.step(slices, each), passed.features, None)
                best.append(self._best(passed))
            made = [passed.logits, *(array for pair in best for array in pair)]
            return made if passed.features is None else [*made, passed.features]

        found = passes.record(work)
        if found is None:
            return None
        logits, *best = found.results
        last = best.pop() if chain.features else None
        made = Rounds(best[::2], best[1::2], logits, last)
        if len(self._graphs) >= MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[n, total, rounds] = _Graph(inputs, owners, indices, later, made, found.run)
        return made

    def _best(self, passed: Passed) -> tuple[Array, Array]:
        """Return the best token of each row, as one of the target's, and its logit."""
        ids, logits = self._passes.best(passed.logits)
        return self._chain.ids(ids), logits
