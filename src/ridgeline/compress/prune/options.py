"""Options of pruning besides the sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ridgeline.compress.folder import Format
from ridgeline.errors import RequestError

Importance = Literal["activation", "weights", "random"]
LayerScore = Literal["cosine", "perplexity"]
Channels = Literal["auto", "importance", "components"]
Sizes = Literal["uniform", "by-layer"]
Residual = Literal["fit", "minitron", "none"]


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """Options of `prune`.

    Attributes:
        importance: ranks parts by what they give on the calibration text, by the norms of their weights, or by chance.
        layer_score: ranks layers, with importance by activation, by 1 - cosine of the stream before and after, or by
            the perplexity without the layer.
        channels: whether channels of the stream are chosen, or the stream is rotated to its principal components first;
            auto: components where the model's norms allow it and importance is by activation.
        sizes: whether a part has one size in all layers, or more where it gives more.
        residual: how what removed heads give is added to those that stay: by least squares, by Minitron's rule, or not.
        format: whether the result has the original family's config, our own, or the first where it can say it.
        sequences: number of calibration sequences. length: tokens of a sequence; None: 512, or the model's longest
            context. layer_sequences: sequences on which removal of layers is scored by perplexity.
        seed: random seed of the draw of sequences, and of random importance. threads: threads of the kernels.
        held_out_tokens: most tokens on which perplexity is measured.
    """

    importance: Importance = "activation"
    layer_score: LayerScore = "perplexity"
    channels: Channels = "auto"
    sizes: Sizes = "uniform"
    residual: Residual = "fit"
    format: Format = "auto"
    sequences: int = 1024
    length: int | None = None
    layer_sequences: int = 16
    seed: int = 0
    threads: int | None = None
    held_out_tokens: int = 32_768

    def check(self) -> None:
        """Raise RequestError for a value that is not known or out of range."""
        choices = (
            ("importance", "--importance", self.importance, get_args(Importance)),
            ("layer_score", "--layer-score", self.layer_score, get_args(LayerScore)),
            ("channels", "--channels", self.channels, get_args(Channels)),
            ("sizes", "--sizes", self.sizes, get_args(Sizes)),
            ("residual", "--residual", self.residual, get_args(Residual)),
            ("format", "--format", self.format, get_args(Format)),
        )
        for name, flag, value, known in choices:
            if value not in known:
                raise RequestError(f"{name} ({flag}) is {value!r}; use {', '.join(known)}")
        for name, flag, number, least in (
            ("sequences", "--calibrate-sequences", self.sequences, 1), ("seed", "--seed", self.seed, 0),
            ("layer_sequences", "--layer-sequences", self.layer_sequences, 1),
        ):  # fmt: skip
            if number < least:
                raise RequestError(f"{name} ({flag}) is {number}; it must be at least {least}")


DEFAULTS = PruneOptions()


def read_options(**values: Any) -> PruneOptions:
    """Return options from texts and numbers. Raises RequestError for a value that is not known or out of range."""
    found = PruneOptions(**values)
    found.check()
    return found
