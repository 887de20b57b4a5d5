"""Options of the chain besides the model, the limits and the texts."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import RequestError
from ridgeline.train.ranges import check_ranges

_RANGES = {
    "tokens": (1, 10**15), "candidates": (1, 100), "updates": (1, 10**6), "held_out": (1e-6, 0.5),
    "repeat": (1, 10**6), "sequence_length": (2, 2**30), "batch_tokens": (2, 10**9), "learning_rate": (0.0, 1e3),
    "calibrate_sequences": (1, 10**9), "seed": (0, 2**31 - 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheaperOptions:
    """Options of `cheaper`.

    Attributes:
        tokens: tokens of the whole repair. candidates: changed models that are repaired for a short while. updates:
            updates of that short repair. quantize: scheme of `ridgeline quantize` for the result; None: none.
        baseline: whether a model of the same shape is trained from random weights with the same tokens.
        held_out: share of the texts on which models are measured, and which nothing else sees. repeat: most times that
            the texts are read.
        sequence_length: tokens of a sequence, in training and calibration. batch_tokens: tokens of an update.
        learning_rate: peak rate of the repair. calibrate_sequences: calibration sequences. seed: random
            seed. threads: threads of the kernels.
    """

    tokens: int
    candidates: int = 3
    updates: int = 100
    quantize: str | None = None
    baseline: bool = False
    held_out: float = 0.05
    repeat: int = 1
    sequence_length: int = 512
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    calibrate_sequences: int = 128
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES, RequestError, flags=True)
        if self.batch_tokens % self.sequence_length:
            raise RequestError(
                f"batch_tokens (--batch-tokens) is {self.batch_tokens}; it must be a multiple of sequence_length "
                f"(--sequence-length) {self.sequence_length}"
            )
