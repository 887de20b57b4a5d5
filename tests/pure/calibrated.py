"""An invented calibration, for tests of predictions that are made from one."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.cost.calibration import Calibration, fingerprint
from ridgeline.spec.rates import Curve, Passes, Rates

ONE_ROW, MANY = 4e-11, 1e-11  # seconds per number and row
FAR = 4.0  # for one row, the factor of time for reading from memory instead of a cache


def passes(scale: float = 1.0) -> Passes:
    rows = (1.0, 16.0, 512.0)
    near = tuple(scale * v for v in (ONE_ROW, MANY, MANY))
    return Passes(Curve(rows, near), Curve(rows, (FAR * near[0], 1.2 * near[1], near[2])))


TERMS = {
    "plain step": 3e-4, "replayed step": 1e-4, "plain sequence": 2e-6, "replayed sequence": 2e-6, "plain call": 1e-5,
    "replayed call": 2e-6, "plain logit": 1e-10, "replayed logit": 1e-10, "plain byte": 5e-11, "replayed byte": 5e-11,
    "attention of a sequence": 1e-6, "expert layer": 1e-4, "expert choice": 1e-6, "Mamba2 layer": 1e-4,
    "Mamba2 state": 1e-9, "Mamba2 token": 5e-11,
}  # fmt: skip
RATES = Rates(
    2, "avx512", {"1": Curve((1e6, 1e9), (1e11, 2e10)), "2": Curve((1e6, 1e9), (2e11, 4e10))},
    {"2": Curve((1e6,), (1e10,))}, Curve((4e6, 3e8), (1e-6, 1.0)),
    {"float32": passes(), "bfloat16": passes(), "int8": passes(0.25)}, {"float32": passes(2.0)}, TERMS,
)  # fmt: skip
KEPT = Calibration(fingerprint(), RATES, "2026-11-22", 12.0, 0.0)


def kept_with(threads: int) -> Calibration:
    """Return the same calibration as if it had been measured with this number of threads."""
    name, old = str(threads), str(RATES.threads)
    rates = replace(RATES, threads=threads, read={name: RATES.read[old]}, copy={name: RATES.copy[old]})
    return replace(KEPT, rates=rates)
