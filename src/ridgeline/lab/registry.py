"""List the experiments by name. A module is imported when its experiment is first used."""

from __future__ import annotations

from importlib import import_module

from ridgeline.catalog.machines import nearest
from ridgeline.errors import RequestError
from ridgeline.lab.claim import claims
from ridgeline.lab.experiment import Experiment

# Each name is that of a module in lab/experiments, which has its Experiment as EXPERIMENT.
NAMES = (
    "batch",
    "chunks",
    "diffusion",
    "drafts",
    "embeddings",
    "flash",
    "heads",
    "intensity",
    "layers",
    "lengths",
    "memory",
    "naive",
    "orca",
    "outliers",
    "paging",
    "phases",
    "plans",
    "prune",
    "radix",
    "recall",
    "recorded",
    "repair",
    "rounding",
    "selective",
    "speculative",
    "types",
    "windows",
)


def find(name: str) -> Experiment:
    """Return the experiment of a name, or of the number of a claim. Raises RequestError for one that is not known."""
    if name in NAMES:
        found = import_module(f"ridgeline.lab.experiments.{name}").EXPERIMENT
        assert isinstance(found, Experiment) and found.name == name
        return found
    if name.isdecimal() and int(name) in claims():
        for other in NAMES:
            if int(name) in (experiment := find(other)).claims:
                return experiment
        raise RequestError(f"claim {name} has no experiment yet; `ridgeline lab list` shows those that have one")
    raise RequestError(f"unknown experiment {name!r:.40}, and no number of a claim; {nearest(name, NAMES)}")
