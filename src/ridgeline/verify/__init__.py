"""Proof by example: however requests are served, the same tokens as naive sampling alone."""

from ridgeline.verify.report import CaseResult, Difference, Report
from ridgeline.verify.run import verify

__all__ = ["CaseResult", "Difference", "Report", "verify"]
