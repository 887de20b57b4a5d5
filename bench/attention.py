"""Measure attention and recurrent kernels beside the machine's limits:

    python bench/attention.py [--threads 0] [--rounds 7] [--parts decode chunk scan] [--models S M L V]
        [--types float32 float16 bfloat16] [--rounded] [--clock wall]

Layers of S = SmolLM2-135M, M = Qwen3-0.6B, L = Llama-3.2-1B and V = DeepSeek-V2-Lite (latent) with random states:

    decode   one token of each of 1, 8 and 32 sequences after 512, 4,096 and 8,192 tokens; `read_share` is the bytes of
             state over time over the read bandwidth of all threads; the layers together exceed the caches
    chunk    512 and 2,048 tokens after none, and 512 after 7,680; `peak_share` is the multiply-adds inside the causal
             mask over the float32 peak; `unit_share` is the same over the bf16 peak of the matrix unit, if attention
             over this type of state uses one (RIDGELINE_MATRIX_UNIT); slices do not count
    scan     512 tokens, and 1, of Mamba-130M, Mamba2-130M and BASED-360M layers; `ratio` is the time of the reference,
             token by token on one thread, over the time of the kernel

With `--rounded`, state of 16 bits is also computed with queries, keys, values and weights in bf16 (`--attention bf16`):
`bf16_share` is the multiply-adds over the peak of the processor's dot products of bf16.

Every case of attention runs with its state in each type, one after the other; `speedup` is the time of the first type
over the time of the type. The limits are measured in the same rounds as every case; figures are medians over rounds.
Run it on a quiet machine: a core that other programs use makes every share too small. On a busy one, `--clock cpu
--threads 1` takes the least processor time of all rounds, and the highest limits. The gate: a query of each case of S,
M and L equals float64 over the stored state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from common import beyond_caches, emit, seconds

from ridgeline import _kernels as kernels
from ridgeline.ops.api import PagedKeyValues, PagedRows
from ridgeline.ops.cpu import attention, latent, recurrent
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.ops.host.stored import keys_of, read_rows, values_of
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.settings.attention import ROUNDS
from ridgeline.spec import ALL, Attention, LatentAttention, Layer, Mamba, Mamba2, ModelSpec, RMSNorm, TaylorAttention
from ridgeline.spec.groups import state_groups
from ridgeline.spec.storage import STORAGES, Storage, state_bytes

PAGE, CHUNK, CACHES = 16, 512, 1 << 27
MEMORY, NORM = NumpyMemory(), RMSNorm()
ATTENTION = {
    "S": Attention(9, 3, 64, 64**-0.5),
    "M": Attention(16, 8, 128, 128**-0.5),
    "L": Attention(32, 8, 64, 64**-0.5),
}
LATENT = LatentAttention(16, 512, 128, 64, 128, 192**-0.5, NORM)
Run = Callable[[], Any]


class Case(NamedTuple):
    """Layers that run one after the other. bytes_read, flops: sums over all of them."""

    dtype: str
    run: Run
    layers: int
    bytes_read: int
    flops: float
    correct: bool = True
    rounds: bool = False


def pages_of(case: Any, sequences: int, context: int, layers: int, storage: Storage, pool: kernels.Pool) -> list[Any]:
    """Return layers of an arena that `sequences` of `context` tokens fill, in random page order, and page tables."""
    count, rng = sequences * (context // PAGE) + 1, np.random.default_rng(0)
    (group,) = state_groups(ModelSpec("x", 1, 1, 1, (Layer(case, None, NORM),) * layers, NORM), page_tokens=PAGE,
                            storage=storage)  # fmt: skip
    arena, views = MEMORY.pages(count, group.page_bytes), []
    for slot in group.slots:
        parts = [MEMORY.page_view(arena, p.offset, (PAGE, *p.shape), p.dtype) for p in slot.parts]
        rows = [rng.standard_normal((PAGE, *shape), dtype=np.float32) for shape in case.state().parts]
        attention.write_pages(case, pool)(parts, rows, np.zeros(PAGE, np.int64), np.arange(PAGE))
        views.append(tuple(parts))
    arena[1:] = arena[0]  # every page holds the same numbers, because the time does not depend on them
    return [views, rng.permutation(np.arange(1, count)).reshape(sequences, -1)]


def attention_case(
    name: str, tokens: int, context: int, sequences: int, pool: kernels.Pool, storage: Storage, rounds: bool = False
) -> Case:
    """Build a case with `tokens` of each sequence, the last ones of `context`. rounds: for a pool that rounds."""
    case: Any = LATENT if name == "V" else ATTENTION[name]
    rng = np.random.default_rng(0)
    per_layer = sequences * state_bytes(case.state(), storage, context)
    layers = max(1, -(-CACHES // per_layer)) if tokens == 1 else 1
    views, tables = pages_of(case, sequences, context, layers, storage, pool)
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
        return Case(
            storage.dtype,
            lambda: [attend(q, PagedRows(v, layout), up) for v in views],
            layers,
            layers * per_layer,
            layers * work,
            rounds=rounds,
        )
    q = rng.standard_normal((sequences * tokens, case.num_heads, case.head_dim), dtype=np.float32)
    attend = attention.paged_attention(case, pool)
    found = attend(q, PagedKeyValues(*views[0], layout))
    correct = right(case, q, views[0], tables, found, storage.dtype, rounds)
    work = 4 * case.num_heads * case.head_dim * seen
    return Case(
        storage.dtype, lambda: [attend(q, PagedKeyValues(*v, layout)) for v in views],
        layers, layers * per_layer, layers * work, correct, rounds,
    )  # fmt: skip


def right(case: Attention, q: Any, parts: Any, tables: Any, found: Any, dtype: str, rounds: bool) -> bool:
    """Check the last query of the last sequence against float64."""
    groups = case.num_heads // case.num_kv_heads
    keys = read_rows(keys_of(parts[0]), tables[-1:], numbers_last=False)[0]
    values = read_rows(values_of(parts[1]), tables[-1:], numbers_last=True)[0]
    keys, values = (np.repeat(x, groups, 1).astype(np.float64) for x in (keys, values))
    scores = np.einsum("hd,shd->hs", q[-1].astype(np.float64), keys) * case.scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = np.einsum("hs,shd->hd", weights / weights.sum(1, keepdims=True), values)
    limit = 2e-2 if rounds else 5e-5 if kernels.attends_in_unit(dtype) else 1e-5
    return bool(np.abs(found[-1].reshape(wanted.shape) - wanted).max() < limit)


def scan_case(name: str, tokens: int, pool: kernels.Pool) -> tuple[Run, Run]:
    """Build a step of the kernel, and a token of the reference."""
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
        order, weights = "xxwxxw", [a, d]
    elif name == "mamba2":
        case = Mamba2(24, 64, 128, 1, 4, NORM)
        x, h = [draw(1, tokens, n) for n in (1536, 24, 128, 128)], draw(1, 24, 64, 128)
        ours, theirs = recurrent.ssd(case, pool), reference.ssd(case)
        order, weights = "xxwwxxw", [draw(24), draw(24), draw(24)]
    else:
        case = TaylorAttention(16, 64, 16)
        x, h = [draw(1, tokens, n) for n in (256, 256, 1024)], np.zeros((1, 16, 65, 273), np.float32)
        ours, theirs = recurrent.taylor_attention(case, pool), reference.taylor_attention(case)
        order, weights = "xxx", []
    inputs, constants = iter(x), iter(weights)
    arrays = [next(inputs if kind == "x" else constants) for kind in order]  # in the order in which the op takes them
    first = [torch.from_numpy(a[:, :1] if a.ndim == 3 else a) for a in arrays]
    lengths, one = np.array([tokens]), torch.tensor([1])
    return lambda: ours(*arrays, h, lengths), lambda: theirs(*first, torch.from_numpy(h), one)


def processor_seconds(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def share(amount: float, taken: list[float], limits: list[float], busy: bool) -> float:
    """Return the share of a limit: the median over rounds, or, on a busy machine, that of the best rounds."""
    if busy:
        return round(amount / min(taken) / max(limits), 3)
    return round(statistics.median(amount / t / limit for t, limit in zip(taken, limits, strict=True)), 3)


def measure(name: str, cases: list[Case], pool: kernels.Pool, rounds: int, busy: bool) -> None:
    """Measure a case with its state in each type, one after the other. busy: by processor time."""

    def run(case: Case) -> None:
        pool.rounds_attention = case.rounds
        case.run()
        pool.rounds_attention = False

    timer, typical = (processor_seconds, min) if busy else (seconds, statistics.median)
    for case in cases:
        run(case)
    times: list[list[float]] = [[] for _ in cases]
    read, peak, unit, dots = [], [], [], []
    for _ in range(rounds):
        read.append(pool.read_rate(beyond_caches()))
        peak.append(pool.fma_rate())
        unit.append(pool.unit_rate() / 2)  # a product of bf16 takes as long as one of twice as many bytes
        dots.append(pool.bf16_rate())
        for case, taken in zip(cases, times, strict=True):
            taken.append(timer(partial(run, case)))
    for case, taken in zip(cases, times, strict=True):
        # These are figures for one layer. Smaller types of state get more layers, so that all layers exceed the caches.
        per_layer = [t / case.layers for t in taken]
        first = [t / cases[0].layers for t in times[0]]
        speedups = [min(first) / min(per_layer)] if busy else [a / b for a, b in zip(first, per_layer, strict=True)]
        took, unit_share = typical(taken), {}
        if unit[0] and kernels.attends_in_unit(case.dtype):
            unit_share = {"unit_share": share(case.flops, taken, unit, busy)}
        if dots[0] and case.rounds:
            unit_share |= {"bf16_share": share(case.flops, taken, dots, busy)}
        emit(
            name, case.correct, state=case.dtype, rounded=case.rounds, threads=pool.size, isa=kernels.isa(),
            us_per_layer=round(typical(per_layer) * 1e6, 1), gb_s=round(case.bytes_read / took / 1e9, 2),
            read_share=share(case.bytes_read, taken, read, busy), gflop_s=round(case.flops / took / 1e9, 1),
            peak_share=share(case.flops, taken, peak, busy), **unit_share,
            speedup=round(statistics.median(speedups), 2),
        )  # fmt: skip


def cases_of(shape: tuple[str, int, int, int], pool: kernels.Pool, types: list[str], rounded: bool) -> list[Case]:
    """Build a case with its state in each type, and again for each type that is rounded."""
    cases = [attention_case(*shape, pool, STORAGES[dtype]) for dtype in types]
    pool.rounds_attention = rounded
    cases += [attention_case(*shape, pool, STORAGES[t], rounded) for t in types if rounded and t in ROUNDS]
    pool.rounds_attention = False
    return cases


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=0, help="number of threads; default: 0, all physical cores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=["decode", "chunk", "scan"])
    parser.add_argument("--models", nargs="+", default=list("SMLV"))
    parser.add_argument("--types", nargs="+", default=list(STORAGES), choices=STORAGES)
    parser.add_argument("--rounded", action="store_true", help="also round attention over state of 16 bits to bf16")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a busy machine")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 8192])
    options = parser.parse_args()
    pool = kernels.Pool(options.threads or kernels.usable_cores())
    decodes = [(1, context, batch) for batch in options.batches for context in options.contexts]
    chunks = [(512, 512, 1), (2048, 2048, 1), (512, 8192, 1)]
    for name in options.models:
        for kind, shapes in (("decode", decodes), ("chunk", chunks)):
            for tokens, context, sequences in shapes if kind in options.parts else ():
                cases = cases_of((name, tokens, context, sequences), pool, options.types, options.rounded)
                title = f"{kind} {name} {sequences}x{tokens} of {context}"
                measure(title, cases, pool, options.rounds, options.clock == "cpu")
    if "scan" not in options.parts:
        return
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
