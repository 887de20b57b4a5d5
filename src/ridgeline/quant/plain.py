"""A matrix as the checkpoint holds it: float32, bfloat16 or float16, widened to float32 where it meets activations."""

from __future__ import annotations

import numpy as np

from ridgeline.quant.linear import Floats, StoredLinear, gamma
from ridgeline.spec.quant import Format


class PlainLinear(StoredLinear):
    """Nothing is lost: `apply` is exact but for float32 rounding of the sum, in whatever order."""

    @staticmethod
    def bound(x: Floats, weight: Floats, bias: Floats, format: Format) -> Floats:
        """Roundings of as many products and sums as there are columns, and of the bias."""
        return gamma(x.shape[1] + 1) * (np.abs(x) @ np.abs(weight).T + np.abs(bias))
