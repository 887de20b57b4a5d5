"""Invented measurements of the lab's experiments on models and their quality."""

from __future__ import annotations

from lab_fakes import Faked

EXACT: tuple[str, ...] = ("types",)
TYPES = {"fp32": [4], "bf16": [2], "fp8": [1, -240, 240], "int8": [1, -128, 127], "int4": [0.5, -8, 7]}
FAKED: dict[str, Faked] = {
    "types": Faked(
        {"types": TYPES, "e4m3fnuz": 240, "e4m3_of_ieee": 240},
        {"types": TYPES}, {"types": TYPES | {"fp8": [1, -448, 448]}}, {25},
    ),
    "speculative": Faked(
        {"tokens": {"1": 1.6, "4": 2.3}, "check": 1.1, "formula": 2.3, "speed_ups": {"1": 2.3, "256": 1.1}},
        {"exact": [0.1, 3.9], "bug": [12.0, 30.0], "tokens": {"1": 1.61, "4": 2.25}, "check": [1.2, 2.4, 3.9]},
        {"exact": [0.1, 4.1], "bug": [12.0, 30.0], "tokens": {"1": 1.6, "4": 2.5}, "check": [1.2, 2.4, 3.9]},
        {31, 32},
    ),
}  # fmt: skip
