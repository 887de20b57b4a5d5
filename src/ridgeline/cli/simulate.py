"""`ridgeline simulate`: predict a workload's latencies on a model and machine. It needs no weights or network."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ridgeline.cli.flags.groups import grouped, values_of
from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.plan.expected import Sureness
    from ridgeline.plan.planner import Deployment
    from ridgeline.sim import Drafts, Settings, Simulated, StepCost, Workload
    from ridgeline.sim.book import Run

_WORK, _MACHINE, _DRAFTS, _OUT = "Workload", "Machine", "Speculative decoding", "Output"
DEFAULT_REQUESTS, DEFAULT_ARRIVALS = 1000, "poisson:8"


class Routing(StrEnum):
    """How requests are spread over replicas."""

    round_robin = "round-robin"
    least_loaded = "least-loaded"
    power_of_two = "power-of-two"
    prefix = "prefix"


class Level(StrEnum):
    """How long steps take, among the times to expect."""

    p10 = "p10"
    p50 = "p50"
    p90 = "p90"


class Depth(StrEnum):
    """How many drafts a sequence verifies."""

    chosen = "chosen"
    fixed = "fixed"


def _option(panel: str, *names: str, help: str) -> Any:
    return option(*names, help=help, panel=panel)


Model = Annotated[str, typer.Argument(help="A published model's name (mistral-7b), a folder or a config.json.")]
Changes = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to apply, as for plan: kv=fp8 weights=int4 tp=2 ... Default: none."),
]
Trace = Annotated[
    str | None,
    _option(_WORK, "--trace", help="Trace to run: Azure CSV or Mooncake JSON lines. Default: random lengths."),
]
Arrivals = Annotated[
    str | None,
    _option(
        _WORK,
        "--arrivals",
        help="Arrival process: poisson:8, gamma:8,cv=4, onoff:8,on=10,off=30 or closed:32,think=1. Default: the "
        "trace's times; without a trace poisson:8 (8 requests per second).",
    ),
]
NumRequests = Annotated[
    int | None,
    _option(_WORK, "--num-requests", help="Number of requests. Default: all of the trace; without a trace 1000."),
]
RateScale = Annotated[
    float, _option(_WORK, "--rate-scale", help="Multiply the arrival rate by this factor. Default: 1.")
]
InputLen = Annotated[
    int, _option(_WORK, "--input-len", help="Mean tokens of a prompt, without a trace. Default: 1024.")
]
OutputLen = Annotated[
    int, _option(_WORK, "--output-len", help="Mean tokens of an answer, without a trace. Default: 256.")
]
LengthCv = Annotated[
    float,
    _option(_WORK, "--length-cv", help="Coefficient of variation of both lengths; 0: all equal. Default: 0."),
]
Truncate = Annotated[bool, _option(_WORK, "--truncate", help="Shorten requests that exceed the longest context.")]
Seed = Annotated[int, _option(_WORK, "--seed", help="Random seed for arrivals, lengths and routing. Default: 0.")]
Hardware = Annotated[
    str,
    _option(
        _MACHINE,
        "--hardware",
        help="Machine: h100, mi300x, rtx4090 ..., local for this one, or a file: NAME.toml with the figures of a "
        "machine, or NAME.json of `ridgeline calibrate --out`. Default: h100.",
    ),
]
StepTimes = Annotated[
    str | None,
    _option(_MACHINE, "--step-times", help="JSON file with step times. Default: the planner's for the machine."),
]
Replicas = Annotated[int, _option(_MACHINE, "--replicas", help="Number of complete copies of the model. Default: 1.")]
RoutingOption = Annotated[
    Routing, _option(_MACHINE, "--routing", help="How requests are spread over replicas. Default: round-robin.")
]
MaxModelLen = Annotated[
    int | None,
    _option(_MACHINE, "--max-model-len", help="Longest context in tokens. Default: the model's."),
]
MaxNumSeqs = Annotated[
    int | None,
    _option(
        _MACHINE,
        "--max-num-seqs",
        help="Most sequences in one step. Default: 256; on a calibrated machine what `ridgeline explain` chooses.",
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    _option(
        _MACHINE,
        "--max-num-batched-tokens",
        help="Most tokens in one step. Default: 512; on a calibrated machine what `ridgeline explain` chooses.",
    ),
]
Percentile = Annotated[
    Level | None,
    _option(
        _MACHINE,
        "--percentile",
        help="Step times to expect of the machine, as `plan` shows them: p10, p50 or p90. Default: none, its roof; on "
        "a calibrated machine its measured times.",
    ),
]
Host = Annotated[
    str | None,
    _option(
        _MACHINE,
        "--host-times",
        help="Times of the host's work: request=1ms,prompt_token=2us,sent_token=20us,step=100us,token=5us. "
        "Default: none, the engine alone.",
    ),
]
BlockSize = Annotated[int, _option(_MACHINE, "--block-size", help="Tokens of a page of the KV cache. Default: 16.")]
Speculative = Annotated[
    str | None,
    _option(
        _DRAFTS,
        "--speculative",
        help="Simulates draft tokens of a draft model, of the head in a folder, or of ngram. Default: no drafts.",
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    _option(_DRAFTS, "--num-speculative-tokens", help="Most draft tokens of a sequence in a step. Default: 4."),
]
DraftAcceptanceRate = Annotated[
    str | None,
    _option(
        _DRAFTS,
        "--draft-acceptance-rate",
        help="Probability that a draft is accepted if those before it were: 0.8, or one for each depth: 0.87,0.92. "
        "Default: that of the draft's card, else an assumed one, which is named.",
    ),
]
DraftDepth = Annotated[
    Depth,
    _option(
        _DRAFTS,
        "--draft-depth",
        help="How many drafts a sequence verifies in a step. chosen: as many as give tokens faster, by the engine's "
        "rule. fixed: always --num-speculative-tokens. Default: chosen.",
    ),
]
SloLimits = Annotated[
    str | None,
    _option(_OUT, "--slo", help="Latency limits for goodput: ttft=200ms,tpot=30ms,e2e=10s. Default: none."),
]
JsonOutput = Annotated[bool, _option(_OUT, "--json", help="Print one JSON object.")]
Plot = Annotated[str | None, _option(_OUT, "--plot", help="Write a picture to this file, .png or .svg. Default: none.")]
EveryStep = Annotated[
    bool,
    _option(_OUT, "--every-step", help="For debugging: simulate every step in full. Slower, with equal figures."),
]


@dataclass(eq=False, repr=False)
class WorkloadFlags:
    """Requests and their arrival times."""

    trace: Trace = None
    arrivals: Arrivals = None
    num_requests: NumRequests = None
    rate_scale: RateScale = 1.0
    input_len: InputLen = 1024
    output_len: OutputLen = 256
    length_cv: LengthCv = 0.0
    truncate: Truncate = False
    seed: Seed = 0


@dataclass(eq=False, repr=False)
class DeploymentFlags:
    """A model's changes, its machine, and the sizes of its steps."""

    changes: Changes = None
    hardware: Hardware = "h100"
    step_times: StepTimes = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    block_size: BlockSize = 16


@dataclass(eq=False, repr=False)
class DraftFlags:
    """The proposer of drafts, their number, and how often they are accepted."""

    speculative: Speculative = None
    num_speculative_tokens: NumSpeculativeTokens = None
    draft_acceptance_rate: DraftAcceptanceRate = None
    draft_depth: DraftDepth = Depth.chosen


@grouped
def simulate(
    *,
    model: Model,
    work: WorkloadFlags,
    machine: DeploymentFlags,
    drafts: DraftFlags,
    replicas: Replicas = 1,
    routing: RoutingOption = Routing.round_robin,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    percentile: Percentile = None,
    host_times: Host = None,
    slo: SloLimits = None,
    json_output: JsonOutput = False,
    plot: Plot = None,
    every_step: EveryStep = False,
) -> None:
    """Run the engine's own scheduler on a virtual clock, and report latencies, goodput, memory and queues."""
    from ridgeline.cli.show.progress import requests_bar
    from ridgeline.sched.routing import ROUTES
    from ridgeline.sim import Slo, settings
    from ridgeline.sim import simulate as run
    from ridgeline.sim.host import HostTimes

    limits = Slo.parse(slo) if slo else None
    name, times, deployment = deployment_of(model, machine, drafts)
    sure, times = sure_times(deployment, machine, percentile, times)
    seqs = min(step_sizes(deployment).seqs, deployment.chunk) if max_num_seqs is None else max_num_seqs
    chosen = settings(deployment, max_model_len=max_model_len, max_num_seqs=seqs)
    workload = workload_of(work, chosen.max_model_len)
    with requests_bar(len(workload.requests)) as over:
        found = run(
            workload, chosen, step_cost(deployment, machine.step_times, sure), replicas=replicas,
            route=ROUTES[routing.value], slo=limits, seed=work.seed, every_step=every_step,
            drafts=simulated_drafts(deployment, drafts, sure), on_over=over,
            host=HostTimes.parse(host_times) if host_times else None,
        )  # fmt: skip
    title = _title(name, deployment, work, replicas, routing)
    if plot:
        from ridgeline.sim.picture import draw

        draw(title, found.run, plot)
    if json_output:
        arguments = values_of(
            work, machine, drafts, model=model, replicas=replicas, routing=routing.value, max_model_len=max_model_len,
            max_num_seqs=max_num_seqs, percentile=percentile, host_times=host_times, slo=slo, json_output=json_output,
            plot=plot, every_step=every_step,
        )  # fmt: skip
        print_json(arguments, found.run, times=times, speculation=_speculation(deployment))
    else:
        _print(title, times, found, chosen, deployment)


def deployment_of(model: str, flags: DeploymentFlags, drafts: DraftFlags | None = None) -> tuple[str, str, Deployment]:
    """Return the model's name, a note on where the step times come from, and the model on its machine."""
    from dataclasses import replace

    from ridgeline.cli.flags.known import find_draft, find_known_writer, local_gpu, precision_of
    from ridgeline.cost.calibration import find_machine
    from ridgeline.plan.changes import change
    from ridgeline.plan.planner import Deployment

    found, note = find_machine(flags.hardware, local_gpu)
    known = find_known_writer(model, on_cpu=found.kind == "cpu")
    times = f"step times come from {flags.step_times}" if flags.step_times else note
    tokens = flags.max_num_batched_tokens
    deployment = Deployment(known.spec, found, precision_of(known, found), page_tokens=flags.block_size)
    deployment = replace(deployment, chunk=step_sizes(deployment).tokens if tokens is None else tokens)
    if flags.changes:
        deployment = change(deployment, ",".join(flags.changes), find_draft).deployment
    return known.name, times, with_drafts(deployment, drafts) if drafts else deployment


def sure_times(
    deployment: Deployment, flags: DeploymentFlags, percentile: Level | None, note: str
) -> tuple[Sureness, str]:
    """Return how long steps take by --percentile, and a note on where their times come from.

    note: the one without --percentile. Raises RequestError if nothing is expected of the machine.
    """
    from ridgeline.errors import RequestError
    from ridgeline.plan.expected import LEVELS, ROOF, origin, sureness

    if percentile is None:
        return ROOF, note
    if flags.step_times:
        raise RequestError("--percentile does not go with --step-times, which has all times; leave one of them out")
    hardware = deployment.hardware
    if not (why := origin(hardware)):
        raise RequestError(
            f"too little is known of {hardware.name} to say which times to expect; leave out --percentile {percentile}"
        )
    return sureness(hardware, LEVELS[percentile.value]), f"step times are the {percentile} of those to expect: {why}"


class StepSizes(NamedTuple):
    """Most sequences and most tokens of a step."""

    seqs: int
    tokens: int


def step_sizes(deployment: Deployment) -> StepSizes:
    """Return what an engine chooses: by the calibration of its machine, else the defaults of `ridgeline serve`."""
    from ridgeline.settings.advice import advise

    advice = advise(deployment)
    if advice is None:
        return StepSizes(256, 512)
    return StepSizes(advice.max_num_seqs, advice.max_num_batched_tokens)


def with_drafts(deployment: Deployment, flags: DraftFlags) -> Deployment:
    """Return a deployment with the drafts of --speculative. Raises RequestError for flags that do not go together."""
    from dataclasses import replace

    from ridgeline.cli.flags.known import find_draft
    from ridgeline.errors import RequestError
    from ridgeline.plan.speculation import DEPTH, NGRAM, Draft, parse_acceptance, speculation_of

    name, depth, acceptance = flags.speculative, flags.num_speculative_tokens, flags.draft_acceptance_rate
    if name is None or name == "off":
        given = [
            n for n, v in (("num-speculative-tokens", depth), ("draft-acceptance-rate", acceptance)) if v is not None
        ]
        if given:
            raise RequestError(f"--{given[0]} needs --speculative with a draft model, the folder of a head, or ngram")
        return deployment
    if name == "auto":
        raise RequestError(
            "--speculative is auto, which only an engine on its own machine can choose; set it to ngram, off, a draft "
            "model or the folder of a head"
        )
    draft = Draft(NGRAM, None) if name == NGRAM else find_draft(name)
    by_depth = parse_acceptance(acceptance) if acceptance else ()
    return replace(deployment, speculation=speculation_of(draft, DEPTH if depth is None else depth, by_depth))


def simulated_drafts(deployment: Deployment, flags: DraftFlags, sure: Sureness) -> Drafts | None:
    """Return the drafts of a deployment for the simulator; None without. Their depth is chosen by the engine's rule.

    sure: margins over the expected times of their steps.
    """
    if deployment.speculation is None:
        return None
    from functools import partial

    from ridgeline.engine.depth import DepthRule
    from ridgeline.sim import draft_cost_of, drafts_of

    is_fixed = flags.draft_depth == Depth.fixed
    return drafts_of(
        deployment, None if is_fixed else lambda most, rounds: DepthRule(most, rounds=rounds),
        partial(draft_cost_of, sure=sure),
    )  # fmt: skip


def _speculation(deployment: Deployment) -> dict[str, Any] | None:
    from ridgeline.plan.report import speculation_json

    return speculation_json(deployment.speculation) if deployment.speculation else None


def step_cost(deployment: Deployment, step_times: str | None, sure: Sureness) -> StepCost:
    """Return the cost of steps: the planner's estimate for the machine, or the one of a JSON file.

    sure: margins over the expected times.
    """
    from ridgeline.sim import LinearCost, cost_of

    return LinearCost.read(step_times) if step_times else cost_of(deployment, sure)


def workload_of(flags: WorkloadFlags, limit: int | None) -> Workload:
    """Return the requests and their arrival times, from a trace or drawn at random. limit: the longest context in
    tokens.
    """
    from itertools import islice

    from ridgeline.sim import Workload
    from ridgeline.sim.traces import read_trace
    from ridgeline.sim.workload import cut, lengths, parse_arrivals, repeated, scale_rate

    count, trace, arrivals = flags.num_requests, flags.trace, flags.arrivals
    _check(flags)
    if trace:
        requests = read_trace(trace, count)
        if count is not None and count > len(requests):
            requests = repeated(requests, count)
    else:
        arrivals = arrivals or DEFAULT_ARRIVALS
        drawn = lengths(flags.input_len, flags.output_len, flags.length_cv, flags.seed, limit)
        requests = list(islice(drawn, count or DEFAULT_REQUESTS))
    workload = parse_arrivals(arrivals)(requests, flags.seed) if arrivals else Workload(requests)
    if flags.rate_scale != 1.0:
        workload = Workload(scale_rate(workload.requests, flags.rate_scale), workload.clients, workload.think_ns)
    return cut(workload, limit) if flags.truncate and limit else workload


def _check(flags: WorkloadFlags) -> None:
    """Raise RequestError for a size or rate that is out of range."""
    from math import isfinite

    from ridgeline.errors import RequestError

    for name in ("num_requests", "input_len", "output_len"):
        if (count := getattr(flags, name)) is not None and count < 1:
            raise RequestError(f"--{name.replace('_', '-')} is {count}; it must be at least 1")
    if not (flags.rate_scale > 0 and isfinite(flags.rate_scale)):
        raise RequestError(f"--rate-scale is {flags.rate_scale}; it must be positive and finite")
    if not (flags.length_cv >= 0 and isfinite(flags.length_cv)):
        raise RequestError(f"--length-cv is {flags.length_cv}; it must be at least 0 and finite")


def print_json(arguments: dict[str, Any], run: Run, **more: Any) -> None:
    """Print one JSON object: the command's arguments, every column, and the timeline."""
    import json

    print(json.dumps({"arguments": arguments, **more, **run.report.to_json(), "timeline": run.timeline.columns()}))


def _title(name: str, deployment: Deployment, work: WorkloadFlags, replicas: int, routing: Routing) -> str:
    from pathlib import Path

    what = [Path(work.trace).name] if work.trace else []
    if not work.trace or work.arrivals:
        what.append(work.arrivals or DEFAULT_ARRIVALS)
    if work.rate_scale != 1.0:
        what.append(f"{work.rate_scale:g} times as fast")
    tp = deployment.scheme.tp
    machines = f"{f'{replicas} x ' if replicas > 1 else ''}{deployment.hardware.name}{f', tp {tp}' if tp > 1 else ''}"
    routed = f", {routing.value}" if replicas > 1 else ""
    precision = deployment.precision
    return f"{name} on {machines}{routed} ({precision.weights}, state {precision.state}): {', '.join(what)}"


# ---- tables --------------------------------------------------------------------------------------------------------


def _print(title: str, times: str, found: Simulated, chosen: Settings, deployment: Deployment) -> None:
    from ridgeline.cli.show.simulated import report_tables
    from ridgeline.cli.show.tables import screen, show

    r = found.report
    refused = f"; {r.refused:,} refused, the first: {found.first_refusal}" if r.refused else ""
    show(
        screen(),
        title,
        times,
        *draft_lines(deployment),
        f"{r.requests:,} requests with {r.prompt_tokens:,} tokens in and {r.output_tokens:,} out, in "
        f"{r.duration_s:,.1f} s of simulated time and {r.steps:,} steps{refused}",
        f"each replica: at most {chosen.max_num_seqs} sequences and {chosen.max_num_batched_tokens:,} tokens a step, "
        + " and ".join(f"{n - 1:,} pages of {g.name}" for n, g in zip(chosen.num_pages, chosen.groups, strict=True)),
        *report_tables(r),
    )


def draft_lines(deployment: Deployment) -> list[str]:
    """Return a line that names what proposes drafts and where their acceptance comes from; none without drafts."""
    if (s := deployment.speculation) is None:
        return []
    name = s.draft.name if s.draft else f"anything that costs {s.draft_cost:g} steps a draft"
    return [f"drafts: {name}, {s.depth} at most; acceptance {s.acceptance_text} ({s.source})"]
