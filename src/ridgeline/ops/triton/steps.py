"""Kernels that prepare a step from numbers on the GPU: page tables, the pages of tokens, and tokens sampled before."""

import triton
import triton.language as tl


@triton.jit
def write_entries(table, changes, count, BLOCK: tl.constexpr):
    """Write table[changes[i]] = changes[count + i] for i in [0, count)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(changes + at, mask=inside, other=0).to(tl.int64)
    tl.store(table + where, tl.load(changes + count + at, mask=inside, other=0), mask=inside)


@triton.jit
def place_tokens(
    table, rows, positions, last, pages, slots, tables, tokens, sequences, columns, stride, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the page and the slot of one token, and copy a part of the page table of one sequence.

    Behind the page of its last token, the copy of a sequence's table stays undefined.
    """
    index, part = tl.program_id(0), tl.program_id(1)
    if (part == 0) & (index < tokens):
        position = tl.load(positions + index).to(tl.int32)
        row = tl.load(rows + index).to(tl.int64)
        tl.store(pages + index, tl.load(table + row * stride + position // PAGE))
        tl.store(slots + index, position % PAGE)
    if index < sequences:
        token = tl.load(last + index).to(tl.int64)
        row = tl.load(rows + token).to(tl.int64)
        held = tl.load(positions + token).to(tl.int32) // PAGE + 1
        at = part * BLOCK + tl.arange(0, BLOCK)
        is_held = at < held
        numbers = tl.load(table + row * stride + at, mask=is_held, other=0)
        tl.store(tables + index.to(tl.int64) * columns + at, numbers, mask=is_held)


@triton.jit
def known_tokens(tokens, sampled, rows, ids, count, BLOCK: tl.constexpr):
    """Write ids [count]: the tokens, or for a token below 0 the one that its row sampled before."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(tokens + at, mask=inside, other=0).to(tl.int64)
    is_last = inside & (token < 0)
    row = tl.load(rows + at, mask=is_last, other=0).to(tl.int64)
    before = tl.load(sampled + row, mask=is_last, other=0).to(tl.int64)
    tl.store(ids + at, tl.where(token < 0, before, token), mask=inside)


@triton.jit
def keep_tokens(sampled, rows, ids, count, BLOCK: tl.constexpr):
    """Write sampled[rows[i]] = ids[i] for i in [0, count)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    tl.store(sampled + row, tl.load(ids + at, mask=inside, other=0), mask=inside)
