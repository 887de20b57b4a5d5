"""Distill a model: train a student until it predicts what its teacher does, in stages."""

from ridgeline.train.distill.options import STAGES, DistillOptions, Stage, parse_stages
from ridgeline.train.distill.produce import Distilled, distill

__all__ = ["STAGES", "DistillOptions", "Distilled", "Stage", "distill", "parse_stages"]
