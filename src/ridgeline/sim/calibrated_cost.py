"""The time of a step in a simulation on a calibrated machine: the parts of cost/calibrated.py:calibrated_step.

    by a step's tokens     passes over the weights, their bytes, activations          computed once for each number
    by its rows of logits  the head
    by its sequences       their number, bytes of state, activations, passes over keys and values

The share that is read from memory depends on all bytes of a step, so passes are summed separately for data in caches
and data in memory. Seconds are summed as whole femtoseconds: a step of 9,000 s fits into 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.cost.calibrated import Counts, facts_of, far_at, passes_s, terms_of
from ridgeline.cost.operations import Forward, Operation, Slice
from ridgeline.cost.roofline import held_bytes
from ridgeline.errors import RequestError
from ridgeline.plan.expected import ROOF, Sureness
from ridgeline.plan.planner import Deployment
from ridgeline.sim.cost import FactoredCost, RooflineCost, StepCost, Sums
from ridgeline.spec import ModelSpec
from ridgeline.spec.heads import HeadSpec
from ridgeline.spec.rates import Rates

FEMTO = 1e-15
BITS = 8  # bits of a byte: activations of 4 bits may take half bytes


def cost_of(deployment: Deployment, sure: Sureness = ROOF) -> StepCost:
    """Return the expected cost on a calibrated machine, and on any other the roofline's bound.

    sure: margins over the times to expect, which then take the place of the bound (plan/expected.py). Raises
    RequestError for a scheme that is not simulated.
    """
    if deployment.offload:
        raise RequestError("weights or state in the host's memory are not simulated; leave out offload")
    return _cost(deployment, None, sure)


def draft_cost_of(deployment: Deployment, sure: Sureness = ROOF) -> StepCost:
    """Return the cost of the steps of a deployment's draft model or head. Raises RequestError as `cost_of` does."""
    draft, drafts = deployment.draft, deployment.speculation
    spec = draft.running(drafts.depth) if draft and drafts else None
    assert spec is not None, "the deployment has no draft model"
    return _cost(deployment, spec, sure)


def _cost(deployment: Deployment, spec: ModelSpec | HeadSpec | None, sure: Sureness) -> StepCost:
    rates, found = deployment.hardware.rates, sure.efficiency
    cost = RooflineCost(deployment, spec, found) if rates is None else CalibratedCost(deployment, rates, spec)
    if sure.tpot == 1:
        return cost
    return FactoredCost(cost, sure.tpot, RooflineCost(deployment, spec) if found and sure.tpot < 1 else None)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Operations that do not depend on contexts.

    near_s: seconds of passes over data in caches. slower_s: additional seconds if the data is in memory.
    """

    near_s: float
    slower_s: float
    held_bytes: float
    moved_bytes: float
    calls: int

    @classmethod
    def of(cls, operations: Iterable[Operation], rates: Rates) -> _Fixed:
        found = [op for op in operations if op.kind != "state"]
        near = [passes_s(op, rates, 0.0) for op in found]
        far = [passes_s(op, rates, 1.0) for op in found]
        return cls(
            sum(near),
            sum(max(b - a, 0.0) for a, b in zip(near, far, strict=True)),
            sum(op.layers * held_bytes(op) for op in found),
            sum(op.layers * op.activation_bytes for op in found),
            sum(op.layers for op in found if op.passes),
        )


class CalibratedCost:
    """The time of calibrated_step, except for rounding (tests/pure/test_sim_clock.py).

    spec: the draft model or head whose steps are timed instead of the deployment's model. Raises RequestError for more
    than one device: communication was not measured.
    """

    def __init__(self, deployment: Deployment, rates: Rates, spec: ModelSpec | HeadSpec | None = None) -> None:
        scheme = deployment.scheme
        if scheme.tp * scheme.ep * scheme.pp > 1:
            raise RequestError(
                f"tp {scheme.tp}, ep {scheme.ep}, pp {scheme.pp}: {deployment.hardware.name} was measured as one "
                "device; set all three to 1, or name another machine with --hardware"
            )
        own = spec or deployment.spec
        self._forward, self._facts = Forward(own, deployment.precision), facts_of(own, drafts=spec is not None)
        self._rates = rates
        first = self._forward.state_operations((Slice(1, 1, 1),))
        self._attending = sum(op.layers for op in first if op.passes)
        self._bodies: dict[int, _Fixed] = {}
        self._heads: dict[int, _Fixed] = {}

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        """Return 1, the bytes of state and the bits of activations of a sequence and, for each operation of attention,
        the femtoseconds of its passes over data in caches and over data in memory.
        """
        held = moved = 0.0
        passes: list[int] = []
        for op in self._forward.state_operations((Slice(1, tokens, context),)):
            held += op.layers * held_bytes(op)
            moved += op.layers * op.activation_bytes
            if op.passes:
                passes += (round(passes_s(op, self._rates, far) / FEMTO) for far in (0.0, 1.0))
        return (1, round(held), round(moved * BITS), *passes)

    def seconds(self, tokens: int, rows: int, sums: Sums) -> Any:
        if tokens not in self._bodies or rows not in self._heads:
            self._ask(tokens, rows)
        body, head, rates = self._bodies[tokens], self._heads[rows], self._rates
        sequences, held, moved, *passes = sums
        far = self._far(body.held_bytes + head.held_bytes + held)
        counts = Counts(
            tokens, _first(sequences), rows, self._attending + body.calls + head.calls, self._attending,
            body.moved_bytes + head.moved_bytes + moved / BITS,
        )  # fmt: skip
        total = body.near_s + head.near_s + far * (body.slower_s + head.slower_s)
        # Not sum(): it is more exact for floats than for arrays, and one step must equal the same step in an array.
        for name, amount in terms_of(self._facts, counts, far).items():
            total = total + amount * rates.terms.get(name, 0.0)
        for near, slow in zip(passes[::2], passes[1::2], strict=True):
            total = total + (near + far * _positive(slow - near)) * FEMTO
        return total

    def _far(self, held: Any) -> Any:
        """Return the share that is read from memory, by the scalar function: logarithms of arrays may differ."""
        if isinstance(held, np.ndarray):
            return np.array([far_at(size, self._rates) for size in held.tolist()])
        return far_at(held, self._rates)

    def _ask(self, tokens: int, rows: int) -> None:
        found = self._forward.operations((Slice(1, tokens, tokens, rows),))
        self._bodies[tokens] = _Fixed.of((op for op in found if op.name != "head"), self._rates)
        self._heads[rows] = _Fixed.of((op for op in found if op.name == "head"), self._rates)


def _first(count: Any) -> int:
    """Return the number of sequences, which is equal in all steps of an array."""
    return int(count[0]) if isinstance(count, np.ndarray) else count


def _positive(number: Any) -> Any:
    return np.maximum(number, 0) if isinstance(number, np.ndarray) else max(number, 0)
