"""Define normalizations and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.spec.weight import Weight


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight). Gemma stores weight - 1, hence offset 1. (arXiv:1910.07467)"""

    eps: float = 1e-6
    offset: float = 0.0

    def weights(self, name: str, width: int) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (width,))


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias. (arXiv:1607.06450) Without `bias`, none is added (Cohere)."""

    eps: float = 1e-5
    bias: bool = True

    def weights(self, name: str, width: int) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (width,))
        if self.bias:
            yield Weight(f"{name}.bias", (width,))


Norm = RMSNorm | LayerNorm
