"""Outliers of activations: absmax in int8 breaks, LLM.int8() does not, and it is slower than 16 bits."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.measure.passes import best_s
from ridgeline.ops import OpsTable
from ridgeline.ops.devices import open_table
from ridgeline.quant import store
from ridgeline.spec.quant import OUTLIER, format_of

ROWS, WIDTH, OUTLIERS, SIZE = 32, 1024, 6, 60.0  # tokens, columns, columns with outliers, their standard deviation
FORMATS = {"absmax": "int8", "llm.int8": "int8-outliers", "16 bits": "auto"}
MENDED = 4.0  # times that the error of absmax has to be that of LLM.int8(), where rounded weights limit the second
ALIKE = 1.2  # most by which their errors may differ without outliers


def predict(setup: Setup) -> Facts:
    """Compute errors of activations: a step is the largest number over 127, and rounding has its size over sqrt(12)."""
    steps = [size * np.sqrt(2 * np.log(WIDTH)) / 127 for size in (SIZE / 2, 1.0)]
    return {"gain": float(steps[0] / steps[1])}


def _inputs(seed: int, size: float) -> tuple[Any, Any]:
    """Return tokens [ROWS, WIDTH] and a matrix [WIDTH, WIDTH]. size: standard deviation of the columns with outliers.

    The matrix is small where outliers meet it, so that they do not drown all else, as in models.
    """
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal((n, WIDTH), dtype=np.float32) for n in (ROWS, WIDTH))
    few = rng.choice(WIDTH, OUTLIERS, replace=False)
    x[:, few] *= size
    weight[:, few] /= size
    return np.clip(x, -1e4, 1e4), weight / np.float32(WIDTH**0.5)


def _error(table: OpsTable, kind: str, x: Any, weight: Any) -> float:
    """Return the error of a product, as a share of its size in float64."""
    one = store(table.memory.put(weight, "float32", "float32"), None, table, format_of(kind))
    one.prepare()
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
    found = np.asarray(table.memory.get(one.apply(table.memory.put(x, "float32", "float32"))))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def measure(setup: Setup) -> Facts:
    """Multiply with and without outliers in each way, and time each way."""
    table, seeds = open_table("cpu", threads=setup.threads), 3 if setup.quick else 10
    found: dict[str, Any] = {"errors": {}, "plain_errors": {}, "seconds": {}}
    for name, kind in FORMATS.items():
        setup.on_part(f"outliers: {name}")
        for key, size in (("errors", SIZE), ("plain_errors", 1.0)):
            found[key][name] = [_error(table, kind, *_inputs(setup.seed + i, size)) for i in range(seeds)]
        x, weight = _inputs(setup.seed, SIZE)
        dtype = "bfloat16" if kind == "auto" else "float32"
        one = store(table.memory.put(weight, "float32", dtype), None, table, format_of(kind))
        one.prepare()
        found["seconds"][name] = min(best_s(partial(one.apply, x)) for _ in range(3))
    return found


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge what outliers cost absmax and not LLM.int8(), and the time of both."""
    errors, plain, seconds = measured["errors"], measured["plain_errors"], measured["seconds"]
    gains = [a / b for a, b in zip(errors["absmax"], errors["llm.int8"], strict=True)]
    alike = max(a / b for a, b in zip(plain["absmax"], plain["llm.int8"], strict=True))
    slower = seconds["llm.int8"] / seconds["16 bits"]
    a, b, c = (median(errors[name]) for name in ("absmax", "llm.int8", "16 bits"))
    found = at_least(
        28, median(gains), MENDED,
        f"with {OUTLIERS} of {WIDTH} columns of outliers the error is {a:.2%} with absmax, {b:.2%} with LLM.int8() and "
        f"{c:.2%} in 16 bits; without outliers both are alike within {alike:.2f} times; LLM.int8() takes {slower:.1f} "
        f"times the time of 16 bits, and int8 {seconds['absmax'] / seconds['16 bits']:.2f}; here numpy "
        "computes LLM.int8(), so only the direction counts",
        (min(gains), max(gains)),
    )  # fmt: skip
    return (only_if(found, alike <= ALIKE and slower > 1),)


EXPERIMENT = Experiment(
    "outliers",
    "Outliers of activations in int8",
    (28,),
    predict,
    measure,
    judge,
    f"The number is the error of absmax over that of LLM.int8(), which takes activations of {OUTLIER:g} or more out. "
    "One outlier sets the step of all other numbers of its token.",
)
