"""Options of `ridgeline train --diffusion-from`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ridgeline.cli.flags.drafts import first_given
from ridgeline.cli.option import option


def _blocks_option(*names: str, help: str) -> Any:
    return option(*names, help=help, panel="Diffusion language models")


_DiffusionFrom = Annotated[
    str | None,
    _blocks_option(
        "--diffusion-from",
        help="Train this autoregressive model to fill blocks of masked tokens: a folder, a hub id, or pocket. "
        "Default: none.",
    ),
]
_BlockLengths = Annotated[
    str,
    _blocks_option(
        "--block-lengths",
        help="Lengths of the blocks in tokens; one is drawn for each forward pass. The written model has the largest. "
        "Short blocks stay closer to the original, long ones take fewer passes. Default: 1,2,4,8,16.",
    ),
]
_MaskToken = Annotated[
    int | None,
    _blocks_option(
        "--mask-token",
        help="Id of the token that becomes the mask; no prompt may have it. Default: the largest id that no text has.",
    ),
]
MODEL = ("data", "out", "held_out", "dtype")  # options of another group that apply
DEFAULT_LENGTHS = "1,2,4,8,16"


@dataclass(eq=False, repr=False)
class BlocksFlags:
    """The model that learns to fill blocks, and the blocks."""

    diffusion_from: _DiffusionFrom = None
    block_lengths: _BlockLengths = DEFAULT_LENGTHS
    mask_token: _MaskToken = None


def check_blocks_flags(blocks: BlocksFlags, model: Any, draft: Any) -> bool:
    """Return whether a block diffusion model is to be trained. model, draft: other groups of `ridgeline train`.

    Raises RequestError for options that do not apply, and for missing ones.
    """
    from ridgeline.errors import RequestError

    if blocks.diffusion_from is None:
        if given := first_given(blocks, ()):
            raise RequestError(f"{given} is for diffusion models; add --diffusion-from MODEL, or leave it out")
        return False
    if given := first_given(model, MODEL) or first_given(draft, ()):
        raise RequestError(f"{given} does not apply to --diffusion-from; leave it out")
    for name in ("data", "out"):
        if not getattr(model, name):
            raise RequestError(f"{name} is missing: give --{name}")
    return True


def read_lengths(text: str) -> tuple[int, ...]:
    """Return the lengths of a list such as 1,2,4. Raises RequestError if one is no number."""
    from ridgeline.errors import RequestError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"--block-lengths is {text!r:.100}; give numbers, such as {DEFAULT_LENGTHS}") from None
