"""Define how a diffusion language model fills an answer: masks (LLaDA, arXiv:2502.09992), or a canvas of noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ridgeline.spec.mlp import GatedMLP
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.weight import Weight

# How many tokens each of a number of passes keeps: equally many (LLaDA), or as time runs from 1 to 0 (Dream).
Schedule = Literal["equal", "time"]

# Which rows of a whole sequence the later passes over a block read as its first pass left them (Fast-dLLM,
# arXiv:2505.22618): none, those before the block, or those after it as well. Any but `none` is an approximation.
BlockCache = Literal["none", "prefix", "dual"]

# Tokens of an answer of a model that sees whole sequences, unless a request gives its length or the context is shorter.
WHOLE_TOKENS = 256

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
        block_cache: Which rows later passes over a block do not compute again; only in a model that sees whole
            sequences.
    """

    tokens_per_pass: ClassVar[float] = 1.0  # that a pass keeps at least

    mask_token: int
    predicts_next: bool = False
    schedule: Schedule = "equal"
    trained_blocks: tuple[int, ...] = ()
    edits: bool = False
    block_cache: BlockCache = "none"

    def __post_init__(self) -> None:
        if self.mask_token < 0:
            raise ValueError(f"mask_token must be a token id, not {self.mask_token}")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule is {self.schedule!r}; it must be {' or '.join(get_args(Schedule))}")
        if self.block_cache not in get_args(BlockCache):
            raise ValueError(f"block_cache is {self.block_cache!r}; it must be {', '.join(get_args(BlockCache))}")


@dataclass(frozen=True, slots=True)
class CanvasDiffusion:
    """An answer grows by a canvas of tokens, which is noise at first and sees itself whole (DiffusionGemma).

    The prompt and finished tokens are computed causally. A pass predicts all tokens of the canvas; it keeps the tokens
    that are nearly independent, and draws the others again at random. The next pass also reads the mean embedding under
    the distribution that the last one predicted: x = norm(x + mlp(norm(mean))). After the last pass the canvas is what
    this pass found most likely.

    Args:
        canvas: Tokens of the canvas.
        conditioning: The MLP that reads the mean embedding.
        norm: The kind of the norm before it; the norm after it has no weights.
        passes: Most passes over a canvas.
        entropy_bound: Tokens are kept while the sum of their entropies less the largest one is at most this, in nats.
        t_min, t_max: Temperature after the last pass, and in the first one; it falls evenly.
        stable_passes: Passes before the last one that must have found the same tokens, so that a canvas is done early.
        confident: Mean entropy below which a canvas is done early, in nats.
    """

    mask_token: ClassVar[int] = -1  # there is none
    predicts_next: ClassVar[bool] = False
    trained_blocks: ClassVar[tuple[int, ...]] = ()
    edits: ClassVar[bool] = False
    block_cache: ClassVar[BlockCache] = "none"

    canvas: int
    conditioning: GatedMLP
    norm: RMSNorm
    passes: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stable_passes: int = 1
    confident: float = 0.005

    def __post_init__(self) -> None:
        for name, least in (("canvas", 1), ("passes", 1), ("stable_passes", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 0 < self.t_min <= self.t_max:
            raise ValueError(f"temperatures must fall from t_max to t_min above 0, not {self.t_max} to {self.t_min}")
        if self.entropy_bound < 0 or self.confident < 0:
            raise ValueError(f"entropy_bound {self.entropy_bound} and confident {self.confident} must not be negative")

    @property
    def tokens_per_pass(self) -> float:
        """Return how many tokens a pass gives at least, with the most passes over a canvas."""
        return max(1.0, self.canvas / self.passes)

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield its parameters."""
        yield from self.norm.weights("conditioning_norm", width)
        yield from (Weight(f"conditioning.{w.name}", w.shape, w.split) for w in self.conditioning.weights(width))

    def rest_of(self, length: int, most: int) -> int:
        """Return the most tokens of an answer after `length` tokens: whole canvases within `most` positions."""
        return max(0, most - length) // self.canvas * self.canvas

    def positions(self, tokens: int) -> int:
        """Return the positions that an answer of `tokens` tokens needs: its last canvas is computed whole."""
        return -(-tokens // self.canvas) * self.canvas


Diffusion = MaskedDiffusion | CanvasDiffusion
