"""Define how a diffusion language model fills an answer: masked diffusion (LLaDA, arXiv:2502.09992)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# How many tokens each of a number of passes keeps: equally many (LLaDA), or as time runs from 1 to 0 (Dream).
Schedule = Literal["equal", "time"]

# Sampling parameters that follow an answer from left to right, token by token, which diffusion models do not.
IN_ORDER = (
    "structured_outputs", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "bad_words",
    "prompt_logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """Unknown tokens are mask tokens; each pass predicts all of them, and some predictions are kept.

    Args:
        mask_token: Id of the mask token. It is in no prompt and in no answer.
        predicts_next: Logits at a position are for the token after it, as in autoregressive models (Dream, and models
            that begin from autoregressive weights), instead of for the token at the position itself (LLaDA, SDAR).
        schedule: How many tokens each pass keeps, if a request gives the number of passes.
        trained_blocks: Lengths of the blocks that the weights were trained with; empty: those of the model's attention.
        edits: The weights were trained to replace tokens that were kept (LLaDA2.1).
    """

    mask_token: int
    predicts_next: bool = False
    schedule: Schedule = "equal"
    trained_blocks: tuple[int, ...] = ()
    edits: bool = False

    def __post_init__(self) -> None:
        if self.mask_token < 0:
            raise ValueError(f"mask_token must be a token id, not {self.mask_token}")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule is {self.schedule!r}; it must be {' or '.join(get_args(Schedule))}")
