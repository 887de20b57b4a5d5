"""`ridgeline bench serve`: a workload against any OpenAI server, in real time, beside what is predicted of it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ridgeline.cli.show.tables import Table
    from ridgeline.measure.client import Server
    from ridgeline.measure.load import Measured
    from ridgeline.sim import Report, Workload

_SERVER, _WORK, _OUT, _PLAN = "Which server", "What comes in", "What comes out", "What is predicted"
NUM_REQUESTS = 200  # without a trace
KEYS = ("RIDGELINE_API_KEY", "OPENAI_API_KEY")
LATENCIES = (("TTFT, the wait included", "ttft_s"), ("TPOT", "tpot_s"), ("between two tokens", "itl_s"),
             ("end to end", "e2e_s"))  # fmt: skip
RATES = (("requests/s", "requests_per_s"), ("tokens/s out", "output_tokens_per_s"),
         ("tokens/s in and out", "total_tokens_per_s"), ("goodput, requests/s", "goodput"),
         ("within the SLO", "attainment"))  # fmt: skip


def _option(panel: str, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


BaseUrl = Annotated[str, _option(_SERVER, "--base-url", help="With or without /v1.")]
Model = Annotated[str | None, _option(_SERVER, "--model", "-m", help="Default: the first that it serves.")]
ApiKey = Annotated[str | None, _option(_SERVER, "--api-key", help=f"Default: the environment's {' or '.join(KEYS)}.")]
BackendName = Annotated[
    str,
    _option(_SERVER, "--backend", help="openai: /v1/completions, token ids; openai-text: words instead; openai-chat."),
]
Endpoint = Annotated[str | None, _option(_SERVER, "--endpoint", help="Where, if not where the backend says.")]
Timeout = Annotated[float, _option(_SERVER, "--timeout", help="Seconds without a byte: then it failed.")]
ExtraBody = Annotated[str, _option(_SERVER, "--extra-body", help="JSON: more fields of every request.")]
VocabSize = Annotated[int, _option(_SERVER, "--vocab-size", min=1, help="Prompts are random token ids below it.")]
Trace = Annotated[str | None, _option(_WORK, "--trace", help="Azure CSV or Mooncake JSON lines.")]
Arrivals = Annotated[
    str | None,
    _option(_WORK, "--arrivals", help="Requests a second: poisson:8, gamma:8,cv=4, onoff:8,on=10,off=30"),
]
Concurrency = Annotated[
    int | None, _option(_WORK, "--concurrency", min=1, help="Closed loop: so many clients; the same as closed:N.")
]
NumRequests = Annotated[
    int | None, _option(_WORK, "--num-requests", min=1, help="Default: the trace's; without one 200.")
]
Scale = Annotated[float, _option(_WORK, "--scale", help="So many times as fast as the trace.")]
InputLen = Annotated[int, _option(_WORK, "--input-len", min=1, help="Mean, without a trace.")]
OutputLen = Annotated[int, _option(_WORK, "--output-len", min=1, help="Mean, without a trace.")]
LengthCv = Annotated[
    float, _option(_WORK, "--length-cv", min=0.0, help="Coefficient of variation of both; 0: all equal.")
]
Truncate = Annotated[bool, _option(_WORK, "--truncate", help="Cut requests to the longest context.")]
Warmup = Annotated[int, _option(_WORK, "--warmup", min=0, help="Requests before it, one by one; not counted.")]
Seed = Annotated[int, _option(_WORK, "--seed", help="Of arrivals, lengths and prompts.")]
Slo = Annotated[str | None, _option(_OUT, "--slo", help="For goodput: ttft=200ms,tpot=30ms,e2e=10s")]
JsonOutput = Annotated[bool, _option(_OUT, "--json", help="Print one JSON object.")]
Plot = Annotated[str | None, _option(_OUT, "--plot", help="Draw it: out.png or out.svg.")]
Predict = Annotated[
    str | None,
    _option(_PLAN, "--predict", help="The model there. Default: what a Ridgeline server says."),
]
Changes = Annotated[str, _option(_PLAN, "--changes", help="Of it: weights=int4,kv=fp8,tp=2, as for plan.")]
Hardware = Annotated[str, _option(_PLAN, "--hardware", help="The machine there: h100, ...; local: this one.")]
StepTimes = Annotated[str | None, _option(_PLAN, "--step-times", help="Those of a JSON file instead of the machine's.")]
MaxNumSeqs = Annotated[int, _option(_PLAN, "--max-num-seqs", help="Sequences that run there at once.")]
MaxNumBatchedTokens = Annotated[int, _option(_PLAN, "--max-num-batched-tokens", help="Of one step there.")]
BlockSize = Annotated[int, _option(_PLAN, "--block-size", help="Tokens of a page there.")]


def bench_serve(
    base_url: BaseUrl = "http://127.0.0.1:8000", model: Model = None, backend: BackendName = "openai",
    endpoint: Endpoint = None, api_key: ApiKey = None, timeout: Timeout = 600,
    extra_body: ExtraBody = "{}", vocab_size: VocabSize = 1000, trace: Trace = None, arrivals: Arrivals = None,
    concurrency: Concurrency = None, num_requests: NumRequests = None, scale: Scale = 1.0, input_len: InputLen = 128,
    output_len: OutputLen = 128, length_cv: LengthCv = 0.0, truncate: Truncate = False, warmup: Warmup = 3,
    seed: Seed = 0, slo: Slo = None, json_output: JsonOutput = False, plot: Plot = None, predict: Predict = None,
    changes: Changes = "", hardware: Hardware = "h100", step_times: StepTimes = None, max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 512, block_size: BlockSize = 16,
) -> None:  # fmt: skip
    """Send a workload to a server at its own pace: requests go out when they are due, whatever became of others."""
    given = locals()  # every option, by its name
    import asyncio

    from ridgeline.measure.load_picture import check_name, draw
    from ridgeline.sim import Slo

    limits = Slo.parse(slo) if slo else None
    if plot:
        check_name(plot)
    server, workload, found, described = asyncio.run(_measure(given, limits))
    predicted, times = _predict(given, described, workload, limits)
    title = _title(given, server, workload)
    if plot:
        draw(title, found, plot)
    if json_output:
        import json

        line = {"benchmark": "serve", "model": server.model, "server": server.owner, "workload": title,
                "arguments": given | {"api_key": None}, "failures": dict(found.failures), "at_once": found.at_once,
                "without_usage": found.without_usage,
                "lateness_s": found.lateness_s, "measured": columns(found.report),
                "predicted": predicted and columns(predicted), "predicted_times": times}  # fmt: skip
        print(json.dumps(line, allow_nan=False))
    else:
        _print(title, found, predicted, times)


def columns(report: Report) -> dict[str, Any]:
    """Those that a client can see."""
    names = ("requests", "prompt_tokens", "output_tokens", "duration_s", *dict(LATENCIES).values(), "slo")
    seen = {name: value for name, value in asdict(report).items() if name in names}
    return seen | {name: getattr(report, name) for name in dict(RATES).values()}


async def _measure(given: dict[str, Any], limits: Any) -> tuple[Server, Workload, Measured, Any]:
    """described: what a server of ours says of itself."""
    from ridgeline.cli.show.progress import prompts_bar
    from ridgeline.measure.backends import backend_of
    from ridgeline.measure.client import Client
    from ridgeline.measure.load import Loop
    from ridgeline.measure.served import PATH

    key = given["api_key"] or next(filter(None, map(os.environ.get, KEYS)), None)
    backend, extra = backend_of(given["backend"]), _extra(given["extra_body"])
    client = Client(given["base_url"], key, given["timeout"], backend, given["endpoint"])
    async with client.http:
        server = await client.server(given["model"])
        workload = _workload(given, server.max_model_len)
        with prompts_bar(len(workload.requests)) as done:
            loop = Loop(client, server, vocab_size=given["vocab_size"], seed=given["seed"], extra=extra, on_done=done)
            await loop.warm_up(workload.requests[: given["warmup"]])
            found = await loop.run(workload, limits)
        return server, workload, found, await client.get(PATH) if server.owner == "ridgeline" else None


def _extra(text: str) -> dict[str, Any]:
    import json

    from ridgeline.errors import RequestError

    try:
        found = json.loads(text)
    except ValueError as e:
        raise RequestError(f"--extra-body is no JSON: {e}") from None
    if not isinstance(found, dict):
        raise RequestError(f'--extra-body {text}: it must be an object, such as {{"top_k": 40}}')
    return found


def _workload(given: dict[str, Any], limit: int | None) -> Workload:
    """limit: tokens of the longest request, None where the server does not say."""
    from ridgeline.cli.simulate import workload_of
    from ridgeline.errors import RequestError

    arrivals, clients = given["arrivals"], given["concurrency"]
    if clients is not None and arrivals is not None:
        raise RequestError("--concurrency is a closed loop and --arrivals says another; give one of them")
    if given["truncate"] and limit is None:
        raise RequestError("--truncate: the server does not say its longest context (max_model_len of /v1/models)")
    if not given["trace"] and arrivals is None and clients is None:
        raise RequestError("say what comes in: --trace FILE, --arrivals poisson:8 or --concurrency 32")
    count = given["num_requests"] or (None if given["trace"] else NUM_REQUESTS)
    asked = {"arrivals": arrivals or (clients and f"closed:{clients}"), "num_requests": count}
    return workload_of(given | asked | {"rate_scale": given["scale"]}, limit)


def _predict(
    given: dict[str, Any], described: Any, workload: Workload, limits: Any
) -> tuple[Report | None, str | None]:
    """The same workload through the simulator, and whose step times; None where nothing is known of the model."""
    from ridgeline.cli.simulate import deployment_of, step_cost
    from ridgeline.measure.served import predict
    from ridgeline.sim import settings, simulate

    if given["predict"] is None:
        return (None, None) if described is None else predict(described, workload, limits, given["seed"])
    named = given | {"model": given["predict"], "changes": [given["changes"]] if given["changes"] else []}
    _, times, deployment = deployment_of(named)
    longest = max(r.prompt_tokens + r.output_tokens for r in workload.requests)
    limit = min(longest, deployment.spec.resolve_max_model_len(None))
    chosen = settings(deployment, max_model_len=limit, max_num_seqs=given["max_num_seqs"])
    cost = step_cost(deployment, given["step_times"])
    return simulate(workload, chosen, cost, slo=limits, seed=given["seed"]).report, times


# ---- reports -------------------------------------------------------------------------------------------------------


def _title(given: dict[str, Any], server: Server, workload: Workload) -> str:
    from pathlib import Path

    what = [Path(given["trace"]).name] if given["trace"] else []
    if workload.clients is not None:
        what.append(f"{workload.clients} clients")
    elif given["arrivals"]:
        what.append(given["arrivals"])
    if given["scale"] != 1.0:
        what.append(f"{given['scale']:g} times as fast")
    return f"{server.model} at {given['base_url']}: {', '.join(what)}"


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
            f"{found.without_usage:,} answers came without usage: their tokens are those asked for where the reason to "
            "stop is length, else events with text"
        )
    if times:
        lines.append(f"predicted: {times}")
    show(screen(), *lines, _latencies(r, predicted), _rates(r, predicted))


def _latencies(measured: Report, predicted: Report | None) -> Table:
    from ridgeline.cli.simulate import spread_table

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
    return table


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"
