"""Options of conversion besides the architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ridgeline.compress.folder import Format
from ridgeline.errors import RequestError

Pool = Literal["mean", "first", "random"]
Tie = Literal["mean", "fit"]
Rotate = Literal["contribution", "uniform"]
Start = Literal["attention", "random"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of `convert`.

    Attributes:
        pool: how KV heads become one: their mean, the first of them, or random weights of the same size. The last two
            are baselines (arXiv:2305.13245). tie: how the keys and values of layers become those of one: the mean of
            their matrices, or of what they give on the calibration text (least squares). rotate: which numbers of keys
            stay rotated in latent attention: those that contribute most, or as many of each pair. keep: which layers
            keep their attention beside recurrent ones: search, pattern, or a list such as 1,3. start: whether recurrent
            layers begin as the attention did, or with random matrices, a baseline.
        format: whether the result has the original family's config, our own, or the first where it can say it.
        sequences: number of calibration sequences. length: tokens of a sequence; None: 512, or the model's longest
            context. seed: random seed. threads: threads of the kernels. held_out_tokens: most tokens on which
            perplexity is measured.
    """

    pool: Pool = "mean"
    tie: Tie = "mean"
    rotate: Rotate = "contribution"
    keep: str = "search"
    start: Start = "attention"
    format: Format = "auto"
    sequences: int = 8
    length: int | None = None
    seed: int = 0
    threads: int | None = None
    held_out_tokens: int = 32_768


DEFAULTS = ConvertOptions()


def read_options(**values: Any) -> ConvertOptions:
    """Return options from texts and numbers. Raises RequestError for a value that is not known."""
    found = ConvertOptions(**values)
    for flag, value, known in (
        ("--pool", found.pool, get_args(Pool)), ("--tie", found.tie, get_args(Tie)),
        ("--rotate", found.rotate, get_args(Rotate)), ("--start", found.start, get_args(Start)),
        ("--format", found.format, get_args(Format)),
    ):  # fmt: skip
        if value not in known:
            raise RequestError(f"{flag} is {value!r}; use {', '.join(known)}")
    return found
