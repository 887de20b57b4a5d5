"""`ridgeline bench`: measure latency and throughput, and compare them with the machine's roofline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.described import with_spec
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, grouped, llm_arguments, values_of
from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.cli.flags.prompts import Row
    from ridgeline.cli.show.tables import Table
    from ridgeline.llm import LLM
    from ridgeline.measure import Latency, Roof, Spread, Throughput
    from ridgeline.measure.predict import Predicted
    from ridgeline.runtime.generator import GenerationRequest
    from ridgeline.spec.dtype import DType
    from ridgeline.spec.request import RequestOutput

app = typer.Typer(no_args_is_help=True, help="Measure latency or throughput, and compare with the machine's roofline.")

INPUT_LEN, OUTPUT_LEN, NUM_PROMPTS = 128, 128, 200
ENGINE_SETTINGS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "steps_in_flight", "num_pages")


@dataclass(eq=False, repr=False)
class BenchFlags:
    """Options of both benchmarks."""

    model: o.Model
    json_output: Annotated[bool, option("--json", help="Print one JSON line.")] = False
    verbose: o.Verbose = False
    seed: o.Seed = 0
    cache: o.CacheMode = o.Cache.on
    batching: o.BatchingMode = o.Batching.continuous


@app.command("latency")
@with_spec
@grouped
def latency(
    *,
    bench: BenchFlags,
    batch_size: Annotated[int, option("--batch-size", min=1, help="Number of sequences in the batch. Default: 8.")] = 8,
    input_len: Annotated[int, option("--input-len", min=1, help="Tokens of each prompt. Default: 128.")] = INPUT_LEN,
    output_len: Annotated[int, option("--output-len", min=1, help="Tokens of each answer. Default: 128.")] = OUTPUT_LEN,
    num_iters_warmup: Annotated[
        int, option("--num-iters-warmup", min=0, help="Batches to run first without timing them. Default: 1.")
    ] = 1,
    num_iters: Annotated[int, option("--num-iters", min=1, help="Batches to time. Default: 5.")] = 5,
    load: LoadFlags,
    engine: EngineFlags,
) -> None:
    """Time whole batches with random prompts of one length, greedy sampling and no shared prefixes."""
    from ridgeline.cli.show.beside import expected, predicted_json
    from ridgeline.cli.show.progress import iterations_bar
    from ridgeline.measure import measure_latency
    from ridgeline.measure.predict import Asked

    llm, roof = _prepare(bench, llm_arguments(load, engine, skip_tokenizer_init=True))
    with iterations_bar(num_iters_warmup + num_iters) as done:
        found = measure_latency(
            llm, roof, batch_size=batch_size, input_len=input_len, output_len=output_len,
            warmup=num_iters_warmup, iters=num_iters, seed=bench.seed, on_iteration=done,
        )  # fmt: skip
    what = f"{batch_size} sequences at once, {input_len} tokens in and {output_len} out; {num_iters} times"
    predicted, note = expected(llm, [Asked(input_len, output_len)] * batch_size)
    measured = asdict(found) | {"predicted": predicted_json(predicted)}
    arguments = values_of(
        bench, load, engine, batch_size=batch_size, input_len=input_len, output_len=output_len,
        num_iters_warmup=num_iters_warmup, num_iters=num_iters,
    )  # fmt: skip
    _report("latency", bench, arguments, llm, roof, what, measured, _latency_tables(found, predicted, note))


@app.command("throughput")
@with_spec
@grouped
def throughput(
    *,
    bench: BenchFlags,
    num_prompts: Annotated[
        int | None,
        option("--num-prompts", min=1, help="Number of prompts. Default: 200, or all rows of --dataset."),
    ] = None,
    input_len: Annotated[
        int, option("--input-len", min=1, help="Tokens of each random prompt. Default: 128.")
    ] = INPUT_LEN,
    output_len: Annotated[int, option("--output-len", min=1, help="Tokens of each answer. Default: 128.")] = OUTPUT_LEN,
    dataset: Annotated[
        str | None,
        option(
            "--dataset",
            help="File of prompts, as for `generate`. A row's own max_tokens overrides --output-len. "
            "Default: random prompts.",
        ),
    ] = None,
    tokenizer: o.TokenizerName = None,
    load: LoadFlags,
    engine: EngineFlags,
) -> None:
    """Time many requests that arrive at once: random prompts or a data set, greedy, answers of the full length."""
    from ridgeline.cli.show.beside import asked_of, expected, predicted_json
    from ridgeline.cli.show.progress import prompts_bar
    from ridgeline.measure import measure_throughput

    rows = _rows(dataset, num_prompts)
    llm, roof = _prepare(bench, llm_arguments(load, engine, tokenizer=tokenizer, skip_tokenizer_init=rows is None))
    if rows is None:
        requests = _random_requests(llm, num_prompts or NUM_PROMPTS, input_len, output_len, bench.seed)
    else:
        requests = _requests(llm, rows, output_len)
    outputs: list[RequestOutput] = []
    with prompts_bar(len(requests)) as done:

        def finished(out: RequestOutput) -> None:
            outputs.append(out)
            done(sum(len(c.token_ids) for c in out.outputs))

        found = measure_throughput(llm, roof, requests, on_done=finished)
    predicted, note = expected(llm, asked_of(outputs))
    what = f"{len(requests):,} requests" + (
        f" of {dataset}" if dataset else f", {input_len} tokens in and {output_len} out"
    )
    rates = {name: getattr(found, name) for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")}
    measured = asdict(found) | rates | {"predicted": predicted_json(predicted)}
    arguments = values_of(
        bench, load, engine, num_prompts=num_prompts, input_len=input_len, output_len=output_len, dataset=dataset,
        tokenizer=tokenizer,
    )  # fmt: skip
    _report("throughput", bench, arguments, llm, roof, what, measured, _throughput_tables(found, predicted, note))


# ---- the requests to measure ----------------------------------------------------------------------------------------


def _prepare(bench: BenchFlags, arguments: Mapping[str, Any]) -> tuple[LLM, Roof]:
    """Load the model, and measure the machine. arguments: the arguments of LLM besides those of `bench`."""
    from ridgeline.cli.flags.loading import load
    from ridgeline.cli.show.report import say_engine
    from ridgeline.measure import measure_roof

    llm = load(bench.model, {**arguments, "cache": bench.cache, "batching": bench.batching, "seed": bench.seed})
    if bench.verbose:
        say_engine(llm, verbose=True)
    return llm, measure_roof(llm.loaded.table)


def _dtype(llm: LLM) -> DType:
    """Return the type in which the weight matrices are stored."""
    from ridgeline.cli.inspect import weight_dtype

    return weight_dtype(dict(llm.checkpoint.config), llm.options.dtype)


def _rows(dataset: str | None, num_prompts: int | None) -> Sequence[Row] | None:
    """Return the rows of a data set, or None for random prompts. Raises RequestError if there are too few rows."""
    from ridgeline.cli.flags.prompts import read_prompts
    from ridgeline.errors import RequestError

    if dataset is None:
        return None
    rows = read_prompts(dataset).rows
    if num_prompts is not None and num_prompts > len(rows):
        raise RequestError(
            f"--num-prompts is {num_prompts}, but {dataset} has only {len(rows)} prompts; use a smaller number"
        )
    return rows[:num_prompts]


def _requests(llm: LLM, rows: Sequence[Row], output_len: int) -> list[GenerationRequest]:
    """Return the requests of a data set. Raises RequestError or TokenizerError, which names the row that cannot be
    served.
    """
    from ridgeline.errors import RequestError, TokenizerError
    from ridgeline.spec.request import SamplingParams

    common: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": output_len}
    requests = []
    for index, row in enumerate(rows):
        try:
            prompt = {"prompt_token_ids": llm.encode(row.prompt), "cache_salt": row.cache_salt}
            params = SamplingParams(**{**common, **row.sampling_params})
            requests.append(llm.frontend.request(prompt, params, index, row.priority))
        except (RequestError, TokenizerError) as e:
            raise type(e)(row.say(e)) from None
    return requests


def _random_requests(llm: LLM, count: int, input_len: int, output_len: int, seed: int) -> list[GenerationRequest]:
    from ridgeline.measure.latency import random_prompts
    from ridgeline.spec.request import SamplingParams

    prompts = random_prompts((seed,), count, input_len, llm.loaded.spec.vocab_size)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    return [llm.frontend.request(prompt, params, i) for i, prompt in enumerate(prompts)]


# ---- reports -------------------------------------------------------------------------------------------------------


def _report(
    name: str, bench: BenchFlags, arguments: Mapping[str, Any], llm: LLM, roof: Roof, what: str,
    found: dict[str, Any], parts: Sequence[Table | str],
) -> None:  # fmt: skip
    """Print one JSON line, or a heading with the conditions of the measurement and then the tables.

    arguments: the value of every option of the command, by name.
    """
    from ridgeline.cli.doctor import machine, versions

    found = found | {"drafts": _drafts(llm)}
    computer, config, dtype, format = machine(), llm.config, _dtype(llm), llm.loaded.model.formats.main
    host = f"{computer['cpu']}, {computer['cores']} cores"
    if bench.json_output:
        settings = {key: getattr(config, key) for key in ENGINE_SETTINGS} if config else {}
        shown = {key: value for key, value in arguments.items() if key not in ("json_output", "verbose")}
        line = {
            "benchmark": name, "model": bench.model, "weight_dtype": dtype, "weight_format": format.name,
            "arguments": shown,
            "machine": {"cpu": computer["cpu"], "cores": int(computer["cores"]), "torch": versions()["torch"],
                        "device": llm.loaded.table.memory.device},
            "roof": asdict(roof), "engine": settings, "reasons": dict(config.reasons) if config else {},
            "measured": found,
        }  # fmt: skip
        print(json.dumps(line, allow_nan=False))
        return
    from ridgeline.cli.show.report import drafts
    from ridgeline.cli.show.tables import screen, show

    device = "" if (where := llm.loaded.table.memory.device) == "cpu" else f", {where}"
    mode = f"{bench.batching.value} batching" if config else "naive sampling"
    taken = "" if format.is_lossy or format.activations == "exact" else f"{format.activations} activations, "
    taken += f"{config.attention} attention, " if config and config.attention != "exact" else ""
    show(
        screen(),
        f"{bench.model}: {format.name if format.is_lossy else dtype} weights, {taken}{mode}",
        what,
        f"{host}{device}: reads {roof.read_bytes_per_s / 1e9:.1f} GB/s, computes {roof.flops_per_s / 1e9:,.0f} GFLOP/s "
        "(measured)",
        *parts,
        *drafts(llm.stats()),
    )


def _drafts(llm: LLM) -> dict[str, Any] | None:
    """Return the counts and times of drafts since the start, warm-up included; None if none were verified."""
    stats = llm.stats()
    if stats is None or not stats.drafts.verifications:
        return None
    counts, speed = stats.drafts, stats.draft_speed
    return asdict(counts) | {
        "tokens_per_verification": counts.tokens, "shares": list(counts.shares),
        "speed": speed and asdict(speed) | {"factor": speed.factor, "expected_factor": speed.expected_factor},
    }  # fmt: skip


def _latency_tables(found: Latency, predicted: Predicted | None, note: str) -> list[Table | str]:
    times = _table(
        "", "mean", "median", "p90", "p99", "predicted", "error", "roofline", "share", drop=("p90", "median")
    )
    forecasts: tuple[float | None, ...] = (None, None, None)
    if predicted:
        each = [x for x in predicted.tpot_s if x is not None]
        forecasts = predicted.elapsed_s, max(predicted.ttft_s), sum(each) / len(each) if each else None
    rows: list[tuple[str, Spread | None, float | None]] = [
        ("whole batch", found.latency_s, found.roofline_latency_s),
        ("TTFT, last sequence", found.ttft_s, found.roofline_ttft_s),
        ("TPOT", found.tpot_s, found.roofline_tpot_s),
    ]
    for (name, spread, floor), forecast in zip(rows, forecasts, strict=True):
        if spread is not None and floor is not None:
            off = ("", "") if forecast is None else (_time(forecast), f"{forecast / spread.mean - 1:+.0%}")
            times.add_row(name, *_spread(spread), *off, _time(floor), f"{floor / spread.mean:.1%}")
    return [times, f"{found.output_tokens_per_s:,.1f} tokens/s out", note]


def _throughput_tables(found: Throughput, predicted: Predicted | None, note: str) -> list[Table | str]:
    rates = _table("", "measured", "at the roofline", "share")
    stretch = found.elapsed_s / found.roofline_s
    for name, rate in (
        ("requests/s", found.requests_per_s),
        ("tokens/s out", found.output_tokens_per_s),
        ("tokens/s in and out", found.total_tokens_per_s),
    ):
        rates.add_row(name, f"{rate:,.2f}", f"{rate * stretch:,.2f}", f"{1 / stretch:.1%}")
    rates.add_row("total time", _time(found.elapsed_s), _time(found.roofline_s), "")
    if predicted:
        off = f"{predicted.elapsed_s / found.elapsed_s - 1:+.0%}"
        rates.add_row("total time, predicted", _time(predicted.elapsed_s), "", f"error {off}")
    times = _table("per request", "mean", "median", "p90", "p99")
    for name, spread in (("TTFT, with queueing", found.ttft_s), ("TPOT", found.tpot_s)):
        if spread is not None:
            times.add_row(name, *_spread(spread))
    if (use := found.pages) is None:
        return [rates, times, note]
    pages = _table("engine", "mean", "peak", "available")
    pages.add_row("sequences running", f"{use.mean_running:,.1f}", "", "")
    pages.add_row("pages in use", f"{use.mean_used_pages:,.1f}", f"{use.peak_used_pages:,}", f"{use.num_pages:,}")
    swapped = f" ({use.swaps:,} to the host)" if use.swaps else ""
    last = (
        f"{use.waste:.1%} of the token slots in pages wasted; {use.hit_rate:.1%} of prompt tokens from the prefix "
        f"cache; {use.preemptions:,} preemptions{swapped}"
    )
    return [rates, times, pages, last, note]


def _table(*names: str, drop: Sequence[str] = ()) -> Table:
    """Return an empty table. drop: columns to leave out on a narrow terminal, in this order."""
    from ridgeline.cli.show.tables import Column, Table

    order = {name: i for i, name in enumerate(drop)}
    return Table("", [Column(name, right=i > 0, drop=order.get(name)) for i, name in enumerate(names)])


def _spread(spread: Spread) -> tuple[str, ...]:
    return tuple(map(_time, (spread.mean, spread.median, spread.p90, spread.p99)))


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
