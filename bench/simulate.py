"""Measure how fast the simulator is: python bench/simulate.py --trace CSV [--requests N] [--rate R] [--every-step]

It repeats the lengths of the Azure conversation trace with Poisson arrivals, for Llama-3-8B on an H100 at its roofline
(--hardware sets another machine; local is this one as it was calibrated), in chunks of 2,048 tokens. The gate: every
answer has its requested number of tokens, and the page tables agree at the end. With --compare, the same requests are
also planned step by step, and all figures and token times must be equal.
"""

from __future__ import annotations

import argparse
import time

from common import emit

from ridgeline.catalog.models import find_model
from ridgeline.cost.calibration import find_machine
from ridgeline.plan.planner import Deployment
from ridgeline.sim import Simulated, Workload, cost_of, settings, simulate
from ridgeline.sim.traces import read_trace
from ridgeline.sim.workload import arrive, cut, poisson, repeated

MODEL = "meta-llama/Meta-Llama-3-8B"
CHUNK = 2048  # tokens per step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second and replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--hardware", default="h100", help="machine at its roofline, or local for this calibrated one; default: h100"
    )
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
