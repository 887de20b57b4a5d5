"""Options for training a draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ridgeline.errors import RequestError
from ridgeline.train.ranges import check_ranges

Kind = Literal["medusa", "eagle", "eagle3", "draft"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DRAFT_STEPS = {"eagle": 1, "eagle3": 4}  # draft steps in a row that training practises, if no number is given
_RANGES = {
    "train_tokens": (1, 10**15), "continuation_tokens": (1, 10**12), "output_len": (2, 10**6), "depth": (1, 64),
    "batch_tokens": (1, 10**9), "learning_rate": (0.0, 1e3), "warmup_steps": (0, 10**9), "decay_share": (0.0, 1.0),
    "weight_decay": (0.0, 1e3), "clip": (0.0, 1e9), "seed": (0, 2**32 - 1), "save_every": (1, 10**9),
    "held_out": (1e-6, 0.5), "held_out_prompts": (1, 10**6),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How a draft is trained.

    Args:
        kind: Medusa heads, a head of EAGLE-1 or EAGLE-3, or a small draft model.
        train_tokens: Tokens to train on, repetitions included; at least one update is made.
        continuation_tokens: Tokens that the target writes to train on.
        output_len: Longest continuation in tokens.
        depth: Number of draft tokens of a verification in the final measurement, and number of Medusa's heads.
        draft_steps: Draft steps in a row that EAGLE heads practise; None: `DRAFT_STEPS`.
        draft_vocab: Number of tokens that EAGLE-3 can propose, the most frequent ones; None: the whole vocabulary.
        shared_head: Medusa's heads have one output matrix.
        batch_tokens: Tokens of an update, in whole continuations.
        learning_rate: Peak rate, reached after warmup_steps; it falls to 0 over the last decay_share of all updates.
        save_every: Updates between two saved states of the run.
        held_out: Share of each text, at its end, that gives the prompts of the final measurement and no others.
        held_out_prompts: Number of those prompts.
    """

    kind: Kind
    train_tokens: int = 2_000_000
    continuation_tokens: int = 1_000_000
    output_len: int = 256
    depth: int = 4
    draft_steps: int | None = None
    draft_vocab: int | None = None
    shared_head: bool = False
    batch_tokens: int = 2048
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    decay_share: float = 0.4
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    save_every: int = 100
    held_out: float = 0.05
    held_out_prompts: int = 100

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"kind (--kind) is {self.kind!r:.100}; use {', '.join(KINDS)}")
        check_ranges(self, _RANGES, RequestError)
        is_eagle, is_eagle3, is_medusa = self.kind.startswith("eagle"), self.kind == "eagle3", self.kind == "medusa"
        for name, value, fits, owners in (
            ("draft_steps", self.draft_steps, is_eagle, "eagle or eagle3"),
            ("draft_vocab", self.draft_vocab, is_eagle3, "eagle3"),
            ("shared_head", self.shared_head or None, is_medusa, "medusa"),
        ):
            if value is not None and not fits:
                raise RequestError(f"{name} does not apply to kind {self.kind}; leave it out, or take {owners}")
        for name in ("draft_steps", "draft_vocab"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1")

    @property
    def practised(self) -> int:
        """Return the number of draft steps in a row that an EAGLE head practises."""
        return DRAFT_STEPS[self.kind] if self.draft_steps is None else self.draft_steps
