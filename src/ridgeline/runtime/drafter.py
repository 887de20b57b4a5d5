"""Propose drafts with passes that follow each other: those of a draft model, or those of an EAGLE head.

Both keep state in the pages of their target (spec/groups.py:with_layers). Prefix reuse, forks, copies, preemption and
swaps of the target thereby also serve the drafts. A step of the target writes only its own rows, so a `Filled` knows
for each page how many rows of the drafts' layers are right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array
from ridgeline.ops.draws import Draw, pack_draws
from ridgeline.runtime.arena import Arena, ArenaPart
from ridgeline.runtime.chain import Chain, Passed
from ridgeline.runtime.draft_rounds import DraftRounds, First, Rounds
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.filled import Filled
from ridgeline.runtime.graphs import Passes, Tap
from ridgeline.runtime.layout import Ints, Slices, build_layout
from ridgeline.runtime.padding import Tokens
from ridgeline.runtime.step import PagedStep
from ridgeline.sample.acceptance import draw_ahead, draw_draft
from ridgeline.sample.logits import Floats
from ridgeline.sample.rejection import Draft
from ridgeline.sample.sampler import Best, SampleRow, take_best
from ridgeline.sched.work import Result, StepPlan, Work
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.groups import StateGroup


class Ask(NamedTuple):
    """A sequence that wants drafts.

    sequence: its id. row: its row in the page tables. tokens: its prompt and answer so far. depth: number of drafts, at
    least 1; pages for len(tokens) + depth - 1 tokens are in the page tables. sampling: draws the drafts; at the next
    token's position.
    """

    sequence: int
    row: int
    tokens: Sequence[int]
    depth: int
    sampling: SampleRow


class Span(NamedTuple):
    """Rows of a sequence from a position on, and the tokens that they read. row: its row in the page tables.

    features: indices in `Features.array`, one for each row; None: the drafts come from a model.
    """

    sequence: int
    row: int
    start: int
    tokens: Sequence[int]
    features: Ints | None = None


class Drafter(Protocol):
    """Proposes drafts on the device of its target.

    tap: takes from each step of the target what the drafter reads; None if it reads tokens only. most: most drafts of
    a sequence; None: any number. lookahead: whether drafts need pages beyond the known tokens. is_usual: the last
    `draft` took as long as the next one with as many rounds will. lost: the error that kept it from taking the
    features of a step; it must not draft any more. tree: most tokens after a draft; 1: drafts are chains. rounds:
    passes of the last `draft`, one after the other; None: as many as the longest chain has drafts.
    """

    tap: Tap | None
    lost: Exception | None
    most: int | None
    lookahead: bool
    is_usual: bool
    tree: int
    rounds: int | None

    def levels(self, drafts: int) -> int:
        """Return how many rounds so many drafts of a sequence take at most."""
        ...

    def follow(self, plan: StepPlan) -> None:
        """Take note of a step that the target is about to run."""
        ...

    def ran(self, plan: StepPlan, tokens: Ints, features: Array | None) -> None:
        """Take the features [T, hidden_size] of a step that has run. tokens: ids of its tokens [T].

        features: None if the step was recorded, and has written its features to `tap.kept`.
        """
        ...

    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Take note of the results of a step whose drafts formed trees, after `ran`."""
        ...

    def draft(self, asks: Sequence[Ask], *, follow: bool = True) -> list[list[Draft]]:
        """Return drafts for each sequence: `depth`, or fewer if that is not possible.

        Drafts of a tree have a `parent`, and the best ones come first. To be called after each step of the target,
        before pages are taken for the next one. follow: also do the work that lets other sequences have drafts sooner.
        """
        ...


class Place(NamedTuple):
    """The part of a runner that a drafter works in.

    first_layer: number of the drafts' first layer in the arena. groups, tables, num_pages, num_host_pages: the
    runner's, for the layers of both. mirrors: the tables as recorded passes read them. max_seqs: rows of the page
    tables. num_drafts: most drafts of a sequence.
    max_tokens: most tokens of a pass. vocab_size: the target's. acceptance: how drafts are accepted, which decides how
    they are drawn. tree: most tokens after a draft; 1: drafts are chains.
    """

    table: OpsTable
    arena: Arena
    first_layer: int
    groups: Sequence[StateGroup]
    tables: Sequence[Ints]
    mirrors: Sequence[Array]
    num_pages: Sequence[int]
    num_host_pages: Sequence[int]
    max_seqs: int
    num_drafts: int
    max_tokens: int
    vocab_size: int
    acceptance: Acceptance
    tree: int = 1


class ChainDrafter(ABC):
    """Proposes drafts with a chain of passes.

    most_id: largest id that the chain's embedding has. recorded_tokens: most tokens of a sequence in the first pass, if
    that is recorded: each number of tokens is recorded once.
    """

    tap: Tap | None = None
    lost: Exception | None = None
    most: int | None = None
    lookahead = True
    tree = 1
    rounds: int | None = None

    def __init__(self, chain: Chain, place: Place, most_id: int, recorded_tokens: int) -> None:
        self._chain, self._acceptance, self._vocab_size = chain, place.acceptance, place.vocab_size
        self._most_id, self._recorded_tokens = most_id, recorded_tokens
        self._table, self._memory, self._max_tokens = place.table, place.table.memory, place.max_tokens
        self._layers = ArenaPart(place.arena, place.groups, place.first_layer)
        own = self._layers.groups
        self._groups, self._tables = [place.groups[g] for g in own], [place.tables[g] for g in own]
        self._filled = Filled(
            self._groups, self._tables, [place.num_pages[g] for g in own], [place.num_host_pages[g] for g in own], own
        )
        self._inputs = DraftInputs(place.max_seqs, 0, place.table)
        mirrors = [place.mirrors[g] for g in own]
        passes = Passes(chain.constants(), place.table, self._groups, self._layers, self._inputs, mirrors)
        self._passes, self._rounds = passes, DraftRounds(passes, chain, place.table)
        self.is_usual = True

    def levels(self, drafts: int) -> int:
        """Return how many rounds so many drafts of a sequence take at most."""
        return drafts

    def follow(self, plan: StepPlan) -> None:
        """Take note of a step that the target is about to run."""
        if plan.copies or plan.swap_out or plan.swap_in:
            self._filled.move(plan.swap_out, source="device", target="host")
            self._filled.move(plan.swap_in, source="host", target="device")
            self._filled.move(plan.copies, source="device", target="device")
        self._filled.follow(plan.works)

    def draft(self, asks: Sequence[Ask], *, follow: bool = True) -> list[list[Draft]]:
        """Return drafts for each sequence; see Drafter."""
        self.is_usual = True
        self._prepare(asks, follow)
        drafts: list[list[Draft]] = [[] for _ in asks]
        spans, going = self._missing(asks)
        if spans and not going:
            self._forward(spans)
        while going:
            found = self._run(spans, [asks[i] for i in going], min(asks[i].depth - len(drafts[i]) for i in going))
            going = extend(drafts, asks, going, found, self._vocab_size, self._acceptance)
            spans = [self._continued(asks[i], drafts[i]) for i in going]
        return drafts

    @abstractmethod
    def _prepare(self, asks: Sequence[Ask], follow: bool) -> None:
        """Run what else must run before the first draft; see Drafter.draft."""

    @abstractmethod
    def _missing(self, asks: Sequence[Ask]) -> tuple[list[Span], list[int]]:
        """Return rows that must run before the first draft, and the indices of the sequences that can draft then.

        Their spans come first.
        """

    @abstractmethod
    def _computed(self, span: Span, rounds: int) -> None:
        """Take note that rows were computed, and after them `rounds` - 1 rows of drafts."""

    def _continued(self, ask: Ask, drafts: Sequence[Draft]) -> Span:
        """Return the row that reads the last draft of a sequence."""
        at = len(ask.tokens) + len(drafts) - 1 - self._chain.lag
        features = self._chain.features
        indices = None if features is None else features.at(ask.row, at, at + 1)
        return Span(ask.sequence, ask.row, at, (drafts[-1].token,), indices)

    def _run(self, spans: Sequence[Span], asks: Sequence[Ask], rounds: int) -> Sequence[Best | Floats]:
        """Run rows, and up to `rounds` rounds of drafts if a kernel can draw them; return what each round found.

        asks: the sequences of the first spans, which draft. Returns the logits [n, vocabulary] after each of their n
        spans, or the tokens that were drawn and the largest logits.
        """
        if len(spans) == len(asks) and max(len(span.tokens) for span in spans) <= self._recorded_tokens:
            draws = self._draws(spans, asks, rounds)
            made = self._recorded(spans, draws or [pack_draws([Draw()] * len(asks))])
            if made is not None and draws:
                found = self._passes.fetch([*made.tokens, *made.top])
                half = len(found) // 2
                return [Best(*pair) for pair in zip(found[:half], found[half:], strict=True)]
            if made is not None:
                return [self._chain.spread(self._memory.get(made.logits))]
        ends = np.cumsum([len(span.tokens) for span in spans])[: len(asks)] - 1
        passed = self._forward(spans, ends)
        assert passed is not None
        return [self._chain.spread(self._memory.get(passed.logits))]

    def _draws(self, spans: Sequence[Span], asks: Sequence[Ask], rounds: int) -> list[Ints] | None:
        """Return how each of some rounds draws, [n * DRAW_WORDS]; None if a kernel cannot draw for one of the asks."""
        ahead = [
            span.start + len(span.tokens) + self._chain.lag - len(ask.tokens)
            for span, ask in zip(spans, asks, strict=True)
        ]
        packed = []
        for i in range(rounds):
            pairs = zip(asks, ahead, strict=True)
            draws = [draw_ahead(ask.sampling, self._acceptance, count + i) for ask, count in pairs]
            known = [draw for draw in draws if draw is not None]
            if len(known) < len(draws):
                return None
            packed.append(pack_draws(known))
        return packed

    def _recorded(self, spans: Sequence[Span], draws: Sequence[Ints]) -> Rounds | None:
        """Run rows and the rounds after them from a recording; None if there is none for so many.

        draws: how each round draws, [n * DRAW_WORDS].
        """
        rounds = len(draws)
        rows, starts = [span.row for span in spans], [span.start for span in spans]
        lengths = [len(span.tokens) for span in spans]
        turned, later, tables = None, None, self._chain.frequency_tables
        if tables is not None:
            slices = Slices.plain(np.array(rows), np.array(starts), np.array(lengths))
            positions, ends = slices.positions(), slices.starts + slices.lengths
            turned = tables.rows(np.zeros_like(positions), positions).tolist()
            later = [tables.rows(np.zeros_like(ends), ends + i).tolist() for i in range(rounds - 1)]
        ids = [min(token, self._most_id) for span in spans for token in span.tokens]
        features = None if self._chain.features is None else _features(spans).tolist()
        made = self._rounds.run(First(Tokens(rows, starts, lengths, ids, turned), later, features, draws))
        self.is_usual &= not self._rounds.has_recorded
        if made is not None:
            self._after(spans, made.features, rounds)
        return made

    def _forward(self, spans: Sequence[Span], last: Ints | None = None) -> Passed | None:
        """Run rows unrecorded; return the results of some of them.

        last: indices of these rows among all of them; None: there are none.
        """
        rows, starts = np.array([span.row for span in spans]), np.array([span.start for span in spans])
        lengths = np.array([len(span.tokens) for span in spans])
        self.is_usual &= bool(lengths.max() <= self._recorded_tokens)
        slices, memory = Slices.plain(rows, starts, lengths), self._memory
        tokens = np.fromiter((t for span in spans for t in span.tokens), np.int64, int(lengths.sum()))
        step = self._step(slices, tokens)
        features = self._chain.features
        given = None if features is None else features.take(memory.integers(_features(spans)))
        if last is None:
            self._chain.write(step, given)
            passed = None
        else:
            passed = self._chain.run(step, given, memory.integers(last))
        self._after(spans, None if passed is None else passed.features, 1)
        return passed

    def _step(self, slices: Slices, tokens: Ints) -> PagedStep:
        """Return the step of an unrecorded pass. tokens: ids for all rows [T]."""
        memory = self._memory
        return PagedStep(
            memory.integers(np.minimum(tokens, self._most_id)),
            memory.integers(slices.positions()),
            slices,
            [
                build_layout(slices, table, group.page_tokens, group.lookback, memory, group.first_tokens)
                for group, table in zip(self._groups, self._tables, strict=True)
            ],
            self._layers,
            self._inputs,
            self._table,
        )

    def _after(self, spans: Sequence[Span], features: Array | None, rounds: int) -> None:
        """Take note of rows and rounds that ran.

        features: [n, hidden_size], which the rows after the first n spans read.
        """
        for span in spans:
            self._computed(span, rounds)
        if features is not None and self._chain.features is not None:
            ends = [span.start + len(span.tokens) + rounds - 1 for span in spans[: features.shape[0]]]
            at = [self._chain.features.at(span.row, end, end + 1) for span, end in zip(spans, ends, strict=False)]
            self._chain.features.put(np.concatenate(at), features)


def extend(
    drafts: Sequence[list[Draft]], asks: Sequence[Ask], going: Sequence[int], found: Sequence[Best | Floats],
    vocab_size: int, acceptance: Acceptance,
) -> list[int]:  # fmt: skip
    """Add a draft to those of some sequences for each round that ran; return the sequences that want more.

    going: indices of the sequences in `asks`. found: for each round its tokens, or logits [n, vocab_size].
    """
    left = dict.fromkeys(going)
    for one in found:
        for i, draft in zip(going, _drawn(one, drafts, asks, going, vocab_size, acceptance), strict=True):
            if i not in left:
                continue
            if draft is not None:
                drafts[i].append(draft)
            if draft is None or len(drafts[i]) == asks[i].depth or asks[i].sampling.is_end(draft.token):
                del left[i]
    return list(left)


def _drawn(
    found: Best | Floats, drafts: Sequence[Sequence[Draft]], asks: Sequence[Ask], going: Sequence[int],
    vocab_size: int, acceptance: Acceptance,
) -> Iterator[Draft | None]:  # fmt: skip
    """Yield the next draft of each sequence; None where the logits are broken."""
    if isinstance(found, Best):
        for one in take_best(found):
            is_known = not isinstance(one, RequestError) and one.token < vocab_size
            yield Draft(one.token) if is_known and not isinstance(one, RequestError) else None
        return
    for i, logits in zip(going, found, strict=True):
        try:
            yield draw_draft(logits, asks[i].sampling.ahead(len(drafts[i])), acceptance)
        except RequestError:
            yield None


def _features(spans: Sequence[Span]) -> Ints:
    """Return the indices of the features that rows read."""
    return np.concatenate([span.features for span in spans if span.features is not None])
