"""Products with exact activations: each token is one or two bfloat16 slices, and so are the numbers of the matrix.

Weights are the left operand of every dot product, and tokens are its columns. So one token takes the instruction that
256 tokens take, and each result is one chain over the columns of its row, in tiles of a fixed width. A matrix with few
rows is divided along its columns into a fixed number of splits, which are computed by programs of their own or by one
program: their sums are added in ascending order in both cases. Nothing depends on the number of tokens.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.finish import store
from ridgeline.ops.triton.numbers import e4m3, slice_of, sum_row


@triton.jit
def numbers_of(codes, HALF: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr):
    """Return one half of a tile as bfloat16, where every code is a bfloat16 number, and wider floats as float32."""
    if KIND == "bfloat16":
        found = codes
    elif KIND == "float16" or KIND == "float32":
        found = codes.to(tl.float32)
    elif KIND == "fp8":
        found = e4m3(codes).to(tl.bfloat16)
    elif KIND == "bytes":
        found = codes.to(tl.float32).to(tl.bfloat16)
    else:
        found = (((codes >> (4 * HALF)) & 15).to(tl.float32) + LOW).to(tl.bfloat16)
    return found


@triton.jit
def sizes_of(
    x, stride, delta, total, tokens, width, scale, eps, BLOCK_T: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Return the mean and the factor of the norm of each token x + scale * delta, [BLOCK_T] each.

    NORM: whether there is a delta, whether the norm has a bias, whether it is a layer norm, and a power of two that is
    at least the width. The first program of all stores the sums. The arithmetic is that of `rows.sum_and_norm`.
    """
    at, index = tl.arange(0, NORM[3]), tl.arange(0, BLOCK_T)
    inside = at < width
    mean, size = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.float32)
    is_owner = (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    for t in range(tokens):
        row = tl.load(x + t * stride + at, mask=inside, other=0.0)
        if NORM[0]:
            row += scale * tl.load(delta + t * width + at, mask=inside, other=0.0)
            tl.store(total + t * width + at, row, mask=inside & is_owner)
        if NORM[2]:
            own = sum_row(row) / width
            mean = tl.where(index == t, own, mean)
            row = tl.where(inside, row - own, 0.0)
        size = tl.where(index == t, tl.rsqrt(sum_row(row * row) / width + eps), size)
    return mean, size


@triton.jit
def normalized_part(x, token, column, inside, width, norm, NORM: tl.constexpr):
    """Return some columns of the norm of tokens, as `rows.normalized` computes them. x: columns of the first array.

    norm: delta, weights and bias of the norm, the factor of delta, the offset of weights, and results of `sizes_of`.
    """
    delta, weight, bias, scale, offset, mean, size = norm
    if NORM[0]:
        x += scale * tl.load(delta + token[:, None] * width + column[None, :], mask=inside, other=0.0)
    if NORM[2]:
        x -= mean[:, None]
    x *= size[:, None]
    x *= (offset + tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32))[None, :]
    if NORM[1]:
        x += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return tl.where(inside, x, 0.0)


@triton.jit
def chain(
    x, codes, scales, zero_points, row, token, is_token, columns, x_stride, tiles, groups, first, last,
    KIND: tl.constexpr, LOW: tl.constexpr, HAS_ZEROS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, norm=None, NORM: tl.constexpr = None,
):  # fmt: skip
    """Return the sums of the products with tiles [first, last): [rows, tokens], float32.

    norm, NORM: as in `normalized_part`, if tokens are normalized here.
    """
    WIDTH: tl.constexpr = COLUMNS if KIND == "nibbles" else COLUMNS * HALVES  # elements of a row in a tile
    total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    at = tl.arange(0, COLUMNS)
    begin = (row // ROWS).to(tl.int64) * tiles * (ROWS * WIDTH) + (row % ROWS) * WIDTH
    of_group = (row // ROWS) * groups * ROWS + row % ROWS
    for tile in range(first, last):
        packed = tl.load(codes + begin[:, None] + tile * (ROWS * WIDTH) + at[None, :])
        for half in tl.static_range(HALVES):
            column = (tile * HALVES + half) * COLUMNS + at
            inside = is_token[:, None] & (column < columns)[None, :]
            given = tl.load(x + token[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
            if NORM is not None:
                given = normalized_part(given, token, column, inside, columns, norm, NORM)
            numbers = numbers_of(packed, half, KIND, LOW)
            group = (tile * HALVES + half) * COLUMNS // GROUP if GROUP else 0
            if HAS_ZEROS:
                zero = tl.load(zero_points + of_group + group * ROWS).to(tl.float32)
                numbers = (numbers.to(tl.float32) - zero[:, None]).to(tl.bfloat16)
            high, low = slice_of(given, SLICES)
            if KIND == "float16" or KIND == "float32":  # numbers of the matrix are two slices, too
                numbers_high, numbers_low = slice_of(numbers, 2)
                total = tl.dot(numbers_high, tl.trans(high), total)
                total = tl.dot(numbers_low, tl.trans(high), total)
                if SLICES == 2:
                    total = tl.dot(numbers_high, tl.trans(low), total)
                    total = tl.dot(numbers_low, tl.trans(low), total)
            elif GROUP:
                part = tl.dot(numbers, tl.trans(high))
                if SLICES == 2:
                    part = tl.dot(numbers, tl.trans(low), part)
                total += part * tl.load(scales + of_group + group * ROWS).to(tl.float32)[:, None]
            else:
                total = tl.dot(numbers, tl.trans(high), total)
                if SLICES == 2:
                    total = tl.dot(numbers, tl.trans(low), total)
    return total


@triton.jit
def sum_splits(
    x, codes, scales, zero_points, bias, parts, arrived, row, token, is_token, rows, columns, x_stride, tiles, groups,
    split_tiles, KIND: tl.constexpr, LOW: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, APART: tl.constexpr, norm=None, NORM: tl.constexpr = None,
):  # fmt: skip
    """Return products of a block of rows with a block of tokens, scales and bias included, and whether they are whole.

    APART: whether each split is a program; the one that ends last has the whole sums. norm, NORM: as in `chain`.
    """
    BLOCK_R: tl.constexpr = row.shape[0]
    BLOCK_T: tl.constexpr = token.shape[0]
    total = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    is_last = True
    if APART:
        split = tl.program_id(2)
        own = chain(
            x, codes, scales, zero_points, row, token, is_token, columns, x_stride, tiles, groups,
            split * split_tiles, tl.minimum((split + 1) * split_tiles, tiles),
            KIND, LOW, HAS_ZEROS, SLICES, ROWS, COLUMNS, HALVES, GROUP, norm, NORM,
        )  # fmt: skip
        block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        blocks = tl.num_programs(0) * tl.num_programs(1)
        cell = tl.arange(0, BLOCK_R)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        tl.store(parts + (split * blocks + block) * (BLOCK_R * BLOCK_T) + cell, own)
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            for s in tl.static_range(SPLITS):
                total += tl.load(parts + (s * blocks + block) * (BLOCK_R * BLOCK_T) + cell, cache_modifier=".cg")
            tl.store(arrived + block, 0)
    else:
        for s in tl.static_range(SPLITS):
            total += chain(
                x, codes, scales, zero_points, row, token, is_token, columns, x_stride, tiles, groups,
                s * split_tiles, tl.minimum((s + 1) * split_tiles, tiles),
                KIND, LOW, HAS_ZEROS, SLICES, ROWS, COLUMNS, HALVES, GROUP, norm, NORM,
            )  # fmt: skip
    if is_last:
        if scales is not None and GROUP == 0:
            total *= tl.load(scales + row)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + row, mask=row < rows, other=0.0)[:, None]
    return total, is_last


@triton.jit
def dense_product(
    x, beside, codes, scales, zero_points, bias, out, parts, arrived, cos, sin, keys, values, gates, pages, slots,
    key_scales, value_scales, q_weight, k_weight, whole, finished, fresh, matrices, latents, delta, total, norm_weight,
    norm_bias, tokens, rows, columns, x_stride, tiles, groups, split_tiles, beside_row, page_stride, slot_stride,
    head_stride, scale_stride, matrix_stride, row_stride, column_stride, latents_stride, k_scale, v_scale, offset, eps,
    norm_scale, norm_offset, norm_eps, KIND: tl.constexpr, LOW: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS:
    tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, GROUP:
    tl.constexpr, SPLITS: tl.constexpr, APART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, NORM:
    tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Compute x[tokens, columns] @ matrix.T + bias, and store it as `finish.store` says.

    beside: None, or other tokens, which rows from `beside_row` on are multiplied with. NORM: None, or how tokens
    x + norm_scale * delta become sums, `total`, and are normalized, as `sizes_of` says.
    """
    if beside is not None:
        x = tl.where(tl.program_id(1) * BLOCK_R < beside_row, x, beside)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token = token < tokens
    token = token.to(tl.int64)
    norm = None
    if NORM is not None:
        mean, size = sizes_of(x, x_stride, delta, total, tokens, columns, norm_scale, norm_eps, BLOCK_T, NORM)
        norm = delta, norm_weight, norm_bias, norm_scale, norm_offset, mean, size
    found, is_last = sum_splits(
        x, codes, scales, zero_points, bias, parts, arrived, row, token, is_token, rows, columns, x_stride, tiles,
        groups, split_tiles, KIND, LOW, HAS_ZEROS, HAS_BIAS, SLICES, ROWS, COLUMNS, HALVES, GROUP, SPLITS, APART, norm,
        NORM,
    )  # fmt: skip
    if is_last:
        store(
            found, tl.program_id(1), token, tokens, rows, out, gates, (cos, sin),
            (
                keys, values, key_scales, value_scales, pages, slots,
                (page_stride, slot_stride, head_stride, scale_stride), (k_scale, v_scale),
            ),
            (q_weight, k_weight, offset, eps), whole, finished, fresh,
            (matrices, (matrix_stride, row_stride, column_stride), latents, latents_stride), FINISH,
        )  # fmt: skip
