"""The model and the machine as the planner sees them: what a step moves and computes, and how long it should take."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ridgeline.llm import LLM
from ridgeline.measure import measure_roof
from ridgeline.plan.operations import Forward, Slice
from ridgeline.plan.planner import Deployment
from ridgeline.plan.precision import Precision, products_type
from ridgeline.plan.roofline import time_step
from ridgeline.sched.stats import StepShape
from ridgeline.spec.dtype import DTYPE_NAMES, config_dtype
from ridgeline.spec.hardware import HardwareSpec

MACHINE = "this machine"


def deployment_of(llm: LLM) -> Deployment:
    """Takes about a second: the roof of the machine is measured, with the kernels that the model runs on."""
    assert llm.config is not None
    loaded, memory = llm.loaded, llm.loaded.table.memory
    roof = measure_roof(loaded.table)
    hardware = HardwareSpec(
        MACHINE, memory_bytes=llm.config.free_bytes, read_bytes_per_s=roof.read_bytes_per_s,
        flops_per_s={"float32": roof.flops_per_s}, kind="cpu" if memory.on_host else "gpu",
    )  # fmt: skip
    stored = loaded.model.format
    wanted = llm.options.dtype
    dtype = config_dtype(llm.checkpoint.config) if wanted == "auto" else DTYPE_NAMES[wanted]
    weights = stored.name if stored.is_lossy else dtype
    products = products_type(hardware, weights, "float32")
    precision = Precision(weights, llm.config.kv_cache_dtype, "float32", products=products)
    chunk = llm.config.max_num_batched_tokens
    return Deployment(loaded.spec, hardware, precision, page_tokens=llm.config.block_size, chunk=chunk)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of one step: new tokens, sequences, bytes moved, operations, seconds that it took and that it should take."""

    tokens: int
    sequences: int
    bytes: float
    flops: float
    measured_s: float
    predicted_s: float


CONTEXT_TOKENS = 16  # so near to each other, two decode steps cost the same
KEPT_COSTS = 4096


class StepCost(NamedTuple):
    """Bytes moved, operations, and the seconds that they should take."""

    bytes: float
    flops: float
    seconds: float


class StepLedger:
    """Counts what steps move and compute."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._forward = Forward(deployment.spec, deployment.precision)
        self._costs: dict[tuple[Slice, ...], StepCost] = {}

    def cost(self, shape: StepShape) -> StepCost:
        """Of a step, in microseconds: sequences with one token each are counted at their mean context, which is exact
        for attention to everything and for recurrences, and steps that are almost alike are counted once.
        """
        contexts = [context for tokens, context, sampled in shape if tokens == sampled == 1]
        rest = Counter(work for work in shape if not work[0] == work[2] == 1)
        batch = [Slice(n, tokens, context, sampled) for (tokens, context, sampled), n in rest.items()]
        if contexts:
            mean = round(sum(contexts) / len(contexts) / CONTEXT_TOKENS) * CONTEXT_TOKENS
            batch.append(Slice(len(contexts), 1, max(mean, 1)))
        key = tuple(batch)
        found = self._costs.get(key)
        if found is None:
            timed = time_step(self._forward.operations(batch), self.deployment.hardware)
            found = StepCost(timed.bytes, timed.flops, timed.seconds)
            if len(self._costs) >= KEPT_COSTS:
                self._costs.clear()
            self._costs[key] = found
        return found

    def roof(self) -> dict[str, float]:
        """Bytes and operations per second at most."""
        hardware, compute = self.deployment.hardware, self.deployment.precision.compute
        return {"bytes_per_s": hardware.read_bytes_per_s, "flops_per_s": hardware.peak(compute)}

    def figures(self, shape: StepShape, measured_s: float) -> dict[str, float] | None:
        """Of a step; None of one that computed nothing."""
        if not shape or not measured_s:
            return None
        batch = [Slice(n, tokens, context, sampled) for (tokens, context, sampled), n in Counter(shape).items()]
        timed = time_step(self._forward.operations(batch), self.deployment.hardware)
        tokens = sum(tokens for tokens, _, _ in shape)
        return asdict(StepFigures(tokens, len(shape), timed.bytes, timed.flops, measured_s, timed.seconds))
