"""Attention over pages: prompts, chunks and decode steps with one arithmetic.

Keys are divided into splits at fixed positions. The softmax of a split is computed from its own start, in tiles of a
fixed number of keys, and splits are merged in ascending order. One program computes all splits of a tile of queries, or
each split has a program and the one that ends last merges them: the bits are equal. Tiles and splits that a query does
not see change nothing, so its result depends on its own sequence only.

Keys and values are the left operands of all dot products, and queries are their columns, as in `dense.py`.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.numbers import tanh


@triton.jit
def sliced(x, kind: tl.constexpr, SLICES: tl.constexpr):
    """Return x, float32, as one number of a type of 16 bits and the rest of it as another one."""
    high = x.to(kind)
    if SLICES == 1:
        low = high
    else:
        low = (x - high.to(tl.float32)).to(kind)
    return high, low


@triton.jit
def product(left, high, low, acc, SLICES: tl.constexpr):
    """Return acc + left @ x, for the slices of x."""
    acc = tl.dot(left, high, acc)
    if SLICES == 2:
        acc = tl.dot(left, low, acc)
    return acc


@triton.jit
def power_of_two(x):
    """Return the largest power of two that is at most x, for x >= 0, and its inverse; both are exact."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)  # both are normal numbers
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def finite(x):
    """Return x, or 0 for minus infinity: the differences from it are then minus infinity, and not NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def merge(m, s, acc, m_new, s_new, acc_new):
    """Return the softmax of two parts: the largest score, the sum of weights and the weighted sum of values of each."""
    top = tl.maximum(m, m_new)
    old, new = tl.exp(m - finite(top)), tl.exp(m_new - finite(top))
    return top, s * old + s_new * new, acc * old[None, :] + acc_new * new[None, :]


@triton.jit
def split_of(
    high, low, factor, keys, values, table, head, position, oldest, last, split, page_stride, slot_stride,
    head_stride, cap, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SLICES: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the softmax over the keys of one split: m [R], s [R] and acc [WIDTH, R].

    The slices [WIDTH, R] times factor [R] are the queries with their scale. position: position of each query, -1 for
    none. oldest, last: the first and the last key that a query of the tile sees; other keys may be NaN.
    """
    begin, end = tl.maximum(split * SPLIT, oldest // BLOCK_K * BLOCK_K), tl.minimum((split + 1) * SPLIT, last + 1)
    R: tl.constexpr = position.shape[0]
    d, n = tl.arange(0, WIDTH), tl.arange(0, BLOCK_K)
    m = tl.full([R], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_K, R], tl.float32)
    acc = tl.zeros([WIDTH, R], tl.float32)
    for start in range(begin, end, BLOCK_K):
        slot = start + n
        is_held = (slot >= oldest) & (slot < end)
        page = tl.load(table + slot // PAGE, mask=is_held, other=0).to(tl.int64)
        row = page * page_stride + (slot % PAGE) * slot_stride + head * head_stride
        is_read = is_held[:, None] & (d < D)[None, :]
        k = tl.load(keys + row[:, None] + d[None, :], mask=is_read, other=0.0)
        scores = product(k, high, low, tl.zeros([BLOCK_K, R], tl.float32), SLICES) * factor[None, :]
        if HAS_CAP:
            scores = cap * tanh(tl.div_rn(scores, cap))
        seen = is_held[:, None] & (slot[:, None] <= position[None, :])
        if WINDOW > 0:
            seen = seen & (slot[:, None] > position[None, :] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 0))
        old, p = tl.exp(m - finite(top)), tl.exp(scores - finite(top)[None, :])
        v = tl.load(values + row[:, None] + d[None, :], mask=is_read, other=0.0)
        weights = weights * old[None, :] + p
        p_high, p_low = sliced(p, v.dtype, SLICES)
        acc = product(tl.trans(v), p_high, p_low, acc * old[None, :], SLICES)
        m = top
    # A product with ones adds up the weights of a query in one order, whatever threads hold them.
    w_high, w_low = sliced(weights, keys.dtype.element_ty, SLICES)
    ones = tl.full([BLOCK_K, BLOCK_K], 1.0, tl.float32).to(keys.dtype.element_ty)
    sums = product(ones, w_high, w_low, tl.zeros([BLOCK_K, R], tl.float32), SLICES)
    return m, tl.max(sums, 0), acc


@triton.jit
def in_turn(
    high, low, factor, keys, values, table, head, position, oldest, last, page_stride, slot_stride, head_stride, cap,
    sums, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SLICES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the softmax over all splits, one after the other.

    sums: cells [WIDTH, R] of this program, for the sum over the splits before: registers have no room for it.
    """
    R: tl.constexpr = position.shape[0]
    m = tl.full([R], float("-inf"), tl.float32)
    s = tl.zeros([R], tl.float32)
    begin_split = oldest // SPLIT
    for split in range(begin_split, last // SPLIT + 1):
        m_own, s_own, acc_own = split_of(
            high, low, factor, keys, values, table, head, position, oldest, last, split, page_stride, slot_stride,
            head_stride, cap, WINDOW, HAS_CAP, SLICES, D, WIDTH, PAGE, SPLIT, BLOCK_K,
        )  # fmt: skip
        if split > begin_split:
            before = tl.load(sums)
        else:
            before = tl.zeros([WIDTH, R], tl.float32)
        m, s, acc = merge(m, s, before, m_own, s_own, acc_own)
        tl.store(sums, acc)
        tl.debug_barrier()  # other threads may read it
    return m, s, tl.load(sums)


@triton.jit
def store_part(parts, index, kept, is_kept, m, s, acc, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Store the softmax of a split as part `index`. kept: the column of each query in the part."""
    base, d = parts + index * ((WIDTH + 2) * KEPT), tl.arange(0, WIDTH)
    tl.store(base + d[:, None] * KEPT + kept[None, :], acc, mask=(d < WIDTH)[:, None] & is_kept[None, :])
    tl.store(base + WIDTH * KEPT + kept, m, mask=is_kept)
    tl.store(base + (WIDTH + 1) * KEPT + kept, s, mask=is_kept)


@triton.jit
def load_part(parts, index, kept, is_kept, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Return what `store_part` stored, from the memory that all programs share."""
    base, d = parts + index * ((WIDTH + 2) * KEPT), tl.arange(0, WIDTH)
    cell, is_cell = base + d[:, None] * KEPT + kept[None, :], (d < WIDTH)[:, None] & is_kept[None, :]
    m = tl.load(base + WIDTH * KEPT + kept, mask=is_kept, other=0.0, cache_modifier=".cg")
    s = tl.load(base + (WIDTH + 1) * KEPT + kept, mask=is_kept, other=1.0, cache_modifier=".cg")
    return m, s, tl.load(cell, mask=is_cell, other=0.0, cache_modifier=".cg")


@triton.jit
def merge_parts(parts, index, begin, end, kept, is_kept, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Return the softmax over the splits [begin, end), in ascending order; index: that of split 0."""
    m = tl.full([kept.shape[0]], float("-inf"), tl.float32)
    s, acc = tl.zeros([kept.shape[0]], tl.float32), tl.zeros([WIDTH, kept.shape[0]], tl.float32)
    for split in range(begin, end):
        m_own, s_own, acc_own = load_part(parts, index + split, kept, is_kept, WIDTH, KEPT)
        m, s, acc = merge(m, s, acc, m_own, s_own, acc_own)
    return m, s, acc


@triton.jit
def slices_of(q, scale, kind: tl.constexpr, SLICES: tl.constexpr):
    """Return two slices of q [R, WIDTH] as columns, and the factor of each that gives q times the scale.

    float16 slices need numbers near 1, so a query is divided by a power of two.
    """
    size, inverse = power_of_two(tl.max(tl.abs(q), 1))
    high, low = sliced(tl.trans(q * inverse[:, None]), kind, SLICES)
    return high, low, scale * size


@triton.jit
def finish(m, s, acc, sinks, head, is_real, HAS_SINKS: tl.constexpr):
    """Return the results of a softmax; sinks: a logit of each head that counts in the denominator alone."""
    old = tl.full([m.shape[0]], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_real, other=0.0).to(tl.float32)
        top = tl.maximum(m, sink)
        old = tl.exp(m - top)
        s = s * old + tl.exp(sink - top)
    return tl.div_rn(acc * old[None, :], tl.zeros_like(acc) + s[None, :])


@triton.jit
def tile_of(lengths, sequences, BLOCK_Q: tl.constexpr, MOST: tl.constexpr):
    """Return the sequence of this program, the number of its tokens before this tile, and that of all tokens before.

    The tiles of all sequences are numbered in order. A program behind the last tile gets a sequence that is none.
    """
    at = tl.arange(0, MOST)
    length = tl.load(lengths + at, mask=at < sequences, other=0).to(tl.int32)
    tiles = (length + BLOCK_Q - 1) // BLOCK_Q
    ends = tl.cumsum(tiles, 0)
    sequence = tl.sum((ends <= tl.program_id(0)).to(tl.int32), 0)
    before = at < sequence
    tile = tl.program_id(0) - tl.sum(tl.where(before, tiles, 0), 0)
    return sequence, tile * BLOCK_Q, tl.sum(tl.where(before, length, 0), 0)


@triton.jit
def attend(
    q, keys, values, tables, starts, lengths, sinks, out, parts, arrived, sequences, table_stride, page_stride,
    slot_stride, head_stride, scale, cap, splits, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SLICES: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr,
    MOST: tl.constexpr, SINGLE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Compute out [T, H, D] for a tile of BLOCK_Q queries of one sequence and the heads of one head of keys.

    GROUP: a power of two that is at least H / K. SINGLE: each sequence has one query. MOST: at least `sequences`.
    """
    R: tl.constexpr = BLOCK_Q * GROUP
    KEPT: tl.constexpr = BLOCK_Q * (H // K)  # columns of parts: those of real heads
    column, head = tl.arange(0, R), tl.program_id(1)
    if SINGLE:
        sequence, begun, token = tl.program_id(0), 0, tl.program_id(0)
    else:
        sequence, begun, token = tile_of(lengths, sequences, BLOCK_Q, MOST)
    if sequence < sequences:
        count = tl.load(lengths + sequence).to(tl.int32)
        first = tl.load(starts + sequence).to(tl.int32) + begun  # position of the first query
        last = first + tl.minimum(BLOCK_Q, count - begun) - 1
        query, member = column // GROUP, column % GROUP
        is_real = (member < H // K) & (query < count - begun)
        position = tl.where(is_real, first + query, -1)
        d = tl.arange(0, WIDTH)
        cell = (token + begun + query).to(tl.int64) * (H * D) + (head * (H // K) + member) * D
        is_cell = is_real[:, None] & (d < D)[None, :]
        queries = tl.load(q + cell[:, None] + d[None, :], mask=is_cell, other=0.0)
        high, low, factor = slices_of(queries, scale, keys.dtype.element_ty, SLICES)
        oldest = tl.maximum(first - WINDOW + 1, 0) if WINDOW > 0 else 0
        begin_split, end_split = oldest // SPLIT, last // SPLIT + 1
        table, block = tables + sequence.to(tl.int64) * table_stride, (tl.program_id(0) * K + head).to(tl.int64)
        is_last = True
        if APART:
            split = tl.program_id(2)
            is_last = False
            m, s = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32)
            acc = tl.zeros([WIDTH, R], tl.float32)
            if (split >= begin_split) & (split < end_split):
                m_own, s_own, acc_own = split_of(
                    high, low, factor, keys, values, table, head, position, oldest, last, split, page_stride,
                    slot_stride, head_stride, cap, WINDOW, HAS_CAP, SLICES, D, WIDTH, PAGE, SPLIT, BLOCK_K,
                )  # fmt: skip
                kept, is_kept = query * (H // K) + member, member < H // K
                store_part(parts, block * splits + split, kept, is_kept, m_own, s_own, acc_own, WIDTH, KEPT)
                tl.debug_barrier()  # all threads have stored before one of them says so
                is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == end_split - begin_split - 1
                if is_last:
                    m, s, acc = merge_parts(parts, block * splits, begin_split, end_split, kept, is_kept, WIDTH, KEPT)
                    tl.store(arrived + block, 0)
        else:
            sums = parts + block * (WIDTH * R) + d[:, None] * R + column[None, :]
            m, s, acc = in_turn(
                high, low, factor, keys, values, table, head, position, oldest, last, page_stride, slot_stride,
                head_stride, cap, sums, WINDOW, HAS_CAP, SLICES, D, WIDTH, PAGE, SPLIT, BLOCK_K,
            )  # fmt: skip
        if is_last:
            found = finish(m, s, acc, sinks, head * (H // K) + member, is_real, HAS_SINKS)
            tl.store(out + cell[None, :] + d[:, None], found, mask=tl.trans(is_cell))
