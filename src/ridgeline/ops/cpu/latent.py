"""Attention over latents in the absorbed form: kv_b maps queries into the latents' space, and results out of it.

The reference rebuilds keys and values for long chunks. The kernels never do, so that no chunk changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ridgeline._kernels import Attention, Matrix, Pool, multiply_heads
from ridgeline.ops import api
from ridgeline.ops.api import DenseRows, PagedRows
from ridgeline.ops.cpu.attention import for_kernels, page_tables, paths_of
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.matrices import Floats, Ndarray, PackedOnce, build_rows
from ridgeline.spec import LatentAttention

GROUP = 32  # largest number of heads that are computed at once: their queries and results stay in the cache


class Up(NamedTuple):
    """kv_b of each head: from queries into the latents' space, and from there to results."""

    queries: list[Matrix]
    values: list[Matrix]


def latent_attention(case: LatentAttention, pool: Pool) -> Callable[[Floats, DenseRows, Ndarray], Floats]:
    bound, absorbed = bind(case), absorbed_form(case, pool)

    def run(q: Floats, kv: DenseRows, kv_b: Ndarray) -> Floats:
        rows, lengths, scale = for_kernels(kv.parts[0]), np.array(kv.lengths, np.int64), kv.scales[0]
        return absorbed(q, kv_b, lambda queries, out: bound.dense_latents(pool, queries, rows, lengths, out, scale))

    return run


def paged_latent_attention(case: LatentAttention, pool: Pool) -> Callable[[Floats, PagedRows, Ndarray], Floats]:
    bound, absorbed = bind(case), absorbed_form(case, pool)

    def run(q: Floats, kv: PagedRows, kv_b: Ndarray) -> Floats:
        pages, where, scale = for_kernels(kv.parts[0]), page_tables(kv.layout), kv.scales[0]
        paths = paths_of(kv.layout)

        def attend(queries: Floats, out: Floats) -> None:
            bound.paged_latents(pool, queries, pages, *where, out, scale, paths)

        return absorbed(q, kv_b, attend)

    return run


def bind(case: LatentAttention) -> Attention:
    """Build the kernels' description of a case."""
    groups = next(n for n in range(-(-case.num_heads // GROUP), case.num_heads + 1) if case.num_heads % n == 0)
    return Attention(case.num_heads, groups, case.row, case.kv_lora_rank, case.scale, 0.0, 0, "", 0)


def absorbed_form(
    case: LatentAttention, pool: Pool
) -> Callable[[Floats, Ndarray, Callable[[Floats, Floats], None]], Floats]:
    """Return a function of q [T, H, nope + rope], kv_b, and attention over latents that gives [T, H * value]."""
    heads, rank, nope = case.num_heads, case.kv_lora_rank, case.qk_nope_head_dim

    def pack(kv_b: Ndarray) -> Up:
        return Up(
            [build_rows(pool, np.ascontiguousarray(head[:nope].T)) for head in kv_b],
            [build_rows(pool, np.ascontiguousarray(head[nope:])) for head in kv_b],
        )

    up = PackedOnce(pack)

    def run(q: Floats, kv_b: Ndarray, attend: Callable[[Floats, Floats], None]) -> Floats:
        matrices, tokens = up(kv_b), len(q)
        queries, sums = empty(pool, tokens, heads, case.row), empty(pool, tokens, heads, rank)
        multiply_heads(pool, matrices.queries, q, queries)
        attend(queries, sums)
        out = empty(pool, tokens, heads, case.v_head_dim)
        multiply_heads(pool, matrices.values, sums, out)
        return out.reshape(tokens, heads * case.v_head_dim)

    return run


KERNELS: Kernels = {
    api.LATENT_ATTENTION: Kernel(never, latent_attention),
    api.PAGED_LATENT_ATTENTION: Kernel(never, paged_latent_attention),
}
