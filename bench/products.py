"""Measure the cpu kernels' matrix products beside the machine's limits: python bench/products.py [--shapes SML]

The products of a decode step (queries, keys and values as one matrix, attention output, gate and up, down, head) of
S = SmolLM2-135M, M = Qwen3-0.6B and L = Llama-3.2-1B with random weights, in every format, for 1, 8, 32 and 512 tokens.
There are enough layers that the weights exceed the caches. The head is left out at 512 tokens, because only the last
token of a prompt needs it. The time includes the quantization of the tokens.

Each round also measures the limits: reading memory with all threads, and multiply-adds of float32 and of bytes in
registers. `read_share` is bytes of weights over time over the limit, `peak_share` operations over time over the limit
(of bytes for int8 and int4); figures are medians over rounds of the ratio within a round. The gate: two rows of each
product differ from float64 by no more than the rounding error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from common import emit

from ridgeline import _kernels as kernels

READ_BYTES = 1 << 28
FORMATS = (("fp32", 0), ("bf16", 0), ("fp16", 0), ("int8", 0), ("int4", 32), ("int4", 128))


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
    parser.add_argument("--formats", default="fp32,bf16,fp16,int8,int4-32,int4-128")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 512])
    parser.add_argument("--threads", type=int, default=0, help="number of threads; default: 0, all physical cores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--bytes", type=int, default=256 << 20, help="least bytes of weights in memory, for up to 32 tokens"
    )
    args = parser.parse_args()
    pool = kernels.Pool(args.threads or kernels.usable_cores())
    for name in args.shapes:
        for form, group in FORMATS:
            if (f"{form}-{group}" if group else form) in args.formats.split(","):
                for tokens in args.tokens:
                    measure(pool, name, form, group, tokens, args.rounds, args.bytes)


def measure(pool: Any, name: str, form: Any, group: int, tokens: int, rounds: int, enough: int) -> None:
    shapes = SHAPES[name].products(head=tokens <= 32)
    step = [build(pool, form, group, rows, columns) for rows, columns in shapes]
    size = sum(w.nbytes for w in step)
    # These are copies of the layer's matrices at other addresses. One head alone is larger than the caches.
    copies = max(1, (enough - size) // sum(w.nbytes for w in step[:4])) if tokens <= 32 else 1
    for _ in range(copies - 1):
        step[:0] = [build(pool, form, group, rows, columns) for rows, columns in shapes[:4]]
    calls = [call(pool, w, tokens) for w in step]
    gate = all(is_right(pool, w, tokens) for w in step[-len(shapes) :])
    weights, operations = sum(w.nbytes for w in step), 2 * tokens * sum(w.rows * w.columns for w in step)
    limit = pool.dot_rate if form in ("int8", "int4") else pool.fma_rate
    run_all(calls)
    reads, peaks, times = [], [], []
    for _ in range(rounds):
        read, peak, taken = pool.read_rate(READ_BYTES), limit(), run_all(calls)
        times.append(taken)
        reads.append(weights / taken / read)
        peaks.append(operations / taken / peak)
    emit(
        f"products {name}", gate,
        format=f"{form}-{group}" if group else form, tokens=tokens, threads=pool.size, isa=kernels.isa(),
        seconds=statistics.median(times), weight_bytes=weights,
        read_share=round(statistics.median(reads), 3), peak_share=round(statistics.median(peaks), 3),
        best_read_share=round(max(reads), 3), best_peak_share=round(max(peaks), 3),
    )  # fmt: skip


def build(pool: Any, form: Any, group: int, rows: int, columns: int) -> Any:
    few = np.random.default_rng(rows + columns).normal(size=(min(rows, 509), columns)).astype(np.float32)
    weight = few[np.arange(rows) % len(few)]
    return kernels.Matrix(pool, [weight], "float32", form, group, [None], False)


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
    step = np.abs(x).max(1, keepdims=True) / 254 * 1.01
    return bool((error <= (step + w.columns * 2.0**-23) * np.abs(rows).sum(1)).all())


if __name__ == "__main__":
    main()
