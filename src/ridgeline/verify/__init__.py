"""Check that requests get the same tokens as from naive sampling alone, however they are served."""

from ridgeline.verify.report import CaseResult, Difference, Report
from ridgeline.verify.run import verify

__all__ = ["CaseResult", "Difference", "Report", "verify"]
