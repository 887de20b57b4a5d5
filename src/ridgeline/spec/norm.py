"""Define normalizations and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.spec.weight import Weight


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight). Gemma stores weight - 1, hence offset 1. (arXiv:1910.07467)

    Without `weight` the factor is one, and nothing is stored (nanochat).
    """

    eps: float = 1e-6
    offset: float = 0.0
    weight: bool = True

    def weights(self, name: str, width: int) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (width,), constant=None if self.weight else 1.0 - self.offset)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * (offset + weight) + bias. (arXiv:1607.06450)

    Without `bias`, none is added (Cohere); without `weight`, the factor is one, and none is stored (OLMo). Nemotron
    stores weight - 1, hence offset 1.
    """

    eps: float = 1e-5
    bias: bool = True
    offset: float = 0.0
    weight: bool = True

    def weights(self, name: str, width: int) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (width,), constant=None if self.weight else 1.0 - self.offset)
        if self.bias:
            yield Weight(f"{name}.bias", (width,))


Norm = RMSNorm | LayerNorm
