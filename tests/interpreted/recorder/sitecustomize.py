"""Make device `cuda` of every Python process the recorder of `interpreted.tape`: kernels in Triton's interpreter.

Python imports this file when it starts, if this folder is in PYTHONPATH. So a program that is written for a GPU runs
unchanged, also where it starts processes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from interpreted.mended import mend
from interpreted.tape import GpuMemory, taped
from ridgeline import ops
from ridgeline.ops import Device, OpsTable

mend()
NAME = "cuda:0"
devices = import_module("ridgeline.ops.devices")
opened = devices.open_table


def gpus() -> list[Device]:
    return [Device(NAME, "a recorder on the CPU")]


def open_table(device: str, overrides: Mapping[str, str] | None = None, *args: Any, **options: Any) -> OpsTable:
    return taped(memory=GpuMemory)[0] if device == NAME else opened(device, overrides, *args, **options)


devices._gpus = gpus
devices.open_table = ops.open_table = open_table  # before others import it
machine = import_module("ridgeline.measure.machine")
machine.READ_BYTES, machine.BEYOND, machine.SQUARES = 1 << 12, 0, (16,)  # larger products would take minutes
