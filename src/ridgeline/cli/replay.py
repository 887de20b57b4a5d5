"""`ridgeline bench replay`: run a workload in real time, and report the columns of `ridgeline simulate`."""

from __future__ import annotations

from typing import Annotated

from ridgeline.cli import simulate as s
from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option

InputLen = Annotated[
    int, option("--input-len", panel="Workload", help="Mean tokens of a prompt, without a trace. Default: 128.")
]
OutputLen = Annotated[
    int, option("--output-len", panel="Workload", help="Mean tokens of an answer, without a trace. Default: 32.")
]


def replay(
    model: o.Model, trace: s.Trace = None, arrivals: s.Arrivals = None, num_requests: s.NumRequests = None,
    rate_scale: s.RateScale = 1.0, input_len: InputLen = 128, output_len: OutputLen = 32,
    length_cv: s.LengthCv = 0.0, truncate: s.Truncate = False, slo: s.SloLimits = None,
    json_output: s.JsonOutput = False, plot: s.Plot = None,
    device: o.Device = "auto", dtype: o.DType = "auto", max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto", revision: o.Revision = None, ops: o.Ops = None, seed: o.Seed = 0,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None,
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None,
    kv_cache_dtype: o.KVCacheDType = "auto", weights: o.WeightFormat = "auto", threads: o.Threads = None,
) -> None:  # fmt: skip
    """Run a workload's requests at their arrival times. Tokens are random; prefixes that a trace shares are shared."""
    given = locals()  # every option, by its name
    from ridgeline.cli.flags.loading import load
    from ridgeline.measure.replay import replay as run
    from ridgeline.sim import Slo

    limits = Slo.parse(slo) if slo else None
    llm = load(model, o.llm_options(given) | {"skip_tokenizer_init": True})
    workload = s.workload_of(given, llm.max_model_len)
    measured = run(llm, workload, slo=limits, seed=seed)
    found = measured.report
    if plot:
        from ridgeline.sim.picture import draw

        draw(f"{model}: {found.requests:,} requests, measured", measured, plot)
    if json_output:
        s.print_json(given, measured)
        return
    from ridgeline.cli.show.tables import screen, show

    refused = f"; {found.refused:,} refused" if found.refused else ""
    line = f"{model}: {found.requests:,} requests in {found.duration_s:,.1f} s{refused}"
    show(screen(), line, *s.report_tables(found))
