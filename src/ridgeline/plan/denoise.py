"""Plan diffusion language models: the cost of a pass over a whole sequence, and of an answer that takes several passes.

LLaDA (Nie et al., arXiv:2502.09992) is a Llama with bidirectional attention. A pass takes the whole sequence, prompt
and masked answer, and returns logits for every position. Then some masks are filled, and the next pass begins. All keys
change with every pass, so nothing can be cached, and no token is final before the last pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.cost.calibrated import calibrated_step, facts_of
from ridgeline.cost.operations import Operation, Slice
from ridgeline.cost.precision import FLOAT_BYTES
from ridgeline.cost.roofline import StepTime, time_step
from ridgeline.cost.shard import device_operations
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Load, Planner

UNKNOWN = (
    "not known: how many passes an answer of a given quality needs (the authors of LLaDA found one per token best)"
)


@dataclass(frozen=True, slots=True)
class Denoising:
    """The cost of a load on one device: bytes, and seconds of one pass. An answer takes `passes` passes.

    logits_bytes: float32 logits for every position.
    """

    load: Load
    passes: int
    weight_bytes: float
    activation_bytes: float
    logits_bytes: float
    memory_bytes: int
    step: StepTime

    @property
    def used_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.logits_bytes

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.memory_bytes

    @property
    def latency_s(self) -> float:
        return self.passes * self.step.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.load.batch * self.load.output / self.latency_s


def denoise(planner: Planner, load: Load, passes: int | None = None) -> Denoising:
    """Plan a load. passes: passes per answer; None: one per token. Raises RequestError if the context is too long."""
    planner.check(load.context)
    d = planner.deployment
    if d.scheme.ep > 1 or d.scheme.pp > 1:
        raise RequestError(
            f"a diffusion model can be planned with tp and replicas only; leave out ep {d.scheme.ep}, pp {d.scheme.pp}"
        )
    batch = [Slice(load.batch, load.context, load.context, load.context)]
    ops = tuple(_both_ways(device_operations(planner.forward, batch, d.scheme), load.context))
    rates = d.hardware.rates
    step = time_step(ops, d.hardware) if rates is None else calibrated_step(ops, facts_of(d.spec), batch, d.hardware)
    tokens = load.batch * load.context
    stream = 4 * d.precision.activation_bytes(tokens * d.spec.hidden_size)
    logits = FLOAT_BYTES * tokens * d.spec.vocab_size / d.scheme.tp
    most = max(op.activation_bytes for op in ops if op.name != "head")
    return Denoising(
        load, passes or load.output, planner.memory.weight_bytes, stream + most, logits, d.hardware.memory_bytes, step
    )


def _both_ways(operations: tuple[Operation, ...], context: int) -> Iterator[Operation]:
    """Yield the operations with attention that is not causal: every query attends to all keys."""
    more = 2 * context / (context + 1)
    for op in operations:
        if op.kind == "state":
            passes = tuple((numbers * more, rows) for numbers, rows in op.passes)
            yield replace(op, flops=op.flops * more, passes=passes)
        else:
            yield op
