"""Compare the planner's prediction for this machine with the engine: python bench/plan_error.py [--keep FILE]

51 cases that no fit has seen: dense, grouped, windowed, with experts, recurrent and hybrid models of modest size with
random weights, in float32, bfloat16, int8 and int4; decodes of 1 to 64 sequences at contexts of 32 to 8,192 tokens,
whose pages are filled without a prefill; prompts of up to 16,384 tokens in all. Each case runs twice, in processes of
their own; `second run` is the time of the second relative to the first. The machine is calibrated again at the
beginning, into the folder of the results, so that calibration and cases are measured within one hour.

    python bench/plan_error.py                       # all of it, some minutes; lines and calibration in plan_error/
    python bench/plan_error.py --seconds 90          # stops after 90 seconds; the same command continues
    python bench/plan_error.py --coverage            # the share of cases in the bands that plan shows
    python bench/plan_error.py --report              # the table of the results so far: median, 90th percentile, largest

A line is one JSON object: case, run, measured and predicted seconds of TPOT or TTFT, memory, the share of the machine
that other programs used. The gate is `others`: a run in which they used more than a tenth is measured again, at most
twice, and then reported as it is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common import commit, machine

from ridgeline.spec import (
    Attention,
    GatedDelta,
    GatedMLP,
    Layer,
    Mamba,
    Mamba2,
    ModelSpec,
    MoE,
    RMSNorm,
    Rope,
)

NORM, VOCAB, DECODES, LENGTH = RMSNorm(1e-5), 20_000, 24, 20_000
BUSY, TRIES = 0.1, 3


def attention(heads: int, kv_heads: int, dim: int = 64, window: int | None = None) -> Attention:
    return Attention(heads, kv_heads, dim, dim**-0.5, Rope(dim), window=window)


def model(width: int, vocab: int, *layers: Layer) -> ModelSpec:
    return ModelSpec("judged", vocab, width, LENGTH, layers, NORM)


def same(width: int, count: int, layer: Layer, vocab: int = VOCAB) -> ModelSpec:
    return model(width, vocab, *[layer] * count)


MODELS: Mapping[str, ModelSpec] = {
    "dense": same(576, 10, Layer(attention(9, 9), GatedMLP(1536), NORM)),
    "grouped": same(768, 12, Layer(attention(12, 3), GatedMLP(2048), NORM), 32_000),
    "windowed": same(640, 8, Layer(attention(10, 5, window=256), GatedMLP(1792), NORM)),
    "experts": same(512, 6, Layer(attention(8, 2), MoE(16, 2, 768), NORM)),
    "recurrent": same(640, 8, Layer(Mamba2(20, 64, 64, 1, 4, NORM), None, NORM)),
    "hybrid": model(
        512, VOCAB, *[Layer(Mamba(1024, 16, 4, 32), GatedMLP(1280), NORM)] * 3,
        Layer(attention(8, 4), GatedMLP(1280), NORM),
        *[Layer(GatedDelta(8, 4, 64, 128, 4, NORM), GatedMLP(1280), NORM)] * 3,
        Layer(attention(8, 4), GatedMLP(1280), NORM),
    ),
}  # fmt: skip
TYPES = {"fp32": ("float32", "auto"), "bf16": ("bfloat16", "auto"), "int8": ("float32", "int8"),
         "int4": ("float32", "int4")}  # fmt: skip


class Case(NamedTuple):
    """One case. prompt: tokens of each sequence for a TTFT; 0 for a TPOT at the context."""

    model: str
    type: str
    batch: int
    context: int
    prompt: int

    @property
    def name(self) -> str:
        what = f"TTFT {self.batch} x {self.prompt}" if self.prompt else f"TPOT {self.batch} at {self.context}"
        return f"{self.model} {self.type} {what}"


# (batch, context) for decodes and (batch, prompt) for prompts, run one after the other for each model and type.
LOADS = (((1, 32), (16, 1024)), ((8, 2048), (64, 128)), ((32, 256), (1, 8192)), ((2, 4096), (4, 512)))
PROMPTS = ((1, 300), (1, 2048), (16, 100), (1, 4096))
LONGEST = (Case("grouped", "bf16", 16, 0, 1024), Case("dense", "int8", 2, 0, 8192), Case("hybrid", "fp32", 8, 0, 512))


def cases() -> list[Case]:
    found = []
    for i, name in enumerate(MODELS):
        for j, kind in enumerate(TYPES):
            pairs = LOADS[(i + j) % len(LOADS)]
            found += [Case(name, kind, batch, context, 0) for batch, context in (pairs[j % 2],)]
            batch, prompt = PROMPTS[(i + 2 * j) % len(PROMPTS)]
            found.append(Case(name, kind, batch, 0, prompt))
    return [*found, *LONGEST]


# ---- one run, in a process of its own --------------------------------------------------------------------------------


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def run(case: Case) -> dict[str, Any]:
    from ridgeline.cost.calibration import this_machine
    from ridgeline.measure.predict import memory_of, planner_of
    from ridgeline.measure.quiet import OthersLoad
    from ridgeline.measure.steps import Steps, load_random

    spec, (dtype, weights) = MODELS[case.model], TYPES[case.type]
    gc.collect()
    base = resident("VmRSS")
    loaded = load_random(spec, dtype=dtype, weights=weights, device="cpu")
    tokens = case.batch * case.context
    length = (case.prompt or case.context) + DECODES + 8
    reset_peak()  # memory that loading takes is not compared
    steps = Steps(loaded, case.batch, length, chunk=512 if case.prompt else max(tokens, 512))
    planner = planner_of(loaded, steps.config, this_machine()[0])
    if case.prompt:
        steps.run([64] * min(case.batch, 2), 1)
        load = OthersLoad()
        timed = steps.run([case.prompt] * case.batch, 1)
        measured = sum(step.seconds for step in timed)
        predicted = sum(planner.step(step.batch).seconds for step in timed)
    else:
        load = OthersLoad()
        timed = steps.decodes(case.batch, case.context, DECODES)[2:]
        measured = statistics.median(step.seconds for step in timed)
        predicted = planner.step(timed[len(timed) // 2].batch).seconds
    others, peak = load.share(), resident("VmHWM") - base
    return {
        "case": case.name, "model": case.model, "type": case.type, "kind": "TTFT" if case.prompt else "TPOT",
        "batch": case.batch, "context": case.context, "prompt": case.prompt, "measured_s": measured,
        "predicted_s": predicted, "others": round(others, 3), "peak_bytes": peak,
        "memory_bytes": memory_of(loaded, steps.config, case.batch, case.prompt, 1).total if case.prompt else None,
    }  # fmt: skip


# ---- all cases -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("plan_error"),
        help="folder for the lines and the calibration; default: plan_error",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this time in seconds; default: no limit"
    )
    parser.add_argument("--report", action="store_true", help="print only the table")
    parser.add_argument(
        "--coverage", action="store_true", help="print only the share of cases in the 90 %% bands of plan"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run(cases()[options.one])))
        return
    options.keep.mkdir(parents=True, exist_ok=True)
    lines = options.keep / "lines.jsonl"
    if not (options.report or options.coverage):
        measure(options.keep, lines, time.monotonic() + options.seconds)
    if not lines.exists():
        raise SystemExit(f"{lines} is not there yet: nothing was measured")
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    if options.coverage:
        coverage(found)
    else:
        report(found)


def coverage(lines: list[dict[str, Any]]) -> None:
    """Print how many first runs lie in the 90 % band around their prediction; 85 to 95 % should."""
    from ridgeline.cost.efficiency import CALIBRATED

    for kind in ("TPOT", "TTFT"):
        own = [abs(math.log(v["measured_s"] / v["predicted_s"])) for v in lines if v["kind"] == kind and v["run"] == 1]
        if own:
            inside = sum(error <= 1.6449 * CALIBRATED.spread[kind.lower()] for error in own) / len(own)
            print(f"{kind}: {inside:.0%} of {len(own)} cases are in the 90 % band")


def measure(folder: Path, lines: Path, end: float) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(folder.resolve() / "cache")}
    if not (folder / "calibrated.json").exists():
        calibrate(folder / "calibrated.json", env)
    done = {(v["case"], v["run"]) for v in map(json.loads, lines.read_text().splitlines())} if lines.exists() else set()
    for number in (1, 2):
        for i, case in enumerate(cases()):
            if (case.name, number) in done or time.monotonic() > end:
                continue
            tries: list[dict[str, Any]] = []
            while not tries or (tries[-1]["others"] > BUSY and len(tries) < TRIES):
                command = [sys.executable, __file__, "--one", str(i)]
                done_run = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
                tries.append(json.loads(done_run.stdout))
            found = min(tries, key=lambda one: one["others"])
            with lines.open("a") as out:
                out.write(json.dumps({**found, "run": number, "commit": commit(), "machine": machine()}) + "\n")
            print(case.name, f"{found['predicted_s'] / found['measured_s'] - 1:+.1%}", flush=True)


def calibrate(path: Path, env: Mapping[str, str]) -> None:
    """Calibrate until no other program disturbs it, at most TRIES times, and keep the last result."""
    for _ in range(TRIES):
        command = [sys.executable, "-m", "ridgeline", "calibrate", "--json"]
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
        if json.loads(done.stdout)["others"] <= BUSY:
            break
    path.write_text(done.stdout)


def report(lines: list[dict[str, Any]]) -> None:
    """Print the table in Markdown. Errors are those of the first run, relative to its own prediction."""
    by_case: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        by_case.setdefault(line["case"], {})[line["run"]] = line
    print("| case | measured | predicted | error | second run | others |\n|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {"TPOT": [], "TTFT": []}
    for name, runs in by_case.items():
        first = runs[min(runs)]
        error = first["predicted_s"] / first["measured_s"] - 1
        errors[first["kind"]].append(abs(error))
        again = f"{runs[2]['measured_s'] / runs[1]['measured_s'] - 1:+.1%}" if len(runs) > 1 else ""
        print(f"| {name} | {1e3 * first['measured_s']:.2f} ms | {1e3 * first['predicted_s']:.2f} ms | {error:+.1%} | "
              f"{again} | {first['others']:.0%} |")  # fmt: skip
    for kind, found in errors.items():
        if found:
            tenth = statistics.quantiles(found, n=10)[-1] if len(found) > 1 else found[0]
            print(f"\n{kind}: {len(found)} cases, median {statistics.median(found):.1%}, 90th percentile {tenth:.1%}, "
                  f"worst {max(found):.1%}")  # fmt: skip
    repeats = [abs(r[2]["measured_s"] / r[1]["measured_s"] - 1) for r in by_case.values() if len(r) > 1]
    if repeats:
        print(f"second run relative to the first: median {statistics.median(repeats):.1%}, worst {max(repeats):.1%}")
    memory = [abs(v["memory_bytes"] / v["peak_bytes"] - 1) for v in lines if v["memory_bytes"]]
    if memory:
        print(f"memory: median {statistics.median(memory):.1%}, worst {max(memory):.1%}")


if __name__ == "__main__":
    main()
