"""SmoothQuant (arXiv:2211.10438): divide input channels by scales that the next matrices take over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.compress.grid import Floats

ALPHA = 0.5  # share of the difficulty that moves from activations to weights
LEAST = 1e-5  # the smallest scale, and the smallest largest weight of a column, as in the published code


def smooth_scales(max_abs: Floats, weights: Sequence[Floats], alpha: float = ALPHA) -> Floats:
    """Return the scales of input channels [in]: max|x|^alpha / max|w|^(1 - alpha).

    Inputs are divided by them, and the columns of matrices multiplied. A channel that is always 0 keeps the scale 1.

    max_abs: [in], the largest |x| of each input channel. weights: all matrices [out, in] that read this input.
    """
    largest = np.max([np.abs(weight).max(0) for weight in weights], axis=0).astype(np.float64)
    scales = np.asarray(max_abs, np.float64) ** alpha / np.maximum(largest, LEAST) ** (1 - alpha)
    found: Floats = np.where(max_abs > 0, np.maximum(scales, LEAST), 1.0).astype(np.float32)
    return found
