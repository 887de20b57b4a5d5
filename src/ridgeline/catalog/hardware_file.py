"""Read a machine from a TOML file that a user writes: memory, bandwidth, peaks by type, and the link.

    kind = "gpu"                      # gpu, tpu or cpu. Default: gpu
    memory_gb = 96
    bandwidth_gb_per_s = 1800
    source = "vendor's sheet, 2026"   # where the figures come from. Default: the file's name

    [tflops]                          # dense, without sparsity
    bfloat16 = 250
    fp8 = 500

    [link]                            # or: link = "pcie5", a link of the catalog. Default: none
    gb_per_s = 64                     # each device, one way
    latency_us = 5                    # Default: 0
    devices = 8                       # most devices that it joins. Default: no limit
    host = "pcie5"                    # at the top: the link of the catalog to the host's memory. Default: not known

Units are decimal, as makers count: a GB is 10^9 bytes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from ridgeline.catalog.machines import GIGA, TERA, link, nearest
from ridgeline.errors import RequestError
from ridgeline.spec.folders import read_text
from ridgeline.spec.hardware import WIDER, HardwareSpec, Link

MOST_BYTES = 1 << 16
TYPES = (*dict.fromkeys((*WIDER, *WIDER.values())),)
MACHINE = ("name", "kind", "memory_gb", "bandwidth_gb_per_s", "source", "tflops", "link", "host")
LINK = ("name", "gb_per_s", "latency_us", "devices")
KINDS: tuple[Literal["gpu", "tpu", "cpu"], ...] = ("gpu", "tpu", "cpu")
LARGEST = 1e12  # of any figure, in the unit of its field


def read_hardware(path: Path) -> HardwareSpec:
    """Return the machine of a TOML file. Raises RequestError, which names the field, the value and the remedy."""
    try:
        value = tomllib.loads(read_text(path, MOST_BYTES))
    except OSError as e:
        raise RequestError(f"--hardware {path} cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise RequestError(f"--hardware {path} is no TOML file: {e}") from None
    fields = _Fields(path, "", value, MACHINE)
    rates = _Fields(path, "tflops", fields.table("tflops"), TYPES)
    if not rates.value:
        raise RequestError(f"{path}: [tflops] is empty; give one type at least, such as bfloat16 = 250")
    joined, said = _link(path, fields), fields.text("source", f"given in {path.name}")
    sources = dict.fromkeys(("memory", "bandwidth", "operations"), said)
    return HardwareSpec(
        name=fields.text("name", path.stem),
        memory_bytes=round(fields.number("memory_gb") * GIGA),
        read_bytes_per_s=fields.number("bandwidth_gb_per_s") * GIGA,
        flops_per_s={kind: rates.number(kind) * TERA for kind in rates.value},
        link=joined,
        kind=fields.choice("kind", KINDS),
        sources=sources | ({"link": joined.source or said} if joined else {}),
        host=link(fields.text("host", "")) if "host" in fields.value else None,
    )


def _link(path: Path, fields: _Fields) -> Link | None:
    """Return the link: one of the catalog by its name, or the one that the file describes."""
    given = fields.value.get("link")
    if given is None:
        return None
    if isinstance(given, str):
        return link(given)
    own = _Fields(path, "link", fields.table("link"), LINK)
    most = own.number("devices", 0.0)
    if most != int(most):
        raise RequestError(f"{path}: devices of [link] is {most}; it must be a whole number")
    return Link(
        own.text("name", f"the link of {path.name}"), own.number("gb_per_s") * GIGA,
        own.number("latency_us", 0.0) / 10**6, f"given in {path.name}", int(most) or None,
    )  # fmt: skip


class _Fields:
    """The fields of one table of a file, each read with its type and its range."""

    def __init__(self, path: Path, table: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
        self.path, self.value, self._of = path, value, f" of [{table}]" if table else ""
        for name in value:
            if name not in known:
                raise RequestError(f"{path}: unknown field {name!r:.60}{self._of}; {nearest(name[:60], known)}")

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table. Raises RequestError if it is missing or something else."""
        found = self.value.get(name)
        if not isinstance(found, dict):
            raise RequestError(f"{self.path}: [{name}] is missing or no table; write [{name}] and its fields below it")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number: above 0, or at least 0 where there is a default."""
        found = self.value.get(name, default)
        if found is None:
            raise RequestError(f"{self.path}: {name}{self._of} is missing; write {name} = a number above 0")
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not isfinite(found) or not 0 <= found <= LARGEST or (default is None and not found):
            least = "above 0" if default is None else "of at least 0"
            raise RequestError(
                f"{self.path}: {name}{self._of} is {found!r:.60}; it must be a number {least}, {LARGEST:.0e} at most"
            )
        return float(found)

    def text(self, name: str, default: str) -> str:
        """Return a short text."""
        found = self.value.get(name, default)
        if not isinstance(found, str) or not 0 < len(found) <= 200 or not found.isprintable():
            raise RequestError(f"{self.path}: {name}{self._of} is {found!r:.60}; it must be a text of 1 to 200 letters")
        return found

    def choice(self, name: str, choices: tuple[Literal["gpu", "tpu", "cpu"], ...]) -> Literal["gpu", "tpu", "cpu"]:
        """Return one of a few words; the first is the default."""
        found = self.value.get(name, choices[0])
        for choice in choices:
            if found == choice:
                return choice
        raise RequestError(f"{self.path}: {name} is {found!r:.60}; it must be {', '.join(choices)}")
