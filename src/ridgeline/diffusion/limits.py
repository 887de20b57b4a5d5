"""Refuse the parameters of a request that its kind of model cannot serve."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.errors import RequestError
from ridgeline.spec.diffusion import IN_ORDER, CanvasDiffusion, Diffusion
from ridgeline.spec.request import SAMPLING, Params, SamplingParams
from ridgeline.spec.sight import BEYOND

ONLY_HERE = (
    "remasking", "denoising_passes", "confidence_threshold", "confidence_factor", "entropy_bound", "edit_threshold",
    "block_length", "cfg_scale",
)  # fmt: skip
SUFFIX = ("suffix", "suffix_token_ids")
ONLY_WHOLE = {
    "block_length": "the blocks of this model have {block} tokens, as its attention does; leave it out",
    "cfg_scale": "guidance needs passes without the prompt, and this model would have to keep its final rows twice; "
    "leave it out",
}
NO_CANVAS = (
    "remasking", "confidence_threshold", "confidence_factor", "edit_threshold", "block_length", "cfg_scale"
)  # fmt: skip
COUNTS = ("confidence_threshold", "confidence_factor", "entropy_bound")  # each says how many tokens a pass keeps
_DEFAULTS = {name: default for name, default, _ in SAMPLING}


def check_params(params: Params, model: Diffusion | None, prompt: Sequence[int], block: int = 1) -> None:
    """Raise RequestError for a parameter, or a prompt, that a model cannot serve.

    model: None if autoregressive. block: tokens of a block; BEYOND if the model sees whole sequences.
    """
    if model is None:
        if isinstance(params, SamplingParams) and _given(params, SUFFIX):
            raise RequestError(
                "suffix needs a diffusion model that sees whole sequences; an autoregressive model continues a text, "
                "but does not fill a gap in it"
            )
        if isinstance(params, SamplingParams) and (found := _given(params, ONLY_HERE)):
            raise RequestError(f"{found} needs a diffusion model, which fills several tokens together; leave it out")
        return
    if not isinstance(params, SamplingParams):
        raise RequestError(
            "a diffusion model cannot search with beams: they rank answers by tokens from left to right; use n"
        )
    if found := _given(params, IN_ORDER):
        raise RequestError(
            f"{found} needs the tokens before a token, but a diffusion model fills them in any order; leave it out"
        )
    if any(len(sequence) > 1 for sequence in params.bad_token_sequences):
        raise RequestError(
            "bad_token_sequences of several tokens need the tokens before a token, but a diffusion model fills them in "
            "any order; give single tokens"
        )
    if isinstance(model, CanvasDiffusion):
        _check_canvas(params, model)
        return
    if len(counts := [name for name in COUNTS if getattr(params, name) is not None]) > 1:
        raise RequestError(f"{' and '.join(counts)} all say how many tokens a pass keeps; give one")
    if block < BEYOND and (found := _given(params, tuple(ONLY_WHOLE))):
        raise RequestError(f"{found} is {getattr(params, found)}, but {ONLY_WHOLE[found].format(block=block)}")
    if block < BEYOND and _given(params, SUFFIX):
        raise RequestError(
            f"suffix needs a model that sees whole sequences; a token of this model sees its own block of {block}, and "
            "nothing after it; leave it out"
        )
    if model.block_cache != "none" and params.cfg_scale:
        raise RequestError(
            f"cfg_scale is {params.cfg_scale}, but block_cache (--block-cache) is {model.block_cache}: guidance takes "
            "passes with and without the prompt, and pages keep the rows of one kind; take none or leave cfg_scale out"
        )
    if params.suffix and params.suffix_token_ids:
        raise RequestError("suffix and suffix_token_ids both say what follows the answer; give one")
    for name, tokens in (("prompt", prompt), ("suffix", params.suffix_token_ids)):
        if model.mask_token not in tokens:
            continue
        raise RequestError(
            f"the {name} has the mask token {model.mask_token}, which stands for unknown tokens; take it out"
        )


def _check_canvas(params: SamplingParams, model: CanvasDiffusion) -> None:
    if found := _given(params, NO_CANVAS):
        raise RequestError(
            f"{found} is {getattr(params, found)}, but a pass over a canvas keeps the tokens that are nearly "
            "independent, and draws all others again; of this kind, only denoising_passes and entropy_bound apply"
        )
    if _given(params, SUFFIX):
        raise RequestError(
            f"suffix needs a model that sees whole sequences; a token of this model sees its canvas of {model.canvas}, "
            "and nothing after it; leave it out"
        )


def _given(params: SamplingParams, names: Sequence[str]) -> str | None:
    """Return the first parameter that has another value than its default; None if all have the default."""
    return next((name for name in names if getattr(params, name) != _DEFAULTS[name]), None)
