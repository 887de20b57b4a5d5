"""Describe speculative decoding to the planner: what proposes drafts, how many, and how often they are accepted.

A verification computes one token and `depth` drafts of each sequence in one step. If drafts 1 to j are all accepted
with probability s_j, it gives 1 + s_1 + ... + s_depth tokens on average; with one acceptance a for all depths that is
(1 - a^(depth + 1)) / (1 - a) (arXiv:2211.17192, equation 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from operator import mul
from types import MappingProxyType

from ridgeline.cost.operations import Slice
from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec
from ridgeline.spec.heads import HeadSpec, MedusaSpec

DRAFT_COST = 0.05  # steps of one token; "less than 0.05" in the experiments of arXiv:2211.17192, section 3.3
NGRAM = "ngram"
DEPTH = 4  # drafts of a verification, unless a number is given; the engine's default
# Kind of proposer -> the acceptance that is assumed where none is known, and why.
ASSUMED: Mapping[str, tuple[float, str]] = MappingProxyType({
    "model": (0.7, "T5-small drafting for T5-XXL has 0.62 to 0.75 (2211.17192)"),
    "eagle": (0.7, "EAGLE-1 has 0.75 at the first depth and 0.64 at the last (2401.15077)"),
    "eagle3": (0.7, "EAGLE-1 has 0.75 at the first depth and 0.64 at the last (2401.15077)"),
    "medusa": (0.5, "a guess without a source"),
    "ngram": (0.2, "a bigram table has about 0.2 (2211.17192); text that repeats itself has more"),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """Names a proposer of drafts.

    spec: the draft model or the head; None for n-grams, whose look-up takes no time of the device. acceptance: measured
    acceptance by depth, from its card; empty if there is none.
    """

    name: str
    spec: ModelSpec | HeadSpec | None
    acceptance: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """Return the kind of proposer: a key of ASSUMED."""
        if self.spec is None:
            return NGRAM
        return "model" if isinstance(self.spec, ModelSpec) else self.spec.kind

    @property
    def most(self) -> int | None:
        """Return the most drafts of a verification; None without a limit. Each head of Medusa gives one."""
        return self.spec.num_heads if isinstance(self.spec, MedusaSpec) else None

    def running(self, depth: int) -> ModelSpec | HeadSpec | None:
        """Return the part of the draft model or the head that runs for `depth` drafts: as many heads of Medusa."""
        if isinstance(self.spec, MedusaSpec):
            return replace(self.spec, num_heads=min(depth, self.spec.num_heads))
        return self.spec

    def misfit(self, target: ModelSpec) -> str | None:
        """Return why it cannot draft for a model; None if it can, as far as sizes show."""
        if self.spec is None:
            return None
        if not isinstance(self.spec, ModelSpec):
            return self.spec.misfit(target)
        recurrent = (i for i, own in enumerate(self.spec.layers) if own.mixer and own.mixer.state().snapshot)
        if (layer := next(recurrent, None)) is not None:
            return f"its layer {layer} is recurrent, and its state cannot be taken back when a draft is rejected"
        return None

    def slices(self, depth: int, batch: int, context: int, gained: float) -> list[Slice]:
        """Return the steps of the draft model or the head for one verification of `batch` sequences.

        A draft model first runs the token that it has not seen, and the one before it, so that all its first steps have
        one shape. EAGLE first runs the tokens that the last verification gave, `gained` on average, with the target's
        hidden states. Medusa proposes all depths in one step.
        """
        if self.spec is None:
            return []
        if isinstance(self.spec, MedusaSpec):
            return [Slice(batch, 1, context)]
        first = 2 if isinstance(self.spec, ModelSpec) else ceil(gained)
        return [Slice(batch, min(first, context), context), *[Slice(batch, 1, context)] * (depth - 1)]


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: `depth` drafts in each verification.

    acceptance: probability that a draft is accepted if those before it were; by depth if there are several, of which
    the last one also holds for deeper drafts. draft_cost: cost of a draft, in steps of one token (c in
    arXiv:2211.17192); without effect if `draft` says what proposes, because its time is then computed. source: where
    the acceptance comes from. Raises RequestError for values out of range.
    """

    acceptance: float | tuple[float, ...]
    depth: int
    draft_cost: float = DRAFT_COST
    draft: Draft | None = None
    source: str = "as given"

    def __post_init__(self) -> None:
        if not self.by_depth:
            raise RequestError("the acceptance of drafts by depth is empty; give at least one number")
        for a in self.by_depth:
            if not 0 <= a <= 1:
                raise RequestError(f"the acceptance of drafts is {a}; it must be from 0 to 1")
        if self.depth < 1:
            raise RequestError(f"the number of drafts is {self.depth}; it must be at least 1")
        if not self.draft_cost >= 0:
            raise RequestError(f"the cost of a draft is {self.draft_cost} steps; it must not be negative")

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Return the acceptance of a draft if those before it were accepted, by depth."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the shares of verifications in which at least the first 1, 2, ... `depth` drafts are accepted."""
        own = self.by_depth
        return tuple(accumulate((own[min(j, len(own) - 1)] for j in range(self.depth)), mul))

    @property
    def tokens(self) -> float:
        """Return the expected tokens of a verification."""
        return 1 + sum(self.shares)

    @property
    def acceptance_text(self) -> str:
        """Return the acceptance for a report."""
        return ", ".join(f"{a:.2g}" for a in self.by_depth)


def speculation_of(draft: Draft, depth: int, acceptance: tuple[float, ...] = ()) -> Speculation:
    """Return the drafts of a proposer: with the given acceptance, else that of its card, else an assumed one.

    depth: lowered to the most that it can propose, as in the engine.
    """
    depth = depth if draft.most is None else min(depth, draft.most)
    if acceptance:
        return Speculation(acceptance, depth, draft=draft)
    if draft.acceptance:
        return Speculation(draft.acceptance, depth, draft=draft, source="measured, from the card of the draft")
    value, why = ASSUMED[draft.kind]
    return Speculation(value, depth, draft=draft, source=f"assumed: {why}")


def parse_acceptance(text: str) -> tuple[float, ...]:
    """Return the acceptance by depth of `0.8`, or of `0.87/0.92/0.94`. Raises RequestError for anything else."""
    try:
        found = tuple(float(part) for part in text.replace(",", "/").split("/"))
    except ValueError:
        raise RequestError(
            f"the acceptance of drafts is {text!r:.100}; write a number from 0 to 1, or one for each depth: 0.87/0.92"
        ) from None
    return Speculation(found, 1).by_depth  # checks the range


def parse_draft(text: str) -> tuple[str, int, tuple[float, ...]]:
    """Return the name, the depth and the acceptance of `NAME`, `NAME:4` or `NAME:4:0.8`; the acceptance may be empty.

    A name may have colons itself. Raises ValueError for a depth that is no whole number of at least 1.
    """
    parts, acceptance, depth = text.split(":"), tuple[float, ...](), DEPTH
    if len(parts) > 2 and is_acceptance(parts[-2]) and is_acceptance(parts[-1]):
        acceptance = parse_acceptance(parts.pop())
    if len(parts) > 1 and is_acceptance(parts[-1]):
        last = parts.pop()
        if not last.isdecimal() or int(last) < 1:
            raise ValueError(f"the number of drafts is {last}; it must be a whole number of at least 1")
        depth = int(last)
    return ":".join(parts), depth, acceptance


def is_acceptance(text: str) -> bool:
    """Return whether a text has only numbers, with slashes between them."""
    try:
        return bool([float(part) for part in text.split("/")])
    except ValueError:
        return False
