"""Beam searches in the engine: every beam is a sequence, and beams that diverge share pages until they write.

A beam's step gives candidates instead of a token, so its sequence pauses. When all beams of a search have paused, the
search selects the next beams (sample/beams.py); they are forked from their parents, and the parents end. The steps of
other requests do not wait for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ridgeline.errors import RequestError
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.sample.beams import BeamSearch, Branch, Candidates, Hypothesis, top_candidates
from ridgeline.sample.logits import Floats
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence
from ridgeline.spec.request import BeamSearchParams


@dataclass(slots=True)
class _Search:
    """One request's search. live: its beams, best first. found: the candidates of each beam, by sequence."""

    request: int
    params: BeamSearchParams
    search: BeamSearch
    num_prompt: int
    num_cached: int
    live: list[Sequence]
    found: dict[int, Candidates | RequestError] = field(default_factory=dict)


class Beams:
    """Runs the searches of one engine. ids: sequence ids. eos: the model's end-of-sequence tokens."""

    def __init__(self, scheduler: Scheduler, ids: Iterator[int], eos: Collection[int]) -> None:
        self._scheduler, self._ids, self._eos = scheduler, ids, eos
        self._searches: dict[int, _Search] = {}  # by request
        self._owners: dict[int, _Search] = {}  # by sequence
        self._in_flight: dict[int, Candidates | RequestError] = {}  # by sequence, until its step is committed

    def __len__(self) -> int:
        """Return the number of searches that are not done."""
        return len(self._searches)

    def add(self, request_id: int, request: GenerationRequest, max_tokens: int, root: bytes, adapter: int) -> None:
        """Queue a search. adapter: the slot of its adapter; -1: none.

        Raises RequestError, and queues nothing, if a single beam can never fit.
        """
        assert isinstance(request.params, BeamSearchParams)
        prompt = list(request.prompt_token_ids)
        first = Sequence(next(self._ids), prompt, max_tokens, request.priority, root, waits=True, adapter=adapter)
        self._scheduler.add(first)
        search = BeamSearch(request.params, self._eos, max_tokens)
        owner = _Search(request_id, request.params, search, len(prompt), 0, [first])
        self._searches[request_id] = self._owners[first.id] = owner

    def use_adapter(self, slot: int) -> bool:
        """Return whether an open search has the adapter of a slot."""
        return any(beam.adapter == slot for search in self._searches.values() for beam in search.live)

    def abort(self, request_id: int) -> None:
        """End a search at any moment. Nothing happens if there is none."""
        search = self._searches.pop(request_id, None)
        for beam in search.live if search else ():
            self._end(beam)

    def taker(self, sequence: int) -> Callable[[Floats], None] | None:
        """Return a function that takes a beam's logits [1, vocabulary] and keeps its best tokens until `commit`.

        Returns None if the beam has ended.
        """
        owner = self._owners.get(sequence)
        if owner is None:
            return None
        count = owner.search.count

        def take(logits: Floats) -> None:
            self._in_flight[sequence] = top_candidates(logits, count)[0]

        return take

    def commit(self, sequence: int) -> None:
        """Give the candidates of a beam, whose step was committed, to its search."""
        self._owners[sequence].found[sequence] = self._in_flight.pop(sequence)

    def advance(self) -> list[Event]:
        """Advance every search whose beams all have candidates; the events of those that are done.

        To be called between commit and schedule.
        """
        events = []
        for search in list(self._searches.values()):
            if len(search.found) == len(search.live):
                events += self._advance(search)
        return events

    def _advance(self, search: _Search) -> list[Event]:
        found = [search.found[beam.id] for beam in search.live]
        search.num_cached = search.num_cached or search.live[0].num_cached
        for each in found:
            if isinstance(each, RequestError):
                self.abort(search.request)
                return [_failed(search, i, each) for i in range(search.params.answers)]
        branches = search.search.advance([each for each in found if not isinstance(each, RequestError)])
        if not search.search.done:
            self._branch(search, branches)
            return []
        self.abort(search.request)
        answers = search.search.results()
        events = [self._answer(search, i, answer) for i, answer in enumerate(answers)]
        none_left = RequestError(f"only {len(answers)} answers have a probability above zero")
        return events + [_failed(search, i, none_left) for i in range(len(answers), search.params.answers)]

    def _branch(self, search: _Search, branches: list[Branch]) -> None:
        """Fork the next live beams. Parents with few children go first: the others can use the rows that they leave."""
        counts = Counter(branch.parent for branch in branches)
        beams: list[Sequence | None] = [None] * len(branches)
        for parent, old in sorted(enumerate(search.live), key=lambda item: counts[item[0]]):
            for i, branch in enumerate(branches):
                if branch.parent == parent:
                    tokens = [*old.tokens, branch.token]
                    beams[i] = new = Sequence(
                        next(self._ids), tokens, old.max_tokens, old.priority, old.root, search.num_prompt, waits=True,
                        adapter=old.adapter,
                    )  # fmt: skip
                    self._scheduler.fork(old.id, new)
            self._end(old)
        search.live, search.found = [beam for beam in beams if beam is not None], {}
        self._owners |= dict.fromkeys((beam.id for beam in search.live), search)

    def _end(self, beam: Sequence) -> None:
        del self._owners[beam.id]
        self._in_flight.pop(beam.id, None)
        self._scheduler.abort(beam.id)

    def _answer(self, search: _Search, choice: int, answer: Hypothesis) -> Event:
        last = answer.tokens[-1]
        stop = last if answer.finished and (search.params.ignore_eos or last not in self._eos) else None
        return Event(
            search.request, choice, answer.tokens, (), "stop" if answer.finished else "length", stop,
            num_cached_tokens=search.num_cached, score=answer.score,
        )  # fmt: skip


def _failed(search: _Search, choice: int, error: RequestError) -> Event:
    return Event(search.request, choice, finish_reason="error", error=error)
