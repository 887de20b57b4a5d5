"""Print `ridgeline plan` for an encoder: its memory, and the time of a pass over whole texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ridgeline.errors import RequestError

if TYPE_CHECKING:
    from ridgeline.cli.show.plan_tables import Figure
    from ridgeline.plan.encode import Encoding
    from ridgeline.plan.planner import Deployment

DEFAULT_TOKENS = 256


def plan_encoder(
    name: str, deployment: Deployment, batch: int, tokens: int | None, note: str, unsupported: Mapping[str, object],
    as_json: bool,
) -> None:  # fmt: skip
    """Print the plan of a pass over `batch` texts of `tokens` tokens; None: DEFAULT_TOKENS, or as many as it takes.

    unsupported: options for models that write text; raises RequestError if one is set.
    """
    from ridgeline.plan.encode import encode
    from ridgeline.plan.planner import Planner
    from ridgeline.plan.report import deployment_json, step_json

    if refused := [what for what, value in unsupported.items() if value]:
        raise RequestError(
            f"{name} is an encoder: {', '.join(refused)} works with models that write text only; leave it out "
            "(--weights, --activations, --replicas, --batch and --context work)"
        )
    if batch < 1:
        raise RequestError(f"--batch is {batch}; it must be at least 1")
    limit = deployment.spec.max_position_embeddings
    found = encode(Planner(deployment), batch, min(DEFAULT_TOKENS, limit) if tokens is None else tokens)
    sizes = ("weight_bytes", "workspace_bytes", "used_bytes", "memory_bytes", "fits")
    report: dict[str, Any] = {
        "model": name, "num_params": deployment.spec.num_params(), "deployment": deployment_json(deployment),
        "load": {"batch": found.batch, "tokens": found.tokens}, "memory": {n: getattr(found, n) for n in sizes},
        "time": {"pass_s": found.step.seconds, "texts_per_s": found.texts_per_s, "tokens_per_s": found.tokens_per_s},
        "pass": step_json(found.step, deployment.hardware), "times": note,
    }  # fmt: skip
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        _show(report, deployment, found)


def _show(report: dict[str, Any], d: Deployment, found: Encoding) -> None:
    from rich.text import Text

    from ridgeline.cli.show.plan_tables import figures_table, operations_table
    from ridgeline.cli.show.tables import Line, screen, show

    title = Text.assemble((report["model"], "bold"), " on ", (d.hardware.name, "bold")).append(
        f": {report['num_params'] / 1e6:,.1f} M parameters, an encoder\n{d.precision.weights} weights, "
        f"{d.precision.activations} activations; {found.batch:,} texts of {found.tokens:,} tokens in a pass"
    )
    show(
        screen(), title, figures_table("Memory per device", _memory(d, found)),
        figures_table("Time", _time(found)), operations_table("one pass", report["pass"]),
        Line(f"{report['times']}.", style="dim"),
    )  # fmt: skip


def _memory(d: Deployment, found: Encoding) -> Iterator[Figure]:
    from rich.text import Text

    from ridgeline.plan.units import decimal_bytes as size

    free = found.memory_bytes - found.used_bytes
    yield "weights", size(found.weight_bytes), f"{d.precision.weights} matrices, float32 vectors"
    yield "state", size(0), "none: a text is computed in one pass"
    yield "workspace", size(found.workspace_bytes), "at most, for all tokens of a pass"
    yield "free", size(free) if found.fits else Text(size(free), "red"), (
        f"of {size(found.memory_bytes)}" if found.fits else "does not fit: a smaller --batch, --context or --weights"
    )  # fmt: skip


def _time(found: Encoding) -> Iterator[Figure]:
    from ridgeline.plan.units import number, seconds

    yield "pass", seconds(found.step.seconds), f"{found.batch:,} texts of {found.tokens:,} tokens, without padding"
    yield "texts", f"{number(found.texts_per_s)} texts/s", "batch x replicas / pass"
    yield "tokens", f"{number(found.tokens_per_s)} tokens/s", "texts x tokens of a text"
