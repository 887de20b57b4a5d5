"""Fill the blocks of a diffusion model without a cache (`--cache off`): each pass computes the whole history again.

With a block cache, the first pass over the block is computed again as well, for the rows that a later pass reads. It is
the baseline for correctness and speed, as naive.py is for autoregressive models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ridgeline.diffusion import Denoiser
from ridgeline.errors import RequestError
from ridgeline.nn.step import Stream
from ridgeline.runtime.generator import Event, GenerationRequest, Generator
from ridgeline.runtime.kept import forward_with_kept_rows
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.naive import MAX_STEP_LOGITS, MAX_STEP_TOKENS, NaiveGenerator
from ridgeline.sample.logit_rows import LogitRows
from ridgeline.sample.logits import Floats
from ridgeline.sample.sampler import NoiseKey, SampleRow
from ridgeline.sched.stats import StepShape
from ridgeline.sched.work import Work
from ridgeline.spec.diffusion import CanvasDiffusion, MaskedDiffusion
from ridgeline.spec.request import FinishReason, SamplingParams


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer that is not complete. tokens: the prompt, and the answer so far. limit: its length at the end."""

    request: int
    choice: int
    tokens: list[int]
    row: SampleRow
    denoiser: Denoiser
    limit: int

    def pass_over(self, block: int) -> tuple[list[int], Work]:
        """Return all tokens of the next pass, and the work of its logits: the token before the block, and the block.

        With a block cache, the work's tokens are those whose rows the pass computes.
        """
        open_block = self.denoiser.open_block(self.tokens)
        own, part = self.denoiser.wanted, self.denoiser.part
        if part is not None:
            start, first = part[0], self.denoiser.first
            whole = [*first[:start], *open_block, *first[start + len(open_block) :]]
            return whole, Work(0, 0, 0, start, open_block, True, start, len(open_block), wanted=own, reads=part[1])
        known = self.tokens[: len(self.tokens) // block * block]
        start = max(0, len(known) - 1)
        tokens = (*known[start:], *open_block)
        return [*known, *open_block], Work(0, 0, 0, start, tokens, True, start, len(open_block), wanted=own)


class NaiveBlocks:
    """A runtime.generator.Generator that keeps no state between passes.

    change: changes the logits of each pass, to find out whether rounding decides about a token.
    """

    def __init__(
        self, loaded: LoadedModel, model: MaskedDiffusion, change: Callable[[Floats], Floats] = lambda logits: logits
    ) -> None:
        self._change = change
        self._loaded, self._model, self._block = loaded, model, loaded.spec.block
        self._answers: list[_Answer] = []

    def __len__(self) -> int:
        return len({answer.request for answer in self._answers})

    def add(self, request_id: int, request: GenerationRequest) -> None:
        prompt, params = list(request.prompt_token_ids), request.params
        assert isinstance(params, SamplingParams), "a diffusion model has no beams"
        limit = self._loaded.max_model_len - len(params.suffix_token_ids)
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        row = SampleRow.start(params, prompt, request.noise[0], self._loaded.eos_token_ids)
        self._answers += [self._begin(request_id, i, prompt, row, key, limit) for i, key in enumerate(request.noise)]

    def _begin(
        self, request: int, choice: int, prompt: Sequence[int], row: SampleRow, key: NoiseKey, limit: int
    ) -> _Answer:
        own = row.again(key)
        denoiser = Denoiser(self._model, self._block, own, len(prompt), limit)
        return _Answer(request, choice, list(prompt), own, denoiser, limit)

    def step(self) -> list[Event]:
        """Run one pass over the open blocks of some answers, and return the blocks that are done."""
        some = self._some()
        if not some:
            return []
        memory = self._loaded.table.memory
        passes = [answer.pass_over(self._block) for answer in some]
        stream = self._forward(some, passes)
        offsets = [0, *accumulate(len(tokens) for tokens, _ in passes)]
        rows = [np.array(work.rows) + work.start + at for at, (_, work) in zip(offsets, passes, strict=False)]
        logits = self._change(memory.get(self._loaded.model.logits(stream, memory.integers(np.concatenate(rows)))))
        events, at = [], 0
        for answer, (_, work) in zip(some, passes, strict=True):
            event = self._take(answer, logits[at : at + work.num_rows], work)
            events += [] if event is None else [event]
            at += work.num_rows
        return events

    def _forward(self, some: Sequence[_Answer], passes: Sequence[tuple[list[int], Work]]) -> Stream:
        """Run the passes over some answers together."""
        whole = [tokens for tokens, _ in passes]
        if self._model.block_cache == "none":
            return self._loaded.model.forward(self._loaded.dense_step(whole))
        parts = [range(work.start, work.start + len(work.tokens)) for _, work in passes]
        return forward_with_kept_rows(self._loaded, [answer.denoiser.first for answer in some], whole, parts)

    def _some(self) -> list[_Answer]:
        """Return the first answers, at least one, while a pass stays within the limits of its memory."""
        most = MAX_STEP_LOGITS // self._loaded.spec.vocab_size
        found, tokens, rows = self._answers[:1], 0, 0
        for answer in self._answers:
            size = min(self._block, answer.limit)
            tokens, rows = tokens + answer.limit + size, rows + size + 1
            if answer is not found[0] and tokens <= MAX_STEP_TOKENS and rows <= most:
                found.append(answer)
        return found

    def _take(self, answer: _Answer, logits: Floats, work: Work) -> Event | None:
        """Return the event of a pass: a block that is done, or an error."""
        result = answer.denoiser.take(LogitRows.of(logits), work)
        passes = answer.denoiser.passes
        if result.error is not None:
            self._drop(answer.request, answer.choice)
            return Event(answer.request, answer.choice, finish_reason="error", error=result.error, num_passes=passes)
        tokens = result.tokens[: answer.limit - len(answer.tokens)]
        if not tokens:
            return None
        answer.tokens += tokens
        reason: FinishReason | None = None
        stop: int | None = None
        if answer.row.is_end(tokens[-1]):
            reason, stop = "stop", answer.row.stop_reason(tokens[-1])
        elif len(answer.tokens) >= answer.limit:
            reason = "length"
        if reason is not None:
            self._drop(answer.request, answer.choice)
        return Event(answer.request, answer.choice, tokens, result.logprobs, reason, stop, num_passes=passes)

    def finish(self, request_id: int, choice: int) -> None:
        self._drop(request_id, choice)

    def abort(self, request_id: int) -> None:
        self._drop(request_id, None)

    def _drop(self, request: int, choice: int | None) -> None:
        self._answers = [a for a in self._answers if a.request != request or choice not in (None, a.choice)]

    def reset(self) -> None:
        self._answers.clear()

    def stats(self) -> None:
        return None

    def last_step(self) -> StepShape:
        return ()

    def check(self) -> None:
        """Do nothing: there are no pages."""


def open_naive(loaded: LoadedModel) -> Generator:
    """Return the generator that keeps no state, for the kind of the model."""
    model = loaded.spec.diffusion
    if isinstance(model, CanvasDiffusion):
        raise RequestError(
            "cache is off, but a canvas reads the rows of the tokens before it, which are computed in another way; "
            "leave --cache out"
        )
    return NaiveGenerator(loaded) if model is None else NaiveBlocks(loaded, model)
