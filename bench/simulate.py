"""Measure how fast the simulator is, or how far it is from the engine.

    python bench/simulate.py --trace CSV [--requests N] [--rate R] [--every-step]
    python bench/simulate.py --against-engine [--model pocket] [--requests 60] [--loads 0.3 0.5 0.7 0.9 1.0 1.2]

The first form repeats the lengths of the Azure conversation trace with Poisson arrivals, for Llama-3-8B on an H100 at
its roofline (--hardware sets another machine; local is this one as it was calibrated), in chunks of 2,048 tokens. The
gate: every answer has its requested number of tokens, and the page tables agree at the end. With --compare, the same
requests are also planned step by step, and all figures and token times must be equal.

The second form sends the same requests through the engine in real time, on this calibrated machine, and through the
simulator with the engine's own settings. Rates are shares of the capacity, which is the throughput of a simulation
in which all sequences of a step are always busy. Each line has both sides, and the share of the machine that other
programs used meanwhile: with more than a tenth, it says nothing about the simulator. The gate: both sides answered
every request with every token.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

from common import emit

from ridgeline.catalog.models import find_model
from ridgeline.cost.calibration import find_machine
from ridgeline.plan.planner import Deployment
from ridgeline.sim import Settings, Simulated, Workload, cost_of, settings, simulate
from ridgeline.sim.traces import read_trace
from ridgeline.sim.workload import arrive, cut, lengths, poisson, repeated

MODEL = "meta-llama/Meta-Llama-3-8B"
CHUNK = 2048  # tokens per step
LOADS = (0.3, 0.5, 0.7, 0.9, 1.0, 1.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="trace whose lengths are repeated; needed without --against-engine")
    parser.add_argument("--requests", type=int, default=None, help="number of requests; default: 10000, or 60 a load")
    parser.add_argument("--against-engine", action="store_true")
    parser.add_argument("--model", default="pocket", help="model of --against-engine; default: pocket")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="shares of the capacity")
    parser.add_argument("--input-len", type=int, default=64, help="mean tokens of a prompt of --against-engine")
    parser.add_argument("--output-len", type=int, default=32, help="mean tokens of an answer of --against-engine")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second and replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--hardware", default="h100", help="machine at its roofline, or local for this calibrated one; default: h100"
    )
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    if args.against_engine:
        against_engine(args)
        return
    if args.trace is None:
        parser.error("give --trace, or --against-engine")
    args.requests = args.requests or 10_000
    deployment = Deployment(find_model(MODEL).spec, find_machine(args.hardware)[0], chunk=CHUNK)
    chosen, cost = settings(deployment), cost_of(deployment)
    times = poisson(args.rate * args.replicas, seed=0)
    requests = arrive(repeated(read_trace(args.trace), args.requests), times)
    workload = cut(Workload(requests), chosen.max_model_len)

    def run(every_step: bool) -> tuple[Simulated, float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        found = simulate(workload, chosen, cost, replicas=args.replicas, every_step=every_step)
        return found, time.perf_counter() - start, time.process_time() - cpu

    found, seconds, cpu = run(args.every_step)
    wanted = sum(r.output_tokens for r in workload.requests)
    gate = found.report.requests == args.requests and found.report.output_tokens == wanted
    if args.compare:
        other, other_seconds, other_cpu = run(not args.every_step)
        gate = gate and found.report == other.report and found.book.token_times() == other.book.token_times()
        emit("the other way", gate, seconds=round(other_seconds, 1), cpu_seconds=round(other_cpu, 1))
    r = found.report
    emit(
        f"simulate: {args.requests} requests, {args.replicas} x {args.rate} a second",
        gate,
        every_step=args.every_step,
        seconds=round(seconds, 1),
        cpu_seconds=round(cpu, 1),
        steps=r.steps,
        output_tokens=r.output_tokens,
        simulated_seconds=round(r.duration_s, 1),
        mean_batch=round(r.mean_batch, 1),
        utilization=round(r.utilization, 3),
        microseconds_per_request=round(1e6 * seconds / args.requests, 1),
    )


def against_engine(args: argparse.Namespace) -> None:
    """Run the same requests through the engine and the simulator, at each share of the capacity."""
    from ridgeline.llm import LLM
    from ridgeline.measure.predict import planner_of
    from ridgeline.measure.quiet import OthersLoad
    from ridgeline.measure.replay import replay

    machine, note = find_machine("local")
    if machine.rates is None:
        raise SystemExit(f"{note}; predictions for an engine need it")
    llm = LLM(args.model, skip_tokenizer_init=True)
    config, deployment = llm.config, planner_of(llm.loaded, llm.config, machine).deployment
    regimes = deployment.spec.regimes(config.max_model_len)
    chosen = Settings(
        config.groups, config.num_pages, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len,
        regimes,
    )  # fmt: skip
    cost, count = cost_of(deployment), args.requests or 60
    drawn = list(islice(lengths(args.input_len, args.output_len, 0.5, 0, config.max_model_len), count))
    full = simulate(Workload(drawn * 4, clients=config.max_num_seqs), chosen, cost).report
    capacity = full.requests_per_s
    for load in args.loads:
        workload = Workload(arrive(drawn, poisson(load * capacity, seed=1)))
        predicted = simulate(workload, chosen, cost).report
        others = OthersLoad()
        measured = replay(llm, workload, seed=1).report
        sides = {"simulated": predicted, "measured": measured}
        wanted = sum(r.output_tokens for r in drawn)
        emit(
            f"{args.model} at {load:g} of {capacity:.1f} requests/s",
            all(r.requests == count and r.output_tokens == wanted for r in sides.values()),
            others=round(others.share(), 3),
            **{
                f"{side}_{name}": round(value, 4)
                for side, r in sides.items()
                for name, value in (
                    ("requests_per_s", r.requests_per_s), ("ttft_p50_s", r.ttft_s.p50), ("ttft_p99_s", r.ttft_s.p99),
                    ("tpot_p50_s", r.tpot_s.p50), ("tpot_p99_s", r.tpot_s.p99), ("mean_batch", r.mean_batch),
                )
            },
        )  # fmt: skip


if __name__ == "__main__":
    main()
