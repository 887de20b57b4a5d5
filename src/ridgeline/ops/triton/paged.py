"""The primitive PAGED_ATTENTION."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.api import PagedKeyValues
from ridgeline.ops.reference.paged import paged_attention as definition
from ridgeline.ops.triton.attention import attend
from ridgeline.ops.triton.launch import Compiled, Launch
from ridgeline.spec import Attention

SPLIT = 512  # keys of a split, at fixed positions: no fact of a batch
BLOCK_KEYS = 64  # keys of a tile
PROGRAMS = 512  # programs that keep a GPU busy: with fewer, each split of a decode step has a program
LEAST_COLUMNS = 16  # queries times heads of a program
LARGEST_GROUP, LARGEST_HEAD = 16, 128  # registers have no room for more
READ = (torch.bfloat16, torch.float16)  # types of keys and values that the kernel reads


class Block(NamedTuple):
    """The part of a step that one program computes; the number of queries changes no result.

    width: numbers of a head, filled up; members: heads that share a head of keys, filled up; queries: those of one
    sequence.
    """

    width: int
    members: int
    queries: int
    compiled: Compiled


def block_of(case: Attention, *, is_single: bool) -> Block:
    """Return the block of a case. is_single: whether each sequence has one query."""
    group, width = power_above(case.query_group), max(16, power_above(case.head_dim))
    columns = 2 * LEAST_COLUMNS if width <= 64 and not is_single else LEAST_COLUMNS
    queries = 1 if is_single else columns // group
    return Block(width, columns // queries, queries, Compiled(columns // 4, 2))


def refuses_attention(case: Attention) -> str | None:
    """Return why no kernel serves a case of attention; None if one does."""
    if case.pattern is not None:
        return "no kernel reads a pattern of keys"
    if case.head_dim > LARGEST_HEAD:
        return f"heads have {case.head_dim} numbers; kernels take {LARGEST_HEAD} at most"
    if case.query_group > LARGEST_GROUP:
        return f"{case.query_group} heads share a head of keys; kernels take {LARGEST_GROUP} at most"
    return None


def power_above(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def paged_attention(case: Attention, slices: int, launch: Launch) -> Callable[..., Tensor]:
    """Return PAGED_ATTENTION. Drafts that form trees, and keys in other types than READ, take the definition."""
    other = definition(case)
    arrived: dict[int, Tensor] = {}  # counters by their number; they are zeros between launches

    def run(q: Tensor, kv: PagedKeyValues, sinks: Tensor | None = None) -> Tensor:
        keys: Any = kv.keys
        layout: Any = kv.layout
        if layout.paths is not None or keys.dtype not in READ:
            return other(q, kv, sinks)
        tokens, sequences, page = q.shape[0], layout.starts.shape[0], keys.shape[1]
        block = block_of(case, is_single=tokens == sequences)
        # Rounding up adds less than a tile for each sequence; programs behind the last tile end at once.
        tiles = tokens if tokens == sequences else -(-tokens // block.queries) + sequences
        blocks, splits = tiles * case.num_kv_heads, -(-layout.tables.shape[1] * page // SPLIT)
        is_apart = tokens == sequences and splits > 1 and blocks < PROGRAMS
        cells = block.width * block.queries * block.members
        if is_apart:
            cells = splits * (block.width + 2) * block.queries * case.query_group
        if blocks not in arrived:
            arrived[blocks] = torch.zeros(blocks, dtype=torch.int32, device=q.device)
        out = torch.empty((tokens, case.num_heads * case.head_dim), dtype=torch.float32, device=q.device)
        launch(
            attend, (tiles, case.num_kv_heads, splits if is_apart else 1), block.compiled,
            q=q.contiguous(), keys=keys, values=kv.values, tables=layout.tables, starts=layout.starts,
            lengths=layout.lengths, sinks=sinks, out=out, parts=out.new_empty(blocks * cells), arrived=arrived[blocks],
            sequences=sequences, table_stride=layout.tables.stride(0), page_stride=keys.stride(0),
            slot_stride=keys.stride(1), head_stride=keys.stride(2), scale=case.scale, cap=case.softcap or 0.0,
            splits=splits, H=case.num_heads, K=case.num_kv_heads, D=case.head_dim, WIDTH=block.width,
            GROUP=block.members, WINDOW=case.window or 0, HAS_CAP=case.softcap is not None, HAS_SINKS=sinks is not None,
            SLICES=slices, PAGE=page, SPLIT=SPLIT, BLOCK_K=BLOCK_KEYS, BLOCK_Q=block.queries,
            MOST=power_above(sequences), SINGLE=tokens == sequences, APART=is_apart,
        )  # fmt: skip
        return out

    return run
