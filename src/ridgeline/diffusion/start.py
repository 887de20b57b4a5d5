"""Make a diffusion model of an autoregressive one: its weights are a start for training."""

from __future__ import annotations

from ridgeline.errors import RequestError
from ridgeline.spec import Blocks, MaskedDiffusion, ModelSpec


def as_blocks(spec: ModelSpec, size: int, mask_token: int, trained: tuple[int, ...] = (1,)) -> ModelSpec:
    """Return the spec of a block diffusion model with the weights of an autoregressive one.

    Logits stay those of the next token. With blocks of one token, the model gives the answers of the original without
    training. mask_token: id of a token that no text has; its embedding becomes that of a mask. trained: lengths of the
    blocks that the weights were trained with. Raises RequestError for a model that cannot see blocks.
    """
    try:
        return spec.seeing(Blocks(size), MaskedDiffusion(mask_token, predicts_next=True, trained_blocks=trained))
    except ValueError as e:
        raise RequestError(f"{spec.family} cannot become a diffusion model with blocks of {size}: {e}") from None
