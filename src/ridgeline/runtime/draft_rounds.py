"""Record the rounds of a draft model or an EAGLE head: several passes, each over the best tokens of the one before.

Between two rounds nothing goes through Python: a recording holds all of them, and each reads its tokens and features
where the round before left them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.ops.api import Array
from ridgeline.runtime.chain import Chain, Passed
from ridgeline.runtime.graphs import MOST_GRAPHS, MOST_SEQUENCES, MOST_TOKENS, Inputs, Passes, cut, fill
from ridgeline.runtime.layout import Slices


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

    def run(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], tokens: Sequence[int], rounds: int,
        frequency_rows: Sequence[int] | None = None, features: Sequence[int] | None = None,
    ) -> Rounds | None:  # fmt: skip
        """Run the next tokens of n sequences, and then the best token of each, so that there are `rounds` passes.

        Returns None if they must run unrecorded.

        rows, starts, lengths: each sequence's row of the page tables, first position and number of tokens in the first
        round. tokens: their ids, one sequence after the other. frequency_rows: frequency rows of all these tokens, and
        then of the sequences in each later round. features: indices in `Features.array` for all these tokens.
        """
        n, total, self.has_recorded = len(rows), len(tokens), False
        if self._passes.refusal is not None or n > MOST_SEQUENCES or total > MOST_TOKENS:
            return None
        graph = self._graphs.pop((n, total, rounds), None)
        self.has_recorded = graph is None
        if graph is None:
            return self._record(rows, starts, lengths, tokens, rounds, frequency_rows, features)
        self._graphs[n, total, rounds] = graph  # the last of the dict is the one that was used last
        self._fill(graph.inputs, graph.owners, graph.later, rows, starts, lengths, tokens, frequency_rows)
        if features is not None:
            self._passes.recorder.assign(graph.features, features)
        graph.run()
        return graph.made

    def _fill(
        self, inputs: Inputs, owners: Array, later: Sequence[_Later], rows: Sequence[int], starts: Sequence[int],
        lengths: Sequence[int], tokens: Sequence[int], frequency_rows: Sequence[int] | None,
    ) -> None:  # fmt: skip
        recorder, n, total = self._passes.recorder, len(rows), len(tokens)
        first = None if frequency_rows is None else frequency_rows[:total]
        fill(recorder, inputs, rows, starts, lengths, tokens, first)
        if later:
            recorder.assign(owners, rows)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        for i, one in enumerate(later):
            recorder.assign(one.positions, [end + i for end in ends])
            if frequency_rows is not None:
                recorder.assign(one.frequency_rows, frequency_rows[total + i * n : total + (i + 1) * n])

    def _record(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], tokens: Sequence[int], rounds: int,
        frequency_rows: Sequence[int] | None, features: Sequence[int] | None,
    ) -> Rounds | None:  # fmt: skip
        n, total, passes, chain = len(rows), len(tokens), self._passes, self._chain
        recorder = passes.recorder
        while len(self._later) < rounds - 1:
            self._later.append(_Later(recorder.input(passes.most), recorder.input(passes.most)))
        inputs, owners = cut(passes, self._inputs, n, total), recorder.first(self._owners, n)
        later = [_Later(*(recorder.first(x, n) for x in one)) for one in self._later[: rounds - 1]]
        self._fill(inputs, owners, later, rows, starts, lengths, tokens, frequency_rows)
        indices = recorder.first(self._features, total)
        if features is not None:
            recorder.assign(indices, features)
        ends = np.array(starts) + np.array(lengths)

        def work() -> Sequence[Array]:
            slices = Slices.plain(np.array(rows), np.array(starts), np.array(lengths))
            given = chain.features.take(indices) if chain.features else None
            passed = chain.run(passes.step(slices, inputs), given, inputs.last if total > n else None)
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
