"""`ridgeline bench serve`: measure an OpenAI server under load, and compare with the prediction of the simulator."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags.groups import grouped, values_of
from ridgeline.cli.simulate import DraftFlags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ridgeline.cli.show.tables import Table
    from ridgeline.measure.client import Server
    from ridgeline.measure.load import Measured
    from ridgeline.sched.stats import DraftCounts
    from ridgeline.sim import Report, Workload

_SERVER, _WORK, _OUT, _PLAN = "Server", "Workload", "Output", "Prediction"
NUM_REQUESTS = 200  # if there is no trace
KEYS = ("RIDGELINE_API_KEY", "OPENAI_API_KEY")
LATENCIES = (("TTFT, with queueing", "ttft_s"), ("TPOT", "tpot_s"), ("between two tokens", "itl_s"),
             ("end to end", "e2e_s"))  # fmt: skip
RATES = (("requests/s", "requests_per_s"), ("tokens/s out", "output_tokens_per_s"),
         ("tokens/s in and out", "total_tokens_per_s"), ("goodput, requests/s", "goodput"),
         ("within the SLO", "attainment"))  # fmt: skip


def _option(panel: str, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


BaseUrl = Annotated[str, _option(_SERVER, "--base-url", help="URL of the server, with or without /v1.")]
Model = Annotated[
    str | None,
    _option(_SERVER, "--model", "-m", help="Name of the model on the server. Default: the first name in /v1/models."),
]
ApiKey = Annotated[
    str | None,
    _option(
        _SERVER, "--api-key", help=f"API key of the server. Default: the environment variable {' or '.join(KEYS)}."
    ),
]
BackendName = Annotated[
    str,
    _option(
        _SERVER,
        "--backend",
        help="Endpoint and form of prompts. openai: /v1/completions with token ids. openai-text: /v1/completions with "
        "text. openai-chat: /v1/chat/completions.",
    ),
]
Endpoint = Annotated[
    str | None, _option(_SERVER, "--endpoint", help="Path of the endpoint. Default: the path of the backend.")
]
Timeout = Annotated[
    float, _option(_SERVER, "--timeout", help="Seconds without data from the server after which a request fails.")
]
ExtraBody = Annotated[
    str, _option(_SERVER, "--extra-body", help="JSON object with fields that are added to every request.")
]
VocabSize = Annotated[
    int, _option(_SERVER, "--vocab-size", min=1, help="Prompts are random token ids below this number.")
]
Trace = Annotated[
    str | None,
    _option(
        _WORK, "--trace", help="File with recorded requests: Azure's CSV or Mooncake's JSON lines. Default: no trace."
    ),
]
Arrivals = Annotated[
    str | None,
    _option(
        _WORK,
        "--arrivals",
        help="Arrival process and requests per second: poisson:8, gamma:8,cv=4 or onoff:8,on=10,off=30. Default: the "
        "times of the trace.",
    ),
]
Concurrency = Annotated[
    int | None,
    _option(
        _WORK,
        "--concurrency",
        min=1,
        help="Number of clients that each send their next request when they have the answer to the last one (closed "
        "loop). Default: an open loop with --arrivals or --trace.",
    ),
]
NumRequests = Annotated[
    int | None,
    _option(_WORK, "--num-requests", min=1, help="Number of requests. Default: all of the trace, or 200 without one."),
]
Scale = Annotated[float, _option(_WORK, "--scale", help="Factor by which the trace is replayed faster.")]
InputLen = Annotated[
    int, _option(_WORK, "--input-len", min=1, help="Mean number of tokens of a prompt. Ignored with --trace.")
]
OutputLen = Annotated[
    int, _option(_WORK, "--output-len", min=1, help="Mean number of tokens of an answer. Ignored with --trace.")
]
LengthCv = Annotated[
    float,
    _option(
        _WORK,
        "--length-cv",
        min=0.0,
        help="Coefficient of variation of prompt and answer lengths. 0 makes all lengths equal.",
    ),
]
Truncate = Annotated[
    bool, _option(_WORK, "--truncate", help="Shorten requests of the trace that exceed the server's context length.")
]
Warmup = Annotated[
    int,
    _option(_WORK, "--warmup", min=0, help="Number of requests that are sent one by one before the measurement."),
]
Seed = Annotated[int, _option(_WORK, "--seed", help="Random seed for arrivals, lengths and prompts.")]
Slo = Annotated[
    str | None,
    _option(
        _OUT,
        "--slo",
        help="Latency limits that a request must meet to count for goodput, such as ttft=200ms,tpot=30ms,e2e=10s. "
        "Default: no goodput.",
    ),
]
JsonOutput = Annotated[bool, _option(_OUT, "--json", help="Print one JSON object instead of tables.")]
Plot = Annotated[
    str | None,
    _option(_OUT, "--plot", help="File for a plot of the results, such as out.png or out.svg. Default: no plot."),
]
Predict = Annotated[
    str | None,
    _option(
        _PLAN,
        "--predict",
        help="Model that the simulator predicts for, as in `ridgeline plan`. Set it for servers other than Ridgeline. "
        "Default: the model and settings that a Ridgeline server reports.",
    ),
]
Changes = Annotated[
    str,
    _option(
        _PLAN, "--changes", help="Changes to the model of --predict, such as weights=int4,kv=fp8,tp=2. Default: none."
    ),
]
Hardware = Annotated[
    str, _option(_PLAN, "--hardware", help="Machine of the prediction, such as h100, or local for this one.")
]
StepTimes = Annotated[
    str | None,
    _option(_PLAN, "--step-times", help="JSON file with measured step times. Default: the roofline of --hardware."),
]
MaxNumSeqs = Annotated[
    int, _option(_PLAN, "--max-num-seqs", help="Largest number of sequences per step, for --predict.")
]
MaxNumBatchedTokens = Annotated[
    int, _option(_PLAN, "--max-num-batched-tokens", help="Largest number of tokens per step, for --predict.")
]
BlockSize = Annotated[int, _option(_PLAN, "--block-size", help="Number of tokens per page, for --predict.")]


@dataclass(eq=False, repr=False)
class ServerFlags:
    """The server that is measured, and how it is called."""

    base_url: BaseUrl = "http://127.0.0.1:8000"
    model: Model = None
    backend: BackendName = "openai"
    endpoint: Endpoint = None
    api_key: ApiKey = None
    timeout: Timeout = 600
    extra_body: ExtraBody = "{}"
    vocab_size: VocabSize = 1000


@dataclass(eq=False, repr=False)
class LoadTestFlags:
    """Requests and when they are sent."""

    trace: Trace = None
    arrivals: Arrivals = None
    concurrency: Concurrency = None
    num_requests: NumRequests = None
    scale: Scale = 1.0
    input_len: InputLen = 128
    output_len: OutputLen = 128
    length_cv: LengthCv = 0.0
    truncate: Truncate = False
    warmup: Warmup = 3
    seed: Seed = 0


@dataclass(eq=False, repr=False)
class PredictionFlags:
    """The model, machine and settings that the simulator predicts for."""

    predict: Predict = None
    changes: Changes = ""
    hardware: Hardware = "h100"
    step_times: StepTimes = None
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxNumBatchedTokens = 512
    block_size: BlockSize = 16


@grouped
def bench_serve(
    *,
    target: ServerFlags,
    work: LoadTestFlags,
    slo: Slo = None,
    json_output: JsonOutput = False,
    plot: Plot = None,
    prediction: PredictionFlags,
    drafts: DraftFlags,
) -> None:
    """Measure an OpenAI-compatible server under load.

    Requests are sent when they are due, even if earlier ones are not answered yet.
    The report shows measured latencies and rates beside those that the simulator predicts.
    """
    import asyncio

    from ridgeline.measure.load_picture import check_name, draw
    from ridgeline.sim import Slo

    limits = Slo.parse(slo) if slo else None
    if plot:
        check_name(plot)
    server, workload, found, described, counts = asyncio.run(_measure(target, work, limits))
    predicted, times = _predict(prediction, drafts, described, workload, limits, work.seed, counts)
    title = _title(target, work, server, workload)
    if plot:
        draw(title, found, plot)
    if json_output:
        import json

        arguments = values_of(
            target, work, prediction, drafts, slo=slo, json_output=json_output, plot=plot, api_key=None
        )
        line = {"benchmark": "serve", "model": server.model, "server": server.owner, "workload": title,
                "arguments": arguments, "failures": dict(found.failures), "at_once": found.at_once,
                "without_usage": found.without_usage,
                "lateness_s": found.lateness_s, "measured": columns(found.report),
                "predicted": predicted and columns(predicted), "predicted_times": times}  # fmt: skip
        print(json.dumps(line, allow_nan=False))
    else:
        _print(title, found, predicted, times)


def columns(report: Report) -> dict[str, Any]:
    """Return the figures of a report that a client can measure."""
    names = ("requests", "prompt_tokens", "output_tokens", "duration_s", *dict(LATENCIES).values(), "slo", "drafts")
    seen = {name: value for name, value in asdict(report).items() if name in names}
    return seen | {name: getattr(report, name) for name in dict(RATES).values()}


async def _measure(
    target: ServerFlags, work: LoadTestFlags, limits: Any
) -> tuple[Server, Workload, Measured, Any, DraftCounts | None]:
    """Send the workload. Return the server, the workload, the measurement, the server's answer to GET /plan, which is
    None for a server other than Ridgeline, and the drafts that it verified, which are None if it does not count them.
    """
    from dataclasses import replace

    from ridgeline.cli.show.progress import prompts_bar
    from ridgeline.measure.backends import backend_of
    from ridgeline.measure.client import Client
    from ridgeline.measure.load import Loop
    from ridgeline.measure.scrape import PATH as METRICS
    from ridgeline.measure.scrape import draft_counts
    from ridgeline.measure.served import PATH
    from ridgeline.sim import DraftsUsed

    key = target.api_key or next(filter(None, map(os.environ.get, KEYS)), None)
    backend, extra = backend_of(target.backend), _extra(target.extra_body)
    client = Client(target.base_url, key, target.timeout, backend, target.endpoint)
    async with client.http:
        server = await client.server(target.model)
        workload = _workload(work, server.max_model_len)
        with prompts_bar(len(workload.requests)) as done:
            loop = Loop(client, server, vocab_size=target.vocab_size, seed=work.seed, extra=extra, on_done=done)
            await loop.warm_up(workload.requests[: work.warmup])
            before = draft_counts(await client.text(METRICS) or "")
            found = await loop.run(workload, limits)
            after = draft_counts(await client.text(METRICS) or "")
        counts = None if before is None or after is None else after.plus(before, -1)
        used = None if counts is None else DraftsUsed.of([counts])
        found = replace(found, report=replace(found.report, drafts=used))
        return server, workload, found, await client.get(PATH) if server.owner == "ridgeline" else None, counts


def _extra(text: str) -> dict[str, Any]:
    import json

    from ridgeline.errors import RequestError

    try:
        found = json.loads(text)
    except ValueError as e:
        raise RequestError(f"--extra-body is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise RequestError(f'--extra-body {text}: it must be an object, such as {{"top_k": 40}}')
    return found


def _workload(work: LoadTestFlags, limit: int | None) -> Workload:
    """Return the workload. limit: the server's context length in tokens, or None if it does not report one."""
    from ridgeline.cli.simulate import WorkloadFlags, workload_of
    from ridgeline.errors import RequestError

    arrivals, clients = work.arrivals, work.concurrency
    if clients is not None and arrivals is not None:
        raise RequestError("--concurrency and --arrivals both set the arrivals; give one of them")
    if work.truncate and limit is None:
        raise RequestError("--truncate: the server does not report its context length (max_model_len in /v1/models)")
    if not work.trace and arrivals is None and clients is None:
        raise RequestError("no workload is given; add --trace FILE, --arrivals poisson:8 or --concurrency 32")
    flags = WorkloadFlags(
        trace=work.trace, arrivals=arrivals or (f"closed:{clients}" if clients else None),
        num_requests=work.num_requests or (None if work.trace else NUM_REQUESTS), rate_scale=work.scale,
        input_len=work.input_len, output_len=work.output_len, length_cv=work.length_cv, truncate=work.truncate,
        seed=work.seed,
    )  # fmt: skip
    return workload_of(flags, limit)


def _predict(
    flags: PredictionFlags, drafts: DraftFlags, described: Any, workload: Workload, limits: Any, seed: int,
    counts: DraftCounts | None,
) -> tuple[Report | None, str | None]:  # fmt: skip
    """Simulate the workload. Return the report and the source of its step times; both are None without a model.

    counts: drafts of the measured run, whose acceptance a simulated Ridgeline server has, too.
    """
    from ridgeline.cli.simulate import DeploymentFlags, deployment_of, draft_lines, simulated_drafts, step_cost
    from ridgeline.measure.served import predict
    from ridgeline.plan.expected import ROOF
    from ridgeline.sim import settings, simulate

    if flags.predict is None:
        return (None, None) if described is None else predict(described, workload, limits, seed, counts)
    machine = DeploymentFlags(
        changes=[flags.changes] if flags.changes else None, hardware=flags.hardware, step_times=flags.step_times,
        max_num_batched_tokens=flags.max_num_batched_tokens, block_size=flags.block_size,
    )  # fmt: skip
    _, times, deployment = deployment_of(flags.predict, machine, drafts)
    longest = max(r.prompt_tokens + r.output_tokens for r in workload.requests)
    limit = min(longest, deployment.spec.resolve_max_model_len(None))
    chosen = settings(deployment, max_model_len=limit, max_num_seqs=flags.max_num_seqs)
    cost, proposer = step_cost(deployment, flags.step_times, ROOF), simulated_drafts(deployment, drafts, ROOF)
    found = simulate(workload, chosen, cost, slo=limits, seed=seed, drafts=proposer).report
    return found, "; ".join((times, *draft_lines(deployment)))


# ---- reports -------------------------------------------------------------------------------------------------------


def _title(target: ServerFlags, work: LoadTestFlags, server: Server, workload: Workload) -> str:
    from pathlib import Path

    parts = [Path(work.trace).name] if work.trace else []
    if workload.clients is not None:
        parts.append(f"{workload.clients} clients")
    elif work.arrivals:
        parts.append(work.arrivals)
    if work.scale != 1.0:
        parts.append(f"{work.scale:g} times as fast")
    return f"{server.model} at {target.base_url}: {', '.join(parts)}"


def _print(title: str, found: Measured, predicted: Report | None, times: str | None) -> None:
    from ridgeline.cli.show.tables import screen, show

    r = found.report
    lines = [
        title,
        f"{r.requests:,} requests with {r.prompt_tokens:,} tokens in and {r.output_tokens:,} out, in "
        f"{r.duration_s:,.1f} s; at most {found.at_once:,} open at once; sent at most {_time(found.lateness_s)} late",
        *(f"{count:,} failed: {reason}" for reason, count in found.failures.items()),
    ]
    if found.without_usage:
        lines.append(
            f"{found.without_usage:,} answers had no usage: their tokens are counted as max_tokens if finish_reason is "
            "length, else as the number of events with text"
        )
    if times:
        lines.append(f"predicted: {times}")
    show(screen(), *lines, _latencies(r, predicted), _rates(r, predicted))


def _latencies(measured: Report, predicted: Report | None) -> Table:
    from ridgeline.cli.show.simulated import spread_table

    table = spread_table()
    for name, column in LATENCIES:
        for title, report in ((name, measured), ("  predicted", predicted)):
            if report is not None and (p := getattr(report, column)) is not None:
                table.add_row(title, *map(_time, (p.mean, p.p50, p.p90, p.p95, p.p99, p.max)))
    return table


def _rates(measured: Report, predicted: Report | None) -> Table:
    from ridgeline.cli.show.tables import Column, Table

    reports: Sequence[Report] = [r for r in (measured, predicted) if r is not None]
    names = ("measured", "predicted")[: len(reports)]
    table = Table("", (Column("", right=False), *(Column(name) for name in names)))
    for name, column in RATES:
        values = [getattr(r, column) for r in reports]
        if None not in values:
            table.add_row(name, *(f"{v:.1%}" if column == "attainment" else f"{v:,.2f}" for v in values))
    if any(r.drafts is not None for r in reports):
        each = (f"{r.drafts.tokens_per_verification:.2f}" if r.drafts else "no drafts" for r in reports)
        table.add_row("tokens per verification", *each)
    return table


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"
