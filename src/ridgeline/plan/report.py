"""Convert a plan to JSON: every figure in base units (bytes, seconds, tokens per second)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from ridgeline.cost.footprint import Footprint
from ridgeline.cost.roofline import StepTime
from ridgeline.plan.compare import Row
from ridgeline.plan.expected import WHY, expected
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Figures, Load, Planner
from ridgeline.plan.slo import Answer, Setting, kept
from ridgeline.plan.speculation import Speculation
from ridgeline.spec.hardware import HardwareSpec

Json = dict[str, Any]


def plan_json(name: str, planner: Planner, load: Load) -> Json:
    """Return a plan without comparisons. Raises RequestError for a context that is too long for the model."""
    d = planner.deployment
    figures = planner.figures(load)
    decode = planner.decode(load.batch, load.context)
    return {
        "model": name,
        "num_params": d.spec.num_params(),
        "num_active_params": d.spec.num_active_params(),
        "deployment": deployment_json(d),
        "load": {**asdict(load), "context": load.context},
        "memory": {
            **footprint_json(planner.footprint(load)),
            "sequence_bytes": planner.memory.sequence_bytes(load.context),
            "largest_batch": planner.memory.largest_batch(load.context),
            "longest_context": planner.memory.longest_context(load.batch),
        },
        "time": {**figures_json(figures), "knee_batch": planner.knee(load), **_drafts_json(planner, load)},
        **_expected_json(planner, load, figures),
        "decode": step_json(decode, d.hardware),
        "prefill": step_json(largest_chunk(planner, load.prompt), d.hardware),
    }


def _expected_json(planner: Planner, load: Load, roof: Figures) -> Json:
    """Return the percentiles of the figures, and what they come from; nothing where too little is known."""
    found = expected(planner, load, roof)
    if found is None:
        return {}
    return {
        "expected": {
            "known": found.known,
            "why": WHY[found.known],
            "figures": {k: dict(v) for k, v in found.bands.items()},
        }
    }


def _drafts_json(planner: Planner, load: Load) -> Json:
    """Return the seconds of a verification and of its drafts at the full context; nothing without drafts."""
    if planner.deployment.speculation is None:
        return {}
    at = load.batch, load.context
    return {"verification_s": planner.verification_s(*at), "drafting_s": planner.drafting_s(*at)}


def largest_chunk(planner: Planner, prompt: int) -> StepTime:
    """Return the slowest prefill step of a prompt."""
    return max(planner.chunks(prompt), key=lambda step: step.seconds)


def deployment_json(d: Deployment) -> Json:
    return {
        "hardware": hardware_json(d.hardware),
        "precision": {**asdict(d.precision), "compute": d.precision.compute},
        "scheme": {**asdict(d.scheme), "devices": d.scheme.devices},
        "page_tokens": d.page_tokens,
        "chunk": d.chunk,
        "prefix_hit": d.prefix_hit,
        "speculation": speculation_json(d.speculation) if d.speculation else None,
        "offload": asdict(d.offload),
        "blocks": asdict(d.blocks) if d.blocks else None,
    }


def speculation_json(s: Speculation) -> Json:
    """Return speculative decoding. draft_cost: steps of one token, if it is given; None if it is computed."""
    return {
        "draft": s.draft.name if s.draft else None, "kind": s.draft.kind if s.draft else None, "depth": s.depth,
        "acceptance": list(s.by_depth), "acceptance_source": s.source, "shares": list(s.shares), "tokens": s.tokens,
        "draft_cost": None if s.draft else s.draft_cost,
    }  # fmt: skip


def hardware_json(h: HardwareSpec) -> Json:
    return {
        "name": h.name, "kind": h.kind, "memory_bytes": h.memory_bytes, "read_bytes_per_s": h.read_bytes_per_s,
        "flops_per_s": dict(h.flops_per_s), "link": asdict(h.link) if h.link else None, "sources": dict(h.sources),
        "op_overhead_s": h.op_overhead_s, "step_overhead_s": h.step_overhead_s,
    }  # fmt: skip


def footprint_json(f: Footprint) -> Json:
    more = ("workspace_bytes", "reserve_bytes", "used_bytes", "spare_bytes", "fits")
    return {**asdict(f), **{name: getattr(f, name) for name in more}}


def figures_json(f: Figures) -> Json:
    names = (
        "step_s", "ttft_s", "tpot_s", "latency_s", "request_tokens_per_s", "tokens_per_s", "served_ttft_s",
        "served_tpot_s", "served_tokens_per_s", "device_seconds_per_token", "naive_step_s", "devices",
    )  # fmt: skip
    return {name: getattr(f, name) for name in names}


def step_json(step: StepTime, hardware: HardwareSpec) -> Json:
    """Return a step and its operations. The figures of an operation are sums over its layers."""
    rows = []
    for t in step.operations:
        op = t.operation
        rows.append({
            "name": op.name, "layers": op.layers, "flops": op.flops * op.layers, "bytes": op.bytes * op.layers,
            "weight_bytes": op.weight_bytes * op.layers, "state_bytes": op.state_bytes * op.layers,
            "activation_bytes": op.activation_bytes * op.layers, "link_bytes": op.link_bytes * op.layers,
            "intensity": op.intensity, "ridge": hardware.ridge(op.compute), "compute": hardware.unit(op.compute),
            "seconds": t.seconds, "bound": t.bound, "slack": t.slack if isfinite(t.slack) else None,
        })  # fmt: skip
    return {"seconds": step.seconds, "flops": step.flops, "bytes": step.bytes, "by_cause": step.by_cause(),
            "operations": rows}  # fmt: skip


def compare_json(rows: Sequence[Row]) -> list[Json]:
    """Return the rows of a comparison, in their order."""
    return [
        {
            "change": row.text, "gives_up": row.gives_up, "notes": list(row.notes), "fits": row.footprint.fits,
            "sequence_bytes": row.sequence_bytes, "largest_batch": row.largest_batch,
            "best_tokens_per_s": row.best_tokens_per_s, "pays_below": row.pays_below,
            "expected_tokens_per_s": dict(row.expected) if row.expected else None,
            "memory": footprint_json(row.footprint), "time": figures_json(row.figures),
        }
        for row in rows
    ]  # fmt: skip


def slo_json(promise: Slo, answer: Answer, confidence: float) -> Json:
    """Return the settings for latency limits. confidence: probability with which each limit is kept."""
    return {
        "promise_s": promise.limits,
        "confidence": confidence,
        "settings": [setting_json(promise, s) for s in answer.settings],
        "closest": setting_json(promise, answer.closest) if answer.closest else None,
        "otherwise": [setting_json(promise, s) for s in answer.otherwise],
    }


def setting_json(promise: Slo, s: Setting) -> Json:
    """Return a setting. sure_...: times that are kept with the confidence; "time" has medians."""
    return {
        "changed": s.changed, "hardware": s.deployment.hardware.name, "batch": s.figures.load.batch,
        "chunk": s.deployment.chunk, "scheme": asdict(s.deployment.scheme), "bound_by": s.why,
        "kept": kept(promise, s.figures, s.sure), "is_bound": s.is_bound, "sure_ttft_s": s.sure_ttft_s,
        "sure_tpot_s": s.sure_tpot_s, "time": figures_json(s.figures),
    }  # fmt: skip
