"""The price of a changed model: what it costs less, and what it lost, in one report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.compress.compare import Comparison
from ridgeline.cost.calibration import this_machine
from ridgeline.cost.precision import cpu_precision
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec
from ridgeline.spec.storage import EXACT, default_storage

FILE = "price_report.json"
CONTEXT = 512  # tokens of the sequence whose decode is predicted, or the model's longest context if that is shorter
ANSWER_SHARE = 4  # one part in four of it is the answer


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a model.

    state_bytes: bytes of state that each token adds, at the start of a sequence. recurrent_bytes: bytes of recurrent
    state of a sequence. tokens_per_s: decode of one sequence, as the planner predicts it for this machine.
    """

    params: int
    state_bytes: int
    recurrent_bytes: int
    tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {
            "params": self.params, "state_bytes_per_token": self.state_bytes,
            "recurrent_state_bytes": self.recurrent_bytes, "predicted_tokens_per_s": self.tokens_per_s,
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


def price(loaded: LoadedModel, spec: ModelSpec) -> Price:
    """Return the price of a model whose weights have the types of `loaded`."""
    storage, (machine, _) = default_storage(loaded.dtype), this_machine()
    context = min(CONTEXT, spec.max_position_embeddings)
    answer = max(1, context // ANSWER_SHARE)
    planner = Planner(Deployment(spec, machine, cpu_precision(loaded.dtype, storage.dtype, machine)))
    states = [layer.mixer.state() for layer in spec.layers if layer.mixer]
    row = sum(storage.part_bytes(part) for state in states if not state.snapshot for part in state.parts)
    recurrent = sum(EXACT.part_bytes(part) for state in states if state.snapshot for part in state.parts)
    speed = planner.figures(Load(1, max(1, context - answer), answer)).tokens_per_s
    return Price(spec.num_params(), row, recurrent, speed)


def machine_note() -> str:
    """Return the line that says for which machine speeds are predicted."""
    return this_machine()[1]
