"""Print `ridgeline plan` for a diffusion model: its memory, the time of a pass over whole sequences, and the open
questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ridgeline.errors import RequestError

if TYPE_CHECKING:
    from ridgeline.cli.show.plan_tables import Figure
    from ridgeline.plan.denoise import Denoising
    from ridgeline.plan.planner import Deployment, Load


def plan_denoiser(
    name: str, deployment: Deployment, load: Load, note: str, unsupported: Mapping[str, object], as_json: bool
) -> None:
    """Print the plan. unsupported: options for autoregressive models only; raises RequestError if one is set."""
    from ridgeline.plan.denoise import UNKNOWN, denoise
    from ridgeline.plan.planner import Planner
    from ridgeline.plan.report import deployment_json, step_json

    if refused := [what for what, value in unsupported.items() if value]:
        raise RequestError(
            f"{name} is a diffusion model: {', '.join(refused)} works with autoregressive models only; leave it out "
            "(--weights, --activations, --tp, --batch, --context, --prompt and --output work)"
        )
    found = denoise(Planner(deployment), load)
    names = ("weight_bytes", "activation_bytes", "logits_bytes", "used_bytes", "memory_bytes", "fits")
    report: dict[str, Any] = {
        "model": name, "num_params": deployment.spec.num_params(), "deployment": deployment_json(deployment),
        "load": {**asdict(load), "context": load.context}, "memory": {n: getattr(found, n) for n in names},
        "time": {"pass_s": found.step.seconds, "passes": found.passes, "latency_s": found.latency_s,
                 "tokens_per_s": found.tokens_per_s * deployment.scheme.replicas},
        "pass": step_json(found.step, deployment.hardware), "times": note, "unknown": UNKNOWN,
    }  # fmt: skip
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        _show(report, deployment, load, found)


def _show(report: dict[str, Any], d: Deployment, load: Load, found: Denoising) -> None:
    from rich.text import Text

    from ridgeline.cli.show.plan_tables import figures_table, operations_table
    from ridgeline.cli.show.tables import Line, screen, show

    title = Text.assemble((report["model"], "bold"), " on ", (d.hardware.name, "bold")).append(
        f": {report['num_params'] / 1e9:,.2f} B parameters, a diffusion model\n{d.precision.weights} weights, "
        f"{d.precision.activations} activations; batch {load.batch:,} of {load.context:,} tokens "
        f"({load.prompt:,} of prompt, {load.output:,} of answer)"
    )
    show(
        screen(), title, figures_table("Memory per device", _memory(d, load, found)),
        figures_table("Time", _time(report, load, found)), operations_table("one pass", report["pass"]),
        Line(f"{report['times']}.", style="dim"), Line(f"{report['unknown']}.", style="dim"),
    )  # fmt: skip


def _memory(d: Deployment, load: Load, found: Denoising) -> Iterator[Figure]:
    from rich.text import Text

    from ridgeline.plan.units import decimal_bytes as size

    free = found.memory_bytes - found.used_bytes
    yield "weights", size(found.weight_bytes), f"{d.precision.weights} matrices, float32 vectors"
    yield "state", size(0), "none: attention is bidirectional, so keys and values change with every pass"
    yield "activations", size(found.activation_bytes), "the residual stream and the largest operation, for all tokens"
    yield "logits", size(found.logits_bytes), f"for every position: {load.batch:,} x {load.context:,} rows, float32"
    yield "free", size(free) if found.fits else Text(size(free), "red"), (
        f"of {size(found.memory_bytes)}" if found.fits else "does not fit: a smaller --batch, --context or --weights"
    )  # fmt: skip


def _time(report: dict[str, Any], load: Load, found: Denoising) -> Iterator[Figure]:
    from ridgeline.plan.units import number, seconds

    yield "pass", seconds(found.step.seconds), f"all {load.context:,} tokens of each of {load.batch:,} sequences"
    yield "passes", f"{found.passes:,}", "one per answer token; fewer if a pass unmasks several tokens"
    yield "latency", seconds(found.latency_s), "passes x pass: no token is final before the last pass"
    yield "total", f"{number(report['time']['tokens_per_s'])} tokens/s", "batch x answer x replicas / latency"
