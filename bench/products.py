"""Measure the cpu kernels' matrix products beside the machine's limits: python bench/products.py [--shapes SML]

The products of a decode step (queries, keys and values as one matrix, attention output, gate and up, down, head) of
S = SmolLM2-135M, M = Qwen3-0.6B and L = Llama-3.2-1B with random weights, in every format, for 1, 8, 32 and 512 tokens.
There are enough layers that the weights exceed the caches. The head is left out at 512 tokens, because only the last
token of a prompt needs it. The time includes the quantization of the tokens.

Each round measures the limits too, and all formats, in turn: reading memory with all threads, multiply-adds of float32
and of bytes in registers. `read_share` is bytes of weights over time over the limit, `peak_share` operations over time
over the limit (of bytes where tokens are rounded to int8, of dot products of bf16 where they are used); figures are
medians over rounds of the ratio within a round.
`unit_share` is that of the processor's matrix unit (AMX), of bytes for rounded tokens and of bf16 for `bf16` and
`bf16-bf16`; it is missing where there is no unit. Tokens in two slices (`bf16`) take two operations of the unit where
one is counted, so that their share is at most 0.5.
`best_` figures are from the shortest time and the highest limit, for a machine that others use too. `beside` is the
shortest time of the first format over that of this one. The gate: two rows of each product differ from float64 by no
more than the rounding error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from common import beyond_caches, emit

from ridgeline import _kernels as kernels
from ridgeline.spec.quant import format_of

FLOATS = ("fp32", "bf16", "fp16", "bf16-bf16")  # the last with tokens rounded to bf16
FORMATS = (
    *FLOATS, "int8", "int8-32", "int8-exact", "int4", "int4-asym", "int4-128", "int4-128-asym", "int4-exact", "int3",
    "int3-asym", "int3-128", "int3-128-asym", "int3-exact", "int2", "fp8",
)  # fmt: skip


class Shape(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    def products(self, head: bool) -> list[tuple[int, int]]:
        """Return [rows, columns] of each matrix."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = [(q + 2 * kv, self.hidden), (self.hidden, q), (2 * self.inner, self.hidden), (self.hidden, self.inner)]
        return [*layer, (self.vocabulary, self.hidden)] if head else layer


SHAPES = {
    "S": Shape(576, 9, 3, 64, 1536, 49152),
    "M": Shape(1024, 16, 8, 128, 3072, 151936),
    "L": Shape(2048, 32, 8, 64, 8192, 128256),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="SML")
    parser.add_argument("--formats", default=",".join(FORMATS), help="floats, or formats of --weights; default: many")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 512])
    parser.add_argument("--threads", type=int, default=0, help="number of threads; default: 0, all physical cores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--bytes", type=int, default=256 << 20, help="least bytes of weights in memory, for up to 32 tokens"
    )
    args = parser.parse_args()
    pool = kernels.Pool(args.threads or kernels.usable_cores())
    for name in args.shapes:
        for tokens in args.tokens:
            measure(pool, name, args.formats.split(","), tokens, args.rounds, args.bytes)


class Case:
    """The products of a shape in one format, and what each round took."""

    def __init__(self, pool: Any, shape: Shape, form: str, tokens: int, enough: int) -> None:
        shapes = shape.products(head=tokens <= 32)
        step = [build(pool, form, rows, columns) for rows, columns in shapes]
        size = sum(w.nbytes for w in step)
        # Copies of the layer's matrices at other addresses; one head is larger than the caches by itself.
        copies = max(1, (enough - size) // sum(w.nbytes for w in step[:4])) if tokens <= 32 else 1
        for _ in range(copies - 1):
            step[:0] = [build(pool, form, rows, columns) for rows, columns in shapes[:4]]
        self.form = form
        self.calls = [call(pool, w, tokens) for w in step]
        self.gate = all(is_right(pool, w, tokens) for w in step[-len(shapes) :])
        self.weights = sum(w.nbytes for w in step)
        self.numbers = sum(w.rows * w.columns for w in step)
        rounded = form not in FLOATS and format_of(form).activations == "int8"
        self.peak = pool.dot_rate if rounded else pool.bf16_rate if step[0].in_dots else pool.fma_rate
        unit = pool.unit_rate if rounded else pool.unit_bf16_rate if step[0].in_tiles else None
        self.unit_peak = unit() if unit is not None else 0.0  # operations/s
        self.rounds: list[tuple[float, float, float]] = []  # seconds, bytes/s, operations/s

    def unit_share(self, operations: float) -> dict[str, float]:
        """Return the share of the matrix unit's peak, or nothing without a unit."""
        if not self.unit_peak:
            return {}
        return {"unit_share": round(statistics.median(operations / t for t, _, _ in self.rounds) / self.unit_peak, 3)}


def measure(pool: Any, name: str, forms: list[str], tokens: int, rounds: int, enough: int) -> None:
    cases = [Case(pool, SHAPES[name], form, tokens, enough) for form in forms]
    for case in cases:
        run_all(case.calls)
    for _ in range(rounds):
        for case in cases:
            read, peak = pool.read_rate(beyond_caches()), case.peak()
            case.rounds.append((run_all(case.calls), read, peak))
    first = cases[0]
    highest = max(read for case in cases for _, read, _ in case.rounds)
    for case in cases:
        least, operations = min(t for t, _, _ in case.rounds), 2 * tokens * case.numbers
        emit(
            f"products {name}", case.gate, format=case.form, tokens=tokens, threads=pool.size, isa=kernels.isa(),
            seconds=statistics.median(t for t, _, _ in case.rounds), weight_bytes=case.weights,
            read_share=round(statistics.median(case.weights / t / read for t, read, _ in case.rounds), 3),
            peak_share=round(statistics.median(operations / t / peak for t, _, peak in case.rounds), 3),
            best_read_share=round(case.weights / least / highest, 3),
            best_peak_share=round(operations / least / max(peak for _, _, peak in case.rounds), 3),
            beside=round(min(t for t, _, _ in first.rounds) / first.numbers / least * case.numbers, 3),
            **case.unit_share(operations),
        )  # fmt: skip


def build(pool: Any, form: str, rows: int, columns: int) -> Any:
    rng = np.random.default_rng(rows + columns)
    if form in FLOATS:
        few = rng.normal(size=(min(rows, 509), columns)).astype(np.float32)
        name, _, tokens = form.partition("-")
        given = few[np.arange(rows) % len(few)]
        return kernels.Matrix(pool, [given], "float32", name, 0, [None], False, tokens=tokens or "exact")
    format = format_of(form)
    few = rng.integers(-3 if format.bits > 2 else -2, 2, (min(rows, 509), columns)).astype(np.int8)
    if format.numbers == "fp8":
        few = rng.integers(0, 0x7E, few.shape).astype(np.int8)
    groups = (rows, format.num_groups(columns))
    scales = rng.uniform(0.1, 1, groups).astype(np.float16).astype(np.float32)
    zeros = [rng.integers(-2, 2, groups).astype(np.int8)] if format.offsets == "zero_points" else []
    codes = few[np.arange(rows) % len(few)]
    return kernels.Matrix(
        pool, [codes], "codes", format.numbers, format.group, [None], False, [scales], format.offsets, zeros,
        format.activations,
    )  # fmt: skip


def call(pool: Any, w: Any, tokens: int) -> Callable[[], None]:
    x, out = inputs(w, tokens), np.zeros((tokens, w.rows), np.float32)
    product = kernels.Projection(pool, w, None, 1.0, 1.0, 0.0)
    return lambda: product(x, None, None, None, out)


def inputs(w: Any, tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).normal(size=(tokens, w.columns)).astype(np.float32)


def run_all(calls: list[Callable[[], None]]) -> float:
    start = time.perf_counter()
    for run in calls:
        run()
    return time.perf_counter() - start


def is_right(pool: Any, w: Any, tokens: int) -> bool:
    """Check the first and the last row of all tokens; a rounded activation is at most half a step off."""
    rows, x, out = np.zeros((2, w.columns), np.float32), inputs(w, tokens), np.zeros((tokens, w.rows), np.float32)
    w.take(pool, np.array([0, w.rows - 1]), rows)
    kernels.Projection(pool, w, None, 1.0, 1.0, 0.0)(x, None, None, None, out)
    error = np.abs(out[:, [0, -1]] - x.astype(np.float64) @ rows.T.astype(np.float64))
    step = np.abs(x).max(1, keepdims=True) / 254 * 1.01  # more than the rounding to bf16 is, 2^-8
    return bool((error <= (step + w.columns * 2.0**-23) * np.abs(rows).sum(1)).all())


if __name__ == "__main__":
    main()
