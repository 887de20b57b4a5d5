"""Print `ridgeline plan` for a diffusion model: its memory, the time of a pass over whole sequences, and the open
questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ridgeline.errors import RequestError

CHANGE = "block_cache"

if TYPE_CHECKING:
    from ridgeline.cli.show.plan_tables import Figure
    from ridgeline.plan.denoise import Denoising
    from ridgeline.plan.planner import Deployment, Load


def plan_denoiser(
    name: str, deployment: Deployment, load: Load, note: str, changes: Sequence[str], unsupported: Mapping[str, object],
    as_json: bool,
) -> None:  # fmt: skip
    """Print the plan. changes: block_cache=KIND:BLOCK[:TOKENS], or none. unsupported: options for autoregressive models
    only. Raises RequestError if one is set, and for other changes.
    """
    from ridgeline.plan.denoise import UNKNOWN, CachedBlocks, denoise
    from ridgeline.plan.planner import Planner
    from ridgeline.plan.report import deployment_json, step_json

    key, _, value = changes[0].partition("=") if len(changes) == 1 else ("", "", "")
    unsupported = {**unsupported, "changes": unsupported["changes"] or (bool(changes) and key != CHANGE)}
    if refused := [what for what, value in unsupported.items() if value]:
        raise RequestError(
            f"{name} is a diffusion model: {', '.join(refused)} works with autoregressive models only; leave it out "
            f"(--weights, --activations, --tp, --batch, --context, --prompt and --output work, and {CHANGE}=dual:32)"
        )
    cache = CachedBlocks.parse(value) if key == CHANGE else None
    found = denoise(Planner(deployment), load, cache=cache)
    names = ("weight_bytes", "state_bytes", "activation_bytes", "logits_bytes", "used_bytes", "memory_bytes", "fits")
    report: dict[str, Any] = {
        "model": name, "num_params": deployment.spec.num_params(), "deployment": deployment_json(deployment),
        "load": {**asdict(load), "context": load.context}, "memory": {n: getattr(found, n) for n in names},
        "time": {"pass_s": found.step.seconds, "passes": found.passes, "latency_s": found.latency_s,
                 "tokens_per_s": found.tokens_per_s * deployment.scheme.replicas},
        "pass": step_json(found.step, deployment.hardware), "times": note, "unknown": UNKNOWN,
    }  # fmt: skip
    if cache is not None and found.cached is not None:
        report["time"] |= {"cached_pass_s": found.cached[0].seconds, "cached_passes": found.cached[1]}
        report["block_cache"] = {**asdict(cache), "computed": cache.computed(load.output)}
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
    if found.cached is None:
        yield "state", size(0), "none: attention is bidirectional, so keys and values change with every pass"
    else:
        yield "state", size(found.state_bytes), "keys and values that later passes over a block read"
    yield "activations", size(found.activation_bytes), "the residual stream and the largest operation, for all tokens"
    yield (
        "logits",
        size(found.logits_bytes),
        f"at most so many at once, of {load.batch:,} x {found.wanted:,} rows, float32",
    )
    yield "free", size(free) if found.fits else Text(size(free), "red"), (
        f"of {size(found.memory_bytes)}" if found.fits else "does not fit: a smaller --batch, --context or --weights"
    )  # fmt: skip


def _time(report: dict[str, Any], load: Load, found: Denoising) -> Iterator[Figure]:
    from ridgeline.plan.units import number, seconds

    yield "pass", seconds(found.step.seconds), f"all {load.context:,} tokens of each of {load.batch:,} sequences"
    if found.cached is not None:
        later, count = found.cached
        positions = f"{report['block_cache']['computed']:,} of {load.context:,} tokens; it is approximate"
        yield "cached pass", seconds(later.seconds), positions
        yield "passes", f"{found.passes:,}", f"{count:,} of them are cached, all but the first one over each block"
        yield "latency", seconds(found.latency_s), "the sum over all passes"
    else:
        yield "passes", f"{found.passes:,}", "one per answer token; fewer if a pass unmasks several tokens"
        yield "latency", seconds(found.latency_s), "passes x pass: no token is final before the last pass"
    yield "total", f"{number(report['time']['tokens_per_s'])} tokens/s", "batch x answer x replicas / latency"
