"""Define a channel mixer that is a dense MLP and a mixture of experts side by side, each between norms of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from ridgeline.spec.mixer import require
from ridgeline.spec.mlp import DenseWithExperts
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.weight import Weight
from ridgeline.spec.workspace import FLOAT


@dataclass(frozen=True, slots=True)
class PairedMLP(DenseWithExperts):
    """dense_post_norm(dense(norm(x))) + experts_post_norm(moe(experts_norm(x))) (Gemma 4).

    x is the residual stream, and norm(x) the layer's own norm. The router reads router_norm(x) / sqrt(width).

    Args:
        dense: The MLP that every token visits.
        moe: The experts and their router.
        norm: The kind of all norms: of the router's input, of the experts' input, and of both results.
    """

    norm: RMSNorm

    def __post_init__(self) -> None:
        plain = self.moe.shared is None and self.moe.latent_size is None and self.moe.identity is None
        require(plain, "experts beside a dense MLP have no shared MLP, latent space or identity experts")

    def weights(self, width: int) -> Iterator[Weight]:
        yield from (replace(w, name=f"dense.{w.name}") for w in self.dense.weights(width))
        yield from self.norm.weights("dense_post_norm", width)
        yield from self.norm.weights("router_norm", width)
        yield from self.moe.weights(width)
        yield from self.norm.weights("experts_norm", width)
        yield from self.norm.weights("experts_post_norm", width)

    def part(self, size: int) -> Self:
        raise ValueError("norms follow its dense MLP and its experts one by one, before their sum over ranks")

    def workspace(self, tokens: int, width: int) -> int:
        """Return an upper bound in bytes on the memory of the reference ops, one part after the other."""
        stream = FLOAT * tokens * width
        return 3 * stream + max(self.dense.workspace(tokens, width), self.moe.workspace(tokens, width))
