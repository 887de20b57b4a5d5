"""Run experiments, keep what they found as one JSON file each, and go on where an earlier run stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ridgeline.cost.calibration import fingerprint
from ridgeline.errors import RidgelineError
from ridgeline.lab.experiment import Experiment, Facts, Figure, Setup, Untried
from ridgeline.lab.judgement import Judgement, untried
from ridgeline.measure.quiet import OthersLoad
from ridgeline.spec.folders import read_text, write_whole

BUSY = 0.1  # share of all cores that other programs may use before a record says that they did
MOST_BYTES = 8 << 20  # of a record; ours have some 20 kB
FORMAT = 2  # of the files; it increases when the meaning of a field changes


@dataclass(frozen=True, slots=True)
class Record:
    """The result of an experiment.

    predicted_at, measured_at: when the prediction was made, and when the measurement ended, ISO 8601 in UTC. seconds:
    how long it was measured. others: share of all cores that other programs used meanwhile. timed: whether times are
    judged. setup: the facts of its Setup, of this machine and of this version.
    """

    name: str
    title: str
    reading: str
    setup: Mapping[str, Any]
    predicted_at: str
    predicted: Facts
    measured_at: str
    measured: Facts
    seconds: float
    others: float
    timed: bool
    judgements: tuple[Judgement, ...]
    figures: tuple[Figure, ...]

    @property
    def is_busy(self) -> bool:
        """Return whether times are judged, and other programs used so much of the machine that they may be too long."""
        return self.timed and self.others > BUSY

    def to_json(self) -> dict[str, Any]:
        """Return everything but the figures, which follow from the rest."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "figures"}
        return {"format": FORMAT} | found | {"judgements": [asdict(j) for j in self.judgements]}


def run(experiment: Experiment, setup: Setup, folder: Path | None = None, *, refuses: bool = True) -> Record:
    """Predict, measure and judge. folder: keep the prediction there before anything is measured, and then the record.

    A record that this folder has already, of the same setup, version and machine, is returned instead. refuses: raise
    the RidgelineError of a model or machine that the experiment cannot use; else its claims cannot be tried here.
    """
    facts = _facts(setup)
    path = folder / f"{experiment.name}.json" if folder else None
    if path is not None and (kept := _kept(path, experiment, facts)):
        return kept
    setup.on_part(f"{experiment.name}: predicting")
    try:
        predicted = _plain(experiment.predict(setup))
    except RidgelineError as e:
        if refuses:
            raise
        experiment, predicted = replace(experiment, measure=partial(_cannot, str(e))), {}
    at = _now()
    begun = {"format": FORMAT, "name": experiment.name, "setup": facts, "predicted_at": at, "predicted": predicted}
    if path is not None:
        write_whole(path, json.dumps(begun, indent=1))
    setup.on_part(f"{experiment.name}: measuring")
    others, start = OthersLoad(), time.perf_counter()
    try:
        measured = _plain(experiment.measure(setup))
        judgements = experiment.judge(predicted, measured)
    except (Untried, RidgelineError) as e:
        if refuses and isinstance(e, RidgelineError):
            raise
        measured, judgements = {}, tuple(untried(number, str(e)) for number in experiment.claims)
    seconds = time.perf_counter() - start
    found = _record(experiment, facts, at, predicted, measured, judgements, _now(), seconds, others.share())
    if path is not None:
        write_whole(path, json.dumps(found.to_json(), indent=1))
    return found


def run_all(
    experiments: Sequence[Experiment],
    setup: Setup,
    folder: Path | None,
    on_record: Callable[[Record], None] = lambda r: None,
) -> tuple[Record, ...]:
    """Run experiments one after the other, as `run` does; one of several that cannot be tried does not end the others.

    on_record: is called with each record.
    """
    found = []
    for experiment in experiments:
        found.append(run(experiment, setup, folder, refuses=len(experiments) == 1))
        on_record(found[-1])
    return tuple(found)


def _cannot(why: str, setup: Setup) -> Facts:
    """Raise Untried."""
    raise Untried(why)


def _record(
    experiment: Experiment, facts: Mapping[str, Any], predicted_at: str, predicted: Facts, measured: Facts,
    judgements: tuple[Judgement, ...], measured_at: str, seconds: float, others: float,
) -> Record:  # fmt: skip
    figures = experiment.figures(predicted, measured) if measured else ()
    return Record(
        experiment.name, experiment.title, experiment.reading, facts, predicted_at, predicted, measured_at, measured,
        seconds, others, experiment.timed, judgements, figures,
    )  # fmt: skip


def _kept(path: Path, experiment: Experiment, facts: Mapping[str, Any]) -> Record | None:
    """Return the record of a file if it is whole, and of the same setup; judged again by the limits of today."""
    try:
        value = json.loads(read_text(path, MOST_BYTES))
        if value["format"] != FORMAT or value["setup"] != facts or "measured" not in value:
            return None
        predicted, measured = value["predicted"], value["measured"]
        judgements = (
            experiment.judge(predicted, measured) if measured
            else tuple(untried(j["claim"], j["text"]) for j in value["judgements"])
        )  # fmt: skip
        return _record(
            experiment, facts, value["predicted_at"], predicted, measured, judgements, value["measured_at"],
            value["seconds"], value["others"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None  # another file, or one that was cut off: the experiment is run again


def _facts(setup: Setup) -> dict[str, Any]:
    """Return what a record depends on."""
    return {
        "quick": setup.quick, "seed": setup.seed, "model": setup.model, "threads": setup.threads,
        "version": version("ridgeline"), "machine": fingerprint(), "predicted_for": setup.machine.name,
        "trace": setup.trace,
    }  # fmt: skip


def _plain(facts: Facts) -> dict[str, Any]:
    """Return facts as they are read back from a file, so that a judgement sees the same either way."""
    found = json.loads(json.dumps(facts, allow_nan=False))
    assert isinstance(found, dict)
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
