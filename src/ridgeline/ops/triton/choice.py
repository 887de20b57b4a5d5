"""The choice of experts by a router's logits, and the order of tokens by expert.

With few tokens, one kernel has all of it: the norm, the product with the router, the choice and the order. Programs of
a token never wait for each other: the one that ends last chooses, and the last one of all tokens orders their visits.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import sigmoid
from ridgeline.ops.triton.dense import sum_splits
from ridgeline.ops.triton.numbers import sum_row
from ridgeline.ops.triton.rows import first_best, sum_and_norm

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
def choose(
    logits, choice_bias, ids, weights, token, stride, scale, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, BEST_TWO: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    PLAIN: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token, as the primitive ROUTE does. PLAIN: experts are chosen by their logits."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_E)[None, :]
    inside = (group < GROUPS) & (member < SIZE)
    number = tl.where(inside, group * SIZE + member, NO_EXPERT)
    x = tl.load(logits + token * stride + number, mask=inside, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        scores = sigmoid(x)
    else:
        scores = tl.exp(x - largest(tl.reshape(x, [BLOCK_G * BLOCK_E])))
        total = sum_row(tl.reshape(scores, [BLOCK_G * BLOCK_E]))
        scores = tl.div_rn(scores, tl.zeros_like(scores) + total)
    rated = x if PLAIN else scores
    if HAS_CHOICE_BIAS:
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
        weight = tl.div_rn(weight, tl.zeros_like(weight) + sum_row(weight))
    tl.store(ids + token * CHOSEN + slot, chosen.to(tl.int64), mask=is_chosen)
    tl.store(weights + token * CHOSEN + slot, weight * scale, mask=is_chosen)


@triton.jit
def sort_last(
    ids, visits, table, num_blocks, chosen, pairs, most_blocks, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sort the visits of all tokens if the experts of the last one are chosen now; chosen: counts tokens."""
    tl.debug_barrier()  # all threads have stored before one of them says so
    is_last = tl.atomic_add(chosen, 1, sem="acq_rel") == tl.num_programs(0) - 1
    tl.debug_barrier()  # other threads read what the counted programs stored
    if is_last:
        sort_few_visits(ids, visits, table, num_blocks, pairs, most_blocks, EXPERTS, BLOCK_T, BLOCK_C, BLOCK_P)
        tl.store(chosen, 0)


@triton.jit
def choose_experts(
    logits, choice_bias, ids, weights, visits, table, num_blocks, arrived, stride, scale, pairs, most_blocks,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, BEST_TWO: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, PLAIN: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token.

    visits: None, or the program of the token that is chosen last also sorts the visits of all tokens.
    """
    choose(
        logits, choice_bias, ids, weights, tl.program_id(0).to(tl.int64), stride, scale, EXPERTS, CHOSEN, GROUPS, OPEN,
        BEST_TWO, SIGMOID, NORMALIZE, PLAIN, HAS_CHOICE_BIAS, BLOCK_G, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    if visits is not None:
        sort_last(ids, visits, table, num_blocks, arrived, pairs, most_blocks, EXPERTS, BLOCK_T, BLOCK_P, BLOCK_C)


@triton.jit
def rate_and_choose(
    residual, delta, norm_weight, norm_bias, total, x, codes, scales, zero_points, bias, logits, parts, arrived,
    choice_bias, ids, weights, visits, table, num_blocks, rows, columns, tiles, groups, split_tiles, stride,
    residual_scale, offset, eps, scale, pairs, most_blocks, HAS_DELTA: tl.constexpr, HAS_TOTAL: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, IS_LAYER: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HALVES: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, APART: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr,
    BEST_TWO: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, PLAIN: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Normalize one token, multiply it with the router's rows, choose its experts, and sort the visits of all tokens.

    x: [tokens, columns], the norm. Each program of a token computes all of it and stores the same numbers, so it reads
    what it stored itself. logits: [tokens, rows]. arrived: counts the splits of each block of rows of each token, then
    the blocks of rows of each token, and then tokens. BLOCK_M: columns of a dot product, of which one is a token.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    found = sum_and_norm(
        residual, delta, total, token, token, at, at < columns, tl.program_id(1) + tl.program_id(2) == 0, columns,
        stride, residual_scale, norm_weight, norm_bias, offset, eps, HAS_DELTA, HAS_TOTAL, HAS_NORM_BIAS, IS_LAYER,
    )  # fmt: skip
    tl.store(x + token * columns + at, found, mask=at < columns)
    tl.debug_barrier()  # all threads have stored before one of them reads
    row, column = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_M)
    found, is_last = sum_splits(
        x, codes, scales, zero_points, bias, parts, arrived, row, token + column, column == 0, rows, columns, columns,
        tiles, groups, split_tiles, KIND, LOW, HAS_ZEROS, HAS_BIAS, SLICES, ROWS, COLUMNS, HALVES, GROUP, SPLITS, APART,
    )  # fmt: skip
    if is_last:
        tl.store(
            logits + token * rows + row[:, None] + column[None, :], found,
            mask=(row < rows)[:, None] & (column == 0)[None, :],
        )  # fmt: skip
        rated = arrived + tl.num_programs(0) * tl.num_programs(1)
        chosen = rated + tl.num_programs(0)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(rated + token, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            choose(
                logits, choice_bias, ids, weights, token, rows, scale, EXPERTS, CHOSEN, GROUPS, OPEN, BEST_TWO,
                SIGMOID, NORMALIZE, PLAIN, HAS_CHOICE_BIAS, BLOCK_G, BLOCK_E, BLOCK_K,
            )  # fmt: skip
            tl.store(rated + token, 0)
            sort_last(ids, visits, table, num_blocks, chosen, pairs, most_blocks, EXPERTS, BLOCK_T, BLOCK_P, BLOCK_C)


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
