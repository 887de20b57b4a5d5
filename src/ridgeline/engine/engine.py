"""The engine: answers requests with a scheduler and a runner.

Requests join, leave and are aborted between any two steps.

A step is four calls: schedule, submit, collect, commit (sched/loop.py). `RequestLoop` works with any Runner; `Engine`
is the one on a device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import Generic

from ridgeline.diffusion import Softens
from ridgeline.engine.answers import Answer, OpenRequest
from ridgeline.engine.beams import Beams
from ridgeline.engine.blocks import BlockAnswer
from ridgeline.engine.depth import DepthRule
from ridgeline.engine.drafts import Drafting, ProposerDrafting
from ridgeline.engine.late import LateRows
from ridgeline.engine.model_drafts import ModelDrafting
from ridgeline.errors import DeviceMemoryError, RequestError
from ridgeline.propose import Drafts, Proposer
from ridgeline.runtime.adapters import Adapters, slot_of
from ridgeline.runtime.arena import Bytes
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.runtime.heads import LoadedHead
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.runtime.sampling import HostRow, Late, PromptTokens, Sampling
from ridgeline.sample.rejection import Distribution
from ridgeline.sample.sampler import SampleRow
from ridgeline.sched.blocks import BlockScheduler
from ridgeline.sched.loop import R, StepLoop
from ridgeline.sched.policy import Priority
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence, hash_root
from ridgeline.sched.stats import Stats, StepShape
from ridgeline.sched.work import Result, StepPlan, Update, Work
from ridgeline.settings import EngineConfig, PreemptCost
from ridgeline.settings.config import CHAINS_ONLY
from ridgeline.spec.diffusion import CanvasDiffusion, Diffusion
from ridgeline.spec.regimes import NO_REGIMES, Regimes
from ridgeline.spec.request import BeamSearchParams, SamplingParams
from ridgeline.spec.trees import as_parents


class RequestLoop(Generic[R]):
    """Answers any number of requests with one runner. Not for several threads at once.

    vocab_size: the number of the model's tokens. eos: its end-of-sequence tokens. proposer: proposes draft tokens;
    without one, `propose` takes them. regimes: how rotary frequencies depend on the length of a sequence. drafting: a
    draft model of the runner, instead of a proposer. diffusion: how a diffusion model fills answers. soften: computes
    mean embeddings, for a model with a canvas. adapters: the ones that requests may name; None: none.
    """

    def __init__(
        self, runner: R, config: EngineConfig, vocab_size: int, eos: frozenset[int], *,
        proposer: Proposer | None = None, swap_cost: PreemptCost | None = None, regimes: Regimes = NO_REGIMES,
        drafting: Drafting | None = None, diffusion: Diffusion | None = None, soften: Softens | None = None,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        self.config, self.adapters = config, adapters
        self._diffusion, self._soften, self._block = diffusion, soften, max(group.block for group in config.groups)
        self._runner, self._vocab_size, self._eos, self._swap_cost = runner, vocab_size, eos, swap_cost
        self._regimes = regimes
        self._ids, self._shrunk = count(), ""
        self._drafting = drafting or ProposerDrafting(config.num_speculative_tokens, vocab_size, proposer)
        if any(group.snapshot for group in config.groups):
            self._drafting.chains_because, self._drafting.untreed = CHAINS_ONLY, config.untreed
        self._start()

    def _start(self) -> None:
        config = self.config
        self._scheduler = (Scheduler if self._diffusion is None else BlockScheduler)(
            config.groups,
            config.num_pages,
            max_batch_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            num_host_pages=config.num_host_pages,
            policy=Priority(),
            swap_cost=self._swap_cost,
            clock=time.perf_counter,
            watcher=self._drafting.watcher,
            regimes=self._regimes,
            lookahead=self._drafting.lookahead,
        )
        self._loop = StepLoop(self._scheduler, self._runner)
        self._beams = Beams(self._scheduler, self._ids, self._eos)
        self._late = LateRows(self._scheduler)
        self._answers: dict[int, Answer] = {}  # by sequence
        self._requests: dict[int, OpenRequest] = {}
        self._works: Seq[Work] = ()  # works of the last step; () if it only collected
        self._computed: Seq[Work] = ()  # works of the last step that computed

    # ---- requests ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of requests that are not complete."""
        return len(self._requests) + len(self._beams)

    def add(self, request_id: int, request: GenerationRequest) -> None:
        """Queue a request under an id that the caller chooses.

        Raises RequestError, and queues nothing, if the request can never fit.
        """
        prompt, params = list(request.prompt_token_ids), request.params
        after = params.suffix_token_ids if isinstance(params, SamplingParams) else ()
        room = self.config.max_model_len - len(prompt) - len(after)
        canvas = self._diffusion if isinstance(self._diffusion, CanvasDiffusion) else None
        if canvas:
            room = canvas.rest_of(len(prompt), self.config.max_model_len)
        max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise RequestError(
                f"the prompt's {len(prompt)} tokens and max_tokens {max_tokens} exceed the context of "
                f"{self.config.max_model_len}"
            )
        slot, adapter = slot_of(self.adapters, request.lora)
        if isinstance(params, BeamSearchParams):
            self._beams.add(request_id, request, max_tokens, self._root(request.cache_salt, adapter=adapter), slot)
            return
        # A cached prefix has no logits, so a request that wants prompt_logprobs shares pages with no other.
        alone = f"request {next(self._ids)}" if params.prompt_logprobs is not None else ""
        root = self._root(request.cache_salt, alone, adapter)
        row = SampleRow.start(params, prompt, request.noise[0], self._eos, grammar=request.grammar)
        waits = row.edits is not None or not self._runner.samples_ahead(row)
        answers = []
        for index, key in enumerate(request.noise):
            sequence = Sequence(
                next(self._ids), prompt, max_tokens, request.priority, root, block=self._block, waits=waits,
                after=canvas.positions(max_tokens) - max_tokens if canvas else len(after),
                adapter=slot,
            )  # fmt: skip
            answers.append(self._answer(request_id, index, row.again(key), sequence))
        first, *others = (answer.sequence for answer in answers)
        self._scheduler.add(first, others)
        self._answers |= {answer.sequence.id: answer for answer in answers}
        for answer in answers:
            answer.row.prepare()
        ids = [answer.sequence.id for answer in answers]
        self._requests[request_id] = OpenRequest(prompt, ids, set(ids), params.prompt_logprobs)

    def _answer(self, request: int, index: int, row: SampleRow, sequence: Sequence) -> Answer:
        if self._diffusion is None:
            return Answer(request, index, row, sequence)
        return BlockAnswer.begin(request, index, row, sequence, self._diffusion, self._soften)

    def _root(self, salt: str, alone: str = "", adapter: str = "") -> bytes:
        precision = self.config.kv_cache_dtype
        return hash_root(cache_salt=salt, adapter=adapter, state_precision=precision, alone=alone)

    def uses_adapter(self, slot: int) -> bool:
        """Return whether an answer that is not complete has the adapter of a slot."""
        return self._beams.use_adapter(slot) or any(a.sequence.adapter == slot for a in self._answers.values())

    def propose(self, request_id: int, choice: int, drafts: Seq[int] | Drafts) -> None:
        """Set the tokens that may follow an answer so far; its next step verifies them together.

        To be called between two steps. At most num_speculative_tokens are run; fewer, or none, where there is no room.
        The answer is the one without drafts; with draft_acceptance "rejection" it has the same distribution. Nothing
        happens if it is over or belongs to a beam search. Drafts with parents are a tree; if the model has recurrent
        layers, the chain of first children is run, and `stats().untreed` says why. Raises RequestError for an id that
        is no token, for parents that are no tree, and if the engine has a proposer of its own.
        """
        tokens = drafts.tokens if isinstance(drafts, Drafts) else drafts
        try:
            as_parents(drafts.parents if isinstance(drafts, Drafts) else (), len(tokens))
        except ValueError as e:
            raise RequestError(str(e)) from e
        wrong = [token for token in tokens if not 0 <= token < self._vocab_size]
        if wrong:
            raise RequestError(f"draft token {wrong[0]} is not among the model's {self._vocab_size}")
        if request_id in self._requests:
            sequence = self._requests[request_id].choices[choice]
            if sequence in self._answers:
                self._drafting.give(sequence, drafts)

    def abort(self, request_id: int) -> None:
        """End a request at any moment. Nothing happens if it was complete already."""
        self._beams.abort(request_id)
        if request_id in self._requests:
            for sequence in tuple(self._requests[request_id].open):
                self._drop(sequence)

    def finish(self, request_id: int, choice: int) -> None:
        """End one answer of a request: a stop string was found in its text."""
        if request_id in self._requests:
            sequence = self._requests[request_id].choices[choice]
            if sequence in self._answers:
                self._drop(sequence)

    def reset(self) -> None:
        """Forget all requests and all state. Needed after an exception in a step, whose plan is lost."""
        self._runner.reset()
        self._drafting.reset()
        self._start()

    # ---- the step ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Begin a step if one can run, and end the steps that are due; return what happened to answers, in order."""
        events = self._late_events()
        self._drafting.propose(self._scheduler, self._answers)
        for answer in self._answers.values() if self._diffusion is not None else ():
            if not answer.sequence.drafts and isinstance(answer, BlockAnswer):  # it lost the rows that it was to read
                answer.open_block()
        plan = self._loop.schedule()
        self._late.drop_preempted()
        if plan is not None:
            self._submit(plan)
        elif not events and not len(self._loop) and not self._late.wait() and len(self):
            raise RuntimeError("nothing can run although requests are waiting: the scheduler is at fault")
        self._works = () if plan is None else plan.works
        self._computed = self._works or self._computed
        while len(self._loop) and (plan is None or len(self._loop) >= self._depth):
            events += self._collect()
        return events

    def _submit(self, plan: StepPlan) -> None:
        """Let the runner begin a step. One that finds too little memory is planned again, with half of its tokens.

        Raises DeviceMemoryError for a step that cannot be smaller, and for one that also moves pages.
        """
        try:
            self._loop.submit(plan, self._sampling(plan.works))
        except DeviceMemoryError as e:
            tokens = sum(len(work.tokens) for work in plan.works)
            if tokens == 1 or self._diffusion is not None or plan.copies or plan.swap_out or plan.swap_in:
                raise
            self._loop.lose(plan, tokens // 2)
            self.config = replace(self.config, max_num_batched_tokens=tokens // 2)
            self._shrunk = f"{e} in a step of {tokens} tokens; steps have at most {tokens // 2} since then"
            logging.getLogger(__name__).warning(self._shrunk)

    def _collect(self) -> list[Event]:
        """Sample the rows of the oldest step that need the host, and end the step; what happened to its answers."""
        works = self._loop.oldest.works
        self._take_sampled(works, self._loop.sample(self._host_rows(works)))
        due, results = self._loop.collect()
        self._drafting.collected(due, results)
        failures = self._fail(due, results)
        updates = self._loop.commit(due, results)
        return [*self._token_events(due, results, updates), *self._beams.advance(), *failures]

    @property
    def _depth(self) -> int:
        """Return how many steps may be in flight: drafts and diffusion models need the tokens of the step before."""
        waits = self._drafting.is_alone or self._diffusion is not None or any(work.num_draft for work in self._works)
        return 1 if waits else self.config.steps_in_flight

    def _sampling(self, works: Seq[Work]) -> Sampling:
        """Return the rows that the runner samples by itself, and the prompt tokens that it scores."""
        now, first = time.perf_counter(), 0
        rows: list[SampleRow | None] = []
        prompts: dict[int, PromptTokens] = {}
        q: dict[int, Seq[Distribution]] = {}
        for i, work in enumerate(works):
            answer = self._answers.get(work.sequence)  # None: a beam
            on_device = answer is not None and work.sample and not answer.needs_host
            rows.append(answer.device_row(work) if answer is not None and on_device else None)
            if answer is not None:
                if work.sample and not on_device:
                    answer.row.prepare()  # most masks were begun with the last token
                answer.scheduled = answer.scheduled or now
                prompt = self._requests[answer.request].prompt_tokens(work, first)
                if prompt is not None:
                    prompts[i] = prompt
            first += len(work.tokens)
            if work.num_draft and (drawn_from := self._drafting.distributions(work)) is not None:
                q[i] = drawn_from
        return Sampling(rows, prompts, q)

    def _host_rows(self, works: Seq[Work]) -> dict[int, HostRow]:
        """Return the rows that need the host, by the index of the work: answers with edits or a grammar, and beams.

        Answers that are over, or were preempted since the step began, have none.
        """
        rows: dict[int, HostRow] = {}
        for i, work in enumerate(works):
            answer = self._answers.get(work.sequence)
            if not work.sample:
                continue
            if answer is None:
                if (taker := self._beams.taker(work.sequence)) is not None:
                    rows[i] = taker
            elif answer.sequence.epoch != work.epoch:
                continue
            elif isinstance(answer, BlockAnswer):
                rows[i] = answer.taker(work)
            elif answer.needs_host:
                rows[i] = answer.row
        return rows

    def _take_sampled(self, works: Seq[Work], sampled: Mapping[int, Result | Late]) -> None:
        """Record what the runner sampled on the host."""
        for i, found in sampled.items():
            answer = self._answers.get(works[i].sequence)
            if answer is None:  # a beam
                continue
            if isinstance(found, Late):
                self._late.hold(answer, found)
            elif found.tokens:
                answer.record(found.tokens)

    def _fail(self, plan: StepPlan, results: Seq[Result]) -> list[Event]:
        """Keep the log probabilities of prompts, and end the answers that could not be sampled; their events."""
        events = []
        for work, result in zip(plan.works, results, strict=True):
            answer = self._answers.get(work.sequence)
            if answer is None:
                continue
            if result.prompt_logprobs:
                self._requests[answer.request].entries += result.prompt_logprobs
            if result.error is not None and answer.sequence.epoch == work.epoch:
                events.append(self._failure(answer, result.error))
        return events

    def _token_events(self, plan: StepPlan, results: Seq[Result], updates: Seq[Update]) -> list[Event]:
        """Return the events for what was committed."""
        found = {work.sequence: result for work, result in zip(plan.works, results, strict=True)}
        events = []
        for update in updates:
            answer = self._answers.get(update.sequence)
            if isinstance(answer, BlockAnswer) and not update.finished:
                answer.open_block()
            if answer is None:
                self._beams.commit(update.sequence)
            elif update.tokens:
                events.append(self._event(answer, found[update.sequence], update.finished))
            else:
                self._late.commit(answer)
        return events

    def _late_events(self) -> list[Event]:
        """Sample the answers whose masks are ready by now, and end those that waited too long; their events."""
        events = []
        for answer, sampled in self._late.ready():
            if isinstance(sampled, RequestError):
                events.append(self._failure(answer, sampled))
                continue
            answer.row.push(sampled.token)
            answer.record([sampled.token])
            logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
            result = Result((sampled.token,), answer.row.is_end(sampled.token), logprobs)
            events.append(self._event(answer, result, self._scheduler.give(answer.sequence.id, result).finished))
        return events

    def _event(self, answer: Answer, result: Result, finished: bool) -> Event:
        event = answer.event(result, finished, self._requests[answer.request].take_entries())
        if finished:
            self._close(answer.sequence.id)
        return event

    def _failure(self, answer: Answer, error: RequestError) -> Event:
        event = answer.failure(error, self._requests[answer.request].take_entries())
        self._drop(answer.sequence.id)
        return event

    def _drop(self, sequence: int) -> None:
        self._close(sequence)
        self._scheduler.abort(sequence)

    def _close(self, sequence: int) -> None:
        """Forget an answer that is over, and its request with the last one."""
        answer = self._answers.pop(sequence)
        self._late.drop(sequence)
        self._drafting.end(sequence)
        request = self._requests[answer.request]
        request.open.discard(sequence)
        if not request.open:
            del self._requests[answer.request]

    # ---- reports ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return pages used, waste, prefix hits, preemptions, and the numbers of running and waiting sequences."""
        return replace(
            self._scheduler.stats(), unrecorded=self._runner.unrecorded, unproposed=self._drafting.refusal,
            untreed=self._drafting.untreed, last_step=_shape(self._computed),
            draft_acceptance=self.config.draft_acceptance, proposer=self.config.speculative,
            draft_speed=self._drafting.speed, resident_pages=self._runner.resident_pages, shrunk=self._shrunk,
        )  # fmt: skip

    def last_step(self) -> StepShape:
        """Return what the last step computed; () if it only collected."""
        return _shape(self._works)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping of pages and rows is inconsistent."""
        self._scheduler.check()


class Engine(RequestLoop[DeviceRunner]):
    """Answers any number of requests with one model on one device. Not for several threads at once.

    proposer: proposes draft tokens, at most config.num_speculative_tokens for a sequence in a step; without one,
    `propose` takes them. draft: a model or a head that proposes them instead; config.groups holds its layers too.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, *, proposer: Proposer | None = None,
        draft: LoadedModel | LoadedHead | None = None,
    ) -> None:  # fmt: skip
        runner = DeviceRunner(
            loaded,
            config.groups,
            config.num_pages,
            max_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_host_pages=config.num_host_pages,
            num_drafts=config.num_speculative_tokens,
            acceptance=config.draft_acceptance,
            threaded=config.steps_in_flight > 1,
            draft=draft,
            max_tokens=config.max_num_batched_tokens,
            draft_tree=1 if config.untreed else config.draft_tree,
        )
        swap_cost = None
        if any(config.num_host_pages):
            swap_cost = config.preempt or PreemptCost(*runner.preemption_rates())
        super().__init__(
            runner,
            config,
            loaded.spec.vocab_size,
            loaded.eos_token_ids,
            drafting=_drafting(loaded, config, proposer, runner, draft),
            diffusion=loaded.spec.diffusion,
            soften=loaded.model.soften if loaded.spec.canvas else None,
            swap_cost=swap_cost,
            regimes=loaded.spec.regimes(config.max_model_len),
            adapters=Adapters(loaded),
        )

    def overwrite(self, contents: Seq[Bytes]) -> None:
        """Give every page that a sequence holds the bytes of its state group, [page_bytes] each. For measuring."""
        tables = [answer.sequence.tables for answer in self._answers.values()]
        for group, page in enumerate(contents):
            self._runner.overwrite(group, sorted({p for held in tables for p in held[group] if p}), page)


def _drafting(
    loaded: LoadedModel, config: EngineConfig, proposer: Proposer | None, runner: DeviceRunner,
    draft: LoadedModel | LoadedHead | None,
) -> Drafting:  # fmt: skip
    most, rule, drafter = config.num_speculative_tokens, None, runner.drafter
    if loaded.spec.diffusion is not None and proposer is not None:
        raise RequestError("a diffusion model predicts several tokens in a step; it takes no proposer of drafts")
    if drafter is not None and drafter.most is not None:
        most = min(most, drafter.most)
    if config.draft_depth == "chosen":
        levels = drafter.levels if drafter is not None and drafter.tree > 1 else None
        rule = DepthRule(most, rounds=drafter is not None, levels=levels)
    if draft is None or drafter is None:
        return ProposerDrafting(most, loaded.spec.vocab_size, proposer, rule)
    return ModelDrafting(drafter, most, draft.max_model_len, rule)


def _shape(works: Seq[Work]) -> StepShape:
    ends = [w.reads or w.start + len(w.tokens) for w in works]
    return tuple((len(w.tokens), end, w.num_rows if w.sample else 0) for w, end in zip(works, ends, strict=True))
