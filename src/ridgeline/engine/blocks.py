"""The answers of diffusion models, which are filled block after block."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

from ridgeline.diffusion import CanvasDenoiser, Denoiser, Softens
from ridgeline.engine.answers import Answer
from ridgeline.runtime.generator import Event
from ridgeline.sample.logit_rows import LogitRows
from ridgeline.sample.sampler import SampleRow
from ridgeline.sched.sequence import Sequence
from ridgeline.sched.work import Result, Work
from ridgeline.spec.diffusion import CanvasDiffusion, Diffusion
from ridgeline.spec.request import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class BlockAnswer(Answer):
    """One answer of a diffusion model. Its open block is in the drafts of its sequence."""

    denoiser: Denoiser | CanvasDenoiser

    @classmethod
    def begin(
        cls, request: int, index: int, row: SampleRow, sequence: Sequence, model: Diffusion, soften: Softens | None
    ) -> BlockAnswer:
        """Return an answer without tokens.

        row: its row at the end of the prompt. soften: computes mean embeddings for a canvas.
        """
        denoiser: Denoiser | CanvasDenoiser
        if isinstance(model, CanvasDiffusion):
            assert soften is not None
            denoiser = CanvasDenoiser(model, row, sequence.max_length, soften)
        else:
            denoiser = Denoiser(model, sequence.block, row, sequence.num_prompt, sequence.max_length)
        answer = cls(request, index, row, sequence, denoiser=denoiser)
        answer.open_block()
        return answer

    def open_block(self) -> None:
        """Give the sequence its open block, as it is after the last pass that was committed."""
        if isinstance(self.denoiser, CanvasDenoiser):
            self.sequence.propose(self.denoiser.open_block(self.sequence.tokens))
            self.sequence.signal = self.denoiser.signal
        else:
            self.sequence.propose(self.denoiser.open_block(self.sequence.tokens, self.sequence.epoch))
            self.sequence.wanted, self.sequence.part = self.denoiser.wanted, self.denoiser.part

    @property
    def needs_host(self) -> bool:
        return True

    def taker(self, work: Work) -> Callable[[LogitRows], Result]:
        """Return the function that takes the logits of a pass, and returns its result."""
        return partial(self.denoiser.take, work=work)

    def record(self, tokens: Seq[int]) -> None:
        """Do nothing: the denoiser knows the tokens."""

    def event(self, result: Result, finished: bool, entries: tuple[TokenLogprobs, ...] | None) -> Event:
        return replace(Answer.event(self, result, finished, entries), num_passes=self.denoiser.passes)
