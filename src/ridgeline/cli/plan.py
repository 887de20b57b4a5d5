"""`ridgeline plan`: predict what a model costs on a machine, before it runs. It needs no weights, torch or network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.ask import AskFlags, check_unused
from ridgeline.cli.flags.groups import grouped
from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.catalog.models import KnownModel
    from ridgeline.plan.expected import Sureness
    from ridgeline.plan.planner import Deployment, Load
    from ridgeline.plan.speculation import Draft

_LOAD, _MACHINE, _ASK = "Load", "Machine", "Output"
DEFAULT_HARDWARE, DEFAULT_CONTEXT = "local", 4096
DEFAULT_CONFIDENCE = 0.9
ANSWER_SHARE = 4  # where only --context is given, one part in four of it is the answer


def _option(panel: str, *names: str, help: str) -> Any:
    return option(*names, help=help, panel=panel)


_Model = Annotated[
    str, typer.Argument(help="A published model's name (mistral-7b), a folder, a GGUF file or a config.json.")
]
_Changes = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to apply, or to rank with --compare: kv=fp8 mla=512+64 tp=2 ... Default: none."),
]
_Hardware = Annotated[
    str | None,
    _option(
        _MACHINE,
        "--hardware",
        help="Machine: h100, mi300x, rtx4090 ..., local for this one, or a file: NAME.toml with the figures of a "
        "machine, or NAME.json of `ridgeline calibrate --out`. Default: local; with --users that of --budget or h100.",
    ),
]
_Tp = Annotated[
    int,
    _option(_MACHINE, "--tp", help="Tensor parallelism: devices that share every matrix. Default: 1."),
]
_Ep = Annotated[int, _option(_MACHINE, "--ep", help="Expert parallelism: devices that share the experts. Default: 1.")]
_Pp = Annotated[int, _option(_MACHINE, "--pp", help="Pipeline parallelism: devices that share the layers. Default: 1.")]
_Replicas = Annotated[int, _option(_MACHINE, "--replicas", help="Number of complete copies of the model. Default: 1.")]
_Link = Annotated[
    str | None,
    _option(_MACHINE, "--link", help="Link between devices: nvlink4, pcie5, ethernet-100g ... Default: the machine's."),
]
_Batch = Annotated[int | None, _option(_LOAD, "--batch", help="Sequences per step on each replica. Default: 1.")]
_Context = Annotated[
    int | None,
    _option(
        _LOAD,
        "--context",
        help="Tokens per sequence, prompt and answer together. Default: --prompt + --output, else 4096 or the "
        "model's longest if that is shorter.",
    ),
]
_Prompt = Annotated[
    int | None,
    _option(_LOAD, "--prompt", "--input-len", help="Tokens of each prompt. Default: the context without the answer."),
]
_Output = Annotated[
    int | None,
    _option(
        _LOAD,
        "--output",
        "--output-len",
        help="Tokens of each answer. Default: a quarter of the context, or what --prompt leaves.",
    ),
]
_Weights = Annotated[
    str | None,
    _option(
        _LOAD,
        "--weights",
        help="Type of the weights: bf16, fp8, int8, int4 ..., or a scheme of `ridgeline quantize` such as gptq-int3. "
        "Default: as published, or as a checkpoint's files have them.",
    ),
]
_Kv = Annotated[
    str | None, _option(_LOAD, "--kv", help="Type of the KV cache: bf16, fp8, int8 ... Default: as --activations.")
]
_Activations = Annotated[
    str | None,
    _option(_LOAD, "--activations", help="Type of the activations. Default: bf16, or float32 on a CPU."),
]
_Page = Annotated[int, _option(_LOAD, "--block-size", help="Tokens of a page of the KV cache. Default: 16.")]
_Compare = Annotated[bool, _option(_ASK, "--compare", help="Rank the changes, each applied alone, by tokens/s.")]
_Slo = Annotated[
    str | None,
    _option(
        _ASK,
        "--slo",
        help="Find the cheapest settings within these limits: ttft=200ms,tpot=30ms. With --batch at this batch only; "
        "with --compare for each change. Default: none.",
    ),
]
_Confidence = Annotated[
    float,
    _option(
        _ASK,
        "--confidence",
        help="Probability with which --slo and --users keep each limit, from 0.5 to 1. Default: 0.9.",
    ),
]
_Explain = Annotated[bool, _option(_ASK, "--explain", help="Also print the formula of every figure, with its numbers.")]
_JsonOutput = Annotated[bool, _option(_ASK, "--json", help="Print one JSON object.")]
_Plot = Annotated[
    str | None, _option(_ASK, "--plot", help="Write a roofline picture to this file, .png or .svg. Default: none.")
]


@dataclass(eq=False, repr=False)
class MachineFlags:
    """A machine, and how a model is divided over several."""

    hardware: _Hardware = None
    tp: _Tp = 1
    ep: _Ep = 1
    pp: _Pp = 1
    replicas: _Replicas = 1
    link: _Link = None


@dataclass(eq=False, repr=False)
class SizeFlags:
    """Sequences, their lengths, and types."""

    batch: _Batch = None
    context: _Context = None
    prompt: _Prompt = None
    output: _Output = None
    weights: _Weights = None
    kv: _Kv = None
    activations: _Activations = None
    page: _Page = 16


@dataclass(eq=False, repr=False)
class OutputFlags:
    """Parts of a plan, and their form."""

    compare: _Compare = False
    slo: _Slo = None
    confidence: _Confidence = DEFAULT_CONFIDENCE
    explain: _Explain = False
    json_output: _JsonOutput = False
    plot: _Plot = None


@grouped
def plan(
    *,
    model: _Model,
    changes: _Changes = None,
    machine: MachineFlags,
    size: SizeFlags,
    out: OutputFlags,
    ask: AskFlags,
) -> None:
    """Predict what a model costs on a machine: memory, time, the bottleneck, and what each technique would change."""
    from ridgeline.cli.flags.known import find_draft
    from ridgeline.errors import RequestError
    from ridgeline.plan.changes import change
    from ridgeline.plan.compare import compare as ranked
    from ridgeline.plan.remarks import remarks

    if out.compare and not changes:
        raise RequestError("--compare needs at least one change, as in --compare kv=fp8 weights=int4 tp=2")
    check_unused(ask, _chosen(machine, size, out))
    if ask.users is not None:
        _answer(model, changes, machine, size, ask, out.confidence, as_json=out.json_output)
        return
    known, note, deployment = _deployment(model, _options(machine, size, machine.hardware or DEFAULT_HARDWARE))
    name, batch = known.name, 1 if size.batch is None else size.batch
    if deployment.spec.encoder:
        from ridgeline.cli.show.plan_encode import plan_encoder

        unsupported = {
            "changes": changes, "--slo": out.slo, "--explain": out.explain, "--plot": out.plot, "--output": size.output,
            "--prompt": size.prompt, "--kv": size.kv,
        }  # fmt: skip
        plan_encoder(name, deployment, batch, size.context, note, unsupported, out.json_output)
        return
    load = shape(batch, size.context, size.prompt, size.output, deployment.spec.max_position_embeddings)
    if known.denoises:
        from ridgeline.cli.show.plan_denoise import plan_denoiser

        unsupported = {"changes": out.compare, "--slo": out.slo, "--explain": out.explain, "--plot": out.plot}
        plan_denoiser(name, deployment, load, note, changes or (), unsupported, out.json_output)
        return
    if changes and not out.compare:
        deployment = change(deployment, ",".join(changes), find_draft).deployment
    rows = ranked(deployment, load, changes or [], find_draft) if out.compare else ()
    said = [*narrowed(known, deployment, size.weights), *remarks(deployment)]
    compared = changes if out.compare else None
    report = _report(name, deployment, load, out, rows, batch=size.batch, changes=compared)
    report |= {"times": note, "remarks": said}
    if size.weights and (made := how_to_make(size.weights)):
        report["weights"] = made
    if out.plot:
        from ridgeline.plan.picture import draw
        from ridgeline.plan.planner import Planner

        draw(name, Planner(deployment), load, out.plot)
    _print(report, out.json_output)


def _options(machine: MachineFlags, size: SizeFlags, hardware: str) -> dict[str, Any]:
    """Return what `_deployment` takes."""
    return {
        "hardware": hardware, "link": machine.link, "weights": size.weights, "kv": size.kv, "page": size.page,
        "activations": size.activations,
        "scheme": {"replicas": machine.replicas, "tp": machine.tp, "ep": machine.ep, "pp": machine.pp},
    }  # fmt: skip


def _chosen(machine: MachineFlags, size: SizeFlags, out: OutputFlags) -> dict[str, Any]:
    """Return the flags that --users has no use for, with what was given."""
    return {
        "--compare": out.compare, "--slo": out.slo, "--plot": out.plot, "--explain": out.explain,
        "--batch": size.batch is not None, "--context": size.context, "--replicas": machine.replicas > 1,
        "--ep": machine.ep > 1, "--pp": machine.pp > 1,
    }  # fmt: skip


def _answer(
    model: str, changes: list[str] | None, flags: MachineFlags, size: SizeFlags, ask: AskFlags, confidence: float,
    *, as_json: bool,
) -> None:  # fmt: skip
    """Answer --users for each machine that the flags allow."""
    from dataclasses import replace

    from ridgeline.cli.ask import answer_users, machines_of, question_of
    from ridgeline.cli.simulate import draft_lines
    from ridgeline.plan.ask import SLOWDOWN, Budget, slowed
    from ridgeline.plan.changes import change
    from ridgeline.plan.expected import sureness
    from ridgeline.plan.remarks import remarks
    from ridgeline.plan.slo import check_confidence

    check_confidence(confidence)
    budget = Budget.parse(ask.budget, ask.dollars_per_hour)
    question, deployments, said = question_of(ask, size.prompt, size.output), [], dict[str, None]()
    for machine in machines_of(ask, flags.hardware, budget):
        known, note, deployment = _deployment(model, _options(flags, size, machine))
        if changes:
            deployment = change(deployment, ",".join(changes), named_draft).deployment
            said |= dict.fromkeys(draft_lines(deployment))
        said |= dict.fromkeys([*narrowed(known, deployment, size.weights), *remarks(deployment)])
        sure = sureness(deployment.hardware, confidence)
        usual = SLOWDOWN if sure.is_roof and not deployment.hardware.is_measured else 1.0
        factor = usual if ask.slowdown is None else ask.slowdown
        said |= {times_note(note, deployment, sure, ask.slowdown, factor): None}
        deployments.append(replace(deployment, hardware=slowed(deployment.hardware, factor)))
    report = answer_users(known.name, deployments, ask, question, budget, confidence)
    report["remarks"] = [*said, lengths_note(ask)]
    _print(report, as_json)


def named_draft(name: str) -> Draft:
    """Find a draft as `find_draft` does, with the hub id of a published model as its name, for commands to paste."""
    from dataclasses import replace

    from ridgeline.cli.flags.known import find_draft, find_known
    from ridgeline.spec import ModelSpec

    found = find_draft(name)
    return replace(found, name=find_known(name).name) if isinstance(found.spec, ModelSpec) else found


def times_note(note: str, deployment: Deployment, sure: Sureness, given: float | None, factor: float) -> str:
    """Return what the times are. note: about the machine's own. given: --slowdown. factor: the one that is used."""
    from ridgeline.plan.expected import origin

    if given is None and sure.efficiency is not None:
        return (
            f"times are those to expect, {origin(deployment.hardware)}; --slowdown takes multiples of the roof instead"
        )
    if factor == 1:
        return note
    why = "" if given is not None else f"; too little is known of {deployment.hardware.name} to say what to expect"
    return f"times are those of the roofline, multiplied by {factor:g} (--slowdown){why}"


def lengths_note(ask: AskFlags) -> str:
    """Return how requests arrive."""
    return (
        f"requests arrive at random; the lengths of prompts and answers vary by {ask.length_cv:.0%} around their means "
        f"(--length-cv, --seed {ask.seed})"
    )


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({k: v for k, v in report.items() if not k.startswith("_")}, indent=2))
    elif "_answered" in report:
        from ridgeline.cli.show.ask_tables import show_answer

        show_answer(report)
    else:
        from ridgeline.cli.show.plan_tables import show_plan

        show_plan(report)


def _deployment(model: str, options: dict[str, Any]) -> tuple[KnownModel, str, Deployment]:
    """Return the model, a note on how accurate the machine's times are, and the deployment to plan."""
    from dataclasses import replace

    from ridgeline.catalog.machines import link as find_link
    from ridgeline.cli.flags.known import find_known, local_gpu, precision_of
    from ridgeline.cost.calibration import find_machine
    from ridgeline.cost.precision import storage_type
    from ridgeline.cost.shard import Scheme
    from ridgeline.plan.planner import Deployment

    machine, note = find_machine(options["hardware"], local_gpu)
    if options["link"]:
        joined = find_link(options["link"])
        machine = replace(machine, link=joined, sources={**machine.sources, "link": joined.source})
    known = find_known(model, on_cpu=machine.kind == "cpu")
    types = {n: storage_type(options[n]) if options[n] else None for n in ("kv", "activations")}
    precision = precision_of(
        known, machine, weights=options["weights"], state=types["kv"], activations=types["activations"]
    )
    scheme = Scheme(**options["scheme"])
    if machine.is_measured and machine.link is not None and scheme.devices > scheme.replicas:
        note += f"; {scheme.devices} machines like this one are assumed, joined by {machine.link.name} at "
        note += f"{machine.link.bytes_per_s / 1e9:.1f} GB/s each"
    return known, note, Deployment(known.spec, machine, precision, scheme, page_tokens=options["page"])


def narrowed(known: KnownModel, deployment: Deployment, weights: str | None) -> list[str]:
    """Return a line if the published weights are planned in a narrower type that the user did not choose."""
    from ridgeline.cli.flags.known import published_type

    taken = published_type(known, deployment.hardware)
    if weights is not None or taken == known.weights:
        return []
    return [
        f"the weights are published in {known.weights}; they are planned in {taken}, as engines load them on this kind "
        f"of machine (--weights {known.weights} plans them as published)"
    ]


def how_to_make(weights: str) -> str:
    """Return how to get a model in a scheme that chooses codes with data; an empty text for other types."""
    from ridgeline.spec.schemes import scheme_of

    if scheme_of(weights.lower()) is None:
        return ""
    name = weights.lower()
    return (
        f"{name} needs a quantized folder: write one with `ridgeline quantize MODEL --scheme {name} --out DIR`; other "
        "commands open it without --weights"
    )


def shape(batch: int, context: int | None, prompt: int | None, output: int | None, limit: int) -> Load:
    """Return the load that the flags describe; missing lengths get defaults. Raises RequestError if they contradict
    each other or the model's limit.
    """
    from ridgeline.errors import RequestError
    from ridgeline.plan.planner import Load

    for name, value in (("batch", batch), ("context", context), ("prompt", prompt), ("output", output)):
        if value is not None and value < 1:
            raise RequestError(f"--{name} is {value}; it must be at least 1")
    for name, value in (("prompt", prompt), ("output", output)):
        if value is not None and value >= limit:
            raise RequestError(
                f"--{name} is {value:,}, but the model has {limit:,} positions for prompt and answer together; "
                f"lower it to {limit - 1:,} at most"
            )
    if context is None:
        context = prompt + output if prompt and output else min(DEFAULT_CONTEXT, limit)
        if not (prompt and output):
            context = min(max(context, (prompt or output or 0) * 4 // 3), limit)
    if context < 2:
        raise RequestError("--context is 1; a prompt and an answer need at least 2 tokens")
    if context > limit:
        raise RequestError(f"--context is {context:,}, but the model has {limit:,} positions; lower it to {limit:,}")
    if prompt is None:
        prompt = context - (output or max(context // ANSWER_SHARE, 1))
    output = context - prompt if output is None else output
    if prompt + output != context or min(prompt, output) < 1:
        raise RequestError(
            f"a prompt of {prompt} and an answer of {output} tokens do not add up to a context of {context}; "
            "leave out one of the three"
        )
    return Load(batch, prompt, output)


def _report(
    name: str, deployment: Deployment, load: Load, out: OutputFlags, rows: Any, *, batch: int | None = None,
    changes: list[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the report that --json prints. Names with a leading underscore are for the tables alone.

    batch: the only batch that --slo may take, or None. changes: changes that --compare ranks; None without it.
    """
    from ridgeline.cli.flags.known import find_draft
    from ridgeline.plan import report as r
    from ridgeline.plan.explain import explain as lines
    from ridgeline.plan.limits import Slo
    from ridgeline.plan.planner import Planner
    from ridgeline.plan.slo import each_within, search

    planner = Planner(deployment)
    found = r.plan_json(name, planner, load)
    found["_planner"], found["_load"] = planner, load
    if rows:
        found["compare"], found["_rows"] = r.compare_json(rows), rows
    if out.slo:
        found["_promise"] = promise = Slo.parse(out.slo)
        if changes is None:
            found["_answer"] = answer = search(deployment, load, promise, out.confidence, batch)
            found["slo"] = r.slo_json(promise, answer, out.confidence)
        else:
            found["_within"] = each = each_within(
                deployment, load, promise, changes, find_draft, out.confidence, batch
            )  # fmt: skip
            settings = [r.setting_json(promise, s) for s in each]
            found["slo"] = {"promise_s": promise.limits, "confidence": out.confidence, "changes": settings}
    if out.explain:
        found["explain"] = dict(lines(planner, load))
    return found
