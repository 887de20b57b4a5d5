"""Experts: products with each expert's matrices, and the weighted sum.

A *visit* is a pair of a token and one of its experts. Visits are sorted by expert on the GPU, and blocks of visits of
one expert are multiplied by programs of their own, so the host never learns how many tokens an expert has. Tokens are
columns of every product, as in `dense.py`, so a token has the same bits whoever else visits its expert.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated, clamped_swiglu, sigmoid
from ridgeline.ops.triton.dense import chain, sum_splits
from ridgeline.ops.triton.finish import store
from ridgeline.ops.triton.whole import scales_of, whole_chain


@triton.jit
def expert_rows(
    x, rounding, codes, scales, zero_points, bias, row, matrix_row, token, is_token, rows, columns, x_stride,
    tiles, groups, WHOLE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return products of one expert's matrix with tokens, bias included: [rows, tokens].

    row: rows of the result; matrix_row: the same rows, counted from the first matrix of the expert. rounding: the
    result of `whole.scales_of`, if WHOLE.
    """
    if WHOLE:
        total = whole_chain(
            x, codes, scales, zero_points, matrix_row, token, is_token, rounding, columns, x_stride, tiles, groups,
            KIND, LOW, HAS_ZEROS, ROWS, COLUMNS, HALVES, GROUP, UNIT, ROUNDS,
        )  # fmt: skip
        total *= rounding[0][None, :]
    else:
        total = chain(
            x, codes, scales, zero_points, matrix_row, token, is_token, columns, x_stride, tiles, groups, 0, tiles,
            KIND, LOW, HAS_ZEROS, SLICES, ROWS, COLUMNS, HALVES, GROUP,
        )  # fmt: skip
        if scales is not None and GROUP == 0:
            total *= tl.load(scales + matrix_row)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0)[:, None]
    return total


@triton.jit
def shared_rows(
    x, codes, scales, zero_points, bias, row, token, is_token, rows, columns, stride, tiles, groups, split_tiles, given,
    HOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return products of the shared expert's matrix with tokens, as kernels of its own compute them: [rows, tokens].

    HOW: whether tokens are rounded, kind of codes, the number of code 0, whether there are zero points, a bias, and a
    scale of all tokens, slices, columns, halves and groups of a tile, its unit, and splits.
    """
    if HOW[0]:
        rounding = scales_of(x, None, token, is_token, columns, stride, given, True, HOW[5], BLOCK)
        total = whole_chain(
            x, codes, scales, zero_points, row, token, is_token, rounding, columns, stride, tiles, groups, HOW[1],
            HOW[2], HOW[3], ROWS, HOW[7], HOW[8], HOW[9], HOW[10], True,
        )  # fmt: skip
        total *= rounding[0][None, :]
        if HOW[4]:
            total += tl.load(bias + row, mask=row < rows, other=0.0)[:, None]
    else:
        total, _ = sum_splits(
            x, codes, scales, zero_points, bias, None, None, row, token, is_token, rows, columns, stride, tiles, groups,
            split_tiles, HOW[1], HOW[2], HOW[3], HOW[4], HOW[6], ROWS, HOW[7], HOW[8], HOW[9], HOW[11], False,
        )  # fmt: skip
    return total


@triton.jit
def sum_visits(
    results, weights, shared, gate, sums, arrived, token, is_token, row, rows, gate_stride, CHOSEN: tl.constexpr,
    COUNT: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Add up the weighted results of the tokens whose last result is stored now: some rows of sums [tokens, rows].

    Each token has a counter of its COUNT results for the rows of a program. Results are added in the order of the
    token's choices, and then the shared expert's, so it does not matter which program is the last one.
    """
    tl.debug_barrier()  # all threads have stored before one of them says so
    counter = arrived + token * tl.num_programs(1) + tl.program_id(1)
    is_last = is_token & (tl.atomic_add(counter, 1, mask=is_token, sem="acq_rel") == COUNT - 1)
    tl.debug_barrier()  # other threads read what the counted programs stored
    if tl.max(is_last.to(tl.int32), 0) > 0:
        inside = (row < rows)[:, None] & is_last[None, :]
        at = token[None, :] * rows + row[:, None]
        total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
        for i in range(CHOSEN):
            pair = token * CHOSEN + i
            found = tl.load(results + pair[None, :] * rows + row[:, None], mask=inside, other=0.0, cache_modifier=".cg")
            total += tl.load(weights + pair, mask=is_last, other=0.0)[None, :] * found
        if HAS_SHARED:
            also = tl.load(shared + at, mask=inside, other=0.0, cache_modifier=".cg")
            if HAS_GATE:
                also *= sigmoid(tl.load(gate + token * gate_stride, mask=is_last, other=0.0))[None, :]
            total += also
        tl.store(sums + at, total, mask=inside)
        tl.store(counter, 0, mask=is_last)


@triton.jit
def results_of(
    x, rounding, codes, scales, zero_points, bias, row, token, is_token, rows, columns, x_stride, tiles, groups,
    row_tiles, alpha, limit, PARTS: tl.constexpr, NAME: tl.constexpr, IS_DOWN: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, LOW: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return the products of an expert's matrix, or of its gate and its up matrix, and their activation."""
    found = expert_rows(
        x, rounding, codes, scales, zero_points, bias, row, row, token, is_token, rows, columns, x_stride,
        tiles, groups, WHOLE, KIND, LOW, HAS_ZEROS, HAS_BIAS, SLICES, ROWS, COLUMNS, HALVES, GROUP, UNIT, ROUNDS,
    )  # fmt: skip
    if PARTS == 2:
        if HAS_BIAS:
            bias += rows
        up = expert_rows(
            x, rounding, codes, scales, zero_points, bias, row, row + row_tiles * ROWS, token, is_token, rows, columns,
            x_stride, tiles, groups, WHOLE, KIND, LOW, HAS_ZEROS, HAS_BIAS, SLICES, ROWS, COLUMNS, HALVES, GROUP, UNIT,
            ROUNDS,
        )  # fmt: skip
        if NAME == "clamped":
            found = clamped_swiglu(found, up, alpha, limit)
        else:
            found = activated(found, NAME) * up
    elif not IS_DOWN:
        found = activated(found, NAME)
    return found


@triton.jit
def multiply_shared(
    beside, sizes, summed, block, tokens, rows, gate_stride, CHOSEN: tl.constexpr, IS_DOWN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BESIDE: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Multiply a block of tokens with some rows of the shared expert's matrix, and store results; see `expert_product`.

    beside: tokens, codes, scales, zero points, bias and results; sizes: rows, columns, stride of tokens, tiles, groups,
    tiles of a split, and the scale of all tokens; summed: what `sum_visits` takes.
    """
    x, codes, scales, zero_points, bias, results = beside
    row, token = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R), block * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, token = token < tokens, token.to(tl.int64)
    if tl.program_id(1) * BLOCK_R < sizes[0]:
        found = shared_rows(
            x, codes, scales, zero_points, bias, row, token, is_token, sizes[0], sizes[1], sizes[2], sizes[3],
            sizes[4], sizes[5], sizes[6], BESIDE, ROWS, BLOCK,
        )  # fmt: skip
        store(
            found, tl.program_id(1), token, tokens, sizes[0], results, None, None, None, None, None, None, None, None,
            FINISH,
        )  # fmt: skip
        if IS_DOWN:
            out, weights, gate, sums, arrived = summed
            sum_visits(
                out, weights, results, gate, sums, arrived, token, is_token, row, rows, gate_stride, CHOSEN, CHOSEN + 1,
                True, gate is not None,
            )  # fmt: skip


@triton.jit
def expert_product(
    x, token_scales, codes, scales, zero_points, bias, out, visits, table, num_blocks, weights, shared, gate, sums,
    arrived, beside, beside_codes, beside_scales, beside_zeros, beside_bias, beside_out, most_blocks, rows, columns,
    x_stride, tiles, groups, row_tiles, gate_stride, alpha, limit, given, tokens, beside_rows, beside_columns,
    beside_stride, beside_tiles, beside_groups, beside_splits, beside_given, CHOSEN: tl.constexpr, PARTS: tl.constexpr,
    NAME: tl.constexpr, IS_DOWN: tl.constexpr, WHOLE: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HALVES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, ROUNDS: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BESIDE: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Multiply one block of visits with the matrix of its expert, or with its gate and its up matrix, and activate.

    x: tokens as floats or, if WHOLE, rounded to int8 with `token_scales`, unless the kernel ROUNDS them itself. Up:
    visits read their tokens, and results are in the order of visits. Down: they are in the order of pairs again, and
    `sum_visits` adds them up. row_tiles: tiles of rows of one matrix.

    BESIDE: None, or what `shared_rows` takes: programs behind those of the blocks multiply all tokens with the shared
    expert's matrix `beside`, and store results as FINISH says; see `finish.store`.
    """
    block = tl.program_id(0)
    if BESIDE is not None:
        if block >= most_blocks:
            multiply_shared(
                (beside, beside_codes, beside_scales, beside_zeros, beside_bias, beside_out),
                (beside_rows, beside_columns, beside_stride, beside_tiles, beside_groups, beside_splits, beside_given),
                (out, weights, gate, sums, arrived), block - most_blocks, tokens, rows, gate_stride, CHOSEN, IS_DOWN,
                ROWS, BLOCK, BLOCK_T, BLOCK_R, BESIDE, FINISH,
            )  # fmt: skip
    if (block < tl.load(num_blocks)) & (tl.program_id(1) * BLOCK_R < rows):
        expert = tl.load(table + block).to(tl.int64)
        visit = tl.load(table + most_blocks + block) + tl.arange(0, BLOCK_T)
        is_token = visit < tl.load(table + 2 * most_blocks + block)
        pair = tl.load(visits + visit, mask=is_token, other=0).to(tl.int64)
        visit = visit.to(tl.int64)
        token = visit if IS_DOWN else pair // CHOSEN
        row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        codes += expert * PARTS * row_tiles * tiles * (ROWS * COLUMNS)
        if scales is not None:
            scales += expert * PARTS * row_tiles * groups * ROWS
        if HAS_ZEROS:
            zero_points += expert * PARTS * row_tiles * groups * ROWS
        if HAS_BIAS:
            bias += expert * PARTS * rows
        rounding = (is_token, is_token, is_token)
        if WHOLE:
            rounding = scales_of(x, token_scales, token, is_token, columns, x_stride, given, ROUNDS, HAS_SCALE, BLOCK)
        found = results_of(
            x, rounding, codes, scales, zero_points, bias, row, token, is_token, rows, columns, x_stride, tiles, groups,
            row_tiles, alpha, limit, PARTS, NAME, IS_DOWN, WHOLE, KIND, LOW, HAS_ZEROS, HAS_BIAS, SLICES, ROWS, COLUMNS,
            HALVES, GROUP, UNIT, ROUNDS,
        )  # fmt: skip
        target = pair if IS_DOWN else visit
        tl.store(out + target[None, :] * rows + row[:, None], found, mask=(row < rows)[:, None] & is_token[None, :])
        if IS_DOWN:
            sum_visits(
                out, weights, shared if BESIDE is None else beside_out, gate, sums, arrived, pair // CHOSEN, is_token,
                row, rows, gate_stride, CHOSEN, CHOSEN if BESIDE is None else CHOSEN + 1,
                (shared is not None) or (BESIDE is not None), gate is not None,
            )  # fmt: skip
