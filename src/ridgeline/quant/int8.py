"""Matrices in 8 bits: each row has a scale, its largest magnitude divided by 127."""

from __future__ import annotations

from ridgeline.quant.linear import Floats, StoredLinear, token_bound
from ridgeline.spec.quant import Format


class Int8Linear(StoredLinear):
    """Codes from -127 to 127 with one float32 scale for each row, rounded to nearest.

    Activations are rounded likewise for each token, so that a product is a sum of whole numbers, which is exact.
    """

    @staticmethod
    def bound(x: Floats, weight: Floats, bias: Floats, format: Format) -> Floats:
        """Add the error of rounding tokens to five roundings: the sum, two scales, their product and the bias."""
        return token_bound(x, weight, bias, 5)
