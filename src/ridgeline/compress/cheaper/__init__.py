"""Make a model cheaper until it keeps latency limits, in one chain: plan, change, repair, measure, verify."""

from ridgeline.compress.cheaper.candidates import KINDS, Candidate, Kind, find_candidates
from ridgeline.compress.cheaper.options import CheaperOptions
from ridgeline.compress.cheaper.report import CheaperReport
from ridgeline.compress.cheaper.run import Aim, Show, cheaper

__all__ = ["KINDS", "Aim", "Candidate", "CheaperOptions", "CheaperReport", "Kind", "Show", "cheaper", "find_candidates"]
