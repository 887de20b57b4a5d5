"""Modules built from a ModelSpec: opaque arrays and ops, no tensor library."""

from ridgeline.nn.model import Model, PassingModel
from ridgeline.nn.step import Step

__all__ = ["Model", "PassingModel", "Step"]
