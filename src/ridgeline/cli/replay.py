"""`ridgeline bench replay`: a workload through the engine in real time, with the columns of `ridgeline simulate`."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.flags import options as o


def replay(
    model: o.Model,
    trace: Annotated[str | None, typer.Option("--trace", help="Azure CSV or Mooncake JSON lines.")] = None,
    arrivals: Annotated[str | None, typer.Option("--arrivals", help="As for simulate: poisson:8 ...")] = None,
    num_requests: Annotated[int | None, typer.Option("--num-requests")] = None,
    rate_scale: Annotated[float, typer.Option("--rate-scale", help="So many times as fast as the trace.")] = 1.0,
    input_len: Annotated[int, typer.Option("--input-len", help="Mean, without a trace.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", help="Mean, without a trace.")] = 32,
    length_cv: Annotated[float, typer.Option("--length-cv", help="Of both; 0: all equal.")] = 0.0,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut requests to the longest context.")] = False,
    slo: Annotated[str | None, typer.Option("--slo", help="For goodput: ttft=200ms,tpot=30ms,e2e=10s")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[str | None, typer.Option("--plot", help="Draw it: out.png or out.svg.")] = None,
    device: o.Device = "auto", dtype: o.DType = "auto", max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto", revision: o.Revision = None, ops: o.Ops = None, seed: o.Seed = 0,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None,
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None,
    kv_cache_dtype: o.KVCacheDType = "auto", weights: o.WeightFormat = "auto", threads: o.Threads = None,
) -> None:  # fmt: skip
    """Send a workload's requests at their times, in real time; tokens are random, blocks of a trace are honored."""
    given = locals()  # every option, by its name
    from ridgeline.cli.flags.loading import load
    from ridgeline.cli.simulate import print_json, report_tables, workload_of
    from ridgeline.measure.replay import replay as run
    from ridgeline.sim import Slo

    limits = Slo.parse(slo) if slo else None
    llm = load(model, o.llm_options(given) | {"skip_tokenizer_init": True})
    workload = workload_of(given, llm.max_model_len)
    measured = run(llm, workload, slo=limits, seed=seed)
    found = measured.report
    if plot:
        from ridgeline.sim.picture import draw

        draw(f"{model}: {found.requests:,} requests, measured", measured, plot)
    if json_output:
        print_json(given, measured)
        return
    from ridgeline.cli.show.tables import screen, show

    refused = f"; {found.refused:,} refused" if found.refused else ""
    line = f"{model}: {found.requests:,} requests in {found.duration_s:,.1f} s{refused}"
    show(screen(), line, *report_tables(found))
