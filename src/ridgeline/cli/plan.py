"""`ridgeline plan`: what a model costs on a machine, before it runs. No weights, no torch, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ridgeline.catalog.models import KnownModel
    from ridgeline.plan.planner import Deployment, Load

_LOAD, _MACHINE, _ASK = "What runs at once", "On what", "Besides"
DEFAULT_HARDWARE, DEFAULT_CONTEXT = "local", 4096
ANSWER_SHARE = 4  # of a context, where only it is given: one part in so many is the answer


def _option(panel: str, *names: str, help: str) -> object:
    return typer.Option(*names, help=help, rich_help_panel=panel)


def plan(
    model: Annotated[str, typer.Argument(help="A published model by name (mistral-7b), a folder, or a config.json.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="kv=fp8 mla=512+64 tp=2 ...: applied, or compared with --compare.")
    ] = None,
    hardware: Annotated[str, _option(_MACHINE, "--hardware", help="local: this machine; h100, mi300x, rtx4090 ...")] = (
        DEFAULT_HARDWARE
    ),
    tp: Annotated[int, _option(_MACHINE, "--tp", help="Devices that share every matrix.")] = 1,
    ep: Annotated[int, _option(_MACHINE, "--ep", help="Devices that share the experts.")] = 1,
    pp: Annotated[int, _option(_MACHINE, "--pp", help="Devices that share the layers.")] = 1,
    replicas: Annotated[int, _option(_MACHINE, "--replicas", help="Whole copies.")] = 1,
    link: Annotated[str | None, _option(_MACHINE, "--link", help="Between devices: nvlink4, pcie5, ethernet-100g")] = (
        None
    ),
    batch: Annotated[int, _option(_LOAD, "--batch", help="Sequences at once, on each replica.")] = 1,
    context: Annotated[int | None, _option(_LOAD, "--context", help="Tokens of each: prompt and answer.")] = None,
    prompt: Annotated[int | None, _option(_LOAD, "--prompt", help="Of these, the prompt's.")] = None,
    output: Annotated[int | None, _option(_LOAD, "--output", help="Of these, the answer's.")] = None,
    weights: Annotated[str | None, _option(_LOAD, "--weights", help="bf16, fp8, int8, int4 ...; as published.")] = None,
    kv: Annotated[str | None, _option(_LOAD, "--kv", help="Of keys, values and latents; as activations are.")] = None,
    activations: Annotated[str | None, _option(_LOAD, "--activations", help="bf16; float32 on a CPU.")] = None,
    page: Annotated[int, _option(_LOAD, "--block-size", help="Tokens of a page.")] = 16,
    compare: Annotated[bool, _option(_ASK, "--compare", help="Rank the changes, each by itself.")] = False,
    slo: Annotated[str | None, _option(_ASK, "--slo", help="Find the settings: ttft=200ms,tpot=30ms")] = None,
    explain: Annotated[bool, _option(_ASK, "--explain", help="Every formula with its numbers.")] = False,
    json_output: Annotated[bool, _option(_ASK, "--json", help="Print one JSON object.")] = False,
    plot: Annotated[str | None, _option(_ASK, "--plot", help="Draw it: out.png or out.svg.")] = None,
) -> None:
    """Say what a model will cost on a machine: memory, time, what binds it, and what each technique would change."""
    from ridgeline.errors import RequestError
    from ridgeline.plan.changes import change
    from ridgeline.plan.compare import compare as ranked

    if compare and not changes:
        raise RequestError("--compare: say with what, as in --compare kv=fp8 weights=int4 tp=2")
    options: dict[str, Any] = {
        "hardware": hardware, "link": link, "weights": weights, "kv": kv, "activations": activations, "page": page,
        "scheme": {"replicas": replicas, "tp": tp, "ep": ep, "pp": pp},
    }  # fmt: skip
    known, note, deployment = _deployment(model, options)
    name, load = known.name, shape(batch, context, prompt, output, deployment.spec.max_position_embeddings)
    if known.denoises:
        from ridgeline.cli.show.plan_denoise import plan_denoiser

        besides = {"changes": changes, "--slo": slo, "--explain": explain, "--plot": plot}
        plan_denoiser(name, deployment, load, note, besides, json_output)
        return
    if changes and not compare:
        deployment = change(deployment, ",".join(changes)).deployment
    rows = ranked(deployment, load, changes or []) if compare else ()
    report = _report(name, deployment, load, slo, rows, explain) | {"times": note}
    if plot:
        from ridgeline.plan.picture import draw
        from ridgeline.plan.planner import Planner

        draw(name, Planner(deployment), load, plot)
    _print(report, json_output)


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({k: v for k, v in report.items() if not k.startswith("_")}, indent=2))
    else:
        from ridgeline.cli.show.plan_tables import show_plan

        show_plan(report)


def _deployment(model: str, options: dict[str, Any]) -> tuple[KnownModel, str, Deployment]:
    """What is known of it, how far its times can be trusted, and what is planned."""
    from dataclasses import replace

    from ridgeline.catalog.machines import link as find_link
    from ridgeline.catalog.models import find_model
    from ridgeline.cost.calibration import find_machine
    from ridgeline.cost.precision import default_precision, storage_type
    from ridgeline.cost.shard import Scheme
    from ridgeline.plan.planner import Deployment

    machine, note = find_machine(options["hardware"])
    if options["link"]:
        joined = find_link(options["link"])
        machine = replace(machine, link=joined, sources={**machine.sources, "link": joined.source})
    known = find_model(model)
    types = {n: storage_type(options[n]) if options[n] else None for n in ("weights", "kv", "activations")}
    precision = default_precision(
        machine, types["weights"] or known.weights, types["weights"] or known.experts, state=types["kv"],
        activations=types["activations"],
    )  # fmt: skip
    scheme = Scheme(**options["scheme"])
    if machine.rates is not None and machine.link is not None and scheme.devices > scheme.replicas:
        note += f"; its {scheme.devices} devices are as many of this machine, joined by {machine.link.name} at "
        note += f"{machine.link.bytes_per_s / 1e9:.1f} GB/s each"
    return known, note, Deployment(known.spec, machine, precision, scheme, page_tokens=options["page"])


def shape(batch: int, context: int | None, prompt: int | None, output: int | None, limit: int) -> Load:
    """What runs at once, from what was given of it. Raises RequestError for what cannot be."""
    from ridgeline.errors import RequestError
    from ridgeline.plan.planner import Load

    for name, value in (("batch", batch), ("context", context), ("prompt", prompt), ("output", output)):
        if value is not None and value < 1:
            raise RequestError(f"--{name} is {value}; it must be at least 1")
    for name, value in (("prompt", prompt), ("output", output)):
        if value is not None and value >= limit:
            raise RequestError(
                f"--{name} is {value:,}, the model's positions allow {limit:,} for prompt and answer together; "
                f"lower it to {limit - 1:,} at most"
            )
    if context is None:
        context = prompt + output if prompt and output else min(DEFAULT_CONTEXT, limit)
        if not (prompt and output):
            context = min(max(context, (prompt or output or 0) * 4 // 3), limit)
    if context < 2:
        raise RequestError("--context is 1; a prompt and an answer take at least 2 tokens")
    if context > limit:
        raise RequestError(f"--context is {context:,}, the model's positions allow {limit:,}; lower it to that")
    if prompt is None:
        prompt = context - (output or max(context // ANSWER_SHARE, 1))
    output = context - prompt if output is None else output
    if prompt + output != context or min(prompt, output) < 1:
        raise RequestError(
            f"a prompt of {prompt} and an answer of {output} tokens do not make a context of {context}; "
            "leave one of the three out"
        )
    return Load(batch, prompt, output)


def _report(name: str, deployment: Deployment, load: Load, slo: str | None, rows: Any, explain: bool) -> dict[str, Any]:
    """What is printed as JSON; names with a leading underscore are for the tables alone."""
    from ridgeline.plan import report as r
    from ridgeline.plan.explain import explain as lines
    from ridgeline.plan.limits import Slo
    from ridgeline.plan.planner import Planner
    from ridgeline.plan.slo import search

    planner = Planner(deployment)
    found = r.plan_json(name, planner, load)
    found["_planner"], found["_load"] = planner, load
    if rows:
        found["compare"], found["_rows"] = r.compare_json(rows), rows
    if slo:
        promise = Slo.parse(slo)
        answer = search(deployment, load, promise)
        found["slo"], found["_answer"], found["_promise"] = r.slo_json(promise, answer), answer, promise
    if explain:
        found["explain"] = dict(lines(planner, load))
    return found
