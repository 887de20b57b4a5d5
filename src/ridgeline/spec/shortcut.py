"""Define a channel mixer whose experts are a branch of their own, which joins the stream one layer later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ridgeline.spec.mixer import require
from ridgeline.spec.mlp import DenseWithExperts
from ridgeline.spec.workspace import FLOAT


@dataclass(frozen=True, slots=True)
class ShortcutMLP(DenseWithExperts):
    """dense(x) is the result of the channel mixer; moe(x) is added to the stream after the next layer (LongCat-Flash).

    x is the layer's own norm of the stream. The shortcut lets devices exchange tokens of experts while the next
    attention is computed (arXiv:2404.05019, 2509.01322).

    Args:
        dense: The MLP that every token visits.
        moe: The experts and their router.
    """

    def __post_init__(self) -> None:
        require(self.moe.shared is None, "experts of a shortcut have no shared MLP: the dense one is beside them")

    def part(self, size: int) -> Self:
        return replace(self, dense=self.dense.part(size), moe=self.moe.part(size))

    def workspace(self, tokens: int, width: int) -> int:
        """Return an upper bound in bytes on the memory of the reference ops: one part after the other, and the result
        that waits for the next layer.
        """
        stream = FLOAT * tokens * width
        return 2 * stream + max(self.dense.workspace(tokens, width), self.moe.workspace(tokens, width))
