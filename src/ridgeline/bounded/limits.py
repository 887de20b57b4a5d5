"""Define the limits of a job, and apply them to the helper process itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

try:
    import resource
except ImportError:  # Windows: the parent still ends a job that takes too long
    _resource: Any = None
else:
    _resource = resource

NICENESS = 5  # so that the engine's steps go first
OPEN_FILES = 64  # enough for a helper's shared libraries and its two pipes


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that one job may use.

    seconds: wall-clock time, the helper is killed after it. memory_bytes: address space beyond what the helper had when
    the job began; only systems with RLIMIT_AS (Linux) enforce it. stack_bytes: stack of the thread that runs the job.
    result_bytes: size of the answer.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    stack_bytes: int = 8 << 20
    result_bytes: int = 64 << 20


def restrict_process() -> None:
    """Limit the whole helper process: no core dump, no file writes, few open files, low priority."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    if _resource is not None:
        _set_soft(_resource.RLIMIT_CORE, 0)
        _set_soft(_resource.RLIMIT_FSIZE, 0)
        _set_soft(_resource.RLIMIT_NOFILE, OPEN_FILES)


def restrict_job(limits: Limits) -> None:
    """Limit the resources of the next job.

    The limit on CPU time only matters when the parent is gone and cannot kill the helper any more.
    """
    if _resource is None:
        return
    if (size := _statm(0)) is not None:
        _set_soft(_resource.RLIMIT_AS, size + limits.memory_bytes)
    used = _resource.getrusage(_resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime + limits.seconds * (os.cpu_count() or 1)
    _set_soft(_resource.RLIMIT_CPU, int(seconds) + 2)


def release_job() -> None:
    """Lift the memory limit of the last job, so that the helper itself can answer."""
    if _resource is not None:
        _set_soft(_resource.RLIMIT_AS, None)


def resident_bytes() -> int:
    """Return the physical memory of this process; 0 if the system does not tell."""
    return _statm(1) or 0


def _statm(field: int) -> int | None:
    """Return bytes of address space (field 0) or physical memory (1); None if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a helper imports as little as it can
            return int(file.read().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _set_soft(kind: Any, most: int | None) -> None:
    """Set a soft limit, at most the hard one; None: as high as the hard one."""
    _, hard = _resource.getrlimit(kind)
    infinite = _resource.RLIM_INFINITY
    if most is None:
        most = hard
    elif hard != infinite:
        most = min(most, hard)
    try:
        _resource.setrlimit(kind, (most, hard))
    except (OSError, ValueError):  # macOS has the name RLIMIT_AS, but not the limit
        return
