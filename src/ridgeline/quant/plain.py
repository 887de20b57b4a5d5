"""Matrices in the type of the checkpoint: float32, bfloat16 or float16, converted to float32 in products."""

from __future__ import annotations

import numpy as np

from ridgeline.quant.linear import Floats, StoredLinear, gamma
from ridgeline.spec.quant import Format


class PlainLinear(StoredLinear):
    """A matrix without loss: `apply` differs from the exact product only by float32 rounding, in any order of sums."""

    @staticmethod
    def bound(x: Floats, weight: Floats, bias: Floats, format: Format) -> Floats:
        """Count one rounding for each column, and one for the bias."""
        return gamma(x.shape[1] + 1) * (np.abs(x) @ np.abs(weight).T + np.abs(bias))
