"""Define a channel mixer whose experts are a branch of their own, which joins the stream one layer later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.mixer import require
from ridgeline.spec.mlp import GatedMLP, MoE
from ridgeline.spec.weight import Weight
from ridgeline.spec.workspace import FLOAT


@dataclass(frozen=True, slots=True)
class ShortcutMLP:
    """dense(x) is the result of the channel mixer; moe(x) is added to the stream after the next layer (LongCat-Flash).

    x is the layer's own norm of the stream. The shortcut lets devices exchange tokens of experts while the next
    attention is computed (arXiv:2404.05019, 2509.01322).

    Args:
        dense: The MLP that every token visits.
        moe: The experts and their router.
    """

    dense: GatedMLP
    moe: MoE

    shared: ClassVar[None] = None

    def __post_init__(self) -> None:
        require(self.moe.shared is None, "experts of a shortcut have no shared MLP: the dense one is beside them")

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.num_experts_per_tok

    @property
    def choices(self) -> int:
        return self.moe.choices

    @property
    def visits(self) -> float:
        return self.moe.visits

    @property
    def intermediate_size(self) -> int:
        """Return the larger size of the two."""
        return max(self.dense.intermediate_size, self.moe.intermediate_size)

    @property
    def gated_parts(self) -> tuple[str, ...]:
        """Return the prefixes of a gate and an up matrix that kernels interleave."""
        return ("dense.", *self.moe.gated_parts)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from (replace(w, name=f"dense.{w.name}") for w in self.dense.weights(width))
        yield from self.moe.weights(width)

    def part(self, size: int) -> Self:
        return replace(self, dense=self.dense.part(size), moe=self.moe.part(size))

    def active_params(self, width: int) -> int:
        """Return the largest number of parameters that one token is multiplied with."""
        return self.dense.active_params(width) + self.moe.active_params(width)

    def workspace(self, tokens: int, width: int) -> int:
        """Return an upper bound in bytes on the memory of the reference ops: one part after the other, and the result
        that waits for the next layer.
        """
        stream = FLOAT * tokens * width
        return 2 * stream + max(self.dense.workspace(tokens, width), self.moe.workspace(tokens, width))
