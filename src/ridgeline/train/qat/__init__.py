"""Train codes of matrices: they are rounded in each forward pass, and gradients pass through the rounding.

`ridgeline quantize --scheme qat-int3` uses it. How codes begin and how they are stored belongs in `compress/`.
"""

from ridgeline.train.qat.distill import Distillation, Original, distill
from ridgeline.train.qat.matrix import LearnedMatrix
from ridgeline.train.qat.student import Codes

__all__ = ["Codes", "Distillation", "LearnedMatrix", "Original", "distill"]
