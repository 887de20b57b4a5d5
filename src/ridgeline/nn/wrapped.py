"""Matrices around another one, which do something before or after its product."""

from __future__ import annotations

from ridgeline.ops.api import Array, Linear, Product, QuantizedMatrix
from ridgeline.spec.quant import Format


class Wrapped:
    """A matrix with the numbers of another one. With `unfused` and `apply`, it is an `ops.api.Linear`."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    @property
    def format(self) -> Format:
        return self._linear.format

    @property
    def data(self) -> Array | QuantizedMatrix:
        return self._linear.data

    @property
    def bias(self) -> Array | None:
        return self._linear.bias

    def prepare(self) -> None:
        """Build the product."""
        self._linear.prepare()


class WrappedProduct:
    """The product of a wrapped matrix, which has the numbers of the other one."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def dequantize(self) -> Array:
        return self._product.dequantize()
