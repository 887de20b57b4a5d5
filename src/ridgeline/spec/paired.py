"""Define a channel mixer that is a dense MLP and a mixture of experts side by side, each between norms of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.mixer import require
from ridgeline.spec.mlp import GatedMLP, MoE
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.weight import Weight
from ridgeline.spec.workspace import FLOAT


@dataclass(frozen=True, slots=True)
class PairedMLP:
    """dense_post_norm(dense(norm(x))) + experts_post_norm(moe(experts_norm(x))) (Gemma 4).

    x is the residual stream, and norm(x) the layer's own norm. The router reads router_norm(x) / sqrt(width).

    Args:
        dense: The MLP that every token visits.
        moe: The experts and their router.
        norm: The kind of all norms: of the router's input, of the experts' input, and of both results.
    """

    dense: GatedMLP
    moe: MoE
    norm: RMSNorm

    shared: ClassVar[None] = None

    def __post_init__(self) -> None:
        plain = self.moe.shared is None and self.moe.latent_size is None and self.moe.identity is None
        require(plain, "experts beside a dense MLP have no shared MLP, latent space or identity experts")

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
        yield from self.norm.weights("dense_post_norm", width)
        yield from self.norm.weights("router_norm", width)
        yield from self.moe.weights(width)
        yield from self.norm.weights("experts_norm", width)
        yield from self.norm.weights("experts_post_norm", width)

    def part(self, size: int) -> Self:
        raise ValueError("norms follow its dense MLP and its experts one by one, before their sum over ranks")

    def active_params(self, width: int) -> int:
        """Return the number of parameters that one token is multiplied with."""
        whole = sum(w.num_params for w in self.weights(width))
        return whole - sum(w.num_params for w in self.moe.weights(width)) + self.moe.active_params(width)

    def workspace(self, tokens: int, width: int) -> int:
        """Return an upper bound in bytes on the memory of the reference ops, one part after the other."""
        stream = FLOAT * tokens * width
        return 3 * stream + max(self.dense.workspace(tokens, width), self.moe.workspace(tokens, width))
