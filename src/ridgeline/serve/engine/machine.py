"""The model and the machine as the planner sees them: what a step moves and computes, and how long it should take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ridgeline.cost.operations import Slice
from ridgeline.llm import LLM
from ridgeline.measure import measure_roof
from ridgeline.measure.predict import calibrated_machine, planner_of
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.sched.stats import StepShape
from ridgeline.spec.hardware import HardwareSpec

CONTEXT_TOKENS = 16  # so near to each other, two decode steps cost the same
KEPT_COSTS = 4096


def deployment_of(llm: LLM) -> Deployment:
    """The model on this machine as it was calibrated, with these kernels and as many threads; otherwise on its roof,
    which is measured, in about a second.
    """
    assert llm.config is not None
    machine, _ = calibrated_machine(llm.loaded.table.driver)
    return planner_of(llm.loaded, llm.config, machine or _measured(llm)).deployment


def _measured(llm: LLM) -> HardwareSpec:
    assert llm.config is not None
    table = llm.loaded.table
    return measure_roof(table).hardware(memory_bytes=llm.config.free_bytes, on_host=table.memory.on_host)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step: new tokens, sequences, bytes moved, operations, seconds that it took.

    predicted_s: seconds that it should take; None where the machine is not calibrated, since the roof leaves out what
    the host does, which is most of a small model's step.
    """

    tokens: int
    sequences: int
    bytes: float
    flops: float
    measured_s: float
    predicted_s: float | None


class StepEstimate(NamedTuple):
    """Bytes moved, operations, the seconds that they should take, and those that they would take at the roof.

    On a machine that is not calibrated, `seconds` are those of the roof, and predicted_s is 0.
    """

    bytes: float
    flops: float
    seconds: float
    roof_s: float
    predicted_s: float


class StepLedger:
    """Counts what steps move and compute."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._planner = Planner(deployment)
        self._roof = Planner(replace(deployment, hardware=replace(deployment.hardware, rates=None)))
        self._costs: dict[tuple[Slice, ...], StepEstimate] = {}

    def cost(self, shape: StepShape) -> StepEstimate:
        """Of a step, in microseconds: sequences with one token each are counted at their mean context, which is exact
        for attention to everything and for recurrences, and steps that are almost alike are counted once.
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
        """Whether times are what the engine is expected to take: the machine is calibrated."""
        return self.deployment.hardware.rates is not None

    def roof(self) -> dict[str, float]:
        """Bytes and operations per second at most."""
        hardware, compute = self.deployment.hardware, self.deployment.precision.compute
        return {"bytes_per_s": hardware.read_bytes_per_s, "flops_per_s": hardware.peak(compute)}

    def figures(self, shape: StepShape, measured_s: float) -> dict[str, float | None] | None:
        """Of a step; None of one that computed nothing."""
        if not shape or not measured_s:
            return None
        timed = self._planner.step(_slices(shape))
        tokens = sum(tokens for tokens, _, _ in shape)
        predicted_s = timed.seconds if self.predicts else None
        return asdict(StepFigures(tokens, len(shape), timed.bytes, timed.flops, measured_s, predicted_s))


def _slices(shape: Sequence[tuple[int, int, int]]) -> list[Slice]:
    return [Slice(n, tokens, context, sampled) for (tokens, context, sampled), n in Counter(shape).items()]
