"""Modules built from a ModelSpec, over opaque arrays and ops.

The computation of layers belongs here; tensor libraries belong in `ops/`, and facts about architectures in `archs/`.
"""

from ridgeline.nn.capture import Capture, input_names, output_names
from ridgeline.nn.model import Model, PassingModel
from ridgeline.nn.step import Step

__all__ = ["Capture", "Model", "PassingModel", "Step", "input_names", "output_names"]
