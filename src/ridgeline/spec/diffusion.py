"""Define how a diffusion language model fills an answer: masked diffusion (LLaDA, arXiv:2502.09992)."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    mask_token: int
    predicts_next: bool = False

    def __post_init__(self) -> None:
        if self.mask_token < 0:
            raise ValueError(f"mask_token must be a token id, not {self.mask_token}")
