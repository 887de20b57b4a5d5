"""Write a calibration to a file that --hardware reads on another machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.cost.calibration import Calibration
    from ridgeline.cost.gpu_calibration import GpuCalibration


def check_out(out: str) -> None:
    """Raise RequestError for a name that --hardware would not take for a calibration."""
    from ridgeline.errors import RequestError

    if not out.lower().endswith(".json"):
        raise RequestError(f"--out is {out}; the name must end in .json, which --hardware takes for a calibration")


def carry_to(found: Calibration | GpuCalibration, out: str) -> None:
    """Write a calibration to the file of --out. Raises RequestError if it cannot be written."""
    from pathlib import Path

    from ridgeline.cost.calibration import carry
    from ridgeline.errors import RequestError

    try:
        carry(found, Path(out))
    except OSError as e:
        raise RequestError(f"--out {out} cannot be written: {e.strerror}") from None
