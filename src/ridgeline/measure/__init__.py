"""Measure a model on a machine, and compare it with the machine's roofline. Predictions alone belong in plan/."""

from ridgeline.measure.latency import Latency, measure_latency
from ridgeline.measure.machine import Roof, measure_roof
from ridgeline.measure.spread import Spread
from ridgeline.measure.throughput import Throughput, measure_throughput

__all__ = [
    "Latency",
    "Roof",
    "Spread",
    "Throughput",
    "measure_latency",
    "measure_roof",
    "measure_throughput",
]
