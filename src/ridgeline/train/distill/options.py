"""Options of a distillation, and its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.errors import RequestError
from ridgeline.train.loop import Precision, TrainOptions
from ridgeline.train.ranges import check_ranges

EARLIER_SHARE = 0.2  # of all tokens, for each stage but the last one
WARMUP = 0.05  # share of a stage's updates in which the rate rises
SAVES = 20  # most saved states of a stage, if their distance is not given
_RANGES = {
    "tokens": (1, 10**15), "held_out": (1e-6, 0.5), "repeat": (1, 10**6), "lora": (0, 2**16), "top_k": (0, 2**20),
    "context": (2, 2**30), "batch_tokens": (2, 10**9), "learning_rate": (0.0, 1e3), "decay_share": (0.0, 1.0),
    "weight_decay": (0.0, 1e3), "clip": (0.0, 1e9), "seed": (0, 2**31 - 1), "save_every": (0, 10**9),
    "eval_every": (1, 10**9),
}  # fmt: skip


class Kind(NamedTuple):
    """A kind of stage. trained: patterns of the names of the weights that train. description: for messages."""

    trained: tuple[str, ...]
    description: str


STAGES = {
    "matrices": Kind(("layers.*.mixer.q.weight", "layers.*.mixer.k.weight"), "weights of linear attention"),
    "layers": Kind(("layers.*",), "each layer on the teacher's stream"),
    "streams": Kind(("layers.*",), "the stream after each layer"),
    "logits": Kind(("*",), "KL from the teacher's distributions"),
    "tokens": Kind(("*",), "cross-entropy of the texts, without a teacher"),
}


class Stage(NamedTuple):
    """A stage, one of STAGES, and its share of all tokens."""

    name: str
    share: float


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Return the stages of a list such as layers=0.3,logits.

    Stages without a share get EARLIER_SHARE each, except for the last stage, which gets the rest. Raises RequestError
    for a name that is not known or is repeated, and for shares that leave nothing for a stage.
    """
    pairs = [part.strip().partition("=") for part in text.split(",")]
    found: list[Stage] = []
    for i, (name, _, share) in enumerate(pairs):
        if name not in STAGES or any(name == other.name for other in found):
            raise RequestError(
                f"stages (--stages) {text!r:.100}: {name!r:.40} is not a stage, or is repeated; stages are "
                f"{', '.join(STAGES)}"
            )
        last = i == len(pairs) - 1
        found.append(Stage(name, _share(text, share, 1.0 - sum(s.share for s in found) if last else EARLIER_SHARE)))
    if any(s.share <= 0 for s in found) or not math.isclose(sum(s.share for s in found), 1.0):
        raise RequestError(
            f"stages (--stages) {text!r:.100}: the shares are {', '.join(f'{s.share:g}' for s in found)}; each must be "
            "above 0 and their sum 1, where the last stage without a share gets what is left"
        )
    return tuple(found)


def _share(text: str, given: str, default: float) -> float:
    try:
        return float(given) if given else default
    except ValueError:
        raise RequestError(
            f"stages (--stages) {text!r:.100}: the share {given!r:.40} is not a number; write a stage as layers=0.3"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """How a student is trained.

    Args:
        tokens: Tokens to train on in all stages together; each stage makes at least one update.
        stages: The stages in their order.
        trained: Patterns of the names of the weights that train, such as layers.*.mixer.*; empty: as the stage says.
        lora: Rank of low-rank terms that train in the last stage instead of all weights; 0: none.
        top_k: Number of the teacher's most likely tokens that are kept on disk for stage logits; 0: the teacher runs
            beside the student.
        held_out: Share of the texts that measures the student and does not train it.
        repeat: Most times that the texts are read.
        context: Tokens of a training row.
        batch_tokens: Tokens of an update.
        micro_tokens: Tokens of a forward pass; None: those of an update.
        learning_rate: Peak rate, reached after WARMUP of a stage's updates; it falls to 0 over its last decay_share.
        eval_every: Updates between two measurements on the held-out texts.
        save_every: Updates between two saved states; 0: a stage has SAVES of them.
    """

    tokens: int
    stages: Sequence[Stage] = (Stage("layers", EARLIER_SHARE), Stage("logits", 1.0 - EARLIER_SHARE))
    trained: Sequence[str] = ()
    lora: int = 0
    top_k: int = 0
    held_out: float = 0.05
    repeat: int = 1
    context: int = 512
    batch_tokens: int = 4096
    micro_tokens: int | None = None
    learning_rate: float = 1e-3
    decay_share: float = 0.6
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 100
    save_every: int = 0
    precision: Precision = "float32"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES, RequestError, flags=True)
        if self.batch_tokens % self.context:
            raise RequestError(
                f"batch_tokens (--batch-tokens) is {self.batch_tokens}; it must be a multiple of context (--context) "
                f"{self.context}"
            )
        if self.lora and self.stages[-1].name == "matrices":
            raise RequestError(
                "lora (--lora) is not for stage matrices; leave it out, or end --stages with another one"
            )
        if self.top_k and "logits" not in (s.name for s in self.stages):
            raise RequestError("top_k (--top-k) is for stage logits; leave it out, or add the stage")

    def of_stage(self, index: int) -> TrainOptions:
        """Return the options of a stage. Stages read the texts in different orders."""
        steps = max(1, round(self.tokens * self.stages[index].share / self.batch_tokens))
        return TrainOptions(
            steps=steps, batch_tokens=self.batch_tokens, micro_tokens=self.micro_tokens or self.batch_tokens,
            context=self.context, learning_rate=self.learning_rate, warmup_steps=math.ceil(WARMUP * steps),
            decay_share=self.decay_share, weight_decay=self.weight_decay, clip=self.clip, seed=self.seed + index,
            eval_every=self.eval_every, save_every=self.save_every or max(1, -(-steps // SAVES)),
            precision=self.precision, activation_checkpointing=self.activation_checkpointing,
        )  # fmt: skip

    def trained_in(self, index: int) -> Sequence[str]:
        """Return the patterns of the names of the weights that train in a stage."""
        return self.trained or STAGES[self.stages[index].name].trained

    def adapters_in(self, index: int) -> int:
        """Return the rank of the low-rank terms that train in a stage."""
        return self.lora if index == len(self.stages) - 1 else 0
