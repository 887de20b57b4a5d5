"""Time the steps of one model, or of one head for speculative decoding, on one machine."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.cost.calibrated import calibrated_step, facts_of
from ridgeline.cost.efficiency import Efficiency, expected_step
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import StepTime, time_step
from ridgeline.cost.shard import Scheme, device_operations
from ridgeline.spec import ModelSpec
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.heads import HeadSpec


class Steps:
    """Times steps: by the roofline, with the rates of a calibrated machine, or as expected with an efficiency.

    drafts: the steps propose drafts. A draft model or a head is cut as its target is; where devices share experts, each
    has all of it.
    """

    def __init__(
        self, spec: ModelSpec | HeadSpec, precision: Precision, hardware: HardwareSpec, scheme: Scheme, *,
        drafts: bool = False, efficiency: Efficiency | None = None,
    ) -> None:  # fmt: skip
        self.forward = Forward(spec, precision)
        self._facts, self._hardware = facts_of(spec, drafts=drafts), hardware
        self._scheme = Scheme(scheme.replicas * scheme.ep, scheme.tp) if drafts else scheme
        self._efficiency = efficiency
        self._share = scheme.ep if drafts else 1

    def time(self, batch: Sequence[Slice]) -> StepTime:
        """Return the time of a step with any mix of sequences. With pipeline stages, the step ends on the last one."""
        if self._share > 1:
            batch = [Slice(-(-s.count // self._share), s.tokens, s.context, s.sampled) for s in batch]
        ops = device_operations(self.forward, batch, self._scheme)
        if self._efficiency is not None:
            return expected_step(ops, batch, self._hardware, self._efficiency)
        if self._hardware.rates is None:
            return time_step(ops, self._hardware)
        return calibrated_step(ops, self._facts, batch, self._hardware)
