"""Simulate serving with the real scheduler on a virtual clock: predict the latencies of a workload on a machine."""

from ridgeline.plan.limits import Slo
from ridgeline.sim.calibrated_cost import CalibratedCost, cost_of, draft_cost_of
from ridgeline.sim.cost import LinearCost, RooflineCost, StepCost
from ridgeline.sim.drafting import Drafts, drafts_of
from ridgeline.sim.metrics import DraftsUsed, Percentiles, Report
from ridgeline.sim.settings import Settings, settings
from ridgeline.sim.simulator import Simulated, simulate
from ridgeline.sim.workload import Request, Workload

__all__ = [
    "CalibratedCost",
    "Drafts",
    "DraftsUsed",
    "LinearCost",
    "Percentiles",
    "Report",
    "Request",
    "RooflineCost",
    "Settings",
    "Simulated",
    "Slo",
    "StepCost",
    "Workload",
    "cost_of",
    "draft_cost_of",
    "drafts_of",
    "settings",
    "simulate",
]
