"""Run functions in helper processes that have limits on time, memory and stack."""

from ridgeline.bounded.frames import Value
from ridgeline.bounded.jobs import job
from ridgeline.bounded.limits import Limits
from ridgeline.bounded.pool import BoundedPool, Setup

__all__ = ["BoundedPool", "Limits", "Setup", "Value", "job"]
