"""Serve the requests of a case with one engine, observe what the engine does, and compare the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.engine import Engine
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.spec import CanvasDiffusion
from ridgeline.spec.sight import BEYOND
from ridgeline.verify.baseline import Baseline
from ridgeline.verify.matrix import Case
from ridgeline.verify.report import Difference, Observed, Score
from ridgeline.verify.requests import Round, params_of


class Proposer:
    """Proposes the drafts of a case: the expected tokens, some of them replaced by wrong ones."""

    def __init__(self, baseline: Baseline, vocab_size: int, case: Case, seed: int) -> None:
        self._baseline, self._vocab_size, self._case = baseline, vocab_size, case
        self._rng = np.random.default_rng([seed, 4, case.number])

    def drafts(self, request: GenerationRequest, choice: int, known: int) -> list[int]:
        """Return the drafts for an answer that has `known` tokens."""
        if not self._case.drafts:
            return []
        coming = self._baseline.answer(request, choice).tokens[known : known + self._case.drafts]
        wrong = self._rng.random(len(coming)) < self._case.wrong
        return [(t + 1) % self._vocab_size if no else t for t, no in zip(coming, wrong, strict=True)]


@dataclass(slots=True)
class Serving:
    """One case on its engine: the tokens that it returned, and observations.

    block: tokens of a block of a diffusion model; None: the model is autoregressive. canvas: how
    a diffusion model with a canvas fills it; None: it has none.
    """

    engine: Engine
    case: Case
    proposer: Proposer
    block: int | None = None
    canvas: CanvasDiffusion | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)  # request -> tokens of its prompt found in the prefix cache
    steps: int = 0
    first_token: int = 0
    most_running: int = 0
    shared_pages: int = 0

    def serve(self, each: Round) -> None:
        """Serve a round of requests until all are complete. Raises the errors of the engine."""
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
                self._propose(i)
            step += 1
            self._step(step)
            if step > limit:
                raise RuntimeError(f"requests are not complete after {limit} steps")
        self.steps += step

    def _step(self, step: int) -> None:
        touched = set()
        for event in self.engine.step():
            if event.error is not None:
                raise event.error
            self.tokens.setdefault((event.request, event.choice), []).extend(event.tokens)
            touched.add(event.request)
            if event.choice == 0:
                self.cached.setdefault(event.request, event.num_cached_tokens)
            if event.request == 0:
                self.first_token = self.first_token or step
        for request in touched:
            self._propose(request)
        self.engine.check()
        stats = self.engine.stats()
        self.most_running = max(self.most_running, stats.running)
        self.shared_pages = max(self.shared_pages, sum(group.shared_pages for group in stats.groups))

    def _propose(self, number: int) -> None:
        request = self.requests[number]
        for choice in range(len(request.noise)) if self.case.source == "known" else ():
            known = len(self.tokens.get((number, choice), ()))
            self.engine.propose(number, choice, self.proposer.drafts(request, choice, known))

    def observed(self) -> Observed:
        """Return what was observed of the engine."""
        stats = self.engine.stats()
        least, slack = 0, self.case.steps_in_flight if self._has_snapshots and self.case.prefix == "hit" else 0
        if self.requests and 0 in self.cached:
            start, prompt = self.cached[0], len(self.requests[0].prompt_token_ids)
            least = self._least_steps(start, prompt) + self.case.steps_in_flight - 1
            if self.canvas:
                least, slack = self._canvas_steps(self.canvas, start, prompt)
            elif self.block is not None:
                least, slack = self._block_steps(self.block, start, prompt)
        return Observed(
            requests=len(self.requests),
            steps=self.steps,
            first_token=self.first_token,
            least_first_token=least,
            slack=slack,
            most_running=self.most_running,
            hits=sum(n > 0 for n in self.cached.values()),
            cached_tokens=sum(self.cached.values()),
            preempted_recompute=stats.preempted_recompute,
            preempted_swap=stats.preempted_swap,
            shared_pages=self.shared_pages,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
        )

    def _least_steps(self, start: int, end: int) -> int:
        """Return the least steps for a prompt from `start` on: a chunk of several tokens ends at a state snapshot."""
        steps, every = 0, self.engine.config.state_snapshot_tokens
        while start < end:
            reach = min(start + (self.case.chunk or end), end)
            last = reach // every * every
            start = last if self._has_snapshots and reach - start > 1 and last > start else reach
            steps += 1
        return steps

    def _block_steps(self, size: int, start: int, prompt: int) -> tuple[int, int]:
        """Return the least steps until the first block is done, one token a pass, and how many more it may take.

        An answer that ends within the block is over once its own tokens are known.
        """
        steps, settled = 0, prompt // size * size
        while self.case.chunk and settled + size - start > self.case.chunk:
            start = min(settled, start + self.case.chunk // size * size)
            steps += 1
        masks = settled + size - prompt
        params = params_of(self.requests[0])
        least = min(masks, params.max_tokens or masks, params.block_length or masks)
        return steps + least, 0 if size >= BEYOND else masks - least

    def _canvas_steps(self, model: CanvasDiffusion, start: int, prompt: int) -> tuple[int, int]:
        """Return the least steps until the first canvas is done, and how many more it may take.

        Its first pass runs with the last tokens of the prompt, if both fit into a step.
        """
        steps, chunk = 0, self.case.chunk
        while chunk and prompt - start + model.canvas > chunk:
            start = min(prompt, start + chunk)
            steps += 1
        most = params_of(self.requests[0]).denoising_passes or model.passes
        least = min(most, 1 + model.stable_passes)
        return steps + least, most - least

    @property
    def _has_snapshots(self) -> bool:
        return any(group.snapshot for group in self.engine.config.groups)

    def compare(self, baseline: Baseline) -> tuple[Mapping[bool, Score], Sequence[Difference]]:
        """Return the scores of greedy (True) and sampled (False) answers, and their differences."""
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
    """Return the number of tokens before the first difference."""
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
