"""The primitive PAGED_ATTENTION, and how its kernel is started for any layer that reads pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.errors import DeviceError
from ridgeline.ops.api import PagedKeyValues
from ridgeline.ops.reference.stored import planes
from ridgeline.ops.triton.attention import attend
from ridgeline.ops.triton.launch import Compiled, Counters, Launch
from ridgeline.spec import Attention, Chunked, Dilated, FirstTokens, Strided
from ridgeline.spec.sight import CAUSAL
from ridgeline.spec.storage import KVScales

SPLIT = 512  # keys of a split, at fixed positions: no fact of a batch
BLOCK_KEYS, LEAST_KEYS = 64, 16  # most and fewest keys of a tile
TILE_BYTES = 2**14  # of the keys of a tile, as operands
# Programs that keep a GPU busy, of values of up to 128 numbers; longer ones leave room for fewer. With fewer programs,
# each split of a decode step has one.
PROGRAMS = 512
LEAST_COLUMNS = 16  # queries times heads of a program
CHUNK, LARGEST_KEPT = 64, 128  # numbers of a query that are read at once, and that stay in registers
LARGEST_HEAD = 512  # registers have no room for more
SLICES = 2  # numbers that stand for one number of a query, and for one weight of a softmax
# By the type of pages: how the kernel reads them, and the type of the operands of its products.
KINDS: dict[torch.dtype, tuple[str, Any]] = {
    torch.bfloat16: ("plain", tl.bfloat16), torch.float16: ("plain", tl.float16), torch.float32: ("plain", tl.bfloat16),
    torch.int8: ("int8", tl.bfloat16), torch.uint8: ("fp8", tl.bfloat16),
}  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """Which queries read which keys of a row.

    size, key: numbers of a value, and of a query and a key. rule: see `attention.sees`.
    """

    num_heads: int
    num_kv_heads: int
    size: int
    key: int
    scale: float
    softcap: float | None = None
    rule: tuple[int, int, int, int] = (0, 1, 0, 0)

    @property
    def group(self) -> int:
        """Heads that share a head of keys."""
        return self.num_heads // self.num_kv_heads


class Block(NamedTuple):
    """The part of a step that one program computes; the number of queries and of heads changes no result.

    members: heads that share a head of keys, a power of two; queries: those of one sequence; programs: number of
    programs for the heads that share a head of keys.
    """

    members: int
    queries: int
    programs: int
    compiled: Compiled


def block_of(heads: Heads, kind: torch.dtype, *, is_single: bool) -> Block:
    """Return the block of a case. is_single: whether a program has one query."""
    columns = 2 * LEAST_COLUMNS if heads.size <= 64 and kind.itemsize == 2 and not is_single else LEAST_COLUMNS
    queries = 1 if is_single else max(1, columns // power_above(heads.group))
    members = columns // queries
    is_large = kind.itemsize == 4 or heads.size > LARGEST_KEPT
    compiled = Compiled(8 if is_large else columns // 4, 1 if kind.itemsize == 4 else 2)
    return Block(members, queries, -(-heads.group // members), compiled)


def value_parts(heads: Heads, kind: torch.dtype) -> int:
    """Return how many programs share the numbers of a value, because registers have no room for all sums of float32.

    Each of them computes all scores.
    """
    return 2 if kind.itemsize == 4 and heads.size > 2 * LARGEST_KEPT and heads.size % 2 == 0 else 1


def chunk_of(heads: Heads, kind: torch.dtype) -> int:
    """Return how many numbers of queries are read at once for each tile of keys; 0 where they stay in registers."""
    if kind.itemsize == 4:
        return CHUNK // 2
    return 0 if heads.key == heads.size <= LARGEST_KEPT else CHUNK


def tile_keys(size: int, kind: torch.dtype) -> int:
    """Return the keys of a tile: a fact of the case, because it changes the order of sums."""
    if kind.itemsize == 4:
        return LEAST_KEYS
    fit = TILE_BYTES // (power_above(size) * 2 * (3 - kind.itemsize))  # bytes become numbers in registers
    return max(LEAST_KEYS, min(BLOCK_KEYS, fit))


def rule_of(case: Attention) -> tuple[int, int, int, int]:
    """Return what `attention.sees` takes for a window and a pattern."""
    match case.pattern:
        case FirstTokens(count):
            return case.window or 0, 1, count, 0
        case Dilated(step):
            return case.window or 0, step, 0, 0
        case Strided(stride):
            return case.window or 0, 1, 0, stride
        case Chunked():
            raise ValueError("no kernel has chunks of keys")
        case None:
            return case.window or 0, 1, 0, 0


def refuses_attention(case: Attention) -> str | None:
    """Return why no kernel serves a case of attention; None if one does."""
    if case.head_dim > LARGEST_HEAD:
        return f"heads have {case.head_dim} numbers; kernels take {LARGEST_HEAD} at most"
    if case.alibi is not None:
        return "kernels for GPUs have no slopes (alibi)"
    if isinstance(case.pattern, Chunked):
        return "kernels for GPUs have no chunks of keys"
    if case.sight != CAUSAL:
        return "kernels for GPUs are causal: a token sees itself and those before it"
    return None


def power_above(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def paged_attention(case: Attention, launch: Launch, *, described: bool = False) -> Callable[..., Tensor]:
    """Return PAGED_ATTENTION; described: as in Attend."""
    heads = Heads(
        case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim, case.scale, case.softcap, rule=rule_of(case)
    )  # fmt: skip
    attend_pages = Attend(heads, launch, described=described)

    def run(q: Tensor, kv: PagedKeyValues, sinks: Tensor | None = None) -> Tensor:
        keys: Any = kv.keys
        values: Any = kv.values
        return attend_pages(q, keys, values, kv.layout, kv.scales, sinks)

    return run


class Attend:
    """Attention of queries [T, H, key] over pages: [T, H * size].

    described: whether tiles of keys and values are loaded through tensor descriptors. Trees of drafts read keys that
    are no neighbors, so they are loaded through pointers.
    """

    def __init__(self, heads: Heads, launch: Launch, *, described: bool = False) -> None:
        self._heads, self._launch, self._described = heads, launch, described
        self._counters = Counters()

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, layout: Any, scales: KVScales, sinks: Tensor | None = None
    ) -> Tensor:
        h, tokens, sequences = self._heads, q.shape[0], layout.starts.shape[0]
        is_tree, page, (kind, operand) = layout.paths is not None, keys.shape[1], KINDS[keys.dtype]
        is_single = tokens == sequences and not is_tree
        block = block_of(h, keys.dtype, is_single=is_single or is_tree)
        # Rounding up adds less than a tile for each sequence; programs behind the last tile end at once.
        tiles = tokens if block.queries == 1 else -(-tokens // block.queries) + sequences
        parts = value_parts(h, keys.dtype)
        size = h.size // parts
        by_key, width = h.num_kv_heads * block.programs * parts, max(16, power_above(size))
        num_splits = -(-layout.tables.shape[1] * page // SPLIT)
        is_few = tiles * by_key < PROGRAMS * LARGEST_KEPT // max(LARGEST_KEPT, width)
        is_apart = (is_single or is_tree) and num_splits > 1 and is_few
        columns = block.queries * block.members
        cells = width * columns
        if is_apart:
            cells = num_splits * (width + 2) * (block.members if block.programs > 1 else block.queries * h.group)
        out = torch.empty((tokens, h.num_heads * h.size), dtype=torch.float32, device=q.device)
        views = views_of(keys), views_of(values)
        numbers, key_scales = views[0]
        loaded: Any = (numbers, views[1][0])
        if is_described := self._described and not is_tree:
            loaded = [described(x, tile_keys(h.size, keys.dtype)) for x in loaded]
        self._launch(
            attend, (tiles, by_key, num_splits if is_apart else 1), block.compiled,
            q=q.contiguous(), keys=loaded[0], values=loaded[1], key_scales=key_scales, value_scales=views[1][1],
            tables=layout.tables, starts=layout.starts, lengths=layout.lengths, paths=layout.paths, sinks=sinks,
            out=out, parts=out.new_empty(tiles * by_key * cells), arrived=self._counters(tiles * by_key, q.device),
            sequences=sequences, table_stride=layout.tables.stride(0), page_stride=numbers.stride(0),
            slot_stride=numbers.stride(1), head_stride=numbers.stride(2),
            scale_stride=0 if key_scales is None else key_scales.stride(0), scale=h.scale * scales[0],
            value_scale=scales[1], cap=h.softcap or 0.0, num_splits=num_splits,
            HAS_CAP=h.softcap is not None, HAS_SINKS=sinks is not None,
            SHAPE=(h.num_heads, h.num_kv_heads, size, width, h.key, parts, h.size), RULE=h.rule,
            NUMBERS=(kind, operand, SLICES, chunk_of(h, keys.dtype), is_described),
            SIZES=(page, SPLIT, tile_keys(h.size, keys.dtype)), GROUP=block.members, BLOCKS=block.programs,
            BLOCK_Q=block.queries, MOST=power_above(sequences), SINGLE=is_single, TREE=is_tree, APART=is_apart,
        )  # fmt: skip
        return out


def described(pages: Tensor, tile: int) -> TensorDescriptor:
    """Return a descriptor of pages [pages, page_tokens, heads, numbers] that loads a tile of rows of one head.

    Raises:
        DeviceError: a page does not hold whole tiles, or its numbers are no 16-bit floats.
    """
    if pages.dtype.itemsize != 2:
        raise DeviceError(f"pages are {pages.dtype}; descriptors read bfloat16 and float16: --kv-cache-dtype bfloat16")
    if pages.shape[1] % tile:
        raise DeviceError(
            f"pages have {pages.shape[1]} tokens; descriptors load {tile} at once: --block-size {tile} or a multiple"
        )
    return TensorDescriptor(pages, [*pages.shape], [*pages.stride()], [1, tile, 1, pages.shape[3]])


def views_of(pages: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the numbers of pages [pages, page_tokens, heads, numbers], and the scales of int8 rows."""
    return planes(pages) if pages.dtype == torch.int8 else (pages, None)
