"""Return facts about this machine and this process: cores, the processor's name, memory. For Linux, macOS and Windows.

psutil is imported on first use, since most commands do not need it. Linux's own files are read only where they have
more than psutil.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CPUINFO = Path("/proc/cpuinfo")
STATUS = Path("/proc/self/status")
SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
MOST_HUGE = 32 << 20  # bytes of the largest huge page that is asked for


def num_cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_core() -> int:
    """Return the hardware threads that share the first core; 1 where the system does not say."""
    if not SIBLINGS.exists():
        return 1
    parts = (part.partition("-") for part in SIBLINGS.read_text(encoding="ascii").strip().split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)


def free_bytes() -> int:
    """Return the memory that programs can take without swapping, in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def total_bytes() -> int:
    """Return the memory of this machine, in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def resident_bytes(*, peak: bool = False) -> int:
    """Return the memory that this process has in RAM, in bytes. peak: the most so far instead of now."""
    import psutil

    used = psutil.Process().memory_info()
    return (_peak_bytes() or int(getattr(used, "peak_wset", used.rss))) if peak else int(used.rss)


def _peak_bytes() -> int | None:
    """Return the peak that the system has recorded; None if only psutil has it (Windows)."""
    if STATUS.exists():  # getrusage would count the memory of the process that started this one
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        if found:
            return found[0]
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class HugePages(NamedTuple):
    """Huge pages for large arrays. size: their bytes; 0 if the system gives none. reason: why."""

    size: int
    reason: str


def huge_pages() -> HugePages:
    """Return the huge pages that the system gives to a program which asks for them."""
    if sys.platform != "linux":
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        return HugePages(0, f"{system} gives none to a program without special rights")
    if not (HUGE_PAGES / "enabled").exists():
        return HugePages(0, "this kernel has no transparent huge pages")
    if STATUS.exists() and "THP_enabled:\t0" in STATUS.read_text(encoding="utf-8"):
        return HugePages(0, "the program that started this one turned them off (prctl PR_SET_THP_DISABLE)")
    file, size = HUGE_PAGES / "enabled", int((HUGE_PAGES / "hpage_pmd_size").read_text(encoding="ascii"))
    own = HUGE_PAGES / f"hugepages-{size >> 10}kB" / "enabled"
    if own.exists() and _chosen(own) != "inherit":
        file = own
    if (mode := _chosen(file)) == "never":
        return HugePages(0, f"{file} is never; an administrator can write madvise there")
    if size > MOST_HUGE:
        return HugePages(0, f"one has {size >> 20} MiB here, more than a short prompt needs")
    return HugePages(size, f"{file} is {mode}")


def _chosen(file: Path) -> str:
    """Return the word in brackets, which is the one that holds."""
    return file.read_text(encoding="ascii").partition("[")[2].partition("]")[0]


def return_freed_memory() -> None:
    """Return freed memory, which the allocator keeps for later, to the system. Only glibc has a call for it."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def busy_seconds() -> float:
    """Return the seconds that all programs have computed since the machine started, on all cores together."""
    import psutil

    times = psutil.cpu_times()
    kinds = ("user", "nice", "system", "irq", "softirq", "steal", "interrupt", "dpc")
    return sum(float(getattr(times, kind, 0.0)) for kind in kinds)


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    if name := cpu_info().get("model name"):
        return name
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode == 0 and run.stdout.strip():
            return run.stdout.strip()
    return platform.processor() or platform.machine() or "unknown"


def cpu_info() -> dict[str, str]:
    """Return the fields of the first processor in Linux's /proc/cpuinfo; empty on other systems."""
    if not CPUINFO.exists():
        return {}
    pairs = (line.partition(":") for line in CPUINFO.read_text(encoding="utf-8").split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def last_cache_bytes() -> int:
    """Return the size of the first processor's largest cache, in bytes; 0 where the system does not say (Windows)."""
    sizes = [path.read_text(encoding="ascii").strip() for path in CACHES.glob("index*/size")]
    found = [int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]] for size in sizes if size[:-1].isdecimal()]
    if not found and sys.platform == "darwin":
        run = subprocess.run(["sysctl", "-n", "hw.l3cachesize"], capture_output=True, text=True, check=False)
        found = [int(line) for line in run.stdout.split() if line.isdecimal()]
    return max(found, default=0)


def gpu_driver() -> bool:
    """Return whether a GPU driver is installed. Without one, torch need not be imported to look for GPUs."""
    windows = Path(os.environ.get("SYSTEMROOT", "C:/Windows")) / "System32" / "nvcuda.dll"
    paths = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", windows)
    return any(Path(path).exists() for path in paths)
