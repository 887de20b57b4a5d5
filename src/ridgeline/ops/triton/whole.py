"""Products with tokens that are rounded to int8: sums of whole numbers, which are exact.

The arithmetic is that of `ops/reference/quant.py` to the bit: the sum over a group is exact and is rounded once to
float32, multiplied with the scale of the group and added to the sum of the groups before it. So tiles may be chosen
freely: only the order of groups matters.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.finish import store
from ridgeline.ops.triton.numbers import step_sizes, steps_of


@triton.jit
def round_tokens(
    x, steps, token_scales, columns, filled, x_stride, given, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one token as whole numbers of at most 127 [tokens, filled], with zeros behind its columns, and its scale.

    The largest magnitude becomes 127; see `numbers.step_sizes`.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    peaks = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        x_here = tl.load(x + token * x_stride + start + at, mask=start + at < columns, other=0.0)
        size = tl.abs(x_here)
        broken |= (~(size < float("inf"))).to(tl.int32)
        peaks = tl.maximum(peaks, size)
    is_finite = tl.max(broken, 0) == 0
    scale, inverse = step_sizes(tl.max(peaks, 0), is_finite, given, HAS_SCALE)
    tl.store(token_scales + token, scale)
    for start in range(0, filled, BLOCK):
        x_here = tl.load(x + token * x_stride + start + at, mask=start + at < columns, other=0.0)
        found = steps_of(x_here, inverse, is_finite)
        tl.store(steps + token * filled + start + at, found, mask=start + at < filled)


@triton.jit
def whole_chain(
    steps, codes, scales, zero_points, row, token, is_token, filled, tiles, groups, KIND: tl.constexpr,
    LOW: tl.constexpr, HAS_ZEROS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return sum over groups (steps @ numbers.T * scale): [rows, tokens], float32, without the scales of tokens.

    filled: columns of `steps`, those that fill up the last tiles included. UNIT: tiles that hold whole groups.
    """
    PER: tl.constexpr = GROUP // COLUMNS  # dot products with one group; 0 where a row is one
    at = tl.arange(0, COLUMNS)
    begin = (row // ROWS).to(tl.int64) * tiles * (ROWS * COLUMNS) + (row % ROWS) * COLUMNS
    of_group = (row // ROWS) * groups * ROWS + row % ROWS
    total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    sums = tl.zeros([row.shape[0], token.shape[0]], tl.int32)
    counts = tl.zeros([token.shape[0]], tl.int32)
    for unit in range(tiles // UNIT):
        for part in tl.static_range(UNIT):
            tile = unit * UNIT + part
            packed = tl.load(codes + begin[:, None] + tile * (ROWS * COLUMNS) + at[None, :])
            for half in tl.static_range(HALVES):
                column = (tile * HALVES + half) * COLUMNS + at
                mine = tl.load(steps + token[:, None] * filled + column[None, :], mask=is_token[:, None], other=0)
                if KIND == "nibbles":
                    numbers = ((packed >> (4 * half)) & 15).to(tl.int8) + LOW
                else:
                    numbers = packed
                sums = tl.dot(numbers, tl.trans(mine), sums, out_dtype=tl.int32)
                if HAS_ZEROS:
                    counts += tl.sum(mine.to(tl.int32), 1)
                # Not one condition: Triton would compute the remainder by 0.
                if PER > 0:  # noqa: SIM102
                    if (part * HALVES + half + 1) % PER == 0:  # a group ends
                        group = (tile * HALVES + half) * COLUMNS // GROUP
                        if HAS_ZEROS:
                            zero = tl.load(zero_points + of_group + group * ROWS).to(tl.int32)
                            sums -= zero[:, None] * counts[None, :]
                            counts = tl.zeros([token.shape[0]], tl.int32)
                        scale = tl.load(scales + of_group + group * ROWS).to(tl.float32)
                        total += sums.to(tl.float32) * scale[:, None]
                        sums = tl.zeros([row.shape[0], token.shape[0]], tl.int32)
    if GROUP == 0:
        if HAS_ZEROS:
            sums -= tl.load(zero_points + row).to(tl.int32)[:, None] * counts[None, :]
        total = sums.to(tl.float32) * tl.load(scales + row)[:, None]
    return total


@triton.jit
def whole_product(
    steps, token_scales, codes, scales, zero_points, bias, out, cos, sin, keys, values, pages, slots, tokens, rows,
    filled, tiles, groups, page_stride, slot_stride, head_stride, KIND: tl.constexpr, LOW: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Compute token scale * whole_chain + bias, and store it as `finish.store` says."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token = token < tokens
    token = token.to(tl.int64)
    total = whole_chain(
        steps, codes, scales, zero_points, row, token, is_token, filled, tiles, groups,
        KIND, LOW, HAS_ZEROS, ROWS, COLUMNS, HALVES, GROUP, UNIT,
    )  # fmt: skip
    total *= tl.load(token_scales + token, mask=is_token, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0)[:, None]
    store(
        total, tl.program_id(1), token, is_token, rows, out, cos, sin, keys, values, pages, slots, page_stride,
        slot_stride, head_stride, FINISH,
    )  # fmt: skip
