"""`ridgeline bench replay`: run a workload in real time, and report the columns of `ridgeline simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ridgeline.cli import simulate as s
from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, grouped, llm_arguments, values_of
from ridgeline.cli.option import option

InputLen = Annotated[
    int, option("--input-len", panel="Workload", help="Mean tokens of a prompt, without a trace. Default: 128.")
]
OutputLen = Annotated[
    int, option("--output-len", panel="Workload", help="Mean tokens of an answer, without a trace. Default: 32.")
]


@dataclass(eq=False, repr=False)
class ReplayFlags(s.WorkloadFlags):
    """Requests and their arrival times, short enough for a CPU by default."""

    input_len: InputLen = 128
    output_len: OutputLen = 32
    seed: o.Seed = 0


@grouped
def replay(
    *,
    model: o.Model,
    work: ReplayFlags,
    slo: s.SloLimits = None,
    json_output: s.JsonOutput = False,
    plot: s.Plot = None,
    load: LoadFlags,
    engine: EngineFlags,
) -> None:
    """Run a workload's requests at their arrival times. Tokens are random; prefixes that a trace shares are shared."""
    from ridgeline.cli.flags.loading import load as load_model
    from ridgeline.measure.replay import replay as run
    from ridgeline.sim import Slo

    limits = Slo.parse(slo) if slo else None
    llm = load_model(model, llm_arguments(load, engine, skip_tokenizer_init=True, seed=work.seed))
    workload = s.workload_of(work, llm.max_model_len)
    measured = run(llm, workload, slo=limits, seed=work.seed)
    found = measured.report
    if plot:
        from ridgeline.sim.picture import draw

        draw(f"{model}: {found.requests:,} requests, measured", measured, plot)
    if json_output:
        arguments = values_of(work, load, engine, model=model, slo=slo, json_output=json_output, plot=plot)
        s.print_json(arguments, measured)
        return
    from ridgeline.cli.show.simulated import report_tables
    from ridgeline.cli.show.tables import screen, show

    refused = f"; {found.refused:,} refused" if found.refused else ""
    line = f"{model}: {found.requests:,} requests in {found.duration_s:,.1f} s{refused}"
    show(screen(), line, *report_tables(found))
