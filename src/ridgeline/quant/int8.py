"""A matrix in 8 bits: rounded to nearest, in 127 steps to the largest magnitude of each row."""

from __future__ import annotations

from ridgeline.quant.linear import Floats, StoredLinear, token_bound
from ridgeline.spec.quant import Format


class Int8Linear(StoredLinear):
    """Each number is within half of its row's scale of what was stored. Tokens are rounded likewise, so that a product
    is one of whole numbers, which is exact.
    """

    @staticmethod
    def bound(x: Floats, weight: Floats, bias: Floats, format: Format) -> Floats:
        """What rounding a token moves; then the sum becomes a float32, meets two scales, each rounded, and the bias."""
        return token_bound(x, weight, bias, 5)
