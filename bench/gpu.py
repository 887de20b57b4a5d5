"""Measure kernels and the engine on a GPU beside what the GPU itself reaches: python bench/gpu.py STAGE [--report]

Stages, in the order in which time on a GPU should be spent. Each is one call of under ten minutes:

    python bench/gpu.py 1       torch's own kernels at each shape; do all of ours compile and agree?
    python bench/gpu.py 2       kernels at the shapes of an 8B model, for 1 to 64 tokens and for prompts
    python bench/gpu.py 3       decode steps of the engine, batch 1, 8, 64, 256; how long the GPU is idle in them
    python bench/gpu.py 4       long contexts
    python bench/gpu.py 5       throughput: 512 requests of 1,000 tokens in and 1,000 out
    python bench/gpu.py 6       `verify`, and all families against transformers
    python bench/gpu.py 7       tilings of products, for 1, 2, 4, 8, 16, 32, 64 and more tokens
    python bench/gpu.py --tilings src/ridgeline/ops/triton/tilings.json      write the fastest of them
    python bench/gpu.py --report [--beside COMMIT] [--markdown docs/gpu.md]

Every case is one JSON line in --results. A call skips the cases that the file has for this commit and this device, and
starts none after --seconds, so a stage goes on where it stopped. No case has a time unless its gate is true: results
are within their bound of float64, outputs were NaN before, and a token has the same bits alone and in the batch.
Kernels of libraries need not have these bits; `same` says whether they do.

Each call first measures the ceilings: how fast memory is copied, and the peak of products of each type. `fraction` is
the least time by these ceilings over the median time. Inputs are noise, and are used in turn so that no cache holds
them. Kernels are replayed as one CUDA graph; `no_graph` says why where that failed. Weights of whole models are random.

    python bench/gpu.py 1 2 3 4 5 6 7 --device interpreter --results FILE      all of it on a CPU, over tiny shapes
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_results import Results

if TYPE_CHECKING:
    from gpu_cases import Case
    from gpu_kernels import Built, Gate
    from gpu_steps import Bench

STAGES = "1234567"
RESULTS = Path(__file__).with_name("gpu_results.jsonl")
FATAL = ("CUDA error", "illegal", "AcceleratorError", "unspecified launch")  # after these errors nothing runs any more


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "stages", type=stage_of, nargs="*", metavar="STAGE", help="stages to measure, 1 to 7, in this order"
    )
    parser.add_argument("--device", choices=("cuda", "interpreter"), default="cuda", help="default: cuda")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="file of results; default: bench/gpu_results.jsonl"
    )
    parser.add_argument("--seconds", type=float, default=540, help="start no case after so many seconds; default: 540")
    parser.add_argument("--only", default="", help="measure the cases whose names contain this text; default: all")
    parser.add_argument("--again", action="store_true", help="measure cases that the file has already, too")
    parser.add_argument("--report", action="store_true", help="print the bars and what was measured")
    parser.add_argument("--beside", metavar="COMMIT", help="compare with an earlier commit on the same device")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of bars into this page")
    parser.add_argument("--tilings", type=Path, metavar="FILE", help="write the fastest tilings into this table")
    args = parser.parse_args()
    if not (args.stages or args.report or args.tilings):
        parser.error("name a stage from 1 to 7, --report or --tilings")
    results = Results(args.results)
    left = measure(args, results) if args.stages else 0
    if args.report:
        import gpu_report

        print(gpu_report.report(results, args.beside))
        if args.markdown:
            gpu_report.write(results, args.markdown)
    if args.tilings:
        write_tilings(results, args.tilings)
    sys.exit(3 if left else 0)


def write_tilings(results: Results, path: Path) -> None:
    """Write the fastest tilings of the device that was measured last into a table. Raises SystemExit without lines."""
    from gpu_cases import TUNED
    from gpu_tilings import write

    runs = results.runs()
    if not runs:
        raise SystemExit("no result has a tiling; measure them first: python bench/gpu.py 7")
    _, device = runs[-1]
    print(f"{path}: {write(results, device, TUNED, path)} tilings of {device}", file=sys.stderr)


def stage_of(text: str) -> int:
    """Return the number of a stage. Raises ArgumentTypeError for any other text."""
    if text not in STAGES:
        raise argparse.ArgumentTypeError(f"{text!r} is no stage; stages are 1 to 7")
    return int(text)


def measure(args: argparse.Namespace, results: Results) -> int:
    """Measure the cases of some stages. Return how many are left."""
    if args.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # kernels read it when they are defined
    import torch
    from gpu_cases import TITLES, stages
    from gpu_machine import Gpu, Interpreter, version

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU that torch can use; --device interpreter runs tiny shapes on the CPU")
    machine = Gpu() if args.device == "cuda" else Interpreter()
    began, commit, all_cases = time.perf_counter(), version(), stages(machine)
    wanted = [(stage, case) for stage in args.stages for case in all_cases[stage] if args.only in case.name]
    todo = [(s, c) for s, c in wanted if args.again or not results.has(commit, machine.name, s, c.name)]
    print(f"{machine.name}, commit {commit}: {len(todo)} of {len(wanted)} cases to measure", file=sys.stderr)
    if not todo:
        return 0
    runner = Runner(results, machine, commit, began, args.seconds)
    if not runner.measure_ceilings():
        raise SystemExit("the ceilings of the device cannot be measured; the lines of the results say why")
    for number, (stage, case) in enumerate(todo):
        if time.perf_counter() - began > args.seconds:
            print(f"{len(todo) - number} cases are left: run the same command again", file=sys.stderr)
            return len(todo) - number
        line = runner.run(stage, case)
        print(f"{stage}: {TITLES[stage]}: {summary(line)}", file=sys.stderr, flush=True)
        if any(word in str(line.get("failed", "")) for word in FATAL):
            print("the device gave up after an error: run the same command again, and it goes on", file=sys.stderr)
            return len(todo) - number - 1
    return 0


class Runner:
    """Measures cases and writes their lines."""

    def __init__(self, results: Results, machine: Any, commit: str, began: float, seconds: float) -> None:
        self._results, self._machine, self._commit = results, machine, commit
        self._end = began + seconds
        self._bench: Bench | None = None

    def measure_ceilings(self) -> bool:
        """Measure the ceilings; False if memory or products of bfloat16 have none. Other types may be missing."""
        from gpu_cases import Kernel
        from gpu_kernels import CEILINGS
        from gpu_steps import Bench

        found = {}
        for name, build in CEILINGS.items():
            line = self.run(0, Kernel(name, build))
            if line["seconds"]:
                found[name] = (line["bytes"] if name == "copy" else line["flops"]) / line["seconds"]
        self._bench = Bench(self._machine, found)
        return {"copy", "bfloat16"} <= set(found)

    def run(self, stage: int, case: Case) -> dict[str, Any]:
        """Measure a case and write its line. An error is a result, too."""
        from gpu_cases import Command, Kernel
        from gpu_machine import one_line

        line: dict[str, Any] = {
            "commit": self._commit, "device": self._machine.name, "stage": stage, "case": case.name,
            "gate": False, "seconds": None, "spread": None, "fraction": None, "ceiling": None, "bytes": None,
            "flops": None, "error": None, "allowed": None, "same": None, "clocks": [self._machine.clocks()],
        }  # fmt: skip
        try:
            if isinstance(case, Kernel):
                self._kernel(case.build(self._machine), line)
            elif isinstance(case, Command):
                self._command(case, line)
            else:
                self._whole(case, line)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            line["failed"] = one_line(e)
        line["clocks"].append(self._machine.clocks())
        self._results.add(line)
        self._machine.free()
        return line

    def _kernel(self, built: Built, line: dict[str, Any]) -> None:
        line.update(bytes=built.num_bytes, flops=built.flops)
        if self._passed(built.gate(), line):
            times = self._machine.timed(built.runs)
            line["spread"] = times.spread()
            line["seconds"] = line["spread"][0]
            if times.no_graph is not None:
                line["no_graph"] = times.no_graph
            self._compare(line, built.unit)

    def _whole(self, case: Any, line: dict[str, Any]) -> None:
        import numpy as np

        bench = self._bench
        if self._passed(case.gate(bench), line):
            found = case.measure(bench)
            line.update(bytes=found.num_bytes, flops=found.flops, **found.more)
            line["spread"] = [float(v) for v in np.percentile(found.seconds, [50, 10, 90])]
            line["seconds"] = line["spread"][0]
            line["fraction"], line["ceiling"] = found.more["roofline_s"] / line["seconds"], "roofline"

    def _command(self, case: Any, line: dict[str, Any]) -> None:
        from gpu_steps import command

        assert self._bench is not None
        found, line["seconds"], line["said"] = command(
            self._bench, case.words, max(self._end - time.perf_counter(), 60)
        )
        self._passed(found, line)

    def _passed(self, gate: Gate, line: dict[str, Any]) -> bool:
        known = gate.error == gate.error  # NaN is not JSON
        line.update(gate=gate.ok, error=gate.error if known else None, allowed=gate.allowed, same=gate.same)
        return gate.ok

    def _compare(self, line: dict[str, Any], unit: str) -> None:
        """Write the share of the least time by the ceilings, and which ceiling that is."""
        if self._bench is None:
            return
        ceilings = self._bench.ceilings
        least = {"copy": line["bytes"] / ceilings["copy"]}
        if unit in ceilings:
            least[unit] = line["flops"] / ceilings[unit]
        line["ceiling"] = max(least, key=lambda name: least[name])
        line["fraction"] = least[line["ceiling"]] / line["seconds"]


def summary(line: dict[str, Any]) -> str:
    """Return a line of a case for people."""
    if not line["gate"]:
        why = line.get("failed") or line.get("said") or f"error {line['error']}, allowed {line['allowed']}"
        return f"{line['case']}: WRONG: {why}"
    share = "" if line["fraction"] is None else f", {line['fraction']:.2f} of {line['ceiling']}"
    return f"{line['case']}: {line['seconds'] * 1e6:.1f} us{share}"


if __name__ == "__main__":
    main()
