"""Convert a Ridgeline server's description (GET /plan: model, machine, settings) for the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from ridgeline.cost.calibration import read_rates
from ridgeline.cost.precision import Precision
from ridgeline.engine.depth import DepthRule
from ridgeline.errors import RequestError
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, memory_of
from ridgeline.plan.speculation import Draft, Speculation, speculation_of
from ridgeline.sched.stats import DraftCounts
from ridgeline.sim.calibrated_cost import cost_of, draft_cost_of
from ridgeline.sim.drafting import drafts_of
from ridgeline.sim.metrics import Report
from ridgeline.sim.settings import Settings
from ridgeline.sim.simulator import simulate
from ridgeline.sim.workload import Workload
from ridgeline.spec import ModelSpec, codec
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.heads import HeadSpec

PATH = "/plan"
_MACHINE = (
    "name", "memory_bytes", "read_bytes_per_s", "flops_per_s", "op_overhead_s", "step_overhead_s", "kind", "sources",
)  # fmt: skip


def describe(
    deployment: Deployment, settings: Mapping[str, Any], draft_depth: Literal["chosen", "fixed"] = "fixed"
) -> dict[str, Any]:
    """Return the facts as JSON.

    settings: pages of each group, sequences, tokens of a step, longest context, as Settings names them.
    """
    machine = deployment.hardware
    rates = None if machine.rates is None else asdict(machine.rates)
    return {
        "model": codec.to_json(deployment.spec),
        "machine": {name: getattr(machine, name) for name in _MACHINE} | {"rates": rates},
        "precision": asdict(deployment.precision),
        "page_tokens": deployment.page_tokens,
        "settings": dict(settings),
        "drafts": None if deployment.speculation is None else _drafts_json(deployment.speculation, draft_depth),
    }


def _drafts_json(speculation: Speculation, draft_depth: str) -> dict[str, Any]:
    draft = speculation.draft
    assert draft is not None, "an engine has something that proposes drafts"
    spec = draft.spec
    return {
        "name": draft.name,
        "model": codec.to_json(spec) if isinstance(spec, ModelSpec) else None,
        "head": codec.head_to_json(spec) if spec is not None and not isinstance(spec, ModelSpec) else None,
        "most": speculation.depth,
        "depth": draft_depth,
    }


def _speculation(value: Mapping[str, Any] | None, counts: DraftCounts | None) -> Speculation | None:
    """Return a server's drafts. counts: drafts that were accepted in the run; without any, an acceptance is assumed."""
    if value is None:
        return None
    spec: ModelSpec | HeadSpec | None = None
    if value["model"] is not None:
        spec = codec.from_json(value["model"])
    elif value["head"] is not None:
        spec = codec.head_from_json(value["head"])
    found = speculation_of(Draft(str(value["name"]), spec), value["most"])
    if counts is None or not counts.tried_at or not counts.tried_at[0]:
        return found
    known = tuple(a for a, tried in zip(counts.acceptance, counts.tried_at, strict=True) if tried)
    return replace(found, acceptance=known, source="as measured in this run")


def _precision(value: Mapping[str, Any]) -> Precision:
    return Precision(**{**value, "matrices": tuple((str(n), str(kind)) for n, kind in value.get("matrices", ()))})


def predict(
    described: Mapping[str, Any], workload: Workload, slo: Slo | None, seed: int, counts: DraftCounts | None = None
) -> tuple[Report, str]:
    """Simulate a workload on the described server, and return a line that says where its step times are from.

    counts: the server's drafts in the measured run, whose acceptance the simulation has, too. Raises RequestError for
    an invalid description.
    """
    try:
        settings, machine = described["settings"], _machine(described["machine"])
        deployment = Deployment(
            codec.from_json(described["model"]), machine,
            _precision(described["precision"]), page_tokens=described["page_tokens"],
            chunk=settings["max_num_batched_tokens"], speculation=_speculation(described.get("drafts"), counts),
        )  # fmt: skip
        memory = memory_of(deployment)
        regimes = deployment.spec.regimes(settings["max_model_len"])
        chosen = Settings(memory.groups, **{**settings, "num_pages": tuple(settings["num_pages"]), "regimes": regimes})
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise RequestError(f"the server's {PATH} is not understood ({e!r}); are both of one version?") from None
    is_chosen = deployment.speculation is not None and described["drafts"]["depth"] == "chosen"
    drafts = drafts_of(deployment, _rule if is_chosen else None, draft_cost_of)
    found = simulate(workload, chosen, cost_of(deployment), slo=slo, seed=seed, drafts=drafts).report
    said = deployment.speculation
    return found, _times(machine) + (f"; acceptance of drafts {said.acceptance_text} ({said.source})" if said else "")


def _rule(most: int, rounds: bool) -> DepthRule:
    return DepthRule(most, rounds=rounds)


def _machine(described: Mapping[str, Any]) -> HardwareSpec:
    rates = described["rates"]
    return HardwareSpec(**{**described, "rates": None if rates is None else read_rates(rates)})


def _times(machine: HardwareSpec) -> str:
    said = machine.sources.get("operations", "it does not say how it knows")
    if not machine.is_measured:
        return f"steps at the roof of the server's machine ({said}), a bound: nothing is faster"
    return f"steps as its engine is expected to take them ({said})"
