"""The loop: schedule -> submit -> sample -> commit. Requests join, leave and are aborted between any two steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate, count

import numpy as np

from ridgeline.engine.beams import Beams
from ridgeline.engine.late import IDLE_SECONDS, PATIENCE_SECONDS, Late
from ridgeline.errors import RequestError
from ridgeline.runtime.arena import Bytes
from ridgeline.runtime.generator import Event, GenerationRequest, prompt_entries
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.runner import Forward, Runner
from ridgeline.sample.beams import Candidates
from ridgeline.sample.logits import Floats, Ints
from ridgeline.sample.masks import MAX_WAIT_SECONDS, TOO_LATE, Grammar
from ridgeline.sample.sampler import NoiseKey, SampledToken, SampleRow, sample, take_best
from ridgeline.sched.policy import Priority
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence, hash_root
from ridgeline.sched.stats import Stats, StepShape
from ridgeline.sched.work import Result, StepPlan, Work
from ridgeline.settings import EngineConfig, PreemptCost
from ridgeline.spec.request import BeamSearchParams, FinishReason, TokenLogprobs


@dataclass(slots=True)
class _Choice:
    """One answer: its sequence, and what the sampler knows of it, tokens in flight included."""

    request: int
    index: int
    noise: NoiseKey
    prompt_length: int
    known: list[int]  # the prompt, and every token that was sampled
    row: SampleRow
    sequence: Sequence
    grammar: Grammar | None
    scheduled: float | None = None  # time.perf_counter
    waited: float = 0.0  # seconds, for masks that were late


@dataclass(slots=True)
class _Request:
    """One request. entries: log probabilities of its prompt's tokens, those after the first; None where not asked."""

    prompt: list[int]
    choices: list[int]  # sequence ids
    open: set[int]
    num_entries: int | None = None  # the likeliest tokens to report of each place
    entries: list[TokenLogprobs] = field(default_factory=list)

    def take_entries(self) -> tuple[TokenLogprobs, ...] | None:
        """The entries, complete, the first time that it is asked."""
        if self.num_entries is None:
            return None
        self.num_entries = None
        return tuple(self.entries)


# Accepted drafts and one token more; of a beam candidates; why there is nothing; nothing was to be sampled, or the mask
# is late.
Sampled = list[SampledToken] | Candidates | RequestError | None


@dataclass(slots=True)
class _Flight:
    """A step on its way, and what each of its works sampled."""

    plan: StepPlan
    sampled: list[Sampled]


class Engine:
    """Answers any number of requests with one model on one device. Not for several threads at once."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self._loaded = loaded
        self._eos = loaded.eos_token_ids
        self._ids = count()
        self._runner = Runner(
            loaded,
            config.groups,
            config.num_pages,
            max_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_host_pages=config.num_host_pages,
            num_drafts=config.num_speculative_tokens,
        )
        can_swap = any(config.num_host_pages)
        known = config.preempt
        self._swap_cost = (known or PreemptCost(*self._runner.preemption_rates())) if can_swap else None
        self._start()

    def _start(self) -> None:
        config = self.config
        self._scheduler = Scheduler(
            config.groups,
            config.num_pages,
            max_batch_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            num_host_pages=config.num_host_pages,
            policy=Priority(),
            swap_cost=self._swap_cost,
            clock=time.perf_counter,
            regimes=self._loaded.spec.regimes(config.max_model_len),
        )
        self._beams = Beams(self._scheduler, self._ids, self._eos)
        self._choices: dict[int, _Choice] = {}
        self._requests: dict[int, _Request] = {}
        self._flights: deque[_Flight] = deque()
        self._late: dict[int, Late] = {}  # by sequence: those that wait for a mask; no more than run at once
        self._failed: list[Event] = []
        self._works: Seq[Work] = ()  # of the last step; () where it only took in what was due
        self._computed: Seq[Work] = ()  # of the last step that computed

    def __len__(self) -> int:
        """Requests that are not complete."""
        return len(self._requests) + len(self._beams)

    def add(self, request_id: int, request: GenerationRequest) -> None:
        """Queue a request under an id of the caller's. Raises RequestError, and queues nothing, if it can never fit."""
        prompt, params = list(request.prompt_token_ids), request.params
        room = self.config.max_model_len - len(prompt)
        max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise RequestError(
                f"the prompt's {len(prompt)} tokens and max_tokens {max_tokens} exceed the context of "
                f"{self.config.max_model_len}"
            )
        if isinstance(params, BeamSearchParams):
            self._beams.add(request_id, request, max_tokens, self._root(request.cache_salt))
            return
        # One who asks for the log probability of every token of the prompt must compute every token.
        alone = f"request {next(self._ids)}" if params.prompt_logprobs is not None else ""
        root = self._root(request.cache_salt, alone)
        choices = []
        for index, key in enumerate(request.noise):
            sequence = Sequence(next(self._ids), list(prompt), max_tokens, request.priority, root)
            row = SampleRow.start(params, prompt, key, self._eos, grammar=request.grammar)
            choices.append(_Choice(request_id, index, key, len(prompt), list(prompt), row, sequence, request.grammar))
        first, *others = (c.sequence for c in choices)
        self._scheduler.add(first, others)
        self._choices |= {c.sequence.id: c for c in choices}
        for choice in choices:
            choice.row.prepare()
        ids = [c.sequence.id for c in choices]
        self._requests[request_id] = _Request(prompt, ids, set(ids), params.prompt_logprobs)

    def _root(self, salt: str, alone: str = "") -> bytes:
        return hash_root(cache_salt=salt, state_precision=self.config.kv_cache_dtype, alone=alone)

    def propose(self, request_id: int, choice: int, drafts: Seq[int]) -> None:
        """Tokens that may follow those of an answer so far, to be verified together in its next step, as many as
        num_speculative_tokens: what comes is what would come without them. Between two steps.

        Fewer are run, or none, where there is no room, and where the next token is already on its way. Nothing happens
        if the answer is over, or is a beam's. Raises RequestError for what is no token.
        """
        vocab_size = self._loaded.spec.vocab_size
        wrong = [token for token in drafts if not 0 <= token < vocab_size]
        if wrong:
            raise RequestError(f"draft token {wrong[0]} is not among the model's {vocab_size}")
        if request_id in self._requests:
            sequence = self._requests[request_id].choices[choice]
            if sequence in self._choices:
                self._scheduler.propose(sequence, drafts[: self.config.num_speculative_tokens])

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
            if sequence in self._choices:
                self._drop(sequence)

    def reset(self) -> None:
        """Forget all requests and all state: after an exception in the middle of a step, whose plan is lost."""
        self._start()

    def step(self) -> list[Event]:
        """Run what can be run, and take in what is due; what became of the answers, in order."""
        events = self._give_late()
        plan = self._scheduler.schedule()
        self._drop_late()
        self._works = () if plan is None else plan.works
        self._computed = self._works or self._computed
        if plan is not None:
            self._flights.append(self._submit(plan))
        elif self._late and not self._flights and not events:  # between two waits, requests may come and go
            self._choices[next(iter(self._late))].row.wait(IDLE_SECONDS)
        elif len(self) and not self._flights and not events:
            raise RuntimeError("nothing can run although requests are waiting: the scheduler is at fault")
        depth = 1 if len(self._beams) else self.config.steps_in_flight
        while self._flights and (plan is None or len(self._flights) >= depth):
            events += self._commit(self._flights.popleft())
        failed, self._failed = self._failed, []
        return events + failed

    def stats(self) -> Stats:
        """Pages used, waste, prefix hits, preemptions, running and waiting."""
        return replace(
            self._scheduler.stats(), unrecorded=self._runner.graphs.refusal, last_step=_shape(self._computed)
        )

    def last_step(self) -> StepShape:
        """What the last step computed; () where it only took in what was due."""
        return _shape(self._works)

    def check(self) -> None:
        """Raise AssertionError if the books of pages and rows do not agree."""
        self._scheduler.check()

    def overwrite(self, contents: Seq[Bytes]) -> None:
        """For measuring: every page that a sequence holds is given the bytes of its state group, [page_bytes] each."""
        tables = [choice.sequence.tables for choice in self._choices.values()]
        for group, page in enumerate(contents):
            self._runner.arena.overwrite(group, sorted({p for held in tables for p in held[group] if p}), page)

    def _submit(self, plan: StepPlan) -> _Flight:
        now = time.perf_counter()
        for work in plan.works:
            if (choice := self._choices.get(work.sequence)) and choice.scheduled is None:
                choice.scheduled = now
        forward = self._runner.submit(plan)
        found: dict[int, Sampled] = {}
        if forward is not None:
            self._read_prompts(forward, plan.works)
            works = [w for w in plan.works if w.sample]
            self._prepare(works)
            if works:
                found = self._sample(forward, _sampled_rows(plan.works), works)
        return _Flight(plan, [found.get(w.sequence) for w in plan.works])

    def _prepare(self, works: Seq[Work]) -> None:
        """Masks of grammars are made beside the steps. Most were begun with the last token; not those of answers that
        were preempted.
        """
        for work in works:
            choice = self._choices.get(work.sequence)  # None: a beam
            if choice is not None and choice.grammar is not None and not self._is_over(work):
                choice.row.prepare()

    def _sample(self, forward: Forward, rows: Ints | None, works: Seq[Work]) -> dict[int, Sampled]:
        """What each of the works gives, by sequence. rows: of the step's tokens, those that follow one another here:
        each work's last known token and its drafts; None for all.
        """
        best = forward.best() if rows is None else None
        choices = [self._choices.get(w.sequence) for w in works]
        if best is not None and all(choice is not None and choice.row.wants_best() for choice in choices):
            results = take_best(best)
            found: dict[int, Sampled] = {}
            for work, result in zip(works, results, strict=True):
                if not self._is_over(work):
                    self._take(work, 0, result, found)
            return found
        return self._sample_logits(forward.logits(rows), works)

    def _sample_logits(self, logits: Floats, works: Seq[Work]) -> dict[int, Sampled]:
        """The same from their logits [n, vocabulary]."""
        found: dict[int, Sampled] = {}
        going: list[tuple[int, Work]] = []  # with the row of its next logits
        at = 0
        for work in works:
            if self._beams.owns(work.sequence):
                found[work.sequence] = self._beams.candidates(work.sequence, logits[at : at + 1])
            elif not self._is_over(work):
                going.append((at, work))
            at += 1 + work.num_draft
        depth, until = 0, time.perf_counter() + PATIENCE_SECONDS
        while going:
            rows = [self._choices[w.sequence].row for _, w in going]
            if not all(row.wait(until - time.perf_counter()) for row in rows):
                going = self._defer(logits, going, found)
                continue
            results = sample(logits if len(rows) == len(logits) else logits[[at for at, _ in going]], rows)
            taken = [self._take(w, depth, r, found) for (_, w), r in zip(going, results, strict=True)]
            going = [(at + 1, w) for (at, w), more in zip(going, taken, strict=True) if more]
            depth += 1
        return found

    def _defer(self, logits: Floats, going: Seq[tuple[int, Work]], found: dict[int, Sampled]) -> list[tuple[int, Work]]:
        """Leave out the works whose masks are late: they wait alone, with their logits. Those that are left. One that
        has accepted a draft has its token, and the next step asks for the mask again.
        """
        left = []
        for at, work in going:
            if self._choices[work.sequence].row.wait(0):
                left.append((at, work))
            elif work.sequence not in found:
                found[work.sequence] = None
                self._late[work.sequence] = Late(logits[at].copy(), time.perf_counter())
                self._scheduler.hold(work.sequence)
        return left

    def _drop_late(self) -> None:
        """Free the logits of those that were preempted: their last tokens are computed and sampled again."""
        for sequence in [s for s in self._late if not self._scheduler.is_held(s)]:
            self._choices[sequence].waited += time.perf_counter() - self._late.pop(sequence).since

    def _give_late(self) -> list[Event]:
        """Let those answers go on whose masks are there by now, and end those that waited too long."""
        events = []
        for sequence, late in list(self._late.items()):
            choice = self._choices[sequence]
            waited, there = choice.waited + time.perf_counter() - late.since, choice.row.wait(0)
            if choice.sequence.pending or (not there and waited <= MAX_WAIT_SECONDS):  # pending: to be committed first
                continue
            del self._late[sequence]
            choice.waited = waited
            result = (
                sample(late.logits[None], [choice.row])[0] if there else RequestError(TOO_LATE.format(MAX_WAIT_SECONDS))
            )
            if isinstance(result, RequestError):
                self._fail(sequence, result)
                continue
            self._record(choice, result.token)
            given = Result((result.token,), choice.row.is_end(result.token))
            events.append(self._event(sequence, [result], self._scheduler.give(sequence, given).finished))
        return events

    def _read_prompts(self, forward: Forward, works: Seq[Work]) -> None:
        """Log probabilities of the prompt tokens that follow the tokens of this step, where they are asked for."""
        first = 0
        for work in works:
            choice = self._choices.get(work.sequence)  # None: a beam
            request = self._requests[choice.request] if choice else None
            if request is not None and request.num_entries is not None:
                known = len(request.entries)  # some may be computed again, after a preemption
                following = request.prompt[work.start + 1 : work.start + len(work.tokens) + 1]
                skip = known - work.start
                request.entries += prompt_entries(
                    lambda at, n: forward.logits(np.arange(at, at + n)),
                    first + skip, following[skip:], request.num_entries,
                )  # fmt: skip
            first += len(work.tokens)

    def _row_at(self, work: Work) -> SampleRow:
        """The sampler's row before the first token that this work gives."""
        choice, position = self._choices[work.sequence], work.start + len(work.tokens) - work.num_draft
        if len(choice.known) > position:  # preempted, and computed again: the same tokens come again
            del choice.known[position:]
            prompt, output = choice.known[: choice.prompt_length], choice.known[choice.prompt_length :]
            choice.row = SampleRow.start(choice.row.params, prompt, choice.noise, self._eos, output, choice.grammar)
        return choice.row

    def _is_over(self, work: Work) -> bool:
        """Did the answer end in a step that is still in flight? Then nothing is sampled: no grammar goes on from an
        end.
        """
        row, choice = self._row_at(work), self._choices[work.sequence]
        return len(choice.known) > choice.prompt_length and row.is_end(choice.known[-1])

    def _take(self, work: Work, depth: int, result: SampledToken | RequestError, found: dict[int, Sampled]) -> bool:
        """The next token of a work, or why there is none. Is it the draft in this place, so that one more follows?"""
        choice, drafts = self._choices[work.sequence], work.tokens[len(work.tokens) - work.num_draft :]
        if isinstance(result, RequestError):
            if depth:  # the next step begins with it
                return False
            found[work.sequence] = result
            self._fail(work.sequence, result)
            return False
        before = found.setdefault(work.sequence, [])
        assert isinstance(before, list)
        before.append(result)
        self._record(choice, result.token)
        self._runner.sampled(work.row, result.token)
        return depth < len(drafts) and result.token == drafts[depth] and not choice.row.is_end(result.token)

    def _record(self, choice: _Choice, token: int) -> None:
        """One more token of an answer; the mask of the next one is begun."""
        choice.known.append(token)
        choice.row.push(token)
        if not choice.row.is_end(token) and len(choice.known) < choice.sequence.max_length:
            choice.row.prepare()

    def _fail(self, sequence: int, error: RequestError) -> None:
        """End an answer with an error, which the step tells."""
        choice = self._choices[sequence]
        event = Event(
            choice.request, choice.index, finish_reason="error", error=error,
            prompt_logprobs=self._requests[choice.request].take_entries(), num_preempted=choice.sequence.num_preempted,
        )  # fmt: skip
        self._failed.append(event)
        self._drop(sequence)

    def _commit(self, flight: _Flight) -> list[Event]:
        pairs = list(zip(flight.plan.works, flight.sampled, strict=True))
        found = {w.sequence: s for w, s in pairs}
        events = []
        for update in self._scheduler.commit(flight.plan, [self._result(w, s) for w, s in pairs]):
            given = found[update.sequence]
            if isinstance(given, list):
                events.append(self._event(update.sequence, given, update.finished))
            elif given is not None:
                self._beams.take(update.sequence, given)
        return events + self._beams.advance()

    def _event(self, sequence: int, sampled: Seq[SampledToken], finished: bool) -> Event:
        """What to tell of tokens that were committed."""
        choice = self._choices[sequence]
        reason: FinishReason | None = None
        stop: int | None = None
        if finished:
            last = sampled[-1].token
            reason, stop = ("stop", choice.row.stop_reason(last)) if choice.row.is_end(last) else ("length", None)
        event = Event(
            choice.request, choice.index, tuple(s.token for s in sampled),
            tuple(s.logprobs for s in sampled if s.logprobs is not None), reason, stop,
            num_cached_tokens=choice.sequence.num_cached, num_preempted=choice.sequence.num_preempted,
            prompt_logprobs=self._requests[choice.request].take_entries(), scheduled=choice.scheduled,
        )  # fmt: skip
        if finished:
            self._close(sequence)
        return event

    def _result(self, work: Work, sampled: Sampled) -> Result:
        choice = self._choices.get(work.sequence)
        if choice is None or not isinstance(sampled, list):  # over meanwhile, or nothing to sample
            return Result()
        return Result(tuple(s.token for s in sampled), choice.row.is_end(sampled[-1].token))

    def _drop(self, sequence: int) -> None:
        self._close(sequence)
        self._scheduler.abort(sequence)

    def _close(self, sequence: int) -> None:
        """An answer is over; with the last one, its request is."""
        choice = self._choices.pop(sequence)
        self._late.pop(sequence, None)
        request = self._requests[choice.request]
        request.open.discard(sequence)
        if not request.open:
            del self._requests[choice.request]


def _shape(works: Seq[Work]) -> StepShape:
    return tuple((len(w.tokens), w.start + len(w.tokens), w.sample + w.num_draft) for w in works)


def _sampled_rows(works: Seq[Work]) -> Ints | None:
    """Of a step's tokens, each work's last known one and its drafts, where it samples; None for all of them."""
    if all(w.sample and len(w.tokens) == w.num_draft + 1 for w in works):
        return None
    ends = accumulate(len(w.tokens) for w in works)
    rows = [np.arange(end - w.num_draft - 1, end) for w, end in zip(works, ends, strict=True) if w.sample]
    return np.concatenate(rows)
