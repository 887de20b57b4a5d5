"""Define the transform between a model's last norm and its output head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.norm import Norm
from ridgeline.spec.weight import Weight, linear


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """norm(activation(dense(x))), which the output head reads in place of x (the decoders of ModernBERT).

    bias: whether a number is added to each result of the dense matrix, which has as many rows as columns.
    """

    activation: Activation
    norm: Norm
    bias: bool = False

    def __post_init__(self) -> None:
        check_activation(self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("head_dense", width, width, bias=self.bias, split=None)
        yield from self.norm.weights("head_norm", width)
