"""Look up machines, links and published models by name, from data files. Needs no network and no weights."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.spec.hardware import HardwareSpec, Link

GIGA, TERA = 10**9, 10**12


def hardware(name: str) -> HardwareSpec:
    """Return a machine by its name or an alias. Raises RequestError with the nearest names."""
    known = _machines()
    found = known.get(name.lower())
    if found is None:
        raise RequestError(f"unknown hardware {name!r}; {nearest(name.lower(), known)}")
    return found


def machines() -> tuple[HardwareSpec, ...]:
    """Return all machines of the catalog, each once."""
    return tuple({machine.name: machine for machine in _machines().values()}.values())


def link(name: str) -> Link:
    """Return a link between devices by its name. Raises RequestError with the nearest names."""
    known = _links()
    found = known.get(name.lower())
    if found is None:
        raise RequestError(f"unknown link {name!r}; {nearest(name.lower(), known)}")
    return found


def nearest(name: str, known: Iterable[str], same: Mapping[str, object] | None = None) -> str:
    """Return the five nearest names as the end of a message ("did you mean ...?").

    same: the thing that each name stands for; of several names for one thing, only the nearest is listed.
    """
    found: dict[object, str] = {}
    names = sorted(known)
    for close in difflib.get_close_matches(name, names, n=len(names), cutoff=0.0):
        found.setdefault(id(same[close]) if same and close in same else close, close)
    *first, last = list(found.values())[:5]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?"


def read_data(name: str) -> Any:
    """Return the parsed content of a file in data/."""
    return json.loads(files("ridgeline.catalog").joinpath("data", name).read_text(encoding="utf-8"))


@cache
def _machines() -> Mapping[str, HardwareSpec]:
    return {
        name: spec
        for entry in read_data("hardware.json")
        for spec in [_machine(entry)]
        for name in (entry["name"], *entry["aliases"])
    }


@cache
def _links() -> Mapping[str, Link]:
    most = {e["link"]: e["devices"] for e in read_data("domains.json")}
    return {
        e["name"]: Link(
            e["name"],
            e["gb_per_s"] * GIGA,
            e["latency_us"] / 10**6,
            e["source"],
            most.get(e["name"]),
            sums=e.get("sums", False),
        )
        for e in read_data("links.json")
    }


def _machine(entry: Mapping[str, Any]) -> HardwareSpec:
    joined = link(entry["link"]) if entry["link"] else None
    sources = {figure: text for figures, text in entry["sources"].items() for figure in figures.split()}
    return HardwareSpec(
        name=entry["name"],
        memory_bytes=entry["memory_gb"] * GIGA,
        read_bytes_per_s=entry["read_gb_per_s"] * GIGA,
        flops_per_s={kind: value * TERA for kind, value in entry["tflops"].items()},
        link=joined,
        kind=entry["kind"],
        sources=sources | ({"link": joined.source} if joined else {}),
        host=_hosts().get(entry["name"]),
    )


@cache
def _hosts() -> Mapping[str, Link]:
    """Return the link of each machine to its host's memory."""
    return {e["machine"]: replace(link(e["link"]), source=e["source"]) for e in read_data("hosts.json")}
