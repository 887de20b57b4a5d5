"""A matrix in 4 bits: rounded to nearest, in 7.5 steps to the largest magnitude of each group of a row's neighbors."""

from __future__ import annotations

from ridgeline.quant.linear import Floats, StoredLinear, token_bound
from ridgeline.spec.quant import Format


class Int4Linear(StoredLinear):
    """A float16 scale for each group of 32 or 128 numbers. Tokens are rounded as they are for int8, so that the sum of
    a group is one of whole numbers, which is exact.
    """

    @staticmethod
    def bound(x: Floats, weight: Floats, bias: Floats, format: Format) -> Floats:
        """What rounding a token moves; then groups are added up in float32, and meet the token's scale and the bias."""
        return token_bound(x, weight, bias, -(-x.shape[1] // format.group) + 2)
