"""Choose a kernel for each op at load: backends in order of preference accept a case or say why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ridgeline.errors import DeviceError
from ridgeline.ops.api import PRIMITIVES, STAGES, Backend, Memory, Op, Weights
from ridgeline.ops.driver import Driver
from ridgeline.ops.stages import compose
from ridgeline.spec.text import describe

F = TypeVar("F", bound=Callable[..., Any])
CPU, REFERENCE = "cpu", "reference"  # devices without a number
GPU_BACKEND, NO_KERNEL = "triton", "no kernel for GPUs serves it yet"  # our kernels, and a reason to refuse any case
COMPOSED = "composed"  # the choice for a stage that no backend fuses


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that serves an op for a case, and why the backends before it do not."""

    op: str
    level: str
    case: str
    backend: str
    refusals: tuple[tuple[str, str], ...]  # (backend, reason)


class OpsTable:
    """The kernels of one device.

    Args:
        backends: candidates in order of preference. The last one has every primitive.
        overrides: backend name by op name, for diagnosis.
        driver: runs the kernels and records their calls; None on devices without one.

    Raises:
        DeviceError: for an override that names an unknown op or backend, or a backend that refuses.
    """

    def __init__(
        self,
        memory: Memory,
        backends: Sequence[Backend],
        overrides: Mapping[str, str] | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.memory, self.driver = memory, driver
        self._backends = backends
        self._overrides = dict(overrides or {})
        self._choices: dict[tuple[str, object], Choice] = {}
        self._check_overrides()

    def primitive(self, op: Op[F], case: object = None) -> F:
        """Return the kernel of a primitive."""
        backend = self._choose(op, case)
        if backend is None:
            raise DeviceError(f"no backend serves {op.name} for {case}: {self._choices[op.name, case].refusals}")
        return backend.primitive(op, case)  # type: ignore[return-value]

    def stage(self, op: Op[F], case: object, weights: Weights) -> F:
        """Return the kernel of a stage over its weights. It is composed of primitives where no backend fuses it."""
        backend = self._choose(op, case)
        reason = backend.refuses_weights(op, weights) if backend else None
        if backend is None or reason is not None:
            if backend is not None:
                self._record_composed(op, case, backend.name, str(reason))
            return compose(op, case, weights, self)  # type: ignore[return-value]
        return backend.stage(op, case, weights)  # type: ignore[return-value]

    def _record_composed(self, op: Op[Any], case: object, backend: str, reason: str) -> None:
        """Record that a stage is composed because of its weights, beside the choice for its case alone."""
        if self._overrides.get(op.name) == backend:
            raise DeviceError(f"--ops {op.name}={backend}: {reason}")
        found = self._choices[op.name, case]
        own = Choice(op.name, op.level, found.case, COMPOSED, (*found.refusals, (backend, reason)))
        self._choices[op.name, (case, reason)] = own

    def choose(self, op: Op[Any], case: object = None) -> Choice:
        """Return the choice for an op and a case, without building a kernel."""
        self._choose(op, case)
        return self._choices[op.name, case]

    def choices(self) -> tuple[Choice, ...]:
        """Return all choices made so far, in order."""
        return tuple(self._choices.values())

    def _choose(self, op: Op[Any], case: object) -> Backend | None:
        wanted = self._overrides.get(op.name)
        refusals: list[tuple[str, str]] = []
        chosen: Backend | None = None
        for backend in self._backends:
            if wanted is not None and backend.name != wanted:
                refusals.append((backend.name, f"overridden by --ops {op.name}={wanted}"))
            elif (reason := backend.refuses(op, case)) is not None:
                refusals.append((backend.name, reason))
            else:
                chosen = backend
                break
        if chosen is None and wanted not in (None, COMPOSED):
            reason = dict(refusals)[str(wanted)]
            raise DeviceError(f"--ops {op.name}={wanted}: {wanted} refuses {describe(case)}: {reason}")
        name = chosen.name if chosen else COMPOSED if op.level == "stage" else "none"
        self._choices[op.name, case] = Choice(
            op.name, op.level, describe(case) if case is not None else "-", name, tuple(refusals)
        )
        return chosen

    def _check_overrides(self) -> None:
        ops = {op.name: op for op in (*PRIMITIVES, *STAGES)}
        names = [b.name for b in self._backends]
        for op, backend in self._overrides.items():
            if op not in ops:
                raise DeviceError(f"--ops {op}={backend}: no such op; known are {', '.join(ops)}")
            allowed = [*names, COMPOSED] if ops[op].level == "stage" else names
            if backend not in allowed:
                raise DeviceError(f"--ops {op}={backend}: no such backend; known are {', '.join(allowed)}")
