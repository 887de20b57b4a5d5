"""The price of a changed model: what it costs less, and what it lost, in one report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.compress.compare import Comparison
from ridgeline.cost.calibration import this_machine
from ridgeline.cost.precision import cpu_precision
from ridgeline.measure.rate import Rate, measure_rate, rate_notes
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec
from ridgeline.spec.storage import default_storage

FILE = "price_report.json"
CONTEXT = 512  # tokens of the sequence whose decode is predicted, or the model's longest context if that is shorter
ANSWER_SHARE = 4  # one part in four of it is the answer


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a model.

    state_bytes: bytes of state that each token adds, at the start of a sequence. recurrent_bytes: bytes of recurrent
    state of a sequence. predicted, measured: tokens per second of decode of one sequence, as the planner predicts it,
    and as it was measured on this machine; None if they are not known.
    """

    params: int
    state_bytes: int
    recurrent_bytes: int
    predicted: float | None
    measured: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {
            "params": self.params, "state_bytes_per_token": self.state_bytes,
            "recurrent_state_bytes": self.recurrent_bytes, "predicted_tokens_per_s": self.predicted,
            "measured_tokens_per_s": self.measured,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PriceReport:
    """The price of a model before and after it was changed.

    Attributes:
        title: a line that says what was done. prices: by "original" and the name of the result. comparison: quality on
            the held-out part; None without text. read_back: largest difference between the logits of the folder and
            those of the model that was written, as a share of the largest one. kept: the indices of the layers that
            were kept.
        source: on what importance was measured. notes: remarks for the user.
    """

    title: str
    prices: Mapping[str, Price]
    comparison: Comparison | None
    read_back: float
    kept: tuple[int, ...]
    source: str
    machine: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        out: dict[str, Any] = {
            "title": self.title, "models": {name: price.to_json() for name, price in self.prices.items()},
            "kept_layers": list(self.kept), "calibration": self.source, "machine": self.machine,
            "read_back_difference": self.read_back, "notes": list(self.notes),
        }  # fmt: skip
        if (c := self.comparison) is not None:
            out["held_out_tokens"] = c.num_tokens
            out["models"]["original"] |= c.original.to_json()
            for name, quality in c.others.items():
                out["models"][name] |= quality.to_json()
        return out


def price(deployment: Deployment, load: Load, rate: Rate | None = None) -> Price:
    """Return the price of a deployed model. load: the sequence to decode. rate: the measured speed on this machine."""
    spec, precision, sizes = deployment.spec, deployment.precision, {False: 0, True: 0}
    for layer in spec.layers:
        if layer.mixer and (state := layer.mixer.state()).elements:
            row = state.parts[-1][-1]
            sizes[state.snapshot] += round(precision.state_bytes(state.elements, row, snapshot=state.snapshot))
    speed = Planner(deployment).figures(load).tokens_per_s
    measured = None if rate is None else rate.tokens_per_s
    return Price(spec.num_params(), sizes[False], sizes[True], speed, measured)


def prices_of(
    loaded: LoadedModel, spec: ModelSpec, folders: Mapping[str, Path], threads: int | None
) -> tuple[dict[str, Price], tuple[str, ...]]:  # fmt: skip
    """Return the prices on this machine of a model and of one that was made from it, and remarks about them.

    spec: the spec of the second one. folders: both, by name. threads: threads of the kernels.
    """
    machine = this_machine()[0]
    precision = cpu_precision(loaded.dtype, default_storage(loaded.dtype).dtype, machine)
    context = min(CONTEXT, spec.max_position_embeddings, loaded.spec.max_position_embeddings)
    answer = max(1, context // ANSWER_SHARE)
    load = Load(1, max(1, context - answer), answer)
    rates = {name: measure_rate(str(folder), load.prompt, load.output, threads) for name, folder in folders.items()}
    prices = {
        name: price(Deployment(own, machine, precision), load, rates[name])
        for name, own in zip(folders, (loaded.spec, spec), strict=True)
    }
    return prices, rate_notes(rates, context)


def machine_note() -> str:
    """Return the line that says for which machine speeds are predicted."""
    return this_machine()[1]
