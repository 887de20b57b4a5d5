"""Tests of kernels in Triton's interpreter, or on a GPU if there is one.

The interpreter needs a process of its own, because kernels read TRITON_INTERPRET when they are defined:
`TRITON_INTERPRET=1 pytest tests/interpreted`. tests/cpu/test_interpreted.py starts one for each file. On a machine with
a GPU, `pytest tests/interpreted` runs the same tests there.
"""

import os

from ridgeline.system import gpu_driver


def has_gpu() -> bool:
    """Return whether kernels can run on a GPU of this machine."""
    if not gpu_driver():
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted.mended import mend

    mend()
elif not has_gpu():
    collect_ignore_glob = ["test_*.py"]
