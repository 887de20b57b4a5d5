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
def scales_of(
    x, token_scales, token, is_token, columns, stride, given, ROUNDS: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the scales of tokens, the factors that make their whole numbers, and which tokens are finite.

    ROUNDS: x has floats, which are read to find the scales, as in `round_tokens`. Otherwise it has whole numbers, and
    only the scales are read and returned.
    """
    if ROUNDS:
        at = tl.arange(0, BLOCK)
        peaks = tl.zeros([token.shape[0], BLOCK], tl.float32)
        broken = tl.zeros([token.shape[0], BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            inside = is_token[:, None] & (start + at < columns)[None, :]
            size = tl.abs(tl.load(x + token[:, None] * stride + (start + at)[None, :], mask=inside, other=0.0))
            broken |= (~(size < float("inf"))).to(tl.int32)
            peaks = tl.maximum(peaks, size)
        is_finite = tl.max(broken, 1) == 0
        scale, inverse = step_sizes(tl.max(peaks, 1), is_finite, given, HAS_SCALE)
        inverse += tl.zeros([token.shape[0]], tl.float32)
    else:
        scale, is_finite = tl.load(token_scales + token, mask=is_token, other=0.0), is_token
        inverse = scale
    return scale, inverse, is_finite


@triton.jit
def whole_chain(
    x, codes, scales, zero_points, row, token, is_token, rounding, columns, stride, tiles, groups, KIND: tl.constexpr,
    LOW: tl.constexpr, HAS_ZEROS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return sum over groups (steps @ numbers.T * scale): [rows, tokens], float32, without the scales of tokens.

    x: whole numbers in rows of `stride`, with zeros that fill up the last tiles; or, if it ROUNDS, floats that become
    whole numbers here. rounding: the result of `scales_of`. UNIT: tiles that hold whole groups.
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
                if ROUNDS:
                    mine = tl.load(
                        x + token[:, None] * stride + column[None, :],
                        mask=is_token[:, None] & (column < columns)[None, :], other=0.0,
                    )  # fmt: skip
                    mine = steps_of(mine, rounding[1][:, None], rounding[2][:, None])
                else:
                    mine = tl.load(x + token[:, None] * stride + column[None, :], mask=is_token[:, None], other=0)
                if KIND == "nibbles":
                    numbers = ((packed >> (4 * half)) & 15).to(tl.int8) + LOW
                else:
                    numbers = packed
                sums = tl.dot(numbers, tl.trans(mine), sums, out_dtype=tl.int32)
                if HAS_ZEROS:
                    counts += tl.sum(mine.to(tl.int32), 1)
                # Not one condition: Triton would compute the remainder by 0.
                if PER > 0:
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
    x, token_scales, codes, scales, zero_points, bias, out, cos, sin, keys, values, gates, pages, slots, key_scales,
    value_scales, q_weight, k_weight, whole, finished, fresh, matrices, latents, tokens, rows, columns, x_stride, tiles,
    groups, given, page_stride, slot_stride, head_stride, scale_stride, matrix_stride, row_stride, column_stride,
    latents_stride, k_scale, v_scale, offset, eps, KIND: tl.constexpr, LOW: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, UNIT:
    tl.constexpr, ROUNDS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R:
    tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Compute token scale * whole_chain + bias, and store it as `finish.store` says.

    ROUNDS: x has floats, and each program rounds the tokens that it multiplies.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token = token < tokens
    token = token.to(tl.int64)
    rounding = scales_of(x, token_scales, token, is_token, columns, x_stride, given, ROUNDS, HAS_SCALE, BLOCK)
    total = whole_chain(
        x, codes, scales, zero_points, row, token, is_token, rounding, columns, x_stride, tiles, groups,
        KIND, LOW, HAS_ZEROS, ROWS, COLUMNS, HALVES, GROUP, UNIT, ROUNDS,
    )  # fmt: skip
    total *= rounding[0][None, :]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0)[:, None]
    store(
        total, tl.program_id(1), token, tokens, rows, out, gates, (cos, sin),
        (
            keys, values, key_scales, value_scales, pages, slots,
            (page_stride, slot_stride, head_stride, scale_stride), (k_scale, v_scale),
        ),
        (q_weight, k_weight, offset, eps), whole, finished, fresh,
        (matrices, (matrix_stride, row_stride, column_stride), latents, latents_stride), FINISH,
    )  # fmt: skip
