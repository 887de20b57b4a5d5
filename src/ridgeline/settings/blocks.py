"""Check the settings of an engine for a diffusion model, whose steps fill blocks."""

from __future__ import annotations

from ridgeline.errors import RequestError
from ridgeline.settings.config import EngineOptions
from ridgeline.settings.speculative import AUTO, OFF
from ridgeline.spec import ModelSpec
from ridgeline.spec.sight import BEYOND

NO_DRAFTS = "chosen, because a step of a diffusion model predicts several tokens already"


def check_options(spec: ModelSpec, options: EngineOptions) -> None:
    """Raise RequestError for an option that does not fit a diffusion model."""
    if spec.diffusion is None:
        return
    if options.speculative not in (None, AUTO, OFF) or options.num_speculative_tokens:
        raise RequestError(
            f"speculative (--speculative) is {options.speculative or OFF} and num_speculative_tokens is "
            f"{options.num_speculative_tokens or 0}, but a step of a diffusion model predicts several tokens already; "
            "leave both out"
        )
    if options.steps_in_flight == 2:
        raise RequestError(
            "steps_in_flight (--steps-in-flight) is 2, but a pass of a diffusion model needs the tokens of the pass "
            "before; set it to 1"
        )
    if options.max_num_batched_tokens is not None:
        check_tokens(spec, options.max_num_batched_tokens)


def check_tokens(spec: ModelSpec, tokens: int, length: int = 1) -> None:
    """Raise RequestError if a step has too few tokens for a pass.

    tokens: most tokens of a step. length: most tokens of a sequence.
    """
    if spec.block >= BEYOND and tokens < length:
        raise RequestError(
            f"max_num_batched_tokens (--max-num-batched-tokens) is {tokens}, but this model computes whole sequences "
            f"of up to {length} tokens in a step; raise it to that, or lower max_model_len (--max-model-len)"
        )
    if spec.diffusion is not None and tokens < spec.open_tokens < BEYOND:
        part = "canvas" if spec.canvas else "block"
        raise RequestError(
            f"max_num_batched_tokens (--max-num-batched-tokens) is {tokens}, but a {part} of this model has "
            f"{spec.open_tokens} tokens, which a step computes together; raise it to that, or free some memory"
        )
