"""How much memory this process has."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(*, peak: bool = False) -> int | None:
    """Now, or the most so far; None where the system does not say."""
    path = Path("/proc/self/status")
    key = "VmHWM:" if peak else "VmRSS:"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(key)]
    return found[0] if found else None
