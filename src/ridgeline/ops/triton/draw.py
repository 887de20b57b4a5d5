"""Kernels that draw a token from each row of logits: the ops DRAW and ACCEPT (ops/draws.py).

Tokens are kept by their order: the larger logit comes first, of equal ones the lower index. Each filter keeps the first
tokens of this order. So a filter is the last token that it keeps, and nothing is sorted. Sums are in float64, and their
order does not depend on other rows.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.rows import first_best


@triton.jit
def scrambled(ids, one, two):
    """Return 32 random bits for each id (ops/noise.py). one, two: the two words of half a key."""
    words = ids.to(tl.uint32) * 0x9E3779B1 + one.to(tl.uint32)
    words = (words ^ (words >> 16)) * 0x21F0AAAD + (one >> 32).to(tl.uint32)
    words = (words ^ (words >> 15)) * 0x735A2D97
    return (words ^ (words >> 15)) + two.to(tl.uint32)


@triton.jit
def gumbel(ids, key):
    """Return the noise of each id. key: its four words.

    With v of 52 bits, 1 - v is exact in float64, so that its logarithm is log1p(-v).
    """
    high = scrambled(ids, tl.load(key), tl.load(key + 1))
    low = scrambled(ids, tl.load(key + 2), tl.load(key + 3)) >> 12
    v = (high.to(tl.float64) * 1048576.0 + low.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^20 and 2^-52
    return -tl.log(-tl.log(1.0 - v))


@triton.jit
def number_of(words, index):
    """Return one of the float64 numbers of a draw."""
    return tl.load(words + index).to(tl.float64, bitcast=True)


@triton.jit
def score_of(x, top, temperature):
    """Return the scores of logits in float64; the largest is 0."""
    return (x.to(tl.float64) - top.to(tl.float64)) / temperature


@triton.jit
def order_of(x):
    """Return whole numbers that are in the order of the numbers x. Both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def is_kept(order, index, limit, last):
    """Return whether tokens come before the one with order `limit` and index `last`, or are this token."""
    return (order > limit) | ((order == limit) & (index <= last))


@triton.jit
def least_score(words):
    """Return the least score that min_p keeps."""
    min_p = number_of(words, 7)
    return tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))


@triton.jit
def is_tried(trials, first, until, index, TRIAL: tl.constexpr):
    """Return whether tokens are drafts that are tried from the row `first` on, before the row `until`; -1: to the end.

    trials: TRIAL numbers for each row (ops/draws.py): each draft says how many rows later the next one is.
    """
    found, at = index < 0, first
    while at != until:
        found = found | (index == tl.load(trials + at * TRIAL + 2))
        step = tl.load(trials + at * TRIAL + 1)
        at = tl.where(step > 0, at + step, until)
    return found


@triton.jit
def tokens_at(logits, likely, is_listed, count, begin, BLOCK: tl.constexpr):
    """Return logits, indices and whether they exist, for tokens from `begin` on: of a row, or of its likely tokens."""
    at = begin + tl.arange(0, BLOCK)
    inside = at < count
    index = tl.load(likely + at, mask=inside & is_listed, other=at)
    return tl.load(logits + index, mask=inside, other=float("-inf")), index, inside


@triton.jit
def sum_from(
    logits, likely, is_listed, count, least, limit, last, top, temperature, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the number, or the weight, of the kept tokens whose order is at least `least`."""
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        x, index, inside = tokens_at(logits, likely, is_listed, count, begin, BLOCK)
        order = order_of(x)
        is_counted = inside & (order >= least) & is_kept(order, index, limit, last)
        if WEIGHTED:
            total += tl.where(is_counted, tl.exp(score_of(x, top, temperature)), 0.0)
        else:
            total += tl.where(is_counted, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def cut_at(
    logits, likely, is_listed, count, limit, last, goal, total, top, temperature, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return order and index of the last of the fewest first tokens whose number or weight, over `total`, is `goal`."""
    low, high = tl.full([], -2147483648, tl.int64), order_of(top).to(tl.int64) + 1
    while high - low > 1:  # tokens from `low` on are enough, those from `high` on are not
        middle = (low + high) >> 1
        found = sum_from(
            logits, likely, is_listed, count, middle.to(tl.int32), limit, last, top, temperature, WEIGHTED, BLOCK
        )
        is_enough = found / total >= goal
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
    order = low.to(tl.int32)
    above = sum_from(logits, likely, is_listed, count, order + 1, limit, last, top, temperature, WEIGHTED, BLOCK)
    one = tl.full([], 1.0, tl.float64)
    if WEIGHTED:
        logit = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        one = tl.exp(score_of(logit, top, temperature))
    # So many of the equal tokens are needed; a quotient that was rounded may be off by one.
    needed = tl.maximum(tl.ceil((goal * total - above) / one), 1.0)
    needed = tl.where((needed > 1.0) & ((above + (needed - 1.0) * one) / total >= goal), needed - 1.0, needed)
    needed = tl.where((above + needed * one) / total >= goal, needed, needed + 1.0)
    number_needed = tl.minimum(needed, 2147483647.0).to(tl.int32)
    seen, end = tl.full([], 0, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
    for begin in range(0, count, BLOCK):
        x, index, inside = tokens_at(logits, likely, is_listed, count, begin, BLOCK)
        is_equal = inside & (order_of(x) == order) & is_kept(order, index, limit, last)
        number = seen + tl.cumsum(is_equal.to(tl.int32), 0)
        end = tl.minimum(end, tl.min(tl.where(is_equal & (number == number_needed), index, 0x7FFFFFFF), 0))
        seen += tl.sum(is_equal.to(tl.int32), 0)
    return order, end


@triton.jit
def cut_rows(
    logits, draws, best_ids, best_values, tops, likely, cuts, vocabulary, parts, WORDS: tl.constexpr,
    LIKELY: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Find the last token that top_k and top_p keep in one row: cuts [rows, 2] are its order and its index.

    best_ids, best_values [rows, parts]: the best logit of each part of a row; the largest goes to tops [rows]. likely
    [rows, MOST]: room for the tokens with a score of at least LIKELY. Where these decide, no others are read again;
    else the whole row is.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    likely += row * MOST
    words = draws + row * WORDS
    temperature, top_k, top_p = number_of(words, 4), tl.load(words + 5), number_of(words, 6)
    part = tl.arange(0, BLOCK_P)
    values = tl.load(best_values + row * parts + part, mask=part < parts, other=float("-inf"))
    top, _ = first_best(values, tl.load(best_ids + row * parts + part, mask=part < parts, other=0x7FFFFFFF))
    tl.store(tops + row, top)
    limit, last = tl.full([], -2147483648, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
    is_counted, is_weighed = (top_k > 0) & (top_k < vocabulary), top_p < 1.0
    if (temperature > 0.0) & (tl.abs(top) < float("inf")) & (is_counted | is_weighed):
        weights, listed = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
        count = tl.full([], 0, tl.int32)
        for begin in range(0, vocabulary, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            score = score_of(tl.load(logits + at, mask=at < vocabulary, other=float("-inf")), top, temperature)
            is_likely, weight = score >= LIKELY, tl.exp(score)
            weights += weight
            listed += tl.where(is_likely, weight, 0.0)
            slot = count + tl.cumsum(is_likely.to(tl.int32), 0) - 1
            tl.store(likely + slot, at, mask=is_likely & (slot < MOST))
            count += tl.sum(is_likely.to(tl.int32), 0)
        tl.debug_barrier()  # other threads read what was stored
        total = tl.sum(weights, 0)
        has_mass = tl.sum(listed, 0) / total >= top_p
        is_listed = (count <= MOST) & ((is_counted & (count >= top_k)) | ((is_counted == 0) & has_mass))
        count = tl.where(is_listed, count, vocabulary)
        if is_counted:
            limit, last = cut_at(
                logits, likely, is_listed, count, limit, last, top_k.to(tl.float64), 1.0, top, temperature, False, BLOCK
            )
            total = sum_from(logits, likely, is_listed, count, limit, limit, last, top, temperature, True, BLOCK)
        if is_weighed:
            limit, last = cut_at(
                logits, likely, is_listed, count, limit, last, top_p, total, top, temperature, True, BLOCK
            )
    tl.store(cuts + row * 2, limit)
    tl.store(cuts + row * 2 + 1, last)


@triton.jit
def draw_of_parts(
    logits, draws, tops, cuts, best_ids, best_values, token_ids, trials, taken, part_ids, part_values, ids, arrived,
    vocabulary, WORDS: tl.constexpr, TRIAL: tl.constexpr, HAS_IDS: tl.constexpr, HAS_TRIALS: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Find the largest sum of score and noise among the kept tokens of one part of one row: part_ids, part_values
    [rows, parts]. The program of a row that ends last finds the largest of the parts: ids [rows].

    A row without a temperature, or whose largest logit is not finite, takes its best logit: best_ids, best_values.
    HAS_TRIALS: a row takes its draft in `taken` [rows], if that is not -1; drafts that rejection sampling rejected are
    not drawn.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = row * tl.num_programs(1) + part
    words = draws + row * WORDS
    temperature, least = number_of(words, 4), least_score(words)
    top = tl.load(tops + row)
    if (temperature > 0.0) & (tl.abs(top) < float("inf")):
        limit, last = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
        best, found = tl.full([BLOCK], float("-inf"), tl.float64), tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for begin in range(0, PART, BLOCK):
            at = part * PART + begin + tl.arange(0, BLOCK)
            inside = at < vocabulary
            x = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf"))
            token = at
            if HAS_IDS:
                token = tl.load(token_ids + at, mask=inside, other=0)
            score = score_of(x, top, temperature)
            is_open = inside & is_kept(order_of(x), at, limit, last) & (score >= least)
            if HAS_TRIALS:
                first = row + tl.load(trials + row * TRIAL)
                is_rejected = (first > row) & (tl.load(trials + row * TRIAL + 3) == 0)
                is_open = is_open & (is_tried(trials, tl.where(is_rejected, first, -1), -1, at, TRIAL) == 0)
            total = tl.where(is_open, score + gumbel(token, words), float("-inf"))
            is_better = total > best
            best, found = tl.where(is_better, total, best), tl.where(is_better, at, found)
        value, index = first_best(best, found)
        tl.store(part_values + out, value)
        tl.store(part_ids + out, index)
    else:
        tl.store(part_values + out, tl.load(best_values + out).to(tl.float64))
        tl.store(part_ids + out, tl.load(best_ids + out))
    tl.debug_barrier()  # all threads have stored before one of them says so
    parts = tl.num_programs(1)
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
        each = row * parts + tl.arange(0, BLOCK_P)
        inside = tl.arange(0, BLOCK_P) < parts
        value = tl.load(part_values + each, mask=inside, other=float("-inf"), cache_modifier=".cg")
        found = tl.load(part_ids + each, mask=inside, other=0x7FFFFFFF, cache_modifier=".cg")
        _, index = first_best(value, found)
        index = index.to(tl.int64)
        if HAS_TRIALS:
            accepted = tl.load(taken + row)
            index = tl.where(accepted >= 0, accepted, index)
        tl.store(ids + row, index)
        tl.store(arrived + row, 0)
