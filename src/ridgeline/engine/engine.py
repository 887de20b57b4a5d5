"""The loop: schedule -> submit -> sample -> commit. Requests join, leave and are aborted between any two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from ridgeline.errors import RequestError
from ridgeline.plan.resolve import EngineConfig
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.runner import Runner
from ridgeline.runtime.sampler import NoiseKey, SampledToken, SampleRow, sample
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence, hash_root
from ridgeline.sched.stats import Stats
from ridgeline.sched.work import Result, StepPlan, Work
from ridgeline.spec.request import FinishReason, SamplingParams, TokenLogprobs

STATE_PRECISION = "float32"


@dataclass(frozen=True, slots=True)
class Event:
    """What became of an answer: a new token, or the error that ended it. finish_reason: set on the last event."""

    request: int
    choice: int
    token: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


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


@dataclass(slots=True)
class _Request:
    choices: list[int]  # sequence ids
    open: set[int]


Sampled = SampledToken | RequestError | None


@dataclass(slots=True)
class _Flight:
    """A step on its way, and what each of its works sampled."""

    plan: StepPlan
    sampled: list[Sampled]


class Engine:
    """Answers any number of requests with one model on one device. Not for several threads at once."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self._eos = loaded.eos_token_ids
        no_host = [0] * len(config.groups)
        self._scheduler = Scheduler(
            config.groups,
            config.num_pages,
            max_batch_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
        )
        self._runner = Runner(
            loaded, config.groups, config.num_pages, max_seqs=config.max_num_seqs, num_host_pages=no_host
        )
        self._root = hash_root(state_precision=STATE_PRECISION)
        self._choices: dict[int, _Choice] = {}
        self._requests: dict[int, _Request] = {}
        self._flights: deque[_Flight] = deque()
        self._failed: list[Event] = []
        self._ids = count()

    def __len__(self) -> int:
        """Requests that are not complete."""
        return len(self._requests)

    def add(self, request: int, prompt_token_ids: Seq[int], params: SamplingParams, noise: Seq[NoiseKey]) -> None:
        """Queue a request under an id of the caller's; `noise` has a key for each of its `params.n` answers.

        Raises RequestError, and queues nothing, for one that can never fit.
        """
        prompt = list(prompt_token_ids)
        room = self.config.max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        choices = []
        for index, key in enumerate(noise):
            sequence = Sequence(next(self._ids), list(prompt), max_tokens, root=self._root)
            row = SampleRow.start(params, prompt, key, self._eos)
            choices.append(_Choice(request, index, key, len(prompt), list(prompt), row, sequence))
        first, *others = (c.sequence for c in choices)
        self._scheduler.add(first, others)
        self._choices |= {c.sequence.id: c for c in choices}
        ids = [c.sequence.id for c in choices]
        self._requests[request] = _Request(ids, set(ids))

    def abort(self, request: int) -> bool:
        """End a request at any moment. False: it was complete already."""
        if request not in self._requests:
            return False
        for sequence in tuple(self._requests[request].open):
            self._drop(sequence)
        return True

    def finish(self, request: int, choice: int) -> None:
        """End one answer of a request: a stop string was found in its text."""
        if request in self._requests:
            sequence = self._requests[request].choices[choice]
            if sequence in self._choices:
                self._drop(sequence)

    def step(self) -> list[Event]:
        """Run what can be run, and take in what is due; what became of the answers, in order."""
        plan = self._scheduler.schedule()
        if plan is not None:
            self._flights.append(self._submit(plan))
        elif self._requests and not self._flights:
            raise RuntimeError("nothing can run although requests are waiting: the scheduler is at fault")
        events = []
        if self._flights and (plan is None or len(self._flights) >= self.config.steps_in_flight):
            events = self._commit(self._flights.popleft())
        failed, self._failed = self._failed, []
        return events + failed

    def stats(self) -> Stats:
        """Pages used, waste, prefix hits, preemptions, running and waiting."""
        return self._scheduler.stats()

    def check(self) -> None:
        """Raise AssertionError if the books of pages and rows do not agree."""
        self._scheduler.check()

    def _submit(self, plan: StepPlan) -> _Flight:
        logits = self._runner.submit(plan)
        works = [w for w in plan.works if w.sample]
        found: dict[int, Sampled] = {}
        if logits is not None:
            rows = [self._row_at(w) for w in works]
            for work, result in zip(works, sample(logits, rows), strict=True):
                found[work.sequence] = result
                self._take(work, result)
        return _Flight(plan, [found[w.sequence] if w.sample else None for w in plan.works])

    def _row_at(self, work: Work) -> SampleRow:
        """The sampler's row before the token that this work gives."""
        choice, position = self._choices[work.sequence], work.start + len(work.tokens)
        if len(choice.known) > position:  # preempted, and computed again: the same tokens come again
            del choice.known[position:]
            prompt, output = choice.known[: choice.prompt_length], choice.known[choice.prompt_length :]
            choice.row = SampleRow.start(choice.row.params, prompt, choice.noise, self._eos, output)
        return choice.row

    def _take(self, work: Work, result: SampledToken | RequestError) -> None:
        choice = self._choices[work.sequence]
        if isinstance(result, RequestError):
            self._failed.append(Event(choice.request, choice.index, None, finish_reason="error", error=result))
            self._drop(work.sequence)
            return
        choice.known.append(result.token)
        choice.row.push(result.token)
        self._runner.sampled(work.row, result.token)

    def _commit(self, flight: _Flight) -> list[Event]:
        pairs = list(zip(flight.plan.works, flight.sampled, strict=True))
        found = {w.sequence: s for w, s in pairs if isinstance(s, SampledToken)}
        events = []
        for update in self._scheduler.commit(flight.plan, [self._result(w, s) for w, s in pairs]):
            choice, sampled = self._choices[update.sequence], found[update.sequence]
            reason: FinishReason | None = None
            stop: int | None = None
            if update.finished:
                ended = choice.row.is_end(sampled.token)
                reason, stop = ("stop", choice.row.stop_reason(sampled.token)) if ended else ("length", None)
                self._close(update.sequence)
            token, cached = sampled.token, choice.sequence.num_cached
            events.append(
                Event(choice.request, choice.index, token, sampled.logprobs, reason, stop, num_cached_tokens=cached)
            )
        return events

    def _result(self, work: Work, sampled: Sampled) -> Result:
        choice = self._choices.get(work.sequence)
        if choice is None or not isinstance(sampled, SampledToken):  # over meanwhile, or nothing to sample
            return Result()
        return Result((sampled.token,), choice.row.is_end(sampled.token))

    def _drop(self, sequence: int) -> None:
        self._close(sequence)
        self._scheduler.abort(sequence)

    def _close(self, sequence: int) -> None:
        """An answer is over; with the last one, its request is."""
        choice = self._choices.pop(sequence)
        request = self._requests[choice.request]
        request.open.discard(sequence)
        if not request.open:
            del self._requests[choice.request]
