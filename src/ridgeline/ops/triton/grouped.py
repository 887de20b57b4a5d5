"""Experts: their choice, the order of tokens by expert, products with each expert's matrices, and the weighted sum.

A *visit* is a pair of a token and one of its experts. Visits are sorted by expert on the GPU, and blocks of visits of
one expert are multiplied by programs of their own, so the host never learns how many tokens an expert has. Tokens are
columns of every product, as in `dense.py`, so a token has the same bits whoever else visits its expert.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated, clamped_swiglu, sigmoid
from ridgeline.ops.triton.dense import chain
from ridgeline.ops.triton.rows import first_best
from ridgeline.ops.triton.whole import scales_of, whole_chain

NO_EXPERT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def largest(x):
    """Return the largest number of x [n] but NaN."""
    return tl.max(tl.where(x == x, x, float("-inf")), 0)


@triton.jit
def open_groups(rated, number, GROUPS: tl.constexpr, OPEN: tl.constexpr, BEST_TWO: tl.constexpr):
    """Return which groups of experts a token may choose from [groups, 1]; rated: [groups, experts]."""
    group = tl.arange(0, rated.shape[0])
    score, index = first_best(rated, number, 1)
    if BEST_TWO:
        second, _ = first_best(tl.where(number == index[:, None], float("-inf"), rated), number, 1)
        score += second
    left = tl.where(group < GROUPS, group, NO_EXPERT)
    score = tl.where(group < GROUPS, score, float("-inf"))
    is_open = group < 0
    for _ in range(OPEN):
        _, best = first_best(score, left)
        is_best = left == best
        is_open |= is_best
        score = tl.where(is_best, float("-inf"), score)
        left = tl.where(is_best, NO_EXPERT, left)
    return is_open[:, None]


@triton.jit
def choose_experts(
    logits, choice_bias, ids, weights, visits, table, num_blocks, arrived, stride, scale, pairs, most_blocks,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, BEST_TWO: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, PLAIN: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token, as the primitive ROUTE does. PLAIN: experts are chosen by their logits.

    visits: None, or the program of the token that is chosen last also sorts the visits of all tokens.
    """
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_E)[None, :]
    inside = (group < GROUPS) & (member < SIZE)
    number = tl.where(inside, group * SIZE + member, NO_EXPERT)
    x = tl.load(logits + token * stride + number, mask=inside, other=float("-inf"))
    if SIGMOID:
        scores = sigmoid(x)
    else:
        scores = tl.exp(x - largest(tl.reshape(x, [BLOCK_G * BLOCK_E])))
        scores = tl.div_rn(scores, tl.zeros_like(scores) + tl.sum(tl.sum(scores, 1), 0))
    rated = x if PLAIN else scores
    if HAS_BIAS:
        rated += tl.load(choice_bias + number, mask=inside, other=0.0)
    rated = tl.where(inside, rated, float("-inf"))
    if OPEN < GROUPS:
        rated = tl.where(open_groups(rated, number, GROUPS, OPEN, BEST_TWO), rated, float("-inf"))
    rated, left = tl.reshape(rated, [BLOCK_G * BLOCK_E]), tl.reshape(number, [BLOCK_G * BLOCK_E])
    given = tl.reshape(x if PLAIN and NORMALIZE else scores, [BLOCK_G * BLOCK_E])
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for i in range(CHOSEN):
        _, best = first_best(rated, left)
        is_best = left == best
        chosen = tl.where(slot == i, best, chosen)
        weight = tl.where(slot == i, tl.sum(tl.where(is_best, given, 0.0), 0), weight)
        rated = tl.where(is_best, float("-inf"), rated)
        left = tl.where(is_best, NO_EXPERT, left)
    is_chosen = slot < CHOSEN
    if NORMALIZE:
        if PLAIN:
            weight = tl.where(is_chosen, weight, float("-inf"))
            weight = tl.exp(weight - largest(weight))
        weight = tl.div_rn(weight, tl.zeros_like(weight) + tl.sum(weight, 0))
    tl.store(ids + token * CHOSEN + slot, chosen.to(tl.int64), mask=is_chosen)
    tl.store(weights + token * CHOSEN + slot, weight * scale, mask=is_chosen)
    if visits is not None:
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1
        tl.debug_barrier()  # other threads read what the counted programs stored
        if is_last:
            sort_few_visits(ids, visits, table, num_blocks, pairs, most_blocks, EXPERTS, BLOCK_T, BLOCK_C, BLOCK_P)
            tl.store(arrived, 0)


@triton.jit
def sort_few_visits(
    ids, visits, table, num_blocks, pairs, most_blocks, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write what `sort_visits` writes, for all experts in one program. BLOCK_P: at least the number of pairs."""
    at, each = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    found = tl.load(ids + at, mask=at < pairs, other=EXPERTS, cache_modifier=".cg").to(tl.int32)
    # Keys of pairs are unique, so one expert's pairs stay in order.
    tl.store(visits + at, tl.sort(found * BLOCK_P + at) % BLOCK_P, mask=at < pairs)
    counts = tl.where(each < EXPERTS, tl.histogram(found, BLOCK_E), 0)
    blocks = (counts + (BLOCK_T - 1)) // BLOCK_T
    end, row = tl.cumsum(counts, 0), tl.cumsum(blocks, 0) - blocks
    tl.store(num_blocks, tl.sum(blocks, 0))
    for i in range(tl.max(blocks, 0)):
        is_block = i < blocks
        tl.store(table + row + i, each, mask=is_block)
        tl.store(table + most_blocks + row + i, end - counts + i * BLOCK_T, mask=is_block)
        tl.store(table + 2 * most_blocks + row + i, end, mask=is_block)


@triton.jit
def sort_visits(
    ids, visits, table, num_blocks, pairs, most_blocks, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write the visits of one expert, in the order of tokens, behind those of the experts before it.

    ids: [pairs], the expert of each pair of a token and a choice; visits: [pairs], pairs ordered by expert.
    table: [3, most_blocks], for each block of at most BLOCK_T visits of one expert: the expert, its first visit, and
    the end of its visits. BLOCK_E: more than the number of experts.
    """
    expert = tl.program_id(0)
    at, each = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, pairs, BLOCK_P):
        found = tl.load(ids + start + at, mask=start + at < pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(found, BLOCK_E)
    counts = tl.where(each < EXPERTS, counts, 0)
    blocks = (counts + (BLOCK_T - 1)) // BLOCK_T
    first = tl.sum(tl.where(each < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(each == expert, counts, 0), 0)
    block = tl.sum(tl.where(each < expert, blocks, 0), 0)
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    for start in range(0, end - first, BLOCK_P * BLOCK_T):
        begin = first + start + at * BLOCK_T
        row = block + start // BLOCK_T + at
        tl.store(table + row, tl.zeros_like(at) + expert, mask=begin < end)
        tl.store(table + most_blocks + row, begin, mask=begin < end)
        tl.store(table + 2 * most_blocks + row, tl.zeros_like(at) + end, mask=begin < end)
    for start in range(0, pairs, BLOCK_P):
        found = tl.load(ids + start + at, mask=start + at < pairs, other=EXPERTS).to(tl.int32)
        is_mine = (found == expert).to(tl.int32)
        tl.store(visits + first + tl.cumsum(is_mine, 0) - 1, start + at, mask=is_mine != 0)
        first += tl.sum(is_mine, 0)


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
def sum_visits(
    results, weights, shared, gate, sums, arrived, token, is_token, row, rows, gate_stride, CHOSEN: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Add up the weighted results of the tokens whose last result is stored now: some rows of sums [tokens, rows].

    Each token has a counter of its results for the rows of a program. Results are added in the order of the token's
    choices, and then the shared expert's, so it does not matter which program is the last one.
    """
    tl.debug_barrier()  # all threads have stored before one of them says so
    counter = arrived + token * tl.num_programs(1) + tl.program_id(1)
    is_last = is_token & (tl.atomic_add(counter, 1, mask=is_token, sem="acq_rel") == CHOSEN - 1)
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
            also = tl.load(shared + at, mask=inside, other=0.0)
            if HAS_GATE:
                also *= sigmoid(tl.load(gate + token * gate_stride, mask=is_last, other=0.0))[None, :]
            total += also
        tl.store(sums + at, total, mask=inside)
        tl.store(counter, 0, mask=is_last)


@triton.jit
def expert_product(
    x, token_scales, codes, scales, zero_points, bias, out, visits, table, num_blocks, weights, shared, gate, sums,
    arrived, most_blocks, rows, columns, x_stride, tiles, groups, row_tiles, gate_stride, alpha, limit, given,
    CHOSEN: tl.constexpr, PARTS: tl.constexpr, NAME: tl.constexpr, IS_DOWN: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, LOW: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Multiply one block of visits with the matrix of its expert, or with its gate and its up matrix, and activate.

    x: tokens as floats or, if WHOLE, rounded to int8 with `token_scales`, unless the kernel ROUNDS them itself. Up:
    visits read their tokens, and results are in the order of visits. Down: they are in the order of pairs again, and
    `sum_visits` adds them up. row_tiles: tiles of rows of one matrix.
    """
    block = tl.program_id(0)
    if block < tl.load(num_blocks):
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
        found = expert_rows(
            x, rounding, codes, scales, zero_points, bias, row, row, token, is_token, rows, columns, x_stride,
            tiles, groups, WHOLE, KIND, LOW, HAS_ZEROS, HAS_BIAS, SLICES, ROWS, COLUMNS, HALVES, GROUP, UNIT, ROUNDS,
        )  # fmt: skip
        if PARTS == 2:
            if HAS_BIAS:
                bias += rows
            up = expert_rows(
                x, rounding, codes, scales, zero_points, bias, row, row + row_tiles * ROWS, token, is_token, rows,
                columns, x_stride, tiles, groups, WHOLE, KIND, LOW, HAS_ZEROS, HAS_BIAS, SLICES, ROWS, COLUMNS,
                HALVES, GROUP, UNIT, ROUNDS,
            )  # fmt: skip
            if NAME == "clamped":
                found = clamped_swiglu(found, up, alpha, limit)
            else:
                found = activated(found, NAME) * up
        elif not IS_DOWN:
            found = activated(found, NAME)
        target = pair if IS_DOWN else visit
        tl.store(out + target[None, :] * rows + row[:, None], found, mask=(row < rows)[:, None] & is_token[None, :])
        if IS_DOWN:
            sum_visits(
                out, weights, shared, gate, sums, arrived, pair // CHOSEN, is_token, row, rows, gate_stride, CHOSEN,
                shared is not None, gate is not None,
            )  # fmt: skip
