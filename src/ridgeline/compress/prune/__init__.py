"""Prune a model: measure what its parts give, keep the best ones, and write what is left as a checkpoint."""

from ridgeline.compress.price import PriceReport
from ridgeline.compress.prune.aims import Aims, parse_keep
from ridgeline.compress.prune.options import PruneOptions
from ridgeline.compress.prune.run import prune

__all__ = ["Aims", "PriceReport", "PruneOptions", "parse_keep", "prune"]
