"""The time of a step in a simulation, from sums of whole numbers over its sequences: their order does not matter.

    sums = [sum of each number of cost.of(tokens, context), over the sequences of the step]
    seconds = cost.seconds(tokens of the step, rows of logits, sums)

`seconds` also takes arrays of sums, one entry per step, for consecutive steps of the same sequences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ridgeline.cost.efficiency import Efficiency, expected_step
from ridgeline.cost.operations import Forward, Operation, Slice
from ridgeline.cost.roofline import StepTime, time_step
from ridgeline.cost.shard import device_operations, device_state_operations
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Deployment
from ridgeline.spec import ModelSpec
from ridgeline.spec.heads import HeadSpec

Sums = Sequence[int] | np.ndarray[Any, Any]  # integers, or arrays of integers
Timer = Callable[[Sequence[Operation]], StepTime]  # times operations, without what a step takes for each sequence


class StepCost(Protocol):
    """Computes the time that a step takes."""

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        """Return what a sequence with `tokens` new tokens, `context` tokens including them, adds to a step's sums."""
        ...

    def seconds(self, tokens: int, rows: int, sums: Sums) -> Any:
        """Return the seconds of a step with `tokens` tokens and `rows` rows of logits; an array if sums are arrays."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """The time of a step as a function of its tokens and its contexts, measured or assumed.

    tokens, step_s: points (tokens of a step, ascending; its seconds), joined by straight lines; the last line extends
    beyond them. context_token_s: seconds for each token in the contexts of a step's sequences.
    """

    tokens: tuple[int, ...]
    step_s: tuple[float, ...]
    context_token_s: float = 0.0

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if not self.tokens or len(self.tokens) != len(self.step_s) or not ascending:
            raise RequestError("step times need as many ascending numbers of tokens as seconds, and one at least")
        if min(*self.step_s, self.context_token_s) < 0:
            raise RequestError("step times must not be negative")

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        return (context,)

    def seconds(self, tokens: int, rows: int, sums: Sums) -> Any:
        return self._base(tokens) + self.context_token_s * sums[0]

    def _base(self, tokens: int) -> float:
        if tokens > self.tokens[-1] and len(self.tokens) > 1:
            (x0, x1), (y0, y1) = self.tokens[-2:], self.step_s[-2:]
            return y1 + (y1 - y0) * (tokens - x1) / (x1 - x0)
        return float(np.interp(tokens, self.tokens, self.step_s))

    @classmethod
    def read(cls, path: str | Path) -> LinearCost:
        """Read JSON {"tokens": [..], "step_s": [..], "context_token_s": ..}. Raises RequestError for anything else."""
        try:
            row = json.loads(Path(path).read_text(encoding="utf-8"))
            points = tuple(map(int, row["tokens"])), tuple(map(float, row["step_s"]))
            return cls(*points, float(row.get("context_token_s", 0.0)))
        except OSError as e:
            raise RequestError(f"the step times {path} cannot be read: {e}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise RequestError(f'{path} is no {{"tokens": [..], "step_s": [..], "context_token_s": ..}}: {e}') from None


@dataclass(frozen=True, slots=True)
class _Line:
    """The time of an operation in all its layers: an overhead, and the longer of compute and memory time."""

    flop_s: float
    byte_s: float
    overhead_s: float

    @classmethod
    def of(cls, operation: Operation, timer: Timer) -> _Line:
        """Derive the line from three operations that are timed: one computes, one moves data, one does neither."""
        still = replace(operation, flops=0.0, weight_bytes=0.0, state_bytes=0.0, activation_bytes=0.0)

        def seconds(probe: Operation) -> float:
            return timer([probe]).operations[0].seconds

        overhead = seconds(still)
        computes, moves = seconds(replace(still, flops=PROBE)), seconds(replace(still, state_bytes=PROBE))
        return cls((computes - overhead) / PROBE, (moves - overhead) / PROBE, overhead)

    def seconds(self, flops: Any, size: Any) -> Any:
        compute, memory = self.flop_s * flops, self.byte_s * size
        longer = np.maximum(compute, memory) if isinstance(compute, np.ndarray) else max(compute, memory)
        return longer + self.overhead_s


HEADS = ("head", "all-gather")  # operations over rows of logits
PROBE = 1e18  # operations or bytes: overheads are negligible beside them


class RooflineCost:
    """The time of a step on a machine's roofline: the parts of cost/roofline.py:time_step. With an efficiency it is the
    time to expect: the parts of cost/efficiency.py:expected_step.

    Operations with weights depend on the tokens of a step alone, so they are computed once for each number of tokens;
    operations on state are summed over sequences. The total is that of the whole step, except for rounding
    (tests/pure/test_sim_cost.py). With an efficiency, a new request takes its time in the step of its first tokens; it
    is not counted for a prompt that begins in the prefix cache.
    spec: the draft model or head whose steps are timed instead of the deployment's model. Raises RequestError for a
    scheme that is not simulated.
    """

    def __init__(
        self, deployment: Deployment, spec: ModelSpec | HeadSpec | None = None, efficiency: Efficiency | None = None
    ) -> None:
        scheme = deployment.scheme
        if scheme.ep > 1 or scheme.pp > 1:
            raise RequestError(f"ep {scheme.ep}, pp {scheme.pp} cannot be simulated; set both to 1, or use tp")
        self._forward = Forward(spec or deployment.spec, deployment.precision)
        # The memory's rate counts for every step, since the bytes of a step are not known here before it is timed.
        hardware, self._scheme = replace(deployment.hardware, reads=None), scheme
        self._timer: Timer = partial(time_step, hardware=hardware)
        self._sequence_s = self._request_s = 0.0
        if efficiency is not None:
            self._timer = partial(expected_step, batch=(), hardware=hardware, found=efficiency)
            self._sequence_s = efficiency.values["sequence_s"]
            self._request_s = 0.0 if spec else efficiency.values["request_s"]
        first = device_state_operations(self._forward, Slice(1, 1, 1), scheme)
        self._lines = [_Line.of(operation, self._timer) for operation in first]
        self._bodies: dict[int, float] = {}
        self._heads: dict[int, float] = {}

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        found = [1, int(tokens == context)]
        for operation in device_state_operations(self._forward, Slice(1, tokens, context), self._scheme):
            found += (int(operation.flops), int(operation.bytes))
        return tuple(found)

    def seconds(self, tokens: int, rows: int, sums: Sums) -> Any:
        if tokens not in self._bodies or rows not in self._heads:
            self._ask(tokens, rows)
        total = self._bodies[tokens] + self._heads[rows]
        for line, flops, size in zip(self._lines, sums[2::2], sums[3::2], strict=True):
            total = total + line.seconds(flops, size)
        return total + self._sequence_s * sums[0] + self._request_s * sums[1]

    def _ask(self, tokens: int, rows: int) -> None:
        """Compute the time of operations without contexts; the head's depends on the rows of logits only."""
        one = [Slice(1, tokens, tokens, rows)]
        timed = self._timer(device_operations(self._forward, one, self._scheme))
        others = [t for t in timed.operations if t.operation.kind != "state"]
        self._heads[rows] = sum(t.seconds for t in others if t.operation.name in HEADS)
        self._bodies[tokens] = timed.overhead_s + sum(t.seconds for t in others if t.operation.name not in HEADS)


@dataclass(frozen=True, slots=True)
class FactoredCost:
    """A cost whose times are multiplied by a factor, but not below those of another cost. least: None: no bound."""

    cost: StepCost
    factor: float
    least: StepCost | None = None

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        return self.cost.of(tokens, context)

    def seconds(self, tokens: int, rows: int, sums: Sums) -> Any:
        found = self.factor * self.cost.seconds(tokens, rows, sums)
        if self.least is None:
            return found
        least = self.least.seconds(tokens, rows, sums)
        return np.maximum(found, least) if isinstance(found, np.ndarray) else max(found, least)
