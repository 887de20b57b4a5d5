"""What all schemes share: a matrix as it comes, and the product that is made of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Product, Weights
from ridgeline.spec.quant import Format

Floats = np.ndarray[Any, np.dtype[np.float64]]


class StoredLinear(ABC):
    """A matrix of a model in one format; an `ops.api.Linear`.

    weight [out, in], float32, bfloat16 or float16; bias [out], float32, or None. A scheme whose numbers are chosen
    with the help of data will bring codes and scales in place of a weight, and its own way to lay them down.
    """

    def __init__(self, weight: Array, bias: Array | None, table: OpsTable, format: Format) -> None:
        self.format, self.weight, self.bias = format, weight, bias
        self._table = table
        self._product: Product | None = None

    def prepare(self) -> None:
        """Make the product; of what came, it keeps what it needs."""
        if self._product is None:
            self._product = self._table.stage(api.PRODUCT, self.format, Weights({"matrix": self}, {}))
            del self.weight

    @property
    def apply(self) -> Product:
        """x [..., in] -> [..., out], float32. `prepare` comes first."""
        assert self._product is not None
        return self._product

    def dequantize(self) -> Array:
        """The matrix that `apply` multiplies with, float32 [out, in]."""
        return self.apply.dequantize()

    @staticmethod
    @abstractmethod
    def bound(x: Floats, weight: Floats, bias: Floats, format: Format) -> Floats:
        """How far `apply` may be from `x @ dequantize().T + bias`, for each result, [T, out].

        x [T, in], weight: the dequantized matrix, bias [out]; in float64.
        """


def gamma(terms: int) -> float:
    """The relative error of so many roundings to float32, one after the other (Higham, Accuracy and Stability of
    Numerical Algorithms, 3.1)."""
    unit = 2.0**-24
    return terms * unit / (1 - terms * unit)


def token_bound(x: Floats, weight: Floats, bias: Floats, roundings: int) -> Floats:
    """Of a product whose tokens are rounded to 127 steps: half a step for each of their numbers, and a number of
    roundings of what is added up."""
    step = (0.5 + 2.0**-15) * np.abs(x).max(1, keepdims=True, initial=0.0) / 127
    size = np.abs(weight).T
    rounded: Floats = (np.abs(x) + step) @ size + np.abs(bias)
    moved: Floats = step * size.sum(0)
    return moved + gamma(roundings) * rounded
