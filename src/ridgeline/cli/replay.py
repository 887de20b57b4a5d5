"""`ridgeline bench replay`: run a workload in real time, and report the columns of `ridgeline simulate`."""

from __future__ import annotations

from typing import Annotated

from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option


def replay(
    model: o.Model,
    trace: Annotated[
        str | None,
        option("--trace", help="Trace to replay: Azure CSV or Mooncake JSON lines. Default: random lengths."),
    ] = None,
    arrivals: Annotated[
        str | None,
        option(
            "--arrivals", help="Arrival process, as for simulate. Default: the trace's times, else poisson:8."
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        option("--num-requests", help="Number of requests. Default: all of the trace; without a trace 1000."),
    ] = None,
    rate_scale: Annotated[
        float, option("--rate-scale", help="Multiply the arrival rate by this factor. Default: 1.")
    ] = 1.0,
    input_len: Annotated[
        int, option("--input-len", help="Mean tokens of a prompt, without a trace. Default: 128.")
    ] = 128,
    output_len: Annotated[
        int, option("--output-len", help="Mean tokens of an answer, without a trace. Default: 32.")
    ] = 32,
    length_cv: Annotated[
        float,
        option("--length-cv", help="Coefficient of variation of both lengths; 0: all equal. Default: 0."),
    ] = 0.0,
    truncate: Annotated[
        bool, option("--truncate", help="Shorten requests that exceed the longest context.")
    ] = False,
    slo: Annotated[
        str | None,
        option("--slo", help="Latency limits for goodput: ttft=200ms,tpot=30ms,e2e=10s. Default: none."),
    ] = None,
    json_output: Annotated[bool, option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        str | None, option("--plot", help="Write a picture to this file, .png or .svg. Default: none.")
    ] = None,
    device: o.Device = "auto", dtype: o.DType = "auto", max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto", revision: o.Revision = None, ops: o.Ops = None, seed: o.Seed = 0,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None,
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None,
    kv_cache_dtype: o.KVCacheDType = "auto", weights: o.WeightFormat = "auto", threads: o.Threads = None,
) -> None:  # fmt: skip
    """Send a workload's requests at their arrival times, in real time. Tokens are random; prefixes that a trace shares
    are shared.
    """
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
