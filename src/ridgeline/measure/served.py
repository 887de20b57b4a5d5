"""Convert a Ridgeline server's description (GET /plan: model, machine, settings) for the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ridgeline.cost.calibration import read_rates
from ridgeline.cost.footprint import Memory
from ridgeline.cost.precision import Precision
from ridgeline.errors import RequestError
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment
from ridgeline.sim.calibrated_cost import cost_of
from ridgeline.sim.metrics import Report
from ridgeline.sim.settings import Settings
from ridgeline.sim.simulator import simulate
from ridgeline.sim.workload import Workload
from ridgeline.spec import codec
from ridgeline.spec.hardware import HardwareSpec

PATH = "/plan"
_MACHINE = (
    "name", "memory_bytes", "read_bytes_per_s", "flops_per_s", "op_overhead_s", "step_overhead_s", "kind", "sources",
)  # fmt: skip


def describe(deployment: Deployment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON. settings: pages of each group, sequences, tokens of a step, longest context, as Settings names them."""
    machine = deployment.hardware
    rates = None if machine.rates is None else asdict(machine.rates)
    return {
        "model": codec.to_json(deployment.spec),
        "machine": {name: getattr(machine, name) for name in _MACHINE} | {"rates": rates},
        "precision": asdict(deployment.precision),
        "page_tokens": deployment.page_tokens,
        "settings": dict(settings),
    }


def _precision(value: Mapping[str, Any]) -> Precision:
    return Precision(**{**value, "matrices": tuple((str(n), str(kind)) for n, kind in value.get("matrices", ()))})


def predict(described: Mapping[str, Any], workload: Workload, slo: Slo | None, seed: int) -> tuple[Report, str]:
    """Simulate a workload on the described server, and return a line that says where its step times are from.

    Raises RequestError for an invalid description.
    """
    try:
        settings, machine = described["settings"], _machine(described["machine"])
        deployment = Deployment(
            codec.from_json(described["model"]), machine,
            _precision(described["precision"]), page_tokens=described["page_tokens"],
            chunk=settings["max_num_batched_tokens"],
        )  # fmt: skip
        memory = Memory(
            deployment.spec, deployment.precision, deployment.hardware, deployment.scheme,
            page_tokens=deployment.page_tokens, chunk=deployment.chunk,
        )  # fmt: skip
        regimes = deployment.spec.regimes(settings["max_model_len"])
        chosen = Settings(memory.groups, **{**settings, "num_pages": tuple(settings["num_pages"]), "regimes": regimes})
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise RequestError(f"the server's {PATH} is not understood ({e!r}); are both of one version?") from None
    return simulate(workload, chosen, cost_of(deployment), slo=slo, seed=seed).report, _times(machine)


def _machine(described: Mapping[str, Any]) -> HardwareSpec:
    rates = described["rates"]
    return HardwareSpec(**{**described, "rates": None if rates is None else read_rates(rates)})


def _times(machine: HardwareSpec) -> str:
    said = machine.sources.get("operations", "it does not say how it knows")
    if machine.rates is None:
        return f"steps at the roof of the server's machine ({said}), a bound: nothing is faster"
    return f"steps as its engine is expected to take them ({said})"
