"""Decides which tokens run next and on which pages. Plain Python: no tensors, no devices, no clock."""

from ridgeline.sched.policy import Policy, Priority, SwapCost, fcfs
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence, hash_root
from ridgeline.sched.stats import GroupStats, Stats
from ridgeline.sched.work import LAST, PageCopy, PageDelta, Result, StepPlan, Update, Work

__all__ = [
    "LAST",
    "GroupStats",
    "PageCopy",
    "PageDelta",
    "Policy",
    "Priority",
    "Result",
    "Scheduler",
    "Sequence",
    "Stats",
    "StepPlan",
    "SwapCost",
    "Update",
    "Work",
    "fcfs",
    "hash_root",
]
