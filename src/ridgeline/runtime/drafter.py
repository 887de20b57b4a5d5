"""Run a draft model over the pages of its target.

Both models read the same tokens, so a page holds the rows of both (spec/groups.py:with_layers). Prefix reuse, forks,
copies, preemption and swaps of the target thereby also serve its draft. A step of the target writes only its own rows,
so a `Filled` knows for each page how many rows of the draft are right. Before it proposes, the draft runs the tokens
whose rows are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.nn.model import Model
from ridgeline.runtime.arena import Arena, ArenaPart
from ridgeline.runtime.draft_rounds import DraftRounds, Rounds
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.filled import Filled
from ridgeline.runtime.graphs import Passes
from ridgeline.runtime.layout import Ints, Slices, build_layout
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.step import PagedStep
from ridgeline.sample.acceptance import draw_draft
from ridgeline.sample.logits import Floats
from ridgeline.sample.rejection import Draft
from ridgeline.sample.sampler import Best, SampleRow, take_best
from ridgeline.sched.work import StepPlan, Work
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.groups import StateGroup

RECORDED_TOKENS = 2  # of each sequence; longer spans are rare, and each length would be recorded


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
    """Tokens of a sequence from a position on. row: its row in the page tables."""

    sequence: int
    row: int
    start: int
    tokens: Sequence[int]


class Drafter:
    """Proposes drafts with a model that shares the pages of its target.

    loaded: the draft, whose layers follow the target's in the arena. groups, tables, num_pages, num_host_pages: the
    runner's, for both models. max_tokens: most tokens of a forward pass. vocab_size: the target's. acceptance: how
    drafts are accepted, which decides how they are drawn.

    is_usual: the last `draft` took as long as the next one with as many rounds will: nothing was recorded in it, and no
    sequence had many tokens to run before its first draft.
    """

    def __init__(
        self, loaded: LoadedModel, first_layer: int, groups: Sequence[StateGroup], tables: Sequence[Ints], arena: Arena,
        num_pages: Sequence[int], num_host_pages: Sequence[int], max_tokens: int, vocab_size: int,
        acceptance: Acceptance,
    ) -> None:  # fmt: skip
        self._acceptance: Acceptance = acceptance
        self._vocab_size = vocab_size
        self._most_id = loaded.spec.vocab_size - 1  # the target may have more unused tokens
        self._model: Model = loaded.model
        self._table, self._memory, self._max_tokens = loaded.table, loaded.table.memory, max_tokens
        self._layers = ArenaPart(arena, groups, first_layer)
        own = self._layers.groups
        self._groups, self._tables = [groups[g] for g in own], [tables[g] for g in own]
        self._filled = Filled(
            self._groups, self._tables, [num_pages[g] for g in own], [num_host_pages[g] for g in own], own
        )
        self._inputs = DraftInputs(len(tables[0]), 0, loaded.table)
        self._rounds = DraftRounds(
            Passes(self._model, self._table, self._groups, self._layers, self._inputs, self._tables)
        )
        self._chunks: list[Work] = []  # works of the target's last step that ended inside a prompt
        self.is_usual = True

    def follow(self, plan: StepPlan) -> None:
        """Take note of a step that the target runs."""
        if plan.copies or plan.swap_out or plan.swap_in:
            self._filled.move(plan.swap_out, source="device", target="host")
            self._filled.move(plan.swap_in, source="host", target="device")
            self._filled.move(plan.copies, source="device", target="device")
        self._chunks = [work for work in plan.works if not work.sample]
        self._filled.follow(plan.works)

    def _follow_chunks(self) -> None:
        """Run the chunks of prompts of the last step, if the rows before them are right."""
        chunks = [w for w in self._chunks if self._filled.end(w.row, w.start) == w.start]
        self._chunks = []
        if chunks:
            self._forward([Span(w.sequence, w.row, w.start, w.tokens) for w in chunks])

    def draft(self, asks: Sequence[Ask], *, follow: bool = True) -> list[list[Draft]]:
        """Return drafts for each sequence: `depth`, or fewer if the draft fails or must run too many tokens before.

        To be called after each step of the target, before pages are taken for the next one. follow: also run the
        chunks of prompts that the target has run, so that their sequences can have drafts sooner.
        """
        self.is_usual = True
        if follow:
            self._follow_chunks()
        drafts: list[list[Draft]] = [[] for _ in asks]
        spans, going = self._missing(asks)
        if spans and not going:
            self._forward(spans)
        while going:
            found = self._run(spans, [asks[i] for i in going], min(asks[i].depth - len(drafts[i]) for i in going))
            going = self._take(asks, drafts, going, found)
            spans = [_continued(asks[i], drafts[i]) for i in going]
        return drafts

    def _missing(self, asks: Sequence[Ask]) -> tuple[list[Span], list[int]]:
        """Return what must run before the first draft, and the indices of the sequences that can draft then.

        Their spans come first. One that has more missing tokens than a pass takes continues in the next step.
        """
        ready, spans, later, left = list[int](), list[Span](), list[Span](), self._max_tokens
        for i, (sequence, row, tokens, _, _) in enumerate(asks):
            known = len(tokens)
            # Two tokens if one or two are missing: then all steps have one shape, which is recorded once.
            start = max(0, min(self._filled.right(sequence, row, known - 1), known - 2))
            run = tokens[start : min(known, start + left)]
            left -= len(run)
            if start + len(run) == known:
                ready.append(i)
                spans.append(Span(sequence, row, start, run))
            elif run:
                later.append(Span(sequence, row, start, run))
        return spans + later, ready

    def _take(
        self, asks: Sequence[Ask], drafts: Sequence[list[Draft]], going: Sequence[int], found: Sequence[Best | Floats]
    ) -> list[int]:
        """Draw drafts from the rounds that ran for some sequences; return those that want more."""
        left = dict.fromkeys(going)
        for one in found:
            for i, draft in zip(going, self._drawn(asks, drafts, going, one), strict=True):
                if i not in left:
                    continue
                if draft is not None:
                    drafts[i].append(draft)
                if draft is None or len(drafts[i]) == asks[i].depth or asks[i].sampling.is_end(draft.token):
                    del left[i]
        return list(left)

    def _drawn(
        self, asks: Sequence[Ask], drafts: Sequence[Sequence[Draft]], going: Sequence[int], found: Best | Floats
    ) -> Iterator[Draft | None]:
        """Yield the next draft of each sequence; None where the draft's logits are broken."""
        if isinstance(found, Best):
            for one in take_best(found):
                is_known = not isinstance(one, RequestError) and one.token < self._vocab_size
                yield Draft(one.token) if is_known and not isinstance(one, RequestError) else None
            return
        for i, logits in zip(going, found[:, : self._vocab_size], strict=True):
            try:
                yield draw_draft(logits, asks[i].sampling.ahead(len(drafts[i])), self._acceptance)
            except RequestError:
                yield None

    def _run(self, spans: Sequence[Span], asks: Sequence[Ask], rounds: int) -> Sequence[Best | Floats]:
        """Run tokens, and up to `rounds` rounds of drafts if nobody needs to draw them; return what each round found.

        asks: the sequences of the first spans, which draft. Returns the logits [n, vocabulary] after each of their n
        spans, or the best tokens.
        """
        if len(spans) == len(asks) and max(len(span.tokens) for span in spans) <= RECORDED_TOKENS:
            greedy = all(ask.sampling.wants_best() for ask in asks)
            made = self._recorded(spans, rounds if greedy else 1)
            if made is not None and greedy:
                pairs = zip(made.best, made.best_logits, strict=True)
                return [Best(np.asarray(best), np.asarray(logits)) for best, logits in pairs]
            if made is not None:
                return [self._memory.get(made.logits)]
        ends = np.cumsum([len(span.tokens) for span in spans])[: len(asks)] - 1
        return [self._forward(spans, ends)]

    def _recorded(self, spans: Sequence[Span], rounds: int) -> Rounds | None:
        """Run tokens and the rounds after them from a recording; None if there is none for so many."""
        sequences, rows, starts, tokens = ([*x] for x in zip(*spans, strict=True))
        lengths = [len(run) for run in tokens]
        turned, tables = None, self._model.frequency_tables
        if tables is not None:
            slices = Slices.plain(np.array(rows), np.array(starts), np.array(lengths))
            positions, ends = slices.positions(), slices.starts + slices.lengths
            positions = np.concatenate([positions, *(ends + i for i in range(rounds - 1))])
            turned = tables.rows(np.zeros_like(positions), positions).tolist()
        ids = [min(token, self._most_id) for run in tokens for token in run]
        made = self._rounds.run(rows, starts, lengths, ids, rounds, turned)
        self.is_usual &= not self._rounds.has_recorded
        if made is not None:
            for sequence, row, start, count in zip(sequences, rows, starts, lengths, strict=True):
                self._filled.computed(sequence, row, start, start + count + rounds - 1)
        return made

    def _forward(self, spans: Sequence[Span], logits: Ints | None = None) -> Floats:
        """Run tokens unrecorded; return the logits of some of them [n, vocabulary].

        logits: indices of their tokens; None: there are none.
        """
        rows, starts = np.array([span.row for span in spans]), np.array([span.start for span in spans])
        lengths = np.array([len(span.tokens) for span in spans])
        self.is_usual &= bool(lengths.max() <= RECORDED_TOKENS)
        slices, memory = Slices.plain(rows, starts, lengths), self._memory
        tokens = np.fromiter((t for span in spans for t in span.tokens), np.int64, int(lengths.sum()))
        step = PagedStep(
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
        stream = self._model.forward(step)
        for span in spans:
            self._filled.computed(span.sequence, span.row, span.start, span.start + len(span.tokens))
        if logits is None or not logits.size:
            return np.empty((0, self._most_id + 1), np.float32)
        return memory.get(self._model.logits(stream, memory.integers(logits)))


def _continued(ask: Ask, drafts: Sequence[Draft]) -> Span:
    """Return the last draft of a sequence, which the draft model runs next."""
    return Span(ask.sequence, ask.row, len(ask.tokens) + len(drafts) - 1, (drafts[-1].token,))
