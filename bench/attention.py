"""Attention and recurrent kernels beside the machine's limits: python bench/attention.py [--threads 0] [--rounds 7]

Layers of S = SmolLM2-135M, M = Qwen3-0.6B, L = Llama-3.2-1B and V = DeepSeek-V2-Lite (latent) with random states:

    decode   a token of each of 1 and 8 sequences after 8,192; `read_share`: bytes of state over time, over what all
             threads read of memory; as many layers in turn as make the states larger than the caches
    chunk    512 tokens after 0 and after 7,680; `peak_share`: multiply-adds that a causal mask leaves, over the peak
    scan     512 tokens, and 1, of Mamba-130M, Mamba2-130M and BASED-360M layers; `ratio`: the reference's time on one
             thread, token by token, over it

Limits are measured in turn with every case; medians over rounds. They are those of a quiet machine: a core that others
share makes every share too small. The gate: a query of each case of S, M and L against float64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from common import emit, seconds

from ridgeline import _kernels as kernels
from ridgeline.ops.api import PagedKeyValues, PagedRows
from ridgeline.ops.cpu import attention, latent, recurrent
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import ALL, Attention, LatentAttention, Mamba, Mamba2, RMSNorm, TaylorAttention

PAGE, CONTEXT, CHUNK, CACHES = 16, 8192, 512, 1 << 27
MEMORY, NORM = NumpyMemory(), RMSNorm()
ATTENTION = {
    "S": Attention(9, 3, 64, 64**-0.5),
    "M": Attention(16, 8, 128, 128**-0.5),
    "L": Attention(32, 8, 64, 64**-0.5),
}
LATENT = LatentAttention(16, 512, 128, 64, 128, 192**-0.5, NORM)
Run = Callable[[], Any]


class Case(NamedTuple):
    name: str
    run: Run
    bytes_read: int = 0
    flops: int = 0
    correct: bool = True


def pages_of(shapes: list[tuple[int, ...]], sequences: int, layers: int, rng: np.random.Generator) -> list[Any]:
    """Layers of an arena that `sequences` of CONTEXT tokens fill, in pages in any order; and their page tables."""
    count = sequences * (CONTEXT // PAGE) + 1
    sizes = [PAGE * int(np.prod(shape)) for shape in shapes]
    arena = MEMORY.pages(count, layers * sum(sizes))
    block = rng.standard_normal((1, arena.shape[1]), dtype=np.float32)
    arena[:] = block  # of every page, the same: what they hold costs nothing
    views, at = [], 0
    for _ in range(layers):
        parts = []
        for shape, size in zip(shapes, sizes, strict=True):
            parts.append(MEMORY.page_view(arena, at, (PAGE, *shape)))
            at += size
        views.append(tuple(parts))
    tables = rng.permutation(np.arange(1, count)).reshape(sequences, -1)
    return [views, tables]


def attention_case(name: str, tokens: int, context: int, sequences: int, pool: kernels.Pool) -> Case:
    """`tokens` of each sequence, the last of `context`."""
    case: Any = LATENT if name == "V" else ATTENTION[name]
    rng = np.random.default_rng(0)
    shapes = list(case.state().parts)
    per_layer = 4 * sequences * context * sum(int(np.prod(shape)) for shape in shapes)
    layers = max(1, -(-CACHES // per_layer)) if tokens == 1 else 1
    views, tables = pages_of(shapes, sequences, layers, rng)
    slices = Slices.plain(
        np.arange(sequences), np.full(sequences, context - tokens), np.full(sequences, tokens, dtype=np.int64)
    )
    layout = build_layout(slices, tables, PAGE, ALL, MEMORY)
    seen = sequences * tokens * (context - (tokens - 1) / 2)
    if name == "V":
        q = rng.standard_normal((sequences * tokens, case.num_heads, case.qk_head_dim), dtype=np.float32)
        up = rng.standard_normal((case.num_heads, 256, 512), dtype=np.float32) / 30
        attend = latent.paged_latent_attention(case, pool)
        work = 2 * case.num_heads * (case.row + case.kv_lora_rank) * seen
        return Case("", lambda: [attend(q, PagedRows(v, layout), up) for v in views], layers * per_layer, int(work))
    q = rng.standard_normal((sequences * tokens, case.num_heads, case.head_dim), dtype=np.float32)
    attend = attention.paged_attention(case, pool)
    correct = right(case, q, views[0], tables, context, attend(q, PagedKeyValues(*views[0], layout)))
    run = lambda: [attend(q, PagedKeyValues(*v, layout)) for v in views]  # noqa: E731
    work = 4 * case.num_heads * case.head_dim * seen
    return Case("", run, layers * per_layer, int(work), correct)


def right(case: Attention, q: Any, parts: Any, tables: Any, context: int, found: Any) -> bool:
    """The last query of the last sequence, against float64."""
    heads, dim, groups = case.num_kv_heads, case.head_dim, case.num_heads // case.num_kv_heads
    pages = tables[-1][: context // PAGE]
    keys = parts[0].reshape(-1, heads, dim, PAGE)[pages].transpose(0, 3, 1, 2).reshape(-1, heads, dim)
    values = parts[1].reshape(-1, heads, PAGE, dim)[pages].swapaxes(1, 2).reshape(-1, heads, dim)
    keys, values = (np.repeat(x, groups, 1).astype(np.float64) for x in (keys, values))
    scores = np.einsum("hd,shd->hs", q[-1].astype(np.float64), keys) * case.scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = np.einsum("hs,shd->hd", weights / weights.sum(1, keepdims=True), values)
    return bool(np.abs(found[-1].reshape(wanted.shape) - wanted).max() < 1e-5)


def scan_case(name: str, tokens: int, pool: kernels.Pool) -> tuple[Run, Run]:
    """A step of the kernel, and a token of the reference."""
    import torch

    from ridgeline.ops.reference import recurrent as reference

    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    if name == "mamba":
        case: Any = Mamba(1536, 16, 4, 48)
        x = [draw(1, tokens, n) for n in (1536, 1536, 16, 16)]
        a, d, h = np.log(np.tile(np.arange(1, 17, dtype=np.float32), (1536, 1))), draw(1536), draw(1, 1536, 16)
        ours, theirs = recurrent.selective_scan(case, pool), reference.selective_scan(case)
        order = lambda x, w, h, n: (x[0], x[1], w[0], x[2], x[3], w[1], h, n)  # noqa: E731
        weights = [a, d]
    elif name == "mamba2":
        case = Mamba2(24, 64, 128, 1, 4, NORM)
        x, h = [draw(1, tokens, n) for n in (1536, 24, 128, 128)], draw(1, 24, 64, 128)
        ours, theirs = recurrent.ssd(case, pool), reference.ssd(case)
        order = lambda x, w, h, n: (x[0], x[1], w[0], w[1], x[2], x[3], w[2], h, n)  # noqa: E731
        weights = [draw(24), draw(24), draw(24)]
    else:
        case = TaylorAttention(16, 64, 16)
        x, h = [draw(1, tokens, n) for n in (256, 256, 1024)], np.zeros((1, 16, 65, 273), np.float32)
        ours, theirs = recurrent.taylor_attention(case, pool), reference.taylor_attention(case)
        order = lambda x, w, h, n: (*x, h, n)  # noqa: E731
        weights = []
    one = order(*([torch.from_numpy(a[:, :1] if a.ndim == 3 else a) for a in group] for group in (x, weights)),
                torch.from_numpy(h), torch.tensor([1]))  # fmt: skip
    given = order(x, weights, h, np.array([tokens]))
    return lambda: ours(*given), lambda: theirs(*one)


def measure(case: Case, pool: kernels.Pool, rounds: int) -> None:
    case.run()
    read, peak, times = [], [], []
    for _ in range(rounds):
        taken = seconds(case.run)
        times.append(taken)
        read.append(case.bytes_read / taken / pool.read_rate(CACHES))
        peak.append(case.flops / taken / pool.fma_rate())
    emit(
        case.name, case.correct, threads=pool.size, isa=kernels.isa(), ms=round(statistics.median(times) * 1e3, 3),
        read_share=round(statistics.median(read), 3), peak_share=round(statistics.median(peak), 3),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=0, help="0: all physical cores")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    pool = kernels.Pool(options.threads or kernels.usable_cores())
    for name in "SMLV":
        for kind, tokens, context, sequences in (
            ("decode", 1, CONTEXT, 1), ("decode", 1, CONTEXT, 8),
            ("chunk", CHUNK, CHUNK, 1), ("chunk", CHUNK, CONTEXT, 1),
        ):  # fmt: skip
            made = attention_case(name, tokens, context, sequences, pool)
            measure(made._replace(name=f"{kind} {name} {sequences}x{context}"), pool, options.rounds)
    import torch

    torch.set_num_threads(1)
    for name in ("mamba", "mamba2", "based"):
        for tokens in (CHUNK, 1):
            ours, theirs = scan_case(name, tokens, pool)
            ours(), theirs()
            pairs = [(seconds(ours), seconds(theirs)) for _ in range(options.rounds)]
            mine = statistics.median(a for a, _ in pairs)
            ratio = statistics.median(tokens * b / a for a, b in pairs)
            emit(f"scan {name} {tokens}", True, threads=pool.size, ms=round(mine * 1e3, 3), ratio=round(ratio, 1))


if __name__ == "__main__":
    main()
