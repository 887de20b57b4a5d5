"""Serves the requests of a case with one engine: the tokens that came, what was seen at work, the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.engine import Engine
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.verify.baseline import Baseline
from ridgeline.verify.matrix import Case
from ridgeline.verify.report import Difference, Observed, Score
from ridgeline.verify.requests import Round, params_of


@dataclass(slots=True)
class Serving:
    """One case on its engine: the tokens that came, and what was seen."""

    engine: Engine
    case: Case
    requests: list[GenerationRequest] = field(default_factory=list)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)  # request -> tokens of its prompt that were found
    steps: int = 0
    first_token: int = 0
    most_running: int = 0
    shared_pages: int = 0

    def serve(self, each: Round) -> None:
        """A round of requests, until all are complete. Raises what the engine raises."""
        for request in each.before:
            self.engine.add(-1, request)
            while len(self.engine):
                self.engine.step()
                self.engine.check()
        first, step = len(self.requests), 0
        todo = {first + i: arrival for i, arrival in enumerate(each.arrivals)}
        self.requests += [arrival.request for arrival in each.arrivals]
        limit = 1000 + 4 * sum(len(r.noise) * (len(r.prompt_token_ids) + 100) for r in self.requests)
        while todo or len(self.engine):
            for i in [i for i, arrival in todo.items() if arrival.step <= step]:
                self.engine.add(i, todo.pop(i).request)
            step += 1
            self._step(step)
            if step > limit:
                raise RuntimeError(f"requests are not complete after {limit} steps")
        self.steps += step

    def _step(self, step: int) -> None:
        for event in self.engine.step():
            if event.error is not None:
                raise event.error
            self.tokens.setdefault((event.request, event.choice), []).extend(event.tokens)
            if event.choice == 0:
                self.cached.setdefault(event.request, event.num_cached_tokens)
            if event.request == 0:
                self.first_token = self.first_token or step
        self.engine.check()
        stats = self.engine.stats()
        self.most_running = max(self.most_running, stats.running)
        pages = zip(self.engine.config.groups, stats.groups, strict=True)
        shared = sum(max(0, s.slots // g.page_tokens - s.used_pages) for g, s in pages)
        self.shared_pages = max(self.shared_pages, shared)

    def observed(self) -> Observed:
        """What the engine did."""
        stats = self.engine.stats()
        least = 0
        if self.requests and 0 in self.cached:
            left = len(self.requests[0].prompt_token_ids) - self.cached[0]
            least = -(-left // (self.case.chunk or left)) + self.case.steps_in_flight - 1
        return Observed(
            requests=len(self.requests),
            steps=self.steps,
            first_token=self.first_token,
            least_first_token=least,
            most_running=self.most_running,
            hits=sum(n > 0 for n in self.cached.values()),
            cached_tokens=sum(self.cached.values()),
            preempted_recompute=stats.preempted_recompute,
            preempted_swap=stats.preempted_swap,
            shared_pages=self.shared_pages,
        )

    def compare(self, baseline: Baseline) -> tuple[Mapping[bool, Score], Sequence[Difference]]:
        """Scores of greedy (True) and sampled answers, and where they differ."""
        scores, differences = {True: Score(), False: Score()}, []
        for i, request in enumerate(self.requests):
            greedy = params_of(request).temperature == 0
            for choice in range(len(request.noise)):
                wanted, got = baseline.answer(request, choice).tokens, self.tokens.get((i, choice), [])
                same = _same(wanted, got)
                scores[greedy] += Score(same, len(wanted))
                if same < max(len(wanted), len(got)):
                    differences.append(_difference(baseline, i, request, choice, same, got))
        return scores, differences


def _same(wanted: Sequence[int], got: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(wanted, got, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))


def _difference(
    baseline: Baseline, number: int, request: GenerationRequest, choice: int, position: int, got: Sequence[int]
) -> Difference:
    params, wanted = params_of(request), baseline.answer(request, choice).tokens
    token, expected = (tokens[position] if position < len(tokens) else None for tokens in (got, wanted))
    gap = None
    if token is not None and expected is not None:
        gap = baseline.gap(request, choice, position, token)
    return Difference(number, choice, params.temperature == 0, position, token, expected, gap)
