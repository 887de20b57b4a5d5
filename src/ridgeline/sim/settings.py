"""The settings of a simulated engine: pages, sequences, tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt

from ridgeline.cost.footprint import largest
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Deployment, memory_of
from ridgeline.plan.units import decimal_bytes
from ridgeline.settings.fit import (
    SEQS,
    left_prefix,
    num_pages,
    share_of,
    snapshot_bytes,
    snapshot_grid,
    with_snapshots,
)
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.regimes import NO_REGIMES, Regimes


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one replica. num_pages: per group, with the null page. max_model_len: most tokens of a sequence."""

    groups: tuple[StateGroup, ...]
    num_pages: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    regimes: Regimes = NO_REGIMES

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all pages, without null pages."""
        return sum((n - 1) * g.page_bytes for n, g in zip(self.num_pages, self.groups, strict=True))


def settings(deployment: Deployment, *, max_model_len: int | None = None, max_num_seqs: int = SEQS) -> Settings:
    """Return the settings that an engine would choose (settings/fit.py).

    Pages fill the memory that weights and workspace leave, at most for `max_num_seqs` sequences of full length. The
    deployment gives the tokens of a step and of a page. Raises RequestError, with the numbers and a remedy, if not even
    one sequence of full length fits.
    """
    if max_num_seqs < 1:
        raise RequestError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
    length = deployment.spec.resolve_max_model_len(max_model_len)
    memory = memory_of(deployment)
    one = memory.footprint(1, length)
    if not one.fits:
        fits = largest(lambda n: memory.footprint(1, n).fits, length)
        remedy = f"lower --max-model-len to {fits}" if fits else "take narrower weights, or a larger machine"
        raise RequestError(
            f"{decimal_bytes(one.weight_bytes)} of weights, {decimal_bytes(one.workspace_bytes)} of workspace and "
            f"{decimal_bytes(one.pages_bytes)} for one sequence of {length} tokens do not fit into "
            f"{deployment.hardware.name}'s {decimal_bytes(one.memory_bytes)}; {remedy}"
        )
    full, books = [g.most_pages(length) for g in memory.groups], memory.bookkeeping_bytes

    def affordable(pages: Sequence[int], seqs: int) -> Fraction:
        return share_of(pages, memory.groups, memory.room_bytes(seqs, length), books)

    seqs = max(1, largest(lambda n: affordable(full, n) >= 1, max_num_seqs))
    share = seqs * snapshot_bytes(memory.groups) / memory.room_bytes(seqs, length)  # for a snapshot of each
    between = snapshot_grid(deployment.page_tokens, left_prefix(length) * sqrt(2 * share))
    groups = with_snapshots(memory.groups, between)
    pages = num_pages(groups, length, seqs, lambda pages: affordable(pages, seqs))
    return Settings(groups, pages, seqs, deployment.chunk, length, deployment.spec.regimes(length))
