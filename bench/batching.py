"""Compare continuous with static batching on a full queue: python bench/batching.py [--seeds 5] [--plot FILE]

Static batching takes the next B requests only when all of the last B are complete; continuous batching fills every slot
as soon as it is free. There are two measurements. Both use prompts of one token, so that every step is decode.

In steps: the real scheduler without a device. For lengths L of mean m a static batch takes E[max of B lengths] steps
and continuous batching m, so with enough requests the gain is E[max] / m: 1 for constant lengths, 2B / (B + 1) for
uniform ones, the harmonic number H_B for geometric ones. These are limits for long answers; `expected` is exact for
the whole numbers that were drawn. When the queue is empty at the end, fewer than B slots are used; these steps count in
full, so the measured gain is a little below `expected`, by the share that `slots_used` lacks. The gate: every request
gets its length, the scheduler's page tables agree, both counts of steps are those of a simulation without the
scheduler, and for geometric lengths at 8 and 32 the gain is at least 0.90 of H_B.

In seconds: LLM(batching="static") and "continuous" with 12 layers of a 135M Llama, dummy weights, one thread. The gain
is smaller than the gain in steps: near the end of a static batch few sequences are left, and a step with fewer
sequences is shorter, so the steps that static batching wastes are its cheap ones. If the time of a step were
proportional to its sequences, there would be no gain; if it were constant, the gain would be that in steps. `predicted`
sums, over the steps that the scheduler runs without a device, the time that this run measured for their number of
sequences (interpolated). `speedup_in_steps` is that of the same few requests: with four batches, the end of the queue
weighs more than above. Every time is given twice: by the clock, and as processor time, which other programs disturb
less. The gate: every answer has the same tokens with both kinds of batching.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from common import emit
from engine import SHAPE

from ridgeline import LLM, SamplingParams
from ridgeline.sched import Result, Scheduler, Sequence
from ridgeline.settings import EngineOptions
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

MODES: tuple[Literal["static", "continuous"], ...] = ("static", "continuous")
BATCHES = (4, 8, 16, 32)
MEAN, NUM_BATCHES = 32, 250  # for the measurement in steps
WALL_BATCHES, WALL_MEAN, WALL_NUM_BATCHES, LAYERS = (8, 32), 24, 4, 12
STEP_SIZES = (1, 2, 4, 8, 16, 32)  # numbers of sequences for which a step is timed
STEP_TOKENS = 2 * WALL_MEAN  # so that the mean context equals that of geometric lengths
CLOCKS = ("by the clock", "of the processor")
LENGTHS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "constant": lambda rng, mean, size: np.full(size, mean),
    "uniform": lambda rng, mean, size: rng.integers(1, 2 * mean, size),
    "geometric": lambda rng, mean, size: rng.geometric(1 / mean, size),
}
LIMIT: dict[str, Callable[[int], float]] = {
    "constant": lambda batch: 1.0,
    "uniform": lambda batch: 2 * batch / (batch + 1),
    "geometric": lambda batch: sum(1 / k for k in range(1, batch + 1)),
}


Times = np.ndarray  # two seconds: by the clock, and of processor time


class Run(NamedTuple):
    """Times of the same requests with both kinds of batching, and whether every answer has the same tokens."""

    batch: int
    lengths: list[int]
    static: Times
    continuous: Times
    equal: bool


def exact_gain(name: str, mean: int, batch: int) -> float:
    """Return E[max of `batch` lengths] / mean: the sum over k >= 0 of 1 - P(length <= k)^batch, / mean."""
    k = np.arange(400 * mean)
    at_most = {
        "constant": (k >= mean).astype(float),
        "uniform": np.minimum(k / (2 * mean - 1), 1.0),
        "geometric": 1 - (1 - 1 / mean) ** k,
    }[name]
    return float((1 - at_most**batch).sum() / mean)


def groups_of(lengths: list[int], batch: int, mode: str) -> list[list[int]]:
    """Return the numbers of requests by group. Static: a group starts when the one before it has ended. Continuous:
    there is one group.
    """
    size = batch if mode == "static" else len(lengths)
    return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]


def step_sizes(lengths: list[int], batch: int, mode: str) -> list[int]:
    """Return how many sequences each step of the real scheduler runs; the device ends each sequence at its length.

    The scheduler does not know the lengths. Raises AssertionError if its page tables disagree, or if a page is left
    over.
    """
    longest, left = max(lengths), list(lengths)
    pages = batch * (longest // 16 + 2) + 1
    scheduler = Scheduler([StateGroup("kv", 16, ALL, 1)], [pages], max_batch_tokens=batch, max_seqs=batch)
    sizes = []
    for group in groups_of(lengths, batch, mode):
        for i in group:
            scheduler.add(Sequence(i, [i], longest + 1))
        while len(scheduler):
            plan = scheduler.schedule()
            assert plan is not None
            for work in plan.works:
                left[work.sequence] -= 1
            scheduler.commit(plan, [Result((7,), ended=left[w.sequence] == 0) for w in plan.works])
            sizes.append(len(plan.works))
        scheduler.check()
    assert not any(left), "a request has the wrong length"
    return sizes


def simulated_steps(lengths: list[int], batch: int, mode: str) -> int:
    """Return the number of steps without the scheduler: each request takes the first free slot."""
    end = 0
    for group in groups_of(lengths, batch, mode):
        slots = [end] * batch
        for i in group:
            heapq.heappush(slots, heapq.heappop(slots) + lengths[i])
        end = max(slots)
    return end


def in_steps(name: str, batch: int, seeds: int) -> dict[str, float]:
    """Print one line: the gain in steps over several draws. Return its mean and deviation for the plot."""
    gains, used, equal = [], [], True
    for seed in range(seeds):
        lengths = LENGTHS[name](np.random.default_rng(seed), MEAN, NUM_BATCHES * batch).tolist()
        counts = {}
        for mode in MODES:
            sizes = step_sizes(lengths, batch, mode)
            counts[mode] = len(sizes)
            equal &= len(sizes) == simulated_steps(lengths, batch, mode) and sum(sizes) == sum(lengths)
        gains.append(counts["static"] / counts["continuous"])
        used.append(sum(lengths) / (batch * counts["continuous"]))
    gain, spread, limit, exact = (
        statistics.mean(gains), statistics.stdev(gains), LIMIT[name](batch), exact_gain(name, MEAN, batch)
    )  # fmt: skip
    enough = gain / limit >= 0.90 or name != "geometric" or batch not in (8, 32)
    emit(
        f"batching in steps: {name} lengths, mean {MEAN}, B {batch}", equal and enough,
        speedup=round(gain, 3), spread=round(spread, 3), limit=round(limit, 3), expected=round(exact, 3),
        over_limit=round(gain / limit, 3), over_expected=round(gain / exact, 3),
        slots_used=round(statistics.mean(used), 3), requests=NUM_BATCHES * batch, seeds=seeds,
    )  # fmt: skip
    return {"gain": gain, "spread": spread}


def build(batch: int, mode: Literal["static", "continuous"]) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": LAYERS}))
        engine = EngineOptions(max_num_seqs=batch)
        return LLM(folder, load_format="dummy", dtype="float32", max_model_len=512, engine=engine, batching=mode)


def answer(llm: LLM, lengths: list[int]) -> list[list[int]]:
    """Return greedy answers of these lengths."""
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in lengths]
    return [output.outputs[0].token_ids for output in llm.generate([[100 + i] for i in range(len(lengths))], params)]


def timed(run: Callable[[], list[list[int]]]) -> tuple[Times, list[list[int]]]:
    """Return the seconds that a call took, and its result."""
    start = np.array([time.perf_counter(), time.process_time()])
    result = run()
    return np.array([time.perf_counter(), time.process_time()]) - start, result


def time_steps(llm: LLM, times: dict[int, list[Times]]) -> None:
    """Append the time of a decode step by its number of sequences, each time a mean over STEP_TOKENS steps."""
    for size in STEP_SIZES:
        times[size].append(timed(partial(answer, llm, [STEP_TOKENS] * size))[0] / STEP_TOKENS)


def in_seconds(seed: int) -> list[dict[str, float]]:
    """Return measured and predicted times. Steps are timed before and after the runs, since the machine's speed may
    change.
    """
    times: dict[int, list[Times]] = {size: [] for size in STEP_SIZES}
    widest = build(max(STEP_SIZES), "continuous")
    answer(widest, [2])  # the first step takes longer
    time_steps(widest, times)
    runs = []
    for batch in WALL_BATCHES:
        lengths = LENGTHS["geometric"](np.random.default_rng(seed), WALL_MEAN, WALL_NUM_BATCHES * batch).tolist()
        llms = [build(batch, mode) for mode in MODES]
        (static, first), (continuous, second) = (timed(partial(answer, llm, lengths)) for llm in llms)
        equal = first == second and [len(tokens) for tokens in first] == lengths
        runs.append(Run(batch, lengths, static, continuous, equal))
    time_steps(widest, times)
    step = {size: np.mean(t, axis=0) for size, t in times.items()}
    for clock, name in enumerate(CLOCKS):
        emit(
            f"decode step {name}, {LAYERS} layers of a 135M Llama, float32, one thread, contexts up to {STEP_TOKENS}",
            True, ms={n: round(1e3 * t[clock], 1) for n, t in step.items()},
        )  # fmt: skip
    gains = [[report_seconds(run, step, clock) for clock in range(len(CLOCKS))] for run in runs]
    return [of_processor | {"speedup_clock": by_clock["speedup"]} for by_clock, of_processor in gains]


def report_seconds(run: Run, step: dict[int, Times], clock: int) -> dict[str, float]:
    """Print one line: measured and predicted seconds, and the gains. Return the gains for the plot."""
    steps = [step_sizes(run.lengths, run.batch, mode) for mode in MODES]
    cost = [t[clock] for t in step.values()]
    static, continuous = (float(np.interp(sizes, list(step), cost).sum()) for sizes in steps)
    gains = {
        "speedup_in_steps": len(steps[0]) / len(steps[1]), "speedup_predicted": static / continuous,
        "speedup": float(run.static[clock] / run.continuous[clock]),
    }  # fmt: skip
    emit(
        f"batching in seconds {CLOCKS[clock]}: geometric lengths, mean {WALL_MEAN}, B {run.batch}", run.equal,
        **{name: round(gain, 3) for name, gain in gains.items()},
        static_s=round(run.static[clock], 1), static_predicted_s=round(static, 1),
        continuous_s=round(run.continuous[clock], 1), continuous_predicted_s=round(continuous, 1),
        static_steps=len(steps[0]), continuous_steps=len(steps[1]), requests=len(run.lengths), tokens=sum(run.lengths),
    )  # fmt: skip
    return gains


def plot(path: Path, steps: dict[tuple[str, int], dict[str, float]], wall: list[dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1.15, 1))
    dense, formula = range(2, 37), {"geometric": "$H_B$", "uniform": "$2B/(B+1)$", "constant": "1"}
    for name, color in (("geometric", "tab:blue"), ("uniform", "tab:orange"), ("constant", "tab:gray")):
        left.plot(dense, [LIMIT[name](b) for b in dense], "-", color=color, lw=1, alpha=0.8)
        points = [steps[name, b] for b in BATCHES]
        left.errorbar(
            BATCHES, [p["gain"] for p in points], [p["spread"] for p in points], fmt="o", ms=5, capsize=3, color=color,
            label=f"{name} lengths: {formula[name]}",
        )  # fmt: skip
    left.set(xlabel="slots B", ylabel="static steps / continuous steps", ylim=(0.8, 4.4))
    left.set_xticks(BATCHES, [str(b) for b in BATCHES])
    left.set_title("In steps: the scheduler (points), the closed form (lines)", fontsize=10)
    left.legend(frameon=False, loc="upper left")
    left.grid(alpha=0.3)
    shown = [
        ("speedup_in_steps", "in steps", "lightgray"),
        ("speedup_predicted", "in processor time, predicted from step times", "skyblue"),
        ("speedup", "in processor time, measured", "tab:blue"),
        ("speedup_clock", "by the clock, measured on a shared machine", "tab:purple"),
    ]
    for n, (key, label, color) in enumerate(shown):
        offsets = [i + 0.2 * (n - 1.5) for i in range(len(wall))]
        bars = right.bar(offsets, [gains[key] for gains in wall], 0.18, color=color, label=label)
        right.bar_label(bars, fmt="%.2f", fontsize=9)
    right.axhline(1, color="black", lw=0.8)
    right.set_xticks(range(len(wall)), [f"B = {b}" for b in WALL_BATCHES])
    right.set(ylabel="static / continuous", ylim=(0, 1.5 * max(max(gains.values()) for gains in wall)))
    right.set_title(f"In time: {LAYERS} layers of a 135M Llama, {WALL_NUM_BATCHES}B requests", fontsize=10)
    right.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds",
        type=int,
        default=5,
        help="number of draws of lengths for the measurement in steps, two or more; default: 5",
    )
    parser.add_argument(
        "--wall-seed", type=int, default=0, help="random seed of the lengths for the measurement in seconds"
    )
    parser.add_argument("--plot", type=Path, help="also draw both measurements into this PNG")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    steps = {(name, batch): in_steps(name, batch, options.seeds) for name in LENGTHS for batch in BATCHES}
    wall = in_seconds(options.wall_seed)
    if options.plot:
        plot(options.plot, steps, wall)


if __name__ == "__main__":
    main()
