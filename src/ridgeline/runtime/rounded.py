"""Let the kernels of a model round attention to bfloat16."""

from __future__ import annotations

from ridgeline.errors import DeviceError
from ridgeline.ops.driver import Driver
from ridgeline.runtime.load import LoadedModel

REMEDY = "leave --attention out"


def round_attention(loaded: LoadedModel) -> Driver:
    """Round attention over keys and values of 16 bits from now on, and return what drives the kernels.

    All models on the same table of kernels share the choice. Raises DeviceError where it cannot be done.
    """
    driver, device = loaded.table.driver, loaded.table.memory.device
    if driver is None:
        raise DeviceError(f"attention (--attention) bf16: device {device!r} has no kernels that round it; {REMEDY}")
    if refusal := driver.rounded_refusal():
        raise DeviceError(f"attention (--attention) bf16: {refusal}; {REMEDY}")
    driver.round_attention(rounds=True)
    return driver
