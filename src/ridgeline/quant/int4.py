"""Matrices in 4 bits: each group of a row's neighbors has a scale, its largest magnitude divided by 7.5."""

from __future__ import annotations

from ridgeline.quant.linear import Floats, StoredLinear, token_bound
from ridgeline.spec.quant import Format


class Int4Linear(StoredLinear):
    """Codes from -8 to 7 with one float16 scale for each group of 32 or 128 numbers.

    Activations are rounded to int8 for each token, so that the sum of a group is a sum of whole numbers, and exact.
    """

    @staticmethod
    def bound(x: Floats, weight: Floats, bias: Floats, format: Format) -> Floats:
        """Add the error of rounding tokens to that of float32 sums over groups, the token's scale and the bias."""
        return token_bound(x, weight, bias, format.num_groups(x.shape[1]) + 2)
