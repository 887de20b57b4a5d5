"""Heads of latent attention: products of each head of a token with a matrix of its own, and rotation.

The matrix is the left operand of every dot product, and tokens are its columns, as in `dense.py`. Each result is one
chain over the columns of its row, in tiles of a fixed width, so nothing depends on the number of tokens.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.attention import product, sliced
from ridgeline.ops.triton.rows import normalized, pairs_of, store_rows


@triton.jit
def head_product(
    x, matrices, to, token, row, is_token, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_C: tl.constexpr, CACHE: tl.constexpr = "",
):  # fmt: skip
    """Store products of one head. x: [T, 1], pointers to its first numbers; to: [1, T], to its results.

    CACHE: ".cg" where other programs of this launch wrote x.
    """
    numbers_of_row, is_row = matrices + row * row_stride, row < ROWS
    total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for begin in range(0, COLUMNS, BLOCK_C):
        column = begin + tl.arange(0, BLOCK_C)
        inside = (column < COLUMNS)[None, :]
        given = tl.load(x + column[None, :], mask=is_token[:, None] & inside, other=0.0, cache_modifier=CACHE)
        numbers = tl.load(
            numbers_of_row[:, None] + column[None, :] * column_stride, mask=is_row[:, None] & inside, other=0.0
        )
        if numbers.dtype == tl.float16:
            numbers = numbers.to(tl.float32)
        high, low = sliced(tl.trans(given), tl.bfloat16, SLICES)
        total = product(numbers, high, low, total, SLICES)
    tl.store(to + row[:, None], total, mask=is_row[:, None] & is_token[None, :])


@triton.jit
def multiply_heads(
    x, matrices, out, tokens, x_stride, x_head, matrix_stride, row_stride, column_stride, SHAPE: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute out[token, head] = [matrices[head] @ x[token, head, :columns], the numbers of x that follow].

    SHAPE: heads, rows and columns of a matrix, numbers that follow the columns and are copied, and a power of two that
    is at least so many. Matrices are bfloat16, float16 or float32.
    """
    ROWS: tl.constexpr = SHAPE[1]
    COLUMNS: tl.constexpr = SHAPE[2]
    COPIED: tl.constexpr = SHAPE[3]
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row, head = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(2).to(tl.int64)
    is_token, mine = token < tokens, (x + token * x_stride + head * x_head)[:, None]
    to = out + (token * SHAPE[0] + head) * (ROWS + COPIED)
    head_product(
        mine, matrices + head * matrix_stride, to[None, :], token, row, is_token, row_stride, column_stride, ROWS,
        COLUMNS, SLICES, BLOCK_C,
    )  # fmt: skip
    if COPIED > 0:
        at = tl.arange(0, SHAPE[4])
        is_cell = is_token[:, None] & (at < COPIED)[None, :] & (tl.program_id(1) == 0)
        copied = tl.load(mine + COLUMNS + at[None, :], mask=is_cell, other=0.0)
        tl.store(to[:, None] + ROWS + at[None, :], copied, mask=is_cell)


@triton.jit
def rotated(
    x, at, inside, cos, sin, token, DIM: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
    CACHE: tl.constexpr = "",
):  # fmt: skip
    """Return numbers x + at, rotated if they do. token: [T, 1], and at: [1, DIM] or more. CACHE: see `head_product`."""
    found = tl.load(x + at, mask=inside, other=0.0, cache_modifier=CACHE)
    if ROTATES:
        pair, is_first, other = pairs_of(at, DIM, INTERLEAVED)
        b = tl.load(x + other, mask=inside, other=0.0, cache_modifier=CACHE)
        c = tl.load(cos + token * (DIM // 2) + pair, mask=inside, other=1.0)
        s = tl.load(sin + token * (DIM // 2) + pair, mask=inside, other=0.0)
        found = found * c + tl.where(is_first, -b, b) * s
    return found


@triton.jit
def latents_of(
    kept, weight, cos, sin, token, at, offset, eps, RANK: tl.constexpr, DIM: tl.constexpr, ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return the row of a token: its normalized latent, and the rotated key behind it. kept: its first number."""
    latent = tl.load(kept + at, mask=at < RANK, other=0.0)
    latent = normalized(latent, weight, None, at, at < RANK, RANK, offset, eps, False, False)
    is_key = (at >= RANK) & (at < RANK + DIM)
    number = tl.where(is_key, at - RANK, 0)
    return tl.where(at < RANK, latent, rotated(kept + RANK, number, is_key, cos, sin, token, DIM, ROTATES, INTERLEAVED))


@triton.jit
def write_latents(
    first, end, step, kept, kept_stride, weight, turn, offset, eps, paged, RANK: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write the rows of tokens first, first + step, and so on before `end` into pages.

    paged: pages of rows, their scales, the pages and slots of tokens, strides from a page, a slot and the scales of a
    page to the next, and the scale of all rows. BLOCK: a power of two that is at least a whole row.
    """
    keys, key_scales, pages, slots, strides, k_scale = paged
    number, one = tl.arange(0, BLOCK), tl.arange(0, 1)
    for i in range(0, end - first, step):
        mine = first.to(tl.int64) + i
        found = latents_of(
            kept + mine * kept_stride, weight, turn[0], turn[1], mine, number, offset, eps, RANK, DIM, ROTATES,
            INTERLEAVED,
        )  # fmt: skip
        page, slot = tl.load(pages + mine).to(tl.int64), tl.load(slots + mine)
        store_rows(
            found[None, :], keys, key_scales, one, one, one < 1, number, page * strides[0] + slot * strides[1],
            page * strides[2] + slot, k_scale, RANK + DIM, KIND,
        )  # fmt: skip


@triton.jit
def absorb(
    x, kept, cos, sin, weight, matrices, out, keys, key_scales, pages, slots, tokens, x_stride, kept_stride,
    matrix_stride, row_stride, column_stride, page_stride, slot_stride, scale_stride, k_scale, offset, eps,
    SHAPE: tl.constexpr, KIND: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Map the queries of a head into the space of latents, and rotate their ends; or write latents into pages.

    SHAPE: heads, numbers of a latent, numbers of a head before those that rotate, those that rotate, and powers of two
    that are at least the last one and at least a whole row. The programs behind those of the last head write latents.
    """
    RANK: tl.constexpr = SHAPE[1]
    STILL: tl.constexpr = SHAPE[2]
    DIM: tl.constexpr = SHAPE[3]
    head = tl.program_id(2).to(tl.int64)
    if head < SHAPE[0]:
        token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        is_token, mine = token < tokens, (x + token * x_stride + head * (STILL + DIM))[:, None]
        to = out + (token * SHAPE[0] + head) * (RANK + DIM)
        head_product(
            mine, matrices + head * matrix_stride, to[None, :], token, row, is_token, row_stride, column_stride, RANK,
            STILL, SLICES, BLOCK_C,
        )  # fmt: skip
        if tl.program_id(1) == 0:
            at = tl.arange(0, SHAPE[4])[None, :]
            inside = is_token[:, None] & (at < DIM)
            end = rotated(mine + STILL, at, inside, cos, sin, token[:, None], DIM, ROTATES, INTERLEAVED)
            tl.store(to[:, None] + RANK + at, end, mask=inside)
    else:
        begin = tl.program_id(0) * BLOCK_T + tl.program_id(1)
        write_latents(
            begin, tl.minimum((tl.program_id(0) + 1) * BLOCK_T, tokens), tl.num_programs(1), kept, kept_stride, weight,
            (cos, sin), offset, eps,
            (keys, key_scales, pages, slots, (page_stride, slot_stride, scale_stride), k_scale),
            RANK, DIM, SHAPE[5], KIND, ROTATES, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def rotate_latents(
    x, kept, cos, sin, weight, q, latents, x_stride, kept_stride, offset, eps, SHAPE: tl.constexpr,
    BLOCKS: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the end of one head of a query; or normalize one latent, and rotate the key behind it.

    SHAPE: heads, numbers of a head before those that rotate, numbers that rotate, and numbers of a latent. BLOCKS:
    powers of two that are at least numbers of a head and at least a whole row.
    """
    STILL: tl.constexpr = SHAPE[1]
    DIM: tl.constexpr = SHAPE[2]
    RANK: tl.constexpr = SHAPE[3]
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < SHAPE[0]:
        source, to = x + token * x_stride + head * (STILL + DIM), q + (token * SHAPE[0] + head) * (STILL + DIM)
        at = tl.arange(0, BLOCKS[0])
        is_end = (at >= STILL) & (at < STILL + DIM)
        still = tl.load(source + at, mask=at < STILL, other=0.0)
        of_end = tl.where(is_end, at - STILL, 0)
        end = rotated(source + STILL, of_end, is_end, cos, sin, token, DIM, ROTATES, INTERLEAVED)
        tl.store(to + at, tl.where(is_end, end, still), mask=at < STILL + DIM)
    else:
        number = tl.arange(0, BLOCKS[1])
        found = latents_of(
            kept + token * kept_stride, weight, cos, sin, token, number, offset, eps, RANK, DIM, ROTATES, INTERLEAVED
        )  # fmt: skip
        tl.store(latents + token * (RANK + DIM) + number, found, mask=number < RANK + DIM)
