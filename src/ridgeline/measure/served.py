"""What a Ridgeline server says of itself (GET /plan), as the simulator takes it: model, machine, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.plan.footprint import Memory
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment
from ridgeline.plan.precision import Precision
from ridgeline.sim.cost import RooflineCost
from ridgeline.sim.metrics import Report
from ridgeline.sim.settings import Settings
from ridgeline.sim.simulator import simulate
from ridgeline.sim.workload import Workload
from ridgeline.spec import codec
from ridgeline.spec.hardware import HardwareSpec

PATH = "/plan"
_MACHINE = ("name", "memory_bytes", "read_bytes_per_s", "flops_per_s", "op_overhead_s", "step_overhead_s", "kind")


def describe(deployment: Deployment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON. settings: pages of each group, sequences, tokens of a step, longest context, as Settings names them."""
    return {
        "model": codec.to_json(deployment.spec),
        "machine": {name: getattr(deployment.hardware, name) for name in _MACHINE},
        "precision": asdict(deployment.precision),
        "page_tokens": deployment.page_tokens,
        "settings": dict(settings),
    }


def predict(described: Mapping[str, Any], workload: Workload, slo: Slo | None, seed: int) -> Report:
    """The same workload through the simulator. Raises RequestError for what is no such description."""
    try:
        settings = described["settings"]
        deployment = Deployment(
            codec.from_json(described["model"]), HardwareSpec(**described["machine"]),
            Precision(**described["precision"]), page_tokens=described["page_tokens"],
            chunk=settings["max_num_batched_tokens"],
        )  # fmt: skip
        memory = Memory(
            deployment.spec, deployment.precision, deployment.hardware, deployment.scheme,
            page_tokens=deployment.page_tokens, chunk=deployment.chunk,
        )  # fmt: skip
        chosen = Settings(memory.groups, **{**settings, "num_pages": tuple(settings["num_pages"])})
    except (KeyError, TypeError, ValueError) as e:
        raise RequestError(f"the server's {PATH} is not understood ({e!r}); are both of one version?") from None
    return simulate(workload, chosen, RooflineCost(deployment), slo=slo, seed=seed).report
