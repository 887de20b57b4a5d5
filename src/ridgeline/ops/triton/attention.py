"""Attention over pages: prompts, chunks, decode steps and trees of drafts with one arithmetic.

Keys are divided into splits at fixed positions. The softmax of a split is computed from its own start, in tiles of a
fixed number of keys, and splits are merged in ascending order. One program computes all splits of a tile of queries, or
each split has a program and the one that ends last merges them: the bits are equal. Tiles and splits that a query does
not see change nothing, so its result depends on its own sequence only.

Keys and values are the left operands of all dot products, and queries are their columns, as in `dense.py`. Numbers in
int8 and fp8 are bfloat16 numbers; the scale of an int8 row multiplies its scores and its weights. Numbers in float32
are two of them.

Latents are one head of keys that are longer than its values: a value is the beginning of its key.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.numbers import e4m3, tanh
from ridgeline.ops.triton.sight import bits_of, bounds_of, sees, tile_at


@triton.jit
def sliced(x, kind: tl.constexpr, SLICES: tl.constexpr):
    """Return x, float32, as one number of a type and the rest of it as another one."""
    high = x.to(kind)
    if SLICES == 1:
        low = high
    else:
        low = (x - high.to(tl.float32)).to(kind)
    return high, low


@triton.jit
def product(left, high, low, acc, SLICES: tl.constexpr):
    """Return acc + left @ x, for the slices of x. Numbers in float32 are two slices, too; the product of both second
    slices is left out.
    """
    if left.dtype == tl.float32:
        left_high, left_low = sliced(left, tl.bfloat16, SLICES)
        acc = tl.dot(left_high, high, acc)
        if SLICES == 2:
            acc = tl.dot(left_low, high, tl.dot(left_high, low, acc))
    else:
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
def nothing(R: tl.constexpr, WIDTH: tl.constexpr):
    """Return the softmax of R queries over no keys."""
    return tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32), tl.zeros([WIDTH, R], tl.float32)


@triton.jit
def merge(m, s, acc, m_new, s_new, acc_new):
    """Return the softmax of two parts: the largest score, the sum of weights and the weighted sum of values of each."""
    top = tl.maximum(m, m_new)
    old, new = tl.exp(m - finite(top)), tl.exp(m_new - finite(top))
    return top, s * old + s_new * new, acc * old[None, :] + acc_new * new[None, :]


@triton.jit
def numbers_at(data, row, d, is_read, KIND: tl.constexpr):
    """Return the numbers of rows as the left operand of a product; those in int8 are still to be scaled."""
    found = tl.load(data + row[:, None] + d[None, :], mask=is_read, other=0)
    if KIND == "int8":
        found = found.to(tl.float32).to(tl.bfloat16)
    elif KIND == "fp8":
        found = e4m3(found).to(tl.bfloat16)
    return found


@triton.jit
def rows_at(data, place, row, d, is_read, NUMBERS: tl.constexpr, MASKED: tl.constexpr):
    """Return the numbers of a tile of rows. data: a pointer; or a descriptor, which reads from `place` on: a page, a
    slot and a head. MASKED: numbers that are not read become zeros there, too.
    """
    if NUMBERS[4]:
        found = tl.reshape(data.load([place[0], place[1], place[2], 0]), [row.shape[0], d.shape[0]])
        if MASKED:
            found = tl.where(is_read, found, tl.zeros_like(found))
    else:
        found = numbers_at(data, row, d, is_read, NUMBERS[0])
    return found


@triton.jit
def added(weights, kind: tl.constexpr, SLICES: tl.constexpr):
    """Return the sum of each column of weights [N, R].

    A product with ones adds them up in one order, whatever threads hold them.
    """
    N: tl.constexpr = weights.shape[0]
    high, low = sliced(weights, kind, SLICES)
    ones = tl.full([N, N], 1.0, tl.float32).to(kind)
    return tl.max(product(ones, high, low, tl.zeros_like(weights), SLICES), 0)


@triton.jit
def add_scores(scores, queries, keys, row, is_held, chunk, SHAPE: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the sum of scores and the products of some numbers of keys and queries; those of queries are read here."""
    CHUNK: tl.constexpr = NUMBERS[3]
    _, _, q, cell, is_real, inverse, _ = queries
    d = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (d < SHAPE[4])[None, :]
    x = tl.load(q + cell[:, None] + d[None, :], mask=is_real[:, None] & inside, other=0.0)
    high, low = sliced(tl.trans(x * inverse[:, None]), NUMBERS[1], NUMBERS[2])
    k = numbers_at(keys, row, d, is_held[:, None] & inside, NUMBERS[0])
    return product(k, high, low, scores, NUMBERS[2])


@triton.jit
def scores_of(queries, keys, place, row, is_held, SHAPE: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the products of keys in some rows with queries, times their factors: [BLOCK_K, R]."""
    SLICES: tl.constexpr = NUMBERS[2]
    CHUNK: tl.constexpr = NUMBERS[3]
    high, low, _, cell, _, _, factor = queries
    scores = tl.zeros([row.shape[0], cell.shape[0]], tl.float32)
    if CHUNK == 0:
        d = tl.arange(0, SHAPE[3])
        k = rows_at(keys, place, row, d, is_held[:, None] & (d < SHAPE[4])[None, :], NUMBERS, False)
        scores = product(k, high, low, scores, SLICES)
    elif keys.dtype.element_ty == tl.float32:  # an unrolled loop would spill registers
        for chunk in range((SHAPE[4] + CHUNK - 1) // CHUNK):
            scores = add_scores(scores, queries, keys, row, is_held, chunk, SHAPE, NUMBERS)
    else:  # an unrolled loop lets copies of the next keys run ahead
        for chunk in tl.static_range((SHAPE[4] + CHUNK - 1) // CHUNK):
            scores = add_scores(scores, queries, keys, row, is_held, chunk, SHAPE, NUMBERS)
    return scores * factor[None, :]


@triton.jit
def add_tile(
    sums, step, bounds, queries, stored, span, head, split, cap, HAS_CAP: tl.constexpr, SHAPE: tl.constexpr,
    RULE: tl.constexpr, NUMBERS: tl.constexpr, SIZES: tl.constexpr, TREE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the softmax m [R], weights [BLOCK_K, R] and acc [WIDTH, R] with one tile of keys more; see `split_of`."""
    PAGE: tl.constexpr = SIZES[0]
    keys, values, key_scales, value_scales, table, strides = stored
    m, weights, acc = sums
    begin, ahead, _ = bounds
    d = tl.arange(0, SHAPE[3])
    at, is_held, slot = tile_at(step, begin, ahead, split, span, RULE, SIZES, TREE)
    page = tl.load(table + slot // PAGE, mask=is_held, other=0).to(tl.int64)
    row = page * strides[0] + (slot % PAGE) * strides[1] + head * strides[2]
    place = (0, 0, 0)
    if NUMBERS[4]:  # all keys of a tile are in one page
        first = begin + step - ahead
        if RULE[2] > 0:
            first = tl.where(step < ahead, split * SIZES[1] + step, first)
        place = (tl.load(table + first // PAGE).to(tl.int32), first % PAGE, head)
    scale_at = page * strides[3] + (slot % PAGE) * SHAPE[1] + head
    scores = scores_of(queries, keys, place, row, is_held, SHAPE, NUMBERS)
    if NUMBERS[0] == "int8":
        scores *= tl.load(key_scales + scale_at, mask=is_held, other=0.0)[:, None]
    if HAS_CAP:
        scores = cap * tanh(tl.div_rn(scores, cap))
    scores = tl.where(is_held[:, None] & sees(at, span[0], RULE), scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 0))
    old, p = tl.exp(m - finite(top)), tl.exp(scores - finite(top)[None, :])
    weights = weights * old[None, :] + p
    if NUMBERS[0] == "int8":
        p *= tl.load(value_scales + scale_at, mask=is_held, other=0.0)[:, None]
    v = rows_at(values, place, row, d, is_held[:, None] & (d < SHAPE[2])[None, :], NUMBERS, MASKED)
    p_high, p_low = sliced(p, NUMBERS[1], NUMBERS[2])
    return top, weights, product(tl.trans(v), p_high, p_low, acc * old[None, :], NUMBERS[2])


@triton.jit
def split_of(
    queries, stored, span, head, split, cap, HAS_CAP: tl.constexpr, SHAPE: tl.constexpr, RULE: tl.constexpr,
    NUMBERS: tl.constexpr, SIZES: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Return the softmax over the keys of one split: m [R], s [R] and acc [WIDTH, R].

    queries: see `slices_of`.
    span: the position of each query, -1 for none; the first and the last key that a query of the tile sees, apart from
    first keys of the RULE; and, in a TREE, the number of slots without drafts and the path. Other keys may be NaN.
    """
    WIDTH: tl.constexpr = SHAPE[3]
    BLOCK_K: tl.constexpr = SIZES[2]
    R: tl.constexpr = span[0].shape[0]
    bounds = bounds_of(split, span, RULE, SIZES)
    m = tl.full([R], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_K, R], tl.float32)
    acc = tl.zeros([WIDTH, R], tl.float32)
    whole = 0
    if NUMBERS[4] and RULE[0] == 0:  # tiles all of whose keys are read need no mask
        whole = bounds[2] // BLOCK_K * BLOCK_K
        for step in range(0, whole, BLOCK_K):
            m, weights, acc = add_tile(
                (m, weights, acc), step, bounds, queries, stored, span, head, split, cap, HAS_CAP, SHAPE, RULE,
                NUMBERS, SIZES, TREE, False,
            )  # fmt: skip
    for step in range(whole, bounds[2], BLOCK_K):
        m, weights, acc = add_tile(
            (m, weights, acc), step, bounds, queries, stored, span, head, split, cap, HAS_CAP, SHAPE, RULE, NUMBERS,
            SIZES, TREE, True,
        )  # fmt: skip
    return m, added(weights, NUMBERS[1], NUMBERS[2]), acc


@triton.jit
def in_turn(
    queries, stored, span, head, splits, cap, sums, HAS_CAP: tl.constexpr, SHAPE: tl.constexpr, RULE: tl.constexpr,
    NUMBERS: tl.constexpr, SIZES: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Return the softmax over all splits, one after the other.

    splits: see `split_at`. sums: cells [WIDTH, R] of this program, for the sum over the splits before: registers have
    no room for it.
    """
    R: tl.constexpr = span[0].shape[0]
    m, s, before = nothing(R, SHAPE[3])
    for turn in range(splits[2]):
        m_own, s_own, acc_own = split_of(
            queries, stored, span, head, split_at(turn, splits), cap, HAS_CAP, SHAPE, RULE, NUMBERS, SIZES, TREE
        )
        if turn > 0:
            before = tl.load(sums)
        m, s, acc = merge(m, s, before, m_own, s_own, acc_own)
        tl.store(sums, acc)
        tl.debug_barrier()  # other threads may read it
    return m, s, tl.load(sums)


@triton.jit
def splits_of(span, RULE: tl.constexpr, SIZES: tl.constexpr):
    """Return how many splits hold first keys and come before the window, the first split of the window, and the number
    of all splits that a tile reads.
    """
    begin, ahead = span[1] // SIZES[1], 0
    if RULE[2] > 0:
        ahead = tl.minimum((RULE[2] + SIZES[1] - 1) // SIZES[1], begin)
    return ahead, begin, ahead + span[2] // SIZES[1] + 1 - begin


@triton.jit
def split_at(turn, splits):
    """Return the split that comes next after `turn` others; splits: as `splits_of` returns them."""
    ahead, begin = splits[0], splits[1]
    return tl.where(turn < ahead, turn, begin + turn - ahead)


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
def merge_parts(parts, index, splits, kept, is_kept, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Return the softmax over splits, in ascending order; index: that of split 0."""
    m, s, acc = nothing(kept.shape[0], WIDTH)
    for turn in range(splits[2]):
        m_own, s_own, acc_own = load_part(parts, index + split_at(turn, splits), kept, is_kept, WIDTH, KEPT)
        m, s, acc = merge(m, s, acc, m_own, s_own, acc_own)
    return m, s, acc


@triton.jit
def slices_of(q, cell, is_real, scale, SHAPE: tl.constexpr, NUMBERS: tl.constexpr):
    """Return two slices of queries as columns; and all that makes them again, for a part of their numbers: q, where
    each query begins, which are real, and a factor. The last result is the factor that gives queries times the scale.

    float16 slices need numbers near 1, so a query is divided by a power of two. Long queries are not kept in
    registers: their slices are made for each tile of keys, some numbers at a time.
    """
    CHUNK: tl.constexpr = NUMBERS[3]
    WIDTH: tl.constexpr = CHUNK if CHUNK > 0 else SHAPE[3]
    largest = tl.zeros([cell.shape[0]], tl.float32)
    for chunk in tl.static_range((SHAPE[4] + WIDTH - 1) // WIDTH):
        d = chunk * WIDTH + tl.arange(0, WIDTH)
        x = tl.load(q + cell[:, None] + d[None, :], mask=is_real[:, None] & (d < SHAPE[4])[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    size, inverse = power_of_two(largest)
    high, low = sliced(tl.trans(x * inverse[:, None]), NUMBERS[1], NUMBERS[2])
    return high, low, q, cell, is_real, inverse, scale * size


@triton.jit
def finish(m, s, acc, sinks, head, is_real, value_scale, HAS_SINKS: tl.constexpr):
    """Return the results of a softmax; sinks: a logit of each head that counts in the denominator alone."""
    old = tl.full([m.shape[0]], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_real, other=0.0).to(tl.float32)
        top = tl.maximum(m, sink)
        old = tl.exp(m - top)
        s = s * old + tl.exp(sink - top)
    return tl.div_rn(acc * old[None, :], tl.zeros_like(acc) + s[None, :]) * value_scale


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
def tile_here(
    starts, lengths, paths, sequences, BLOCK_Q: tl.constexpr, MOST: tl.constexpr, SINGLE: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    """Return the sequence of this program, its first token, the number of its queries, the position of the first one,
    and, in a TREE, the number of slots without drafts and the path.
    """
    if SINGLE:
        sequence, begun, before = tl.program_id(0), 0, tl.program_id(0)
    else:
        sequence, begun, before = tile_of(lengths, sequences, BLOCK_Q, MOST)
    is_one = sequence < sequences
    length = tl.load(lengths + sequence, mask=is_one, other=0).to(tl.int32)
    first = tl.load(starts + sequence, mask=is_one, other=0).to(tl.int32) + begun
    known, path = first + 1, 0
    if TREE:  # one query
        path = tl.load(paths + before + begun, mask=is_one, other=0)
        others = length - 1 - tl.arange(0, 64)
        drafts = tl.sum((tl.load(paths + before + others, mask=is_one & (others >= 0), other=0) != 0).to(tl.int32), 0)
        ancestors = tl.sum(bits_of(path), 0)
        known = tl.where(ancestors == 0, known, first - begun + length - drafts)
        first = tl.where(ancestors == 0, first, known + ancestors - 1)
    return sequence, before + begun, tl.minimum(BLOCK_Q, length - begun), first, known, path


@triton.jit
def attend(
    q, keys, values, key_scales, value_scales, tables, starts, lengths, paths, sinks, out, parts, arrived, sequences,
    table_stride, page_stride, slot_stride, head_stride, scale_stride, scale, value_scale, cap, num_splits,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SHAPE: tl.constexpr, RULE: tl.constexpr, NUMBERS: tl.constexpr,
    SIZES: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr, MOST: tl.constexpr,
    SINGLE: tl.constexpr, TREE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Compute out [T, H, D] for a tile of BLOCK_Q queries of one sequence and some heads of one head of keys.
    SHAPE: H, K, numbers of a value for one program, a power of two of them, numbers of a query and a key, programs that
    share a value, D. NUMBERS: kind and type of the operands, slices, numbers of a query that are read at once, or 0 for
    queries that stay in registers, and whether `keys` and `values` are tensor descriptors. SIZES: tokens of a page, and
    keys of a split and of a tile. GROUP: heads of the program, a power of two; BLOCKS: programs for the heads of one
    head of keys. SINGLE: each sequence has one query. MOST: at least `sequences`. TREE: drafts of some sequences form
    trees, and BLOCK_Q is 1.
    """
    R: tl.constexpr = BLOCK_Q * GROUP
    MEMBERS: tl.constexpr = SHAPE[0] // SHAPE[1]
    OWN: tl.constexpr = GROUP if BLOCKS > 1 else MEMBERS  # columns of a query in parts
    WIDTH: tl.constexpr = SHAPE[3]
    column, begin = tl.arange(0, R), tl.program_id(1) % SHAPE[5] * SHAPE[2]
    here = tile_here(starts, lengths, paths, sequences, BLOCK_Q, MOST, SINGLE, TREE)
    sequence, token, count, first, known, path = here
    if sequence < sequences:
        query, index, head = column // GROUP, column % GROUP, tl.program_id(1) // (BLOCKS * SHAPE[5])
        member = tl.program_id(1) // SHAPE[5] % BLOCKS * GROUP + index
        is_real = (member < MEMBERS) & (query < count)
        cell = (token + query).to(tl.int64) * SHAPE[0] + head * MEMBERS + member
        queries = slices_of(q, cell * SHAPE[4], is_real, scale, SHAPE, NUMBERS)
        oldest = tl.maximum(first - (RULE[0] - 1) * RULE[1], 0) if RULE[0] > 0 and RULE[3] == 0 else 0
        span = tl.where(is_real, first + query, -1), oldest, first + count - 1, known, path
        table = tables + sequence.to(tl.int64) * table_stride
        strides = page_stride, slot_stride, head_stride, scale_stride
        stored = keys, values if NUMBERS[4] else values + begin, key_scales, value_scales, table, strides
        splits = splits_of(span, RULE, SIZES)
        block, d = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64), tl.arange(0, WIDTH)
        is_last = True
        if APART:
            split = tl.program_id(2)
            is_last = False
            m, s, acc = nothing(R, WIDTH)
            if (split < splits[0]) | ((split >= splits[1]) & (split < splits[1] + splits[2] - splits[0])):
                m_own, s_own, acc_own = split_of(
                    queries, stored, span, head, split, cap, HAS_CAP, SHAPE, RULE, NUMBERS, SIZES, TREE
                )
                kept, is_kept, at = query * OWN + index, index < OWN, block * num_splits
                store_part(parts, at + split, kept, is_kept, m_own, s_own, acc_own, WIDTH, BLOCK_Q * OWN)
                tl.debug_barrier()  # all threads have stored before one of them says so
                is_last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == splits[2] - 1
                if is_last:
                    m, s, acc = merge_parts(parts, at, splits, kept, is_kept, WIDTH, BLOCK_Q * OWN)
                    tl.store(arrived + block, 0)
        else:
            sums = parts + block * (WIDTH * R) + d[:, None] * R + column[None, :]
            m, s, acc = in_turn(
                queries, stored, span, head, splits, cap, sums, HAS_CAP, SHAPE, RULE, NUMBERS, SIZES, TREE
            )
        if is_last:
            found = finish(m, s, acc, sinks, head * MEMBERS + member, is_real, value_scale, HAS_SINKS)
            to = out + cell[None, :] * SHAPE[6] + begin + d[:, None]
            tl.store(to, found, mask=is_real[None, :] & (d < SHAPE[2])[:, None])
