"""Measures a model on a machine, beside the least that the machine's roofline allows."""

from ridgeline.measure.floor import Cost, Costs
from ridgeline.measure.latency import Latency, measure_latency
from ridgeline.measure.machine import Roof, measure_roof
from ridgeline.measure.spread import Spread
from ridgeline.measure.throughput import Throughput, measure_throughput

__all__ = [
    "Cost",
    "Costs",
    "Latency",
    "Roof",
    "Spread",
    "Throughput",
    "measure_latency",
    "measure_roof",
    "measure_throughput",
]
