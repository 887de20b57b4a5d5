"""The kernels of the cpu backend (csrc/). Absent where no compiler was there at installation.

Arrays are numpy's, float32 unless it says otherwise; an argument of the wrong type, shape or layout is a TypeError or a
ValueError. Every call lets other threads of Python run while it works.
"""

def isa() -> str:
    """The instruction set in use: avx512, avx2 or portable."""

def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""

class Pool:
    """Threads that work for one call at a time; other callers wait. Safe after a fork."""

    def __init__(self, threads: int) -> None:
        """threads: the caller's included. More than there are cores is slow, and right."""
    @property
    def size(self) -> int: ...
    def read_rate(self, bytes: int) -> float:
        """Bytes per second that all threads read of so much memory, which is taken for that: the best of three."""
    def fma_rate(self) -> float:
        """float32 operations per second in registers; a product and its sum are two."""
    def dot_rate(self) -> float:
        """The same of bytes."""
