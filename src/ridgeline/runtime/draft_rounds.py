"""Record the rounds of a draft model or an EAGLE head: several passes, each over the tokens that the last one drew.

Between two rounds nothing goes through Python: a recording holds all of them, and each reads its tokens and features
where the round before left them. How each round draws, greedily or with the noise of its position, is an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array
from ridgeline.ops.draws import DRAW_WORDS, Draw, pack_draws
from ridgeline.ops.driver import Recorder
from ridgeline.runtime.chain import Chain, Passed
from ridgeline.runtime.features import Features
from ridgeline.runtime.graphs import Inputs, Passes, cut, fill, make_room
from ridgeline.runtime.layout import Ints, Slices
from ridgeline.runtime.padding import Tokens, more_drafting


class Rounds(NamedTuple):
    """Results of recorded rounds, valid until the next ones.

    tokens, top: for each round the token that each of n sequences draws, and the largest logit, [n]. logits: logits of
    the last round, [n, vocabulary of the drafts]. features: [n, hidden_size], which the next round would read; None if
    the drafts come from a model.
    """

    tokens: Sequence[Array]
    top: Sequence[Array]
    logits: Array
    features: Array | None

    def of_first(self, recorder: Recorder, n: int) -> Rounds:
        """Return the results of the first n sequences."""
        tokens, top = ([recorder.first(x, n) for x in arrays] for arrays in (self.tokens, self.top))
        features = None if self.features is None else recorder.first(self.features, n)
        return Rounds(tokens, top, recorder.first(self.logits, n), features)


class First(NamedTuple):
    """Inputs of the rounds of n sequences.

    first: the tokens of the first round. later: frequency rows [n] of each later round; None if there are none.
    features: indices in `Features.array` for all tokens of the first round; None if the drafts come from a model.
    draws: how each round draws, [n * DRAW_WORDS] (ops/draws.py).
    """

    first: Tokens
    later: Sequence[Sequence[int]] | None
    features: Sequence[int] | None
    draws: Sequence[Ints]

    def with_more(self, lengths: Sequence[int], row: int, features: Features | None) -> First:
        """Return these sequences, and more with the given lengths. row: their row of the page tables."""
        later = None if self.later is None else [[*rows, *[0] * len(lengths)] for rows in self.later]
        indices = self.features
        if indices is not None and features is not None:
            indices = [*indices, *features.zeros(sum(lengths)).tolist()]
        greedy = pack_draws([Draw()] * len(lengths))
        draws = [np.concatenate([each, greedy]) for each in self.draws]
        return First(self.first.with_more(lengths, row), later, indices, draws)


class _Later(NamedTuple):
    """Arrays [n] that a round after the first reads besides the tokens of the round before."""

    positions: Array
    frequency_rows: Array


class _Arrays(NamedTuple):
    """Arrays that some rounds read.

    inputs: arrays of the first round. owners: rows of the sequences. features: indices of the features that the first
    round reads. later: arrays of each later round. draws: how each round draws.
    """

    inputs: Inputs
    owners: Array
    features: Array
    later: Sequence[_Later]
    draws: Sequence[Array]


class _Graph(NamedTuple):
    """Recorded rounds."""

    arrays: _Arrays
    made: Rounds
    run: Callable[[], None]


class DraftRounds:
    """Holds recorded rounds of one chain, by the numbers of sequences, tokens of the first round, and rounds.

    has_recorded: the last `run` also recorded, which takes longer.
    """

    def __init__(self, passes: Passes, chain: Chain, table: OpsTable) -> None:
        self._passes, self._chain, self.has_recorded = passes, chain, False
        self._drawn = table.primitive(api.DRAW)
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self._later: list[_Later] = []
        self._draws: list[Array] = []
        if passes.refusal is None:
            recorder, most = passes.recorder, passes.most
            of_tokens = [recorder.input(passes.most_tokens) for _ in range(4)]
            self._inputs = Inputs(*of_tokens, *(recorder.input(most) for _ in range(3)))
            self._owners, self._features = recorder.input(most), recorder.input(passes.most_tokens)

    def run(self, given: First) -> Rounds | None:
        """Run the next tokens of n sequences, and then the token that each draws, until each round has run.

        Returns None if they must run unrecorded.
        """
        n, total, self.has_recorded = len(given.first.rows), len(given.first.tokens), False
        passes, rounds = self._passes, len(given.draws)
        if passes.refusal is not None or n > passes.most or total > passes.most_tokens:
            return None
        more = () if (n, total, rounds) in self._graphs else more_drafting(n, total, passes.most, passes.most_tokens)
        given = given.with_more(more, passes.spare, self._chain.features) if more else given
        key = len(given.first.rows), len(given.first.tokens), rounds
        graph = self._graphs.pop(key, None)
        self.has_recorded = graph is None
        if graph is None:
            made = self._record(given)
        else:
            self._graphs[key] = graph  # the last of the dict is the one that was used last
            self._fill(graph.arrays, given)
            graph.run()
            made = graph.made
        return made.of_first(passes.recorder, n) if made and more else made

    def _fill(self, arrays: _Arrays, given: First) -> None:
        recorder, first = self._passes.recorder, given.first
        fill(recorder, arrays.inputs, first)
        for array, draws in zip(arrays.draws, given.draws, strict=True):
            recorder.assign(array, draws)
        if given.features is not None:
            recorder.assign(arrays.features, given.features)
        if arrays.later:
            recorder.assign(arrays.owners, first.rows)
        ends = [start + length for start, length in zip(first.starts, first.lengths, strict=True)]
        for i, one in enumerate(arrays.later):
            recorder.assign(one.positions, [end + i for end in ends])
            if given.later is not None:
                recorder.assign(one.frequency_rows, given.later[i])

    def _record(self, given: First) -> Rounds | None:
        rows, starts, lengths, tokens, *_ = given.first
        n, total, rounds, passes, chain = len(rows), len(tokens), len(given.draws), self._passes, self._chain
        recorder = passes.recorder
        while len(self._later) < rounds - 1:
            self._later.append(_Later(recorder.input(passes.most), recorder.input(passes.most)))
        while len(self._draws) < rounds:
            self._draws.append(recorder.words(passes.most * DRAW_WORDS))
        arrays = _Arrays(
            cut(passes, self._inputs, n, total),
            recorder.first(self._owners, n),
            recorder.first(self._features, total),
            [_Later(*(recorder.first(x, n) for x in one)) for one in self._later[: rounds - 1]],
            [recorder.first(x, n * DRAW_WORDS) for x in self._draws[:rounds]],
        )
        self._fill(arrays, given)
        ends = np.array(starts) + np.array(lengths)

        def work() -> Sequence[Array]:
            slices = Slices.plain(np.array(rows), np.array(starts), np.array(lengths))
            features = chain.features.take(arrays.features) if chain.features else None
            last = arrays.inputs.last if total > n else None
            passed = chain.run(passes.step(slices, arrays.inputs), features, last)
            drawn = [self._draw(passed, arrays.draws[0])]
            ones, order = (recorder.first(x, n) for x in passes.single)
            owners = arrays.owners
            for i, one in enumerate(arrays.later):
                slices = Slices.plain(np.array(rows), ends + i, np.ones(n, np.int64))
                each = Inputs(owners, drawn[-1][0], one.positions, one.frequency_rows, one.positions, ones, order)
                passed = chain.run(passes.step(slices, each), passed.features, None)
                drawn.append(self._draw(passed, arrays.draws[i + 1]))
            made = [passed.logits, *(array for pair in drawn for array in pair)]
            return made if passed.features is None else [*made, passed.features]

        found = passes.record(work)
        if found is None:
            return None
        logits, *drawn = found.results
        features = drawn.pop() if chain.features else None
        made = Rounds(drawn[::2], drawn[1::2], logits, features)
        make_room(self._graphs, total, passes.sizes)
        self._graphs[n, total, rounds] = _Graph(arrays, made, found.run)
        return made

    def _draw(self, passed: Passed, draws: Array) -> tuple[Array, Array]:
        """Return the token that each row draws, as one of the target's, and the row's largest logit."""
        ids, top = self._drawn(passed.logits, draws, self._chain.tokens)
        return self._chain.ids(ids), top
