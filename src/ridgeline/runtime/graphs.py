"""Record decode steps once and run them again: on a GPU as CUDA graphs, on a CPU as a list of kernel calls.

A step of n sequences computes T tokens: the next one of each sequence, and perhaps drafts. Another step with the same
n and T differs only in the tokens, their positions, how many of them each sequence has, and the contents of the page
tables. So it is recorded over arrays at fixed addresses, which are filled before each run.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ridgeline.nn.model import Model
from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Buckets, PagedLayout, Segments, SequenceBucket, SnapshotLayout
from ridgeline.ops.draws import DRAW_WORDS, TRIAL_WORDS, Draw, pack_draws, pack_trials
from ridgeline.ops.driver import Recorded, Recorder, Sizes
from ridgeline.runtime.again import Again, numbers, sizes
from ridgeline.runtime.again import segments as segments_of
from ridgeline.runtime.arena import Layers
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.features import Features
from ridgeline.runtime.layout import Slices
from ridgeline.runtime.padding import Shapes, Tokens
from ridgeline.runtime.sampled import SampledTokens
from ridgeline.runtime.step import PagedStep
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.groups import StateGroup

ADAPTED = ", adapted"  # ends the kind of a step some of whose sequences have adapters
NOTHING = Sizes((0,), 0, 0, 0)  # of a device that records nothing

Tree = tuple[Sequence[int], Sequence[int]]  # positions and paths of a step's tokens


class Tap(NamedTuple):
    """Takes what a head for speculative decoding reads from a forward pass.

    aux: ids of layers, as in `Model.forward`. features: returns the features [T, hidden_size] of a stream. kept:
    recorded steps write their features there.
    """

    aux: tuple[int, ...]
    features: Callable[[Stream], Array]
    kept: Features


class Decoded(NamedTuple):
    """Results of a recorded step of T tokens, valid until the next one.

    logits: [T, vocabulary]. best, best_logits: the token of each row, which is the best one or was drawn, and the row's
    largest logit [T]. stream: the residual stream.
    """

    logits: Array
    best: Array
    best_logits: Array
    stream: Stream


class Inputs(NamedTuple):
    """Arrays that a recorded step reads: of its tokens [T], and of its sequences [n].

    starts: position of each sequence's first token. last: index of its last token among the T tokens. A step of one
    token each has its positions as `starts`, and the other two never change. slots, paths: slot and path
    of each token, if drafts form trees (api.PagedLayout); None: they are chains. draws: how the token after each one is
    sampled, [T * DRAW_WORDS]; None: the best token of each row is taken. trials: the drafts that are tried before,
    [T * TRIAL_WORDS]; None: none. before, fresh: for recurrent layers, the position of the token before the first one,
    and whether there is none. adapters: the slot of each token's adapter [T], -1 for none; None if no token has one.
    """

    rows: Array
    tokens: Array
    positions: Array
    frequency_rows: Array
    starts: Array
    lengths: Array
    last: Array
    slots: Array | None = None
    paths: Array | None = None
    draws: Array | None = None
    trials: Array | None = None
    before: Array | None = None
    fresh: Array | None = None
    adapters: Array | None = None


class _Graph(NamedTuple):
    """A recorded step.

    again: as in `Passes.step`. kept: where the features of its tokens are written; None if nobody reads any.
    """

    inputs: Inputs
    again: Again[Array] | None
    kept: Array | None
    made: Decoded
    run: Callable[[], None]


class Passes:
    """Prepares forward passes over arrays at fixed addresses, and records them.

    constants: arrays that a pass reads besides its step and its state. page_tables: as recorded work reads them.
    refusal: why nothing can be recorded. has_states: whether there are recurrent layers.
    most, most_tokens: sequences and tokens of the largest recorded step. sequences: numbers of sequences
    up to which steps are filled. spare: a row of the page tables that no sequence has.
    """

    def __init__(
        self, constants: Sequence[Array], table: OpsTable, groups: Sequence[StateGroup], arena: Layers,
        drafts: DraftInputs, page_tables: Sequence[Array], refusal: str | None = None,
    ) -> None:  # fmt: skip
        self._table, self._groups, self._page_tables = table, groups, page_tables
        self._arena, self._drafts = arena, drafts
        self._layout = table.primitive(api.DECODE_LAYOUT)
        self.best, self.draw = table.primitive(api.BEST), table.primitive(api.DRAW)
        self.accept = table.primitive(api.ACCEPT)
        self.sizes = table.driver.sizes if table.driver else NOTHING
        lines = page_tables[0].shape[0]
        self.most, self.most_tokens = min(lines, self.sizes.sequences[-1]), self.sizes.tokens
        self.sequences = (*(n for n in self.sizes.sequences if n < self.most), self.most)
        self.spare = lines - 1
        self.has_states = any(group.snapshot for group in groups)
        self.refusal = refusal or _refusal(table)
        if self.refusal is None and table.driver is not None:
            self.recorder = table.driver.recorder()
            self.single = self.recorder.input(self.most), self.recorder.input(self.most)
            self.recorder.assign(self.single[0], [1] * self.most)
            self.recorder.assign(self.single[1], range(self.most))
            self._known = [*arena.pages, *page_tables, *constants]

    def step(self, slices: Slices, inputs: Inputs, again: Again[Array] | None = None) -> PagedStep:
        """Return the step of one pass. slices: rows, starts and lengths of the pass that is recorded.

        again: for recurrent layers in a step with drafts, or with accepted drafts that run again.
        """
        rows, tokens, positions, frequency_rows, starts, lengths, last, given, paths, _, _, before, fresh, adapters = (
            inputs
        )
        slots_at, n, kept, segments = positions if given is None else given, slices.rows.size, None, None
        each = self.recorder.first(self.single[1], n)
        if again is not None:
            has_drafts = tokens.shape[0] > n
            segments = segments_of(again, each, self._drafts.num_drafts, self.recorder.matrix, has_drafts=has_drafts)
            kept = again.read, again.write if has_drafts else None
        elif self.has_states:
            segments = self._segments(lengths, last)
        layouts: list[PagedLayout | SnapshotLayout] = []
        for group, page_table in zip(self._groups, self._page_tables, strict=True):
            pages, slots, tables = self._layout(page_table, rows, slots_at, last, group.page_tokens)
            if group.snapshot and before is not None and fresh is not None:
                known = rows if again is None else again.rows
                read, _, _ = self._layout(page_table, known, before, each, group.page_tokens)
                if again is not None:
                    pages, _, _ = self._layout(page_table, known, again.known, each, group.page_tokens)
                layouts.append(SnapshotLayout(read, fresh, pages))
            else:
                layouts.append(PagedLayout(pages, slots, starts, lengths, tables, _no_buckets, paths))
        return PagedStep(
            tokens, positions, slices, layouts, self._arena, self._drafts, self._table, frequency_rows, segments, kept,
            adapters=adapters,
        )  # fmt: skip

    def _segments(self, ones: Array, numbers: Array) -> Segments:
        """Return the segments of n sequences of one token each. numbers: 0 to n - 1."""
        bucket = SequenceBucket(numbers, self.recorder.matrix(numbers, 1), ones)
        return Segments((bucket,), numbers, numbers)

    def fetch(self, arrays: Sequence[Array]) -> list[np.ndarray[Any, Any]]:
        """Return results of recorded work on the host."""
        assert self._table.driver is not None, "nothing is recorded without a driver"
        return self._table.driver.fetch(arrays)()

    def record(self, work: Callable[[], Sequence[Array]]) -> Recorded | None:
        """Run and record work; None if it must run unrecorded, with the reason in `refusal`."""
        try:
            found = self.recorder.record(work, [*self._known, *self._drafts.arrays])
        except _AsksForBucketsError:  # the step runs again unrecorded and writes the same values to pages
            found = "attention gathers what the pages of a step hold"
        if isinstance(found, str):
            left = sorted({c.op for c in self._table.choices() if c.refusals and c.level == "primitive"})
            self.refusal = f"{found}; served beside the best kernels: {', '.join(left) or 'nothing'}"
            return None
        return found


class DecodeGraphs:
    """Holds recorded decode steps of one engine, by their numbers of sequences and tokens.

    tap: takes features from each step; None if nobody reads any. sampled: holds the tokens that steps sample, where the
    device runs ahead of the host; a step without drafts then keeps the token of each row there. acceptance: how drafts
    are accepted.
    """

    def __init__(
        self, model: Model, table: OpsTable, groups: Sequence[StateGroup], arena: Layers, drafts: DraftInputs,
        page_tables: Sequence[Array], tap: Tap | None = None, sampled: SampledTokens | None = None,
        acceptance: Acceptance = "same",
    ) -> None:  # fmt: skip
        self._model, self._tap, self._sampled = model, tap, sampled
        constants = [*model.constants(), *([tap.kept.array] if tap else ())]
        apart = None if model.group is None else "ranks send each other numbers between kernels"
        self._passes = Passes(constants, table, groups, arena, drafts, page_tables, apart)
        self._graphs: dict[tuple[int, int, str], _Graph] = {}
        self._drafts = drafts
        self._again: Again[Array] | None = None
        if self.refusal is None:
            recorder, most = self._passes.recorder, self._passes.most
            tokens = self._passes.most_tokens
            of_tokens = [recorder.input(tokens) for _ in range(4)]
            self._inputs = Inputs(*of_tokens, *(recorder.input(most) for _ in range(3)))
            self._tree = recorder.input(tokens), recorder.words(tokens)
            self._kept = recorder.input(tokens)
            self._adapters = recorder.input(tokens)
            self._draws = recorder.words(max(most, tokens) * DRAW_WORDS)
            tries = sampled is not None and acceptance != "same"
            self._trials = recorder.words(max(most, tokens) * TRIAL_WORDS) if tries else None
            self._states = (recorder.input(most), recorder.input(most)) if self._passes.has_states else None
            if self._states and drafts.num_drafts:
                self._again = Again(*(recorder.input(size) for size in sizes(most, most + tokens, drafts.num_drafts)))
        self._shapes = Shapes(self._passes.sequences, self._passes.most, self._passes.most_tokens)

    @property
    def refusal(self) -> str | None:
        """Return why there are no recordings."""
        return self._passes.refusal

    @property
    def has_states(self) -> bool:
        """Return whether there are recurrent layers."""
        return self._passes.has_states

    def run(
        self, given: Tokens, tree: Tree | None = None, kept: Sequence[int] = (), draws: Sequence[Draw] = (),
        replays: Sequence[int] = (),
    ) -> Decoded | None:  # fmt: skip
        """Run the next tokens of n sequences, with their drafts; None if the step must run unrecorded.

        tree: positions and paths of all tokens, if drafts form trees. kept: indices in the features of the tap, one for
        each token. draws: how the token after each one is sampled, where the device samples. replays: accepted
        drafts of each sequence that run again in recurrent layers. The result may have more rows after theirs.
        """
        n, total = len(given.rows), len(given.tokens)
        if self.refusal is not None or n > self._passes.most or total > self._passes.most_tokens:
            return None
        kind = "tree" if tree is not None else "chain"
        if self.has_states and (total > n or any(replays)):
            kind = "again"
            if self._again is None or not self._drafts.is_allocated:
                return None
        if given.adapters:
            kind = f"{kind}{ADAPTED}"
        if tree is None and (n, total, kind) not in self._graphs and (more := self._shapes.more(n, total)):
            if kind.removesuffix(ADAPTED) == "chain" or max(more) <= self._drafts.num_drafts + 1:
                given = given.with_more(more, self._passes.spare)
            if self._tap:
                kept = [*kept, *self._tap.kept.at(self._passes.spare, 0, len(given.tokens) - total).tolist()]
        key = len(given.rows), len(given.tokens), kind
        graph = self._graphs.pop(key, None)
        if graph is None:
            return self._record(given, kind, tree, kept, draws, replays)
        self._graphs[key] = graph  # the last of the dict is the one that was used last
        fill(self._passes.recorder, graph.inputs, given, tree, draws)
        self._fill_again(graph.inputs, graph.again, given, replays)
        if graph.kept is not None:
            self._passes.recorder.assign(graph.kept, kept)
        graph.run()
        return graph.made

    def _fill_again(self, inputs: Inputs, again: Again[Array] | None, given: Tokens, replays: Sequence[int]) -> None:
        """Write where sequences begin whose accepted drafts run again, and what runs. More sequences repeat nothing."""
        if again is None or inputs.before is None or inputs.fresh is None:
            return
        replays, assign = [*replays, *[0] * (len(given.rows) - len(replays))], self._passes.recorder.assign
        begins = [start - count for start, count in zip(given.starts, replays, strict=True)]
        assign(inputs.before, [max(begin - 1, 0) for begin in begins])
        assign(inputs.fresh, [begin == 0 for begin in begins])
        for array, values in zip(again, numbers(given, replays, self._drafts.num_drafts), strict=True):
            assign(array, values)

    def _record(
        self, given: Tokens, kind: str, tree: Tree | None, kept: Sequence[int], draws: Sequence[Draw],
        replays: Sequence[int],
    ) -> Decoded | None:  # fmt: skip
        n, total, passes, tap = len(given.rows), len(given.tokens), self._passes, self._tap
        # The first recording is run twice and compared, so no two of its tokens may share their places in pages.
        is_first = self.has_states and total > 1 and not self._graphs
        single = f"chain{ADAPTED}" if given.adapters else "chain"
        if is_first and self._record(given.of_one(passes.spare), single, None, kept[:1], (), ()) is None:
            return None
        inputs = cut(passes, self._inputs, n, total)
        if tree is not None:
            slots, paths = (passes.recorder.first(x, total) for x in self._tree)
            inputs = inputs._replace(slots=slots, paths=paths)
        if self._sampled is not None:
            inputs = inputs._replace(draws=passes.recorder.first(self._draws, total * DRAW_WORDS))
            if self._trials is not None and total > n:
                inputs = inputs._replace(trials=passes.recorder.first(self._trials, total * TRIAL_WORDS))
        if self._states is not None:
            before, fresh = (passes.recorder.first(x, n) for x in self._states)
            inputs = inputs._replace(before=before, fresh=fresh)
        if given.adapters:
            inputs = inputs._replace(adapters=passes.recorder.first(self._adapters, total))
        again = None
        if kind.removesuffix(ADAPTED) == "again" and self._again is not None:
            counts = sizes(n, total, self._drafts.num_drafts)
            again = Again(*(passes.recorder.first(x, size) for x, size in zip(self._again, counts, strict=True)))
        # Where a step changes what the next one reads, it is recorded while it computes rows that nobody has.
        apart = self._sampled is not None or self.has_states
        first = given.of_row(passes.spare) if apart else given
        fill(passes.recorder, inputs, first, tree)
        self._fill_again(inputs, again, first, ())
        slices, places = Slices.plain(np.array(given.rows), np.array(given.starts), np.array(given.lengths)), None
        if tap:
            places = passes.recorder.first(self._kept, total)
            passes.recorder.assign(places, kept)

        def work() -> Sequence[Array]:
            stream = self._model.forward(passes.step(slices, self._known(inputs), again), aux=tap.aux if tap else ())
            if tap and places is not None:
                tap.kept.write(places, tap.features(stream))
            logits = self._model.logits(stream)
            made = [logits, *self._take(logits, inputs, keeps=n == total), stream.residual]
            return made if stream.delta is None else [*made, stream.delta]

        found = passes.record(work)
        if found is None:
            return None
        logits, best, best_logits, residual, *more = found.results
        made = Decoded(logits, best, best_logits, Stream(residual, more[0] if more else None))
        if apart:
            fill(passes.recorder, inputs, given, tree, draws)
            self._fill_again(inputs, again, given, replays)
            found.run()
        make_room(self._graphs, total, passes.sizes)
        self._graphs[n, total, kind] = _Graph(inputs, again, places, made, found.run)
        return made

    def _take(self, logits: Array, inputs: Inputs, *, keeps: bool) -> tuple[Array, Array]:
        """Return the token of each row and its largest logit. keeps: the next step begins with these tokens."""
        if self._sampled is None or inputs.draws is None:
            return self._passes.best(logits)
        if inputs.trials is not None:
            return self._passes.accept(logits, inputs.draws, inputs.trials)
        tokens, top = self._passes.draw(logits, inputs.draws, None)
        if keeps:
            self._sampled.keep(inputs.rows, tokens)
        return tokens, top

    def _known(self, inputs: Inputs) -> Inputs:
        """Return the inputs with tokens in place of LAST."""
        if self._sampled is None:
            return inputs
        return inputs._replace(tokens=self._sampled.known(inputs.tokens, inputs.rows))


def cut(passes: Passes, inputs: Inputs, n: int, total: int) -> Inputs:
    """Return the first parts of arrays, for a step of `n` sequences and `total` tokens."""
    first = passes.recorder.first
    of_sequences = inputs[4:7] if total > n else (inputs.positions, *passes.single)
    return Inputs(*(first(x, total) for x in inputs[:4]), *(first(x, n) for x in of_sequences))


def fill(
    recorder: Recorder, inputs: Inputs, given: Tokens, tree: Tree | None = None, draws: Sequence[Draw] = ()
) -> None:
    """Write the inputs of a recorded step. Without frequency rows, those that were written before stay.

    Tokens beyond those of `draws` are followed by their best tokens.
    """
    rows, starts, lengths, tokens, frequency_rows, adapters = given
    assign, positions = recorder.assign, starts
    if len(tokens) > len(rows):
        assign(inputs.starts, starts), assign(inputs.lengths, lengths)
        assign(inputs.last, [end - 1 for end in accumulate(lengths)])
        rows = [row for row, count in zip(rows, lengths, strict=True) for _ in range(count)]
        positions = [first + i for first, count in zip(starts, lengths, strict=True) for i in range(count)]
        if tree is not None and inputs.slots is not None and inputs.paths is not None:
            assign(inputs.slots, positions), assign(inputs.paths, tree[1])
            positions = tree[0]
    if inputs.before is not None and inputs.fresh is not None:
        assign(inputs.before, [max(start - 1, 0) for start in starts])
        assign(inputs.fresh, [start == 0 for start in starts])
    if inputs.adapters is not None:
        assign(inputs.adapters, [slot for slot, count in zip(adapters, lengths, strict=True) for _ in range(count)])
    assign(inputs.rows, rows), assign(inputs.tokens, tokens), assign(inputs.positions, positions)
    if frequency_rows is not None:
        assign(inputs.frequency_rows, frequency_rows)
    if inputs.draws is not None:
        every = [*draws, *[Draw()] * (len(rows) - len(draws))]
        assign(inputs.draws, pack_draws(every))
        if inputs.trials is not None:
            assign(inputs.trials, pack_trials(every))


def make_room(graphs: MutableMapping[tuple[Any, ...], Any], tokens: int, sizes: Sizes) -> None:
    """Drop the recordings that were not used for the longest time, to keep one more of some tokens.

    graphs: by keys whose second part is the number of tokens, in the order of their use.
    """
    while graphs and (len(graphs) >= sizes.graphs or sum(key[1] for key in graphs) + tokens > sizes.rows):
        del graphs[next(iter(graphs))]


def _refusal(table: OpsTable) -> str | None:
    return f"device {table.memory.device} records nothing" if table.driver is None else None


class _AsksForBucketsError(Exception):
    """A kernel needs the buckets of a step, which a recorded step does not have: they change from step to step."""


def _no_buckets() -> Buckets:
    raise _AsksForBucketsError
