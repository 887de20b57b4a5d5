"""Heads of latent attention: products of each head of a token with a matrix of its own, and rotation.

The matrix is the left operand of every dot product, and tokens are its columns, as in `dense.py`. Each result is one
chain over the columns of its row, in tiles of a fixed width, so nothing depends on the number of tokens.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.attention import product, sliced
from ridgeline.ops.triton.rows import pairs_of


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
    is_token, is_row = token < tokens, row < ROWS
    mine, numbers_of_row = x + token * x_stride + head * x_head, matrices + head * matrix_stride + row * row_stride
    total = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for begin in range(0, COLUMNS, BLOCK_C):
        column = begin + tl.arange(0, BLOCK_C)
        inside = (column < COLUMNS)[None, :]
        given = tl.load(mine[:, None] + column[None, :], mask=is_token[:, None] & inside, other=0.0)
        numbers = tl.load(
            numbers_of_row[:, None] + column[None, :] * column_stride, mask=is_row[:, None] & inside, other=0.0
        )
        if numbers.dtype == tl.float16:
            numbers = numbers.to(tl.float32)
        high, low = sliced(tl.trans(given), tl.bfloat16, SLICES)
        total = product(numbers, high, low, total, SLICES)
    to = out + (token * SHAPE[0] + head) * (ROWS + COPIED)
    tl.store(to[None, :] + row[:, None], total, mask=is_row[:, None] & is_token[None, :])
    if COPIED > 0:
        at = tl.arange(0, SHAPE[4])
        is_cell = is_token[:, None] & (at < COPIED)[None, :] & (tl.program_id(1) == 0)
        copied = tl.load(mine[:, None] + COLUMNS + at[None, :], mask=is_cell, other=0.0)
        tl.store(to[:, None] + ROWS + at[None, :], copied, mask=is_cell)


@triton.jit
def rotate_part(
    source, to, cos, sin, token, DIM: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate DIM numbers of a token, or copy them."""
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    found = tl.load(source + at, mask=inside, other=0.0)
    if ROTATES:
        pair, is_first, other = pairs_of(at, DIM, INTERLEAVED)
        b = tl.load(source + other, mask=inside, other=0.0)
        c = tl.load(cos + token * (DIM // 2) + pair, mask=inside, other=1.0)
        s = tl.load(sin + token * (DIM // 2) + pair, mask=inside, other=0.0)
        found = found * c + tl.where(is_first, -b, b) * s
    tl.store(to + at, found, mask=inside)


@triton.jit
def rotate_latents(
    x, kept, cos, sin, weight, q, latents, x_stride, kept_stride, offset, eps, SHAPE: tl.constexpr,
    BLOCKS: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the end of one head of a query; or normalize one latent, and rotate the key behind it.

    SHAPE: heads, numbers of a head before those that rotate, numbers that rotate, and numbers of a latent. BLOCKS:
    powers of two that are at least the last three.
    """
    STILL: tl.constexpr = SHAPE[1]
    DIM: tl.constexpr = SHAPE[2]
    RANK: tl.constexpr = SHAPE[3]
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < SHAPE[0]:
        source, to = x + token * x_stride + head * (STILL + DIM), q + (token * SHAPE[0] + head) * (STILL + DIM)
        at = tl.arange(0, BLOCKS[0])
        tl.store(to + at, tl.load(source + at, mask=at < STILL, other=0.0), mask=at < STILL)
        rotate_part(source + STILL, to + STILL, cos, sin, token, DIM, ROTATES, INTERLEAVED, BLOCKS[1])
    else:
        source, to, number = kept + token * kept_stride, latents + token * (RANK + DIM), tl.arange(0, BLOCKS[2])
        inside = number < RANK
        c = tl.load(source + number, mask=inside, other=0.0)
        c *= tl.rsqrt(tl.sum(c * c, 0) / RANK + eps)
        c *= offset + tl.load(weight + number, mask=inside, other=0.0).to(tl.float32)
        tl.store(to + number, c, mask=inside)
        rotate_part(source + RANK, to + RANK, cos, sin, token, DIM, ROTATES, INTERLEAVED, BLOCKS[1])
