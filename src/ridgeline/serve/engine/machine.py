"""Predict with the planner what a step of the engine moves and computes, and how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ridgeline.cost.operations import Slice
from ridgeline.llm import LLM
from ridgeline.measure import measure_roof
from ridgeline.measure.predict import calibrated_machine, planner_of, speculation_of_engine
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.sched.stats import StepShape
from ridgeline.spec.hardware import HardwareSpec

CONTEXT_TOKENS = 16  # mean contexts are rounded to this, so that similar decode steps share one cached cost
KEPT_COSTS = 4096


def deployment_of(llm: LLM) -> Deployment:
    """Return the model on this machine, as the planner takes it.

    The machine is the calibrated one, if `ridgeline calibrate` ran with these kernels and this number of threads.
    Otherwise its peak bandwidth and compute are measured, which takes about a second.
    """
    assert llm.config is not None
    machine, _ = calibrated_machine(llm.loaded.table.driver, llm.loaded.table.memory.device)
    found = planner_of(llm.loaded, llm.config, machine or _measured(llm)).deployment
    drafts = speculation_of_engine(llm.config, llm.draft_spec)
    return found if drafts is None else replace(found, speculation=drafts)


def _measured(llm: LLM) -> HardwareSpec:
    assert llm.config is not None
    table = llm.loaded.table
    return measure_roof(table).hardware(memory_bytes=llm.config.free_bytes, on_host=table.memory.on_host)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step.

    tokens: number of new tokens. bytes: bytes moved. flops: floating-point operations. measured_s: measured time in
    seconds. predicted_s: predicted time in seconds; None if the machine is not calibrated, since the roofline leaves
    out the host's work, which is most of a small model's step.
    """

    tokens: int
    sequences: int
    bytes: float
    flops: float
    measured_s: float
    predicted_s: float | None


class StepEstimate(NamedTuple):
    """The cost of a step: bytes moved, floating-point operations, and times in seconds.

    seconds: predicted time, or the roofline's if the machine is not calibrated. roof_s: least time by the roofline.
    predicted_s: predicted time, or 0 if the machine is not calibrated.
    """

    bytes: float
    flops: float
    seconds: float
    roof_s: float
    predicted_s: float


class StepLedger:
    """Computes the cost of steps."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._planner = Planner(deployment)
        self._roof = Planner(replace(deployment, hardware=deployment.hardware.roof()))
        self._costs: dict[tuple[Slice, ...], StepEstimate] = {}

    def cost(self, shape: StepShape) -> StepEstimate:
        """Return the cost of a step. This takes microseconds.

        Sequences in decode are counted at their mean context, which is exact for full attention and for recurrent
        layers. The costs of similar steps are cached.
        """
        contexts = [context for tokens, context, sampled in shape if tokens == sampled == 1]
        batch = _slices([work for work in shape if not work[0] == work[2] == 1])
        if contexts:
            mean = round(sum(contexts) / len(contexts) / CONTEXT_TOKENS) * CONTEXT_TOKENS
            batch.append(Slice(len(contexts), 1, max(mean, 1)))
        key = tuple(batch)
        found = self._costs.get(key)
        if found is None:
            timed = self._planner.step(batch)
            predicted_s = timed.seconds if self.predicts else 0.0
            found = StepEstimate(timed.bytes, timed.flops, timed.seconds, self._roof.step(batch).seconds, predicted_s)
            if len(self._costs) >= KEPT_COSTS:
                self._costs.clear()
            self._costs[key] = found
        return found

    @property
    def predicts(self) -> bool:
        """Return whether predicted times are available, which needs a calibrated machine and a model that is whole.

        A calibration does not time the sums of ranks.
        """
        return self.deployment.hardware.is_measured and self.deployment.spec.ranks == 1

    def roof(self) -> dict[str, float]:
        """Return the peak bandwidth in bytes per second and the peak compute in operations per second."""
        hardware, compute = self.deployment.hardware, self.deployment.precision.compute
        return {"bytes_per_s": hardware.read_bytes_per_s, "flops_per_s": hardware.peak(compute)}

    def figures(self, shape: StepShape, measured_s: float) -> dict[str, float | None] | None:
        """Return the figures of a step, or None for a step that computed nothing."""
        if not shape or not measured_s:
            return None
        timed = self._planner.step(_slices(shape))
        tokens = sum(tokens for tokens, _, _ in shape)
        predicted_s = timed.seconds if self.predicts else None
        return asdict(StepFigures(tokens, len(shape), timed.bytes, timed.flops, measured_s, predicted_s))


def _slices(shape: Sequence[tuple[int, int, int]]) -> list[Slice]:
    return [Slice(n, tokens, context, sampled) for (tokens, context, sampled), n in Counter(shape).items()]
