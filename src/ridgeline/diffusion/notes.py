"""Warn of uses for which a diffusion model was not trained: they work, and answers may get worse."""

from __future__ import annotations

from ridgeline.spec import ModelSpec
from ridgeline.spec.diffusion import WHOLE_TOKENS
from ridgeline.spec.request import Params, SamplingParams
from ridgeline.spec.sight import BEYOND


def block_notes(spec: ModelSpec) -> tuple[str, ...]:
    """Return a remark on blocks of a length with which the weights were not trained; () if there are none."""
    trained = spec.diffusion.trained_blocks if spec.diffusion else ()
    if not trained or spec.block in trained:
        return ()
    return (
        f"blocks have {spec.block} tokens (block_size), but the weights of {spec.family} were trained with blocks of "
        f"{', '.join(map(str, trained))}: answers may be worse",
    )


def length_notes(spec: ModelSpec) -> tuple[str, ...]:
    """Return a remark on the default length of answers, if it is a part of what the model sees; () if it is not."""
    if spec.diffusion is None or spec.block < BEYOND:
        return ()
    return (
        f"answers have {WHOLE_TOKENS} tokens, or what the context has left, unless max_tokens (--max-tokens) is given: "
        "this model computes all of them in each pass, and another length gives other tokens",
    )


def edit_notes(params: Params, spec: ModelSpec) -> tuple[str, ...]:
    """Return a remark on editing by a model that was not trained for it; () if there is none."""
    model = spec.diffusion
    if model is None or model.edits or not isinstance(params, SamplingParams) or params.edit_threshold is None:
        return ()
    return (
        f"edit_threshold (--edit-threshold) is {params.edit_threshold}, but {spec.family} was not trained to replace "
        "its own tokens: answers may be worse, and each block takes at least one pass more",
    )
