"""Define an experiment as data: what it predicts, what it measures, and how it judges claims by both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.lab.judgement import Judgement
from ridgeline.spec.hardware import HardwareSpec

Facts = Mapping[str, Any]  # values of JSON by name


class Untried(Exception):
    """An experiment cannot measure here. The message says what would be needed."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The choices of an experiment.

    quick: measure less. seed: random seed of everything that is drawn. model: a folder, a hub id or a built-in model,
    which is measured where a model is needed. threads: threads of the kernels; None: one for each core. machine: the
    machine as predictions see it. on_part: is called with the name of each part before it is measured. trace: a trace
    of requests with equal beginnings, as a file; None: they are drawn.

    Raises RequestError for a negative seed.
    """

    quick: bool
    seed: int
    model: str
    threads: int | None
    machine: HardwareSpec
    on_part: Callable[[str], None] = lambda name: None
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise RequestError(f"--seed is {self.seed}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a curve. measured: they were measured, and not predicted; each gets a mark."""

    name: str
    points: Sequence[tuple[float, float]]
    measured: bool


@dataclass(frozen=True, slots=True)
class Figure:
    """Curves over one quantity. x, y: names of the axes with units. log: both axes are logarithmic."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log: bool = True


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment.

    name: for the command line. title: one line. claims: numbers of the claims that it judges. predict: returns what the
    cost model or arithmetic says, before anything is measured. measure: returns what was measured, or raises Untried.
    judge: returns one verdict for each claim from both, and nothing else, so that it can be tested without measuring.
    figures: returns curves of both. reading: a text for people that says how to read the result. timed: whether times
    are judged, which other programs disturb.
    """

    name: str
    title: str
    claims: tuple[int, ...]
    predict: Callable[[Setup], Facts]
    measure: Callable[[Setup], Facts]
    judge: Callable[[Facts, Facts], tuple[Judgement, ...]]
    reading: str
    figures: Callable[[Facts, Facts], tuple[Figure, ...]] = lambda predicted, measured: ()
    timed: bool = True
