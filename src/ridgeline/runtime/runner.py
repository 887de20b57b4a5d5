"""Run StepPlans on one device: page moves, page tables, the forward pass, and sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.nn.step import Stream
from ridgeline.ops import api
from ridgeline.ops.api import PagedLayout, SnapshotLayout
from ridgeline.ops.draws import Draw, pack_draws, pack_trials
from ridgeline.runtime.arena import Arena, Bytes
from ridgeline.runtime.canvases import build_canvas_layout, canvas_rows, on_device, over_canvases
from ridgeline.runtime.drafter import Place
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.features import is_decode
from ridgeline.runtime.forward import Floats, Forward
from ridgeline.runtime.generator import prompt_entries
from ridgeline.runtime.graphs import Decoded, DecodeGraphs
from ridgeline.runtime.heads import LoadedHead
from ridgeline.runtime.layout import Ints, Slices, adapters_of, build_layout, build_snapshot_layout
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.moves import RowMover, by_group, least_seconds
from ridgeline.runtime.open_drafter import open_drafter
from ridgeline.runtime.orders import Open, Probe, Settle, tell_nobody
from ridgeline.runtime.padding import Tokens
from ridgeline.runtime.sampled import Ahead, SampledTokens, is_drawn, sampled_ahead
from ridgeline.runtime.sampling import (
    HostRow,
    Late,
    PromptTokens,
    Sampling,
    Target,
    best_results,
    rows_of,
    sample_targets,
    sampled_rows,
)
from ridgeline.runtime.step import DenseStep, PagedStep
from ridgeline.sample.logit_rows import Pieces
from ridgeline.sample.rejection import Distribution
from ridgeline.sample.sampler import SampleRow
from ridgeline.sched.work import LAST, Result, StepPlan, Work
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.groups import NULL_PAGE, StateGroup
from ridgeline.spec.request import TokenLogprobs
from ridgeline.spec.trees import paths

NOTHING = Result()
Draws = Mapping[int, Sequence[Draw]]  # by the index of a work: a draw for each of its rows
NO_DRAWS: Draws = MappingProxyType({})
PROBE_TOKENS, PROBE_BYTES = 32, 2**22  # size of the prompt and the pages that are timed


@dataclass(slots=True)
class Computed:
    """A step that ran: a result for each work.

    q: as in Sampling. logits: waits for the logits of the works that the host samples; None if there are none. pieces:
    logits of a diffusion model instead, which are computed when they are read. targets: works whose rows were given, by
    their index. left: the others, by their index, with the index of their first row of logits. ahead: tokens that the
    device sampled, and that are on their way.
    """

    plan: StepPlan
    results: list[Result]
    q: Mapping[int, Sequence[Distribution]] = field(default_factory=dict)
    logits: Callable[[], Floats] | None = None
    pieces: Pieces | None = None
    targets: dict[int, Target] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    ahead: Ahead | None = None

    def read(self) -> Floats:
        """Return the logits of the works that the host samples."""
        assert self.logits is not None, "the step has no logits left"
        return self.logits()


class DeviceRunner:
    """A sched.loop.Runner on one device. A token LAST is the one that its row sampled in the step before.

    num_pages, num_host_pages: per group, with the null page. max_seqs: rows of the page tables. max_model_len: tokens
    of the longest sequence. num_drafts: most drafts of a work. acceptance: how drafts are accepted. threaded: steps of
    at least `thread_works` works run in a thread of their own, so that the caller can do its part of one step while the
    next one is computed. draft: a model or a head that proposes drafts; its layers are in `groups` after those of
    `loaded`. max_tokens: most tokens of a step. draft_tree: most tokens after a draft of a head; 1: chains.
    """

    # Two cores, pocket model, greedy: handing a step to the thread costs more than the overlap saves for 1 sequence
    # (0.8 times the steps per second), for 2 to 4 (0.8 to 0.95), and no more from 8 on (0.95 to 1.1).
    thread_works = 8

    def __init__(
        self,
        loaded: LoadedModel,
        groups: Sequence[StateGroup],
        num_pages: Sequence[int],
        *,
        max_seqs: int,
        max_model_len: int,
        num_host_pages: Sequence[int],
        num_drafts: int = 0,
        acceptance: Acceptance = "same",
        threaded: bool = False,
        draft: LoadedModel | LoadedHead | None = None,
        max_tokens: int = 0,
        draft_tree: int = 1,
    ) -> None:
        self._model, self._memory, self._groups = loaded.model, loaded.table.memory, groups
        self._group = ranks = loaded.model.group
        if ranks is not None and draft is not None:
            raise RequestError("a model that is cut for several ranks takes no draft model or head; choose ngram")
        self._tell = tell_nobody if ranks is None or ranks.rank else ranks.broadcast
        options = {
            "max_seqs": max_seqs, "max_model_len": max_model_len, "num_host_pages": num_host_pages,
            "num_drafts": num_drafts, "max_tokens": max_tokens,
        }  # fmt: skip
        self._tell(Open(groups, num_pages, options))
        self._table = loaded.table
        self.arena = Arena(groups, num_pages, num_host_pages, self._memory)
        # One row more than sequences: steps are filled up with tokens that are in no page (runtime/padding.py).
        lines = max_seqs + 1
        self._tables: list[Ints] = [np.zeros((lines, group.num_pages(max_model_len)), np.int64) for group in groups]
        self._driver = loaded.table.driver
        self._mirrors = self._driver.mirrors(self._tables) if self._driver else None
        mirrors = self._mirrors.arrays if self._mirrors else self._tables
        runs_ahead = self._driver is not None and self._driver.runs_ahead
        self._sampled = SampledTokens(lines, loaded.table) if runs_ahead else None
        self._draw, self._accept = loaded.table.primitive(api.DRAW), loaded.table.primitive(api.ACCEPT)
        self._vocab_size, self._max_model_len = loaded.spec.vocab_size, max_model_len
        self._canvas, self._denoises = loaded.spec.canvas, loaded.spec.diffusion is not None
        self._num_host_pages = num_host_pages[0]
        self._last, self._acceptance = np.full(max_seqs, LAST if runs_ahead else 0), acceptance
        self._inputs = DraftInputs(lines, num_drafts, loaded.table)
        self._mover = RowMover(loaded.table, self.arena, groups, self._tables, loaded.spec)
        self.drafter = None
        if draft is not None:
            place = Place(
                loaded.table, self.arena, len(loaded.spec.layers), groups, self._tables, mirrors, num_pages,
                num_host_pages, max_seqs, num_drafts, max_tokens, loaded.spec.vocab_size, acceptance, draft_tree,
            )  # fmt: skip
            self.drafter = open_drafter(draft, loaded.model, place)
        self._tap = None if self.drafter is None else self.drafter.tap
        self.graphs = DecodeGraphs(
            loaded.model, loaded.table, groups, self.arena, self._inputs, mirrors, self._tap, self._sampled, acceptance
        )
        has_thread = threaded and not runs_ahead and ranks is None
        self._thread = ThreadPoolExecutor(1, "ridgeline-runner") if has_thread else None
        self._open: set[Future[Computed]] = set()  # steps that the thread has not finished

    # ---- the Runner protocol ----------------------------------------------------------------------------

    def submit(self, plan: StepPlan, sampling: Sampling) -> Future[Computed]:
        """Begin a step. One that does not run in the thread runs and raises here."""
        if self._thread is not None and (self._open or len(plan.works) >= self.thread_works):
            step = self._thread.submit(self._run, plan, sampling)
            self._open.add(step)
            step.add_done_callback(self._open.discard)
            return step
        done: Future[Computed] = Future()
        with self._memory.guard():
            done.set_result(self._run(plan, sampling))
        return done

    def samples_ahead(self, row: SampleRow) -> bool:
        """Return whether the next step can refer to a row's token before its step is collected. row: without edits."""
        return self._sampled is None or is_drawn(row)

    def sample(self, handle: Future[Computed], rows: Mapping[int, HostRow]) -> Mapping[int, Result | Late]:
        """Sample works that `submit` left, by their index in the plan; a Late for each whose mask is not ready."""
        step = handle.result()
        targets, found = dict[int, Target](), dict[int, Result | Late]()
        for i, row in rows.items():
            at, count = step.left[i], step.plan.works[i].num_rows
            if isinstance(row, SampleRow):
                targets[i] = self._target(step, i, row, at)
            else:
                own: Any = step.pieces.rows(at, count) if step.pieces else step.read()[at : at + count]
                result = row(own)
                found[i] = result or Result()
                if result is not None:
                    self._keep(step, i, result)
        self._take(step, targets)
        return found | {i: target.late or step.results[i] for i, target in targets.items()}

    def collect(self, handle: Future[Computed]) -> Sequence[Result]:
        """Wait for a step and return a result for each work."""
        step = handle.result()
        self._finish(step)
        if step.ahead is not None:
            found = step.ahead.results()
            for i, result in found.items():
                self._keep(step, i, result)
            self.settle([step.plan.works[i] for i in found], list(found.values()))
        return step.results

    def reset(self) -> None:
        """Wait for the steps that were submitted and forget them."""
        wait(tuple(self._open))
        if self._driver is not None:
            self._driver.reset()

    @property
    def unrecorded(self) -> str | None:
        """Return why decode steps are not run from a recording; None where they are."""
        return self.graphs.refusal

    @property
    def resident_pages(self) -> tuple[int, ...]:
        """Number of pages of each group that have memory, because they were used or touched ahead."""
        return self.arena.resident_pages

    # ---- for measuring ----------------------------------------------------------------------------------

    def overwrite(self, group: int, pages: Sequence[int], content: Bytes) -> None:
        """Give pages of a group the same content [page_bytes]."""
        self.arena.overwrite(group, pages, content)

    def preemption_rates(self) -> tuple[float, float]:
        """Measure the seconds to compute a token of a prompt again, and to copy a byte of pages one way.

        No page that holds anything is touched: the prompt is computed without pages, and the null page is copied to
        the host and back many times. Needs host pages.
        """
        count = min(PROBE_TOKENS, self._max_model_len)
        page_bytes = self._groups[0].page_bytes
        pages = [NULL_PAGE] * min(self._num_host_pages, -(-PROBE_BYTES // page_bytes))

        def move() -> None:
            self.arena.swap_in(0, pages, pages)
            self.arena.swap_out(0, pages, pages)  # also waits for swap_in

        computed = least_seconds(self.probe)
        moved = least_seconds(move)
        return computed / count, moved / (2 * len(pages) * page_bytes)

    def probe(self) -> None:
        """Compute a short prompt without pages, and wait for its logits."""
        self._tell(Probe())
        tokens = [i % self._vocab_size for i in range(min(PROBE_TOKENS, self._max_model_len))]
        prompt = DenseStep.build([tokens], self._memory)
        self._memory.get(self._model(prompt, prompt.last_rows(self._memory)))

    # ---- one step ---------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, sampling: Sampling) -> Computed:
        step = Computed(plan, [NOTHING] * len(plan.works), sampling.q)
        ahead = {} if self._sampled is None else sampled_ahead(plan.works, sampling.rows, self._acceptance, sampling.q)
        forward = self.forward(plan, ahead)
        if forward is None:
            return step
        for i, prompt in sampling.prompts.items():
            step.results[i] = Result(prompt_logprobs=_prompt_logprobs(forward, prompt))
        if any(work.sample for work in plan.works):
            self._sample_ahead(step, forward, sampling.rows, ahead)
            self._sample(step, forward, sampling.rows, ahead)
            if self._sampled is None:
                self._finish(step)
                self._remember(step)
        return step

    def _sample(self, step: Computed, forward: Forward, given: Sequence[SampleRow | None], ahead: Draws) -> None:
        """Begin to sample the works besides those of `ahead`: `_finish` ends it for given rows, `sample` for others."""
        works = step.plan.works
        if all(i in ahead for i, work in enumerate(works) if work.sample):
            return
        rows = sampled_rows(works, ahead)
        best = forward.best() if rows is None else None
        if best is not None and all(row is not None and row.wants_best() for row in given):
            for i, result in enumerate(best_results(best, [row for row in given if row is not None], works)):
                self._keep(step, i, result)
            self.settle(works, step.results)
            return
        at = 0
        for i, (work, row) in enumerate(zip(works, given, strict=True)):
            if not work.sample or i in ahead:
                continue
            if row is None:
                step.left[i] = at
            else:
                step.targets[i] = self._target(step, i, row, at)
            at += work.num_rows
        if self._denoises:
            step.pieces = forward.pieces(rows)
            return
        step.logits = forward.fetch(rows)
        if step.left and self._thread is not None:  # the next step may run before they are sampled
            logits = step.logits().copy()
            step.logits = lambda: logits

    def _finish(self, step: Computed) -> None:
        """Sample the works whose rows were given, once their logits are there."""
        if step.targets:
            self._take(step, step.targets)
            step.targets = {}

    def _take(self, step: Computed, targets: Mapping[int, Target]) -> None:
        """Sample some works by their index, and move what belongs to their accepted drafts."""
        if step.logits is not None:
            sample_targets(step.logits(), list(targets.values()))
        for i, target in targets.items():
            self._keep(step, i, target.result())
        self.settle([step.plan.works[i] for i in targets], [step.results[i] for i in targets])

    def _sample_ahead(self, step: Computed, forward: Forward, given: Sequence[SampleRow | None], ahead: Draws) -> None:
        """Let the device sample some works without waiting for it. ahead: how each of them is drawn."""
        works, driver = step.plan.works, self._driver
        if self._sampled is None or driver is None or not ahead:
            return
        chosen = {i: (works[i], row) for i in ahead if (row := given[i]) is not None}
        at = rows_of(works, chosen)
        if forward.decoded is not None:
            ids, tops = forward.decoded.best, forward.decoded.best_logits
        else:
            each = [draw for draws in ahead.values() for draw in draws]
            logits, words = forward.on_device(at), self._memory.integers(pack_draws(each))
            if any(draw.trial.first for draw in each):
                ids, tops = self._accept(logits, words, self._memory.integers(pack_trials(each)))
            else:
                ids, tops = self._draw(logits, words, None)
            if len(at) == len(chosen):  # after drafts the host collects the step before it submits another one
                self._sampled.keep(self._memory.integers(np.array([works[i].row for i in chosen])), ids)
            at = np.arange(len(at))
        step.ahead = Ahead(driver.fetch((ids, tops)), at, chosen)

    def _target(self, step: Computed, index: int, row: SampleRow, at: int) -> Target:
        work = step.plan.works[index]
        drafts = work.tokens[len(work.tokens) - work.num_draft :]
        return Target(row, at, drafts, self._acceptance, step.q.get(index), work.parents)

    def _keep(self, step: Computed, index: int, result: Result) -> None:
        """Store the result of a work."""
        prompt_logprobs = step.results[index].prompt_logprobs
        step.results[index] = result._replace(prompt_logprobs=prompt_logprobs) if prompt_logprobs else result

    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Move what belongs to the accepted drafts of trees to their positions."""
        if not any(result.path for result in results):
            return
        self._tell(Settle(works, results))
        self._mover.settle(works, results)
        if self.drafter is not None and self.drafter.lost is None:
            try:
                self.drafter.settle(works, results)
            except Exception as e:  # a step of the target must not end with its draft
                self.drafter.lost = e

    def _remember(self, step: Computed) -> None:
        """Store the last tokens of rows, which the next step may refer to as LAST."""
        for work, result in zip(step.plan.works, step.results, strict=True):
            if result.tokens:
                self._last[work.row] = result.tokens[-1]

    def forward(self, plan: StepPlan, ahead: Draws = NO_DRAWS) -> Forward | None:
        """Move pages and compute the plan's works up to the head; None if there are no works.

        ahead: how a recorded step samples works; it takes the best tokens of the others.
        """
        if self._group is None:
            return self._forward(plan, ahead)
        known = [work._replace(tokens=tuple(self._tokens([work]).tolist())) for work in plan.works]
        self._tell(plan._replace(works=tuple(known)))
        try:
            return self._forward(plan, ahead)
        except Exception:
            self._group.leave()  # the others wait for this rank's part of a sum
            raise

    def _forward(self, plan: StepPlan, ahead: Draws) -> Forward | None:
        if plan.copies or plan.swap_out or plan.swap_in:
            self._move(plan)
        deltas = [delta for work in plan.works for delta in work.deltas]
        for group, row, first, pages in deltas:
            self._tables[group][row, first : first + len(pages)] = pages
            self.arena.handed_out(group, pages)
        if self._mirrors is not None:
            self._mirrors.write(deltas)
        if self.drafter is not None:
            self.drafter.follow(plan)
        if not plan.works:
            return None
        if self._canvas:
            return self._over_canvases(plan.works)
        tokens = self._tokens(plan.works)
        slices = self._slices(plan.works)
        decoded = self._decode(plan.works, slices, tokens, ahead)
        if decoded is not None:
            forward = Forward(self._model, decoded.stream, self._table, decoded)
        else:
            step = self._step(slices, tokens, adapters=adapters_of(plan.works))
            stream = self._model.forward(step, aux=self._tap.aux if self._tap else ())
            features = self._tap.features(stream) if self._tap else None
            forward = Forward(self._model, stream, self._table, features=features, tell=self._tell)
        if self.drafter is not None and self._tap is not None and self.drafter.lost is None:
            try:
                self.drafter.ran(plan, tokens, forward.features)
            except Exception as e:  # a step of the target must not end with its draft
                self.drafter.lost = e
        return forward

    def _over_canvases(self, works: Sequence[Work]) -> Forward:
        def run(some: Sequence[Work], signal: Floats | None) -> Stream:
            return self._model.forward(self._step(self._slices(some), self._tokens(some), signal))

        return Forward(self._model, over_canvases(works, run), self._table, canvas_rows=canvas_rows(works))

    def _tokens(self, works: Sequence[Work]) -> Ints:
        """Return the ids of a step's tokens [T]; LAST for those that only the device knows."""
        last = self._last
        return np.array([t if t != LAST else int(last[work.row]) for work in works for t in work.tokens])

    def _decode(self, works: Sequence[Work], slices: Slices, tokens: Ints, ahead: Draws) -> Decoded | None:
        """Run the step from a recording, if each work is one token and its drafts; None if it must run unrecorded."""
        if not all(is_decode(work) for work in works):
            return None
        starts, lengths = [work.start for work in works], [len(work.tokens) for work in works]
        rows = None
        if (tables := self._model.frequency_tables) is not None:
            rows = tables.rows(np.repeat(slices.floors, slices.lengths), slices.positions()).tolist()
        tree = None if slices.paths is None else (slices.positions().tolist(), slices.paths.tolist())
        kept = () if self._tap is None else self._tap.kept.places(works, tokens)
        draws = [draw for i, n in enumerate(lengths) for draw in ahead.get(i, [Draw()] * n)]
        given = Tokens([work.row for work in works], starts, lengths, tokens.tolist(), rows, adapters_of(works))
        return self.graphs.run(given, tree, kept, draws, slices.replays.tolist())

    def _slices(self, works: Sequence[Work]) -> Slices:
        trees = None
        if any(work.parents for work in works):
            trees = np.array([bit for w in works for bit in [0] * (len(w.tokens) - len(w.parents)) + paths(w.parents)])
        return Slices(
            np.array([w.row for w in works]),
            np.array([w.start for w in works]),
            np.array([len(w.tokens) for w in works]),
            np.array([w.num_draft for w in works]),
            np.array([w.start - w.replay_from for w in works]),
            np.array([w.floor for w in works]) if self._model.frequency_tables else np.zeros(len(works), np.int64),
            trees,
            np.array([w.reads or w.start + len(w.tokens) for w in works]) if any(w.reads for w in works) else None,
        )

    def _step(
        self, slices: Slices, tokens: Ints, signal: Floats | None = None, adapters: Sequence[int] = ()
    ) -> PagedStep:
        """Return a step. signal: each token's signal, in a pass over canvases. adapters: as in Tokens."""
        own = zip(self._groups, self._tables, strict=True)
        if signal is None:
            layouts = [self._layout(slices, group, table) for group, table in own]
        else:
            layouts = [build_canvas_layout(slices, table, group, self._canvas, self._memory) for group, table in own]
        ids = self._memory.integers(tokens)
        if self._sampled is not None and (tokens == LAST).any():
            ids = self._sampled.known(ids, self._memory.integers(np.repeat(slices.rows, slices.lengths)))
        return PagedStep(
            ids,
            self._memory.integers(slices.positions()),
            slices,
            layouts,
            self.arena,
            self._inputs,
            self._table,
            signal=None if signal is None else on_device(signal, self._table),
            adapters=self._memory.integers(np.repeat(adapters, slices.lengths)) if adapters else None,
        )

    def _layout(self, slices: Slices, group: StateGroup, table: Ints) -> PagedLayout | SnapshotLayout:
        if group.snapshot:
            return build_snapshot_layout(slices, table, group.page_tokens, self._memory)
        return build_layout(slices, table, group.page_tokens, group.lookback, self._memory, group.first_tokens)

    def _move(self, plan: StepPlan) -> None:
        """Move whole pages in the order that plans promise: out to the host, in from it, copies on the device."""
        for group, source, target in by_group(plan.swap_out):
            self.arena.swap_out(group, source, target)
        for group, source, target in by_group(plan.swap_in):
            self.arena.swap_in(group, source, target)
        for group, source, target in by_group(plan.copies):
            self.arena.copy(group, source, target)


def _prompt_logprobs(forward: Forward, prompt: PromptTokens) -> tuple[TokenLogprobs, ...]:
    def logits(first: int, count: int) -> Floats:
        return forward.logits(np.arange(first, first + count))

    return tuple(prompt_entries(logits, prompt.first, prompt.following, prompt.count))
