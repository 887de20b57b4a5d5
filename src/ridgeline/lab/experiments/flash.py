"""Attention in tiles against attention that writes all scores to memory."""

from __future__ import annotations

import time

import numpy as np

from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least
from ridgeline.lab.timing import middle
from ridgeline.measure.passes import attention_s
from ridgeline.ops import OpsTable
from ridgeline.ops.devices import open_table

LENGTHS, HEADS, SIZE = (256, 512, 1024, 2048), 4, 64  # tokens of a prompt; heads and their numbers
FASTER = 1.5  # least gain at the longest prompt
FLOAT = 4


def predict(setup: Setup) -> Facts:
    """Count bytes: queries, keys, values and results once, and the scores written and read twice."""
    rows = {n: HEADS * 4 * n * SIZE * FLOAT for n in LENGTHS}
    scores = {n: HEADS * 4 * n * n * FLOAT for n in LENGTHS}  # written, read for the softmax, written again, read
    return {
        "tiles": {str(n): rows[n] for n in LENGTHS},
        "materialized": {str(n): rows[n] + scores[n] for n in LENGTHS},
    }


def measure(setup: Setup) -> Facts:
    """Time the engine's kernel, which keeps a tile of scores in a cache, and numpy's products with all scores."""
    table, found = open_table("cpu", threads=setup.threads), {}
    for n in LENGTHS:
        setup.on_part(f"flash: {n} tokens")
        pairs = n * (n + 1) // 2
        tiles = [_tiles(table, n) * pairs * HEADS * 2 * SIZE for _ in range(3)]
        found[str(n)] = [tiles, [_materialized(n, setup.seed) for _ in range(3)]]
    return {"seconds": found}


def _tiles(table: OpsTable, tokens: int) -> float:
    """Return the seconds of the kernel for a number of a key or value and a query that sees it."""
    return attention_s(table, "float32", 1, tokens, 2)


def _materialized(tokens: int, seed: int) -> float:
    """Return the seconds of softmax(q k^T) v with scores in memory, causal."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((HEADS, tokens, SIZE), dtype=np.float32) for _ in range(3))
    hidden = np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
    start = time.perf_counter()
    scores = q @ k.transpose(0, 2, 1) * np.float32(SIZE**-0.5) + hidden
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    _ = weights @ v
    return time.perf_counter() - start


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the gain at the longest prompt."""
    last = str(LENGTHS[-1])
    tiles, whole = measured["seconds"][last]
    gain, spread = middle([b / a for a, b in zip(tiles, whole, strict=True)])
    fewer = predicted["materialized"][last] / predicted["tiles"][last]
    return (
        at_least(
            39, gain, FASTER,
            f"at {LENGTHS[-1]:,} tokens tiles move {fewer:.0f} times fewer bytes by count, and the kernel is "
            f"{gain:.1f} times as fast as numpy with all scores in memory",
            spread,
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return both times over the length of the prompt."""
    curves = tuple(
        Series(name, [(float(n), middle(t[i])[0] * 1e3) for n, t in measured["seconds"].items()], measured=True)
        for i, name in enumerate(("tiles", "all scores in memory"))
    )
    return (Figure("Attention of a prompt", "tokens", "ms", curves),)


EXPERIMENT = Experiment(
    "flash", "Attention in tiles", (39,), predict, measure, judge,
    "Scores are a square of the prompt's length for each head. A kernel that keeps a tile of them in a cache, and the "
    "sums of the softmax beside it, never writes them to memory.", figures,
)  # fmt: skip
