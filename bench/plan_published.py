"""Fit expected times to published results, and state the error on those left out: python bench/plan_published.py

    python bench/plan_published.py            # the table of errors, for sources and for groups left out
    python bench/plan_published.py --write    # only fits, and writes src/ridgeline/cost/data/efficiency.json
    python bench/plan_published.py --rows     # also every result with the prediction that did not see it

The rows are those of ridgeline.plan.published. The numbers of ridgeline.cost.efficiency are logarithms with normal
priors (PRIORS), and have factors for the generation of the GPU and for the engine with priors around one (SPREADS), so
that what few rows tell stays near the typical value. The fit minimizes squared errors of logarithms of times; a row
that is far away counts less (Student's t), and rows of one source, model, machine and engine share their weight.

For each source left out, everything is fitted again without it: medians, factors and the width of the bands. The width
is the spread of the errors of the groups that remain, each predicted without itself, by the linear formula.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.cost.efficiency import collective_s, compute_class, memory_classes
from ridgeline.cost.operations import Forward
from ridgeline.cost.roofline import time_step
from ridgeline.cost.shard import device_operations
from ridgeline.plan.published import Result, results

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Number -> its typical value before any row is seen, and the standard deviation of its logarithm.
PRIORS = {
    "memory": (0.8, 0.2), "state": (0.6, 0.4), "experts": (0.7, 0.4), "codes8": (0.8, 0.3), "codes4": (0.6, 0.4),
    "compute16": (0.7, 0.25), "compute8": (0.55, 0.3), "compute4": (0.4, 0.4), "attention": (0.4, 0.5),
    "link": (1.5, 0.5), "kernel_s": (4e-6, 0.7), "step_s": (3e-4, 1.0), "sequence_s": (8e-6, 1.0),
    "request_s": (1e-2, 1.0),
}  # fmt: skip
# Number -> standard deviation of the logarithm of its factor, for generations and for engines.
SPREADS = {
    "memory": 0.15, "state": 0.3, "compute16": 0.2, "compute8": 0.2, "compute4": 0.2, "attention": 0.3, "link": 0.2,
    "kernel_s": 0.4, "step_s": 0.4, "sequence_s": 0.4, "request_s": 0.6,
}  # fmt: skip
FAMILIES = {
    "a100": "ampere", "l4": "ada", "l40s": "ada", "rtx4090": "ada", "h100": "hopper", "h200": "hopper",
    "b200": "blackwell", "rtx5090": "blackwell", "mi300x": "cdna3", "m2-ultra": "apple", "m3-max": "apple",
    "m4-max": "apple",
}  # fmt: skip
SIGMA, FREEDOM, STEPS = 0.2, 4.0, 12
ENGINE = 0.1  # addition of an engine that is not named to the spread of logarithms
KINDS = {"decode": "tpot", "served_tpot": "tpot", "ttft": "ttft", "prefill": "ttft", "latency": "throughput",
         "throughput": "throughput"}  # fmt: skip
NAMES = tuple(PRIORS)


@dataclass(frozen=True)
class Design:
    """All operations of all rows as arrays. names: the parameters; prior, sd: of their logarithms."""

    rows: tuple[Result, ...]
    row: np.ndarray[Any, np.dtype[np.int64]]
    compute_s: Floats
    memory_s: Floats
    link_s: Floats
    kernels: Floats
    steps: Floats
    sequences: Floats
    requests: Floats
    compute: np.ndarray[Any, np.dtype[np.int64]]
    memory: np.ndarray[Any, np.dtype[np.float64]]  # operations x numbers: 1 where the fraction is multiplied
    measured: Floats


def design(rows: Sequence[Result]) -> Design:
    ops: list[tuple[float, ...]] = []
    memory: list[list[float]] = []
    sums = np.zeros((3, len(rows)))
    for i, row in enumerate(rows):
        d = row.deployment
        forward, roof = Forward(d.spec, d.precision), d.hardware.roof()
        sums[2, i] = row.prompts
        for often, one in row.steps:
            sums[0, i] += often
            sums[1, i] += often * one.count
            for t in time_step(device_operations(forward, [one], d.scheme), roof).operations:
                op, names = t.operation, memory_classes(t.operation)
                memory.append([float(name in names) for name in NAMES])
                if op.messages:
                    ops.append((i, 0.0, 0.0, often * op.layers * collective_s(op, d.hardware), 0.0, 0))
                    continue
                which = NAMES.index(compute_class(op, d.hardware.unit(op.compute)))
                ops.append((i, often * t.compute_s, often * t.memory_s, 0.0, often * op.layers, which))
    a = np.array(ops)
    return Design(
        tuple(rows), a[:, 0].astype(int), a[:, 1], a[:, 2], a[:, 3], a[:, 4], sums[0], sums[1], sums[2],
        a[:, 5].astype(int), np.array(memory), np.array([row.seconds for row in rows]),
    )  # fmt: skip


@dataclass(frozen=True)
class Parameters:
    """Names, prior means and standard deviations of all parameters, and how rows use them."""

    names: list[tuple[str, str]]  # (number, "" or a generation or an engine)
    mean: Floats
    sd: Floats

    @classmethod
    def of(cls, rows: Sequence[Result]) -> Parameters:
        names = [(name, "") for name in NAMES]
        mean, sd = [float(np.log(PRIORS[n][0])) for n in NAMES], [PRIORS[n][1] for n in NAMES]
        for group in sorted({FAMILIES[r.machine] for r in rows}) + sorted({r.engine for r in rows}):
            for name, spread in SPREADS.items():
                names.append((name, group))
                mean.append(0.0)
                sd.append(spread)
        return cls(names, np.array(mean), np.array(sd))

    def by_row(self, rows: Sequence[Result], theta: Floats) -> Floats:
        """Return the logarithm of each number for each row; groups that were not fitted have the typical value."""
        return np.append(theta, 0.0)[self.places(rows)].sum(2)

    def places(self, rows: Sequence[Result]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return which three parameters make each number of each row; the last one stands for a factor of one."""
        place = {name: i for i, name in enumerate(self.names)}
        return np.array([
            [[place.get((name, own), len(place)) for own in ("", FAMILIES[row.machine], row.engine)] for name in NAMES]
            for row in rows
        ])  # fmt: skip


def predicted(d: Design, values: Floats) -> Floats:
    """Return the seconds of each row. values: logarithms of the numbers by row."""
    own = values[d.row]
    compute = d.compute_s * np.exp(-np.take_along_axis(own, d.compute[:, None], 1)[:, 0])
    memory = d.memory_s * np.exp(-(d.memory * own).sum(1))
    rest = d.kernels * np.exp(own[:, NAMES.index("kernel_s")]) + d.link_s * np.exp(own[:, NAMES.index("link")])
    total = np.bincount(d.row, np.maximum(compute, memory) + rest, len(d.rows))
    for name, amount in (("step_s", d.steps), ("sequence_s", d.sequences), ("request_s", d.requests)):
        total = total + amount * np.exp(values[:, NAMES.index(name)])
    return total


def part(d: Design, keep: Floats) -> Design:
    """Return the design of some of the rows."""
    index = np.flatnonzero(keep)
    place = -np.ones(len(d.rows), int)
    place[index] = np.arange(len(index))
    inside = keep[d.row].astype(bool)
    return Design(
        tuple(d.rows[i] for i in index), place[d.row[inside]], d.compute_s[inside], d.memory_s[inside],
        d.link_s[inside], d.kernels[inside], d.steps[index], d.sequences[index], d.requests[index], d.compute[inside],
        d.memory[inside], d.measured[index],
    )  # fmt: skip


def group(row: Result) -> tuple[str, ...]:
    return row.source, row.model, row.machine, row.engine


@dataclass(frozen=True)
class Fit:
    parameters: Parameters
    theta: Floats
    spread: dict[str, float]
    left_out: Floats  # linear errors of the rows of the fit, each group predicted without itself


def fit(d: Design, start: Fit | None = None) -> Fit:
    p = Parameters.of(d.rows)
    theta = p.mean.copy()
    if start is not None:
        known = dict(zip(start.parameters.names, start.theta, strict=True))
        theta = np.array([known.get(name, mean) for name, mean in zip(p.names, p.mean, strict=True)])
    groups = [group(row) for row in d.rows]
    share = np.array([groups.count(g) ** -0.5 for g in groups])

    places = p.places(d.rows)

    def error(at: Floats) -> Floats:
        return np.log(d.measured / predicted(d, np.append(at, 0.0)[places].sum(2)))

    for _ in range(STEPS if start is None else 5):
        found = error(theta)
        slope = jacobian(error, theta, found)
        weight = share * (FREEDOM + 1) / (FREEDOM + (found / SIGMA) ** 2) / SIGMA**2
        left = slope.T @ (weight[:, None] * slope) + np.diag(p.sd**-2)
        theta = theta - np.linalg.solve(left, slope.T @ (weight * found) + (theta - p.mean) / p.sd**2)
    found = error(theta)
    inverse = np.linalg.inv(left)
    out = np.zeros(len(found))
    for g in set(groups):
        mine = np.array([x == g for x in groups])
        hat = slope[mine] @ inverse @ slope[mine].T * weight[mine]
        out[mine] = np.linalg.solve(np.eye(int(mine.sum())) - hat, found[mine])
    return Fit(p, theta, spreads(d.rows, out, share), out)


def jacobian(f: Callable[[Floats], Floats], at: Floats, value: Floats) -> Floats:
    columns = []
    for i in range(len(at)):
        moved = at.copy()
        moved[i] += 1e-4
        columns.append((f(moved) - value) / 1e-4)
    return np.array(columns).T


def spreads(rows: Sequence[Result], errors: Floats, share: Floats) -> dict[str, float]:
    """Return the width of the bands by kind: half of the span of the middle 90 % of the errors, in deviations."""
    found = {}
    for kind in ("tpot", "ttft", "throughput"):
        mine = np.array([KINDS[row.kind] == kind for row in rows])
        size, weight = np.abs(errors[mine]), share[mine]
        order = np.argsort(size)
        cut = np.searchsorted(np.cumsum(weight[order]), 0.9 * weight.sum())
        found[kind] = float(size[order][min(cut, len(order) - 1)]) / 1.6449
    return found


# ---- the error on rows that were left out ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    row: Result
    error: float  # logarithm of measured / expected seconds
    spread: float


def judge(d: Design, of: Callable[[Result], Any], whole: Fit) -> list[Judged]:
    found = []
    for name in sorted({of(row) for row in d.rows}):
        out = np.array([of(row) == name for row in d.rows])
        seen, unseen = part(d, ~out), part(d, out)
        model = fit(seen, whole)
        values = model.parameters.by_row(unseen.rows, model.theta)
        errors = np.log(unseen.measured / predicted(unseen, values))
        machines, families = {r.machine for r in seen.rows}, {FAMILIES[r.machine] for r in seen.rows}
        for row, error in zip(unseen.rows, errors, strict=True):
            known = "machine" if row.machine in machines else "family" if FAMILIES[row.machine] in families else "none"
            found.append(Judged(row, float(error), widened(model.spread, known)[KINDS[row.kind]]))
    return found


def widened(spread: dict[str, float], known: str) -> dict[str, float]:
    """Add to the bands what is unknown of a machine or a generation without results."""
    more = {"machine": 0.0, "family": 0.1, "none": 0.25}[known]
    return {kind: float(np.hypot(value, more)) for kind, value in spread.items()}


def table(title: str, judged: Sequence[Judged], of: Callable[[Result], str]) -> None:
    print(f"\n| {title} | results | median of measured / expected | within 35 % | in the 90 % band |")
    print("|---|---|---|---|---|")
    lines = [(name, [j for j in judged if of(j.row) == name]) for name in sorted({of(j.row) for j in judged})]
    for name, own in [*lines, ("all", list(judged))]:
        errors = [j.error for j in own]
        inside = sum(abs(j.error) <= 1.6449 * j.spread for j in own) / len(own)
        near = sum(1 / 1.35 <= float(np.exp(e)) <= 1.35 for e in errors) / len(own)
        print(f"| {name} | {len(own)} | {np.exp(statistics.median(errors)):.2f} | {near:.0%} | {inside:.0%} |")


def write(found: Fit, rows: Sequence[Result]) -> None:
    """Write the numbers of the package: a factor of an engine is not among them, so the bands are wider by ENGINE."""
    value = {name: float(np.exp(v)) for name, v in zip(found.parameters.names, found.theta, strict=True)}
    machines = sorted({row.machine for row in rows})
    families = sorted({FAMILIES[m] for m in machines})
    path = Path(__file__).parents[1] / "src" / "ridgeline" / "cost" / "data" / "efficiency.json"
    data = {
        "fitted": f"by bench/plan_published.py to {len(rows)} rows of plan/data/published.json",
        "machines": machines,
        "families": FAMILIES,
        "typical": {name: float(f"{value[name, '']:.4g}") for name in NAMES},
        "by_family": {f: {name: round(value[name, f], 4) for name in SPREADS} for f in families},
        "spread": {
            known: {k: round(float(np.hypot(v, ENGINE)), 3) for k, v in widened(found.spread, known).items()}
            for known in ("machine", "family", "none")
        },
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="only write the fit of all rows into the package")
    parser.add_argument("--rows", action="store_true", help="print every row that was left out with its source")
    options = parser.parse_args()
    d = design(results())
    whole = fit(d)
    if options.write:
        write(whole, d.rows)
        return
    by_source = judge(d, lambda row: row.source, whole)
    table("source left out", by_source, lambda row: row.source)
    table("machine, sources left out", by_source, lambda row: row.machine)
    table("figure, sources left out", by_source, lambda row: row.kind)
    by_group = judge(d, group, whole)
    table("machine, groups left out", by_group, lambda row: row.machine)
    table("engine, groups left out", by_group, lambda row: row.engine)
    table("figure, groups left out", by_group, lambda row: row.kind)
    if options.rows:
        for j in by_group:
            print(f"{np.exp(j.error):6.2f}  {' '.join(group(j.row))} {j.row.weights} tp{j.row.tp} b{j.row.batch} "
                  f"{j.row.prompt}+{j.row.output} {j.row.kind} {j.row.seconds:.4g} s")  # fmt: skip
    for (name, own), value in zip(whole.parameters.names, whole.theta, strict=True):
        if not own:
            print(f"{name}: {np.exp(value):.4g}")
    print("spread:", {k: round(v, 3) for k, v in whole.spread.items()})


if __name__ == "__main__":
    main()
