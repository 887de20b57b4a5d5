"""Attention in tiles against attention that writes all scores to memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.timing import middle
from ridgeline.ops import api
from ridgeline.ops.api import PagedKeyValues
from ridgeline.ops.devices import open_table
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention
from ridgeline.spec.storage import UNSCALED

LENGTHS, HEADS, SIZE = (256, 512, 1024, 2048), 4, 64  # tokens of a prompt; heads and their numbers
FASTER = 1.5  # least gain at the longest prompt
FLOAT, PAGE = 4, 16  # bytes of a number, tokens of a page
EQUAL = 1e-4  # largest difference of results, which are means of numbers of size 1: some hundred roundings of float32
Floats = np.ndarray[Any, np.dtype[np.float32]]


def predict(setup: Setup) -> Facts:
    """Count bytes: queries, keys, values and results once, and the scores written and read twice."""
    rows = {n: HEADS * 4 * n * SIZE * FLOAT for n in LENGTHS}
    scores = {n: HEADS * 4 * n * n * FLOAT for n in LENGTHS}  # written, read for the softmax, written again, read
    return {
        "tiles": {str(n): rows[n] for n in LENGTHS},
        "materialized": {str(n): rows[n] + scores[n] for n in LENGTHS},
    }


def measure(setup: Setup) -> Facts:
    """Time the attention of the same prompts by the engine's kernel, and by numpy's products with all scores."""
    kernel, seconds, error = _Kernel(setup.threads), {}, 0.0
    for n in LENGTHS:
        setup.on_part(f"flash: {n} tokens")
        rng = np.random.default_rng((setup.seed, n))
        q, k, v = (rng.standard_normal((n, HEADS, SIZE), dtype=np.float32) for _ in range(3))
        tiles, whole = kernel.prepared(q, k, v), partial(_materialized, q, k, v)
        error = max(error, float(np.abs(tiles() - whole()).max()))
        tries = [[_seconds(tiles), _seconds(whole)] for _ in range(5)]
        seconds[str(n)] = [list(times) for times in zip(*tries, strict=True)]
    return {"seconds": seconds, "error": error}


def _seconds(run: Callable[[], Floats]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class _Kernel:
    """The engine's attention over pages, in float32."""

    def __init__(self, threads: int | None) -> None:
        self._table, self._case = open_table("cpu", threads=threads), Attention(HEADS, HEADS, SIZE, SIZE**-0.5)

    def prepared(self, q: Floats, k: Floats, v: Floats) -> Callable[[], Floats]:
        """Store the keys and values of a prompt in pages, and return the call that computes its results."""
        memory, tokens = self._table.memory, len(q)
        pages, numbers = tokens // PAGE, np.arange(tokens)
        shape = (pages + 1, PAGE, HEADS, SIZE)  # page 0 is the null page
        views: Any = tuple(np.zeros(shape, np.float32) for _ in range(2))
        write = self._table.primitive(api.WRITE_PAGES, self._case)
        write(views, [k, v], memory.integers(1 + numbers // PAGE), memory.integers(numbers % PAGE), UNSCALED)
        tables = 1 + np.arange(pages)[None]
        layout = build_layout(
            Slices.plain(np.zeros(1, int), np.zeros(1, int), np.array([tokens])), tables, PAGE, tokens, memory
        )
        attend, given = (
            self._table.primitive(api.PAGED_ATTENTION, self._case),
            PagedKeyValues(views[0], views[1], layout),
        )
        return lambda: np.asarray(attend(q, given, None)).reshape(tokens, HEADS, SIZE)


def _materialized(q: Floats, k: Floats, v: Floats) -> Floats:
    """Return softmax(q k^T) v with all scores in memory, causal."""
    q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) * np.float32(SIZE**-0.5)
    scores[:, ~np.tri(q.shape[1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray((weights @ v).transpose(1, 0, 2))


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the gain at the longest prompt, where both results are equal but for rounding."""
    last = str(LENGTHS[-1])
    tiles, whole = measured["seconds"][last]
    gain, spread = middle([b / a for a, b in zip(tiles, whole, strict=True)])
    fewer = predicted["materialized"][last] / predicted["tiles"][last]
    return (
        only_if(
            at_least(
                39, gain, FASTER,
                f"at {LENGTHS[-1]:,} tokens tiles move {fewer:.0f} times fewer bytes by count, and the kernel is "
                f"{gain:.1f} times as fast as numpy with all scores in memory; results differ by at most "
                f"{measured['error']:.1g}",
                spread,
            ),
            measured["error"] <= EQUAL,
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
