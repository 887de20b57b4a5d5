"""The end of a product before its results are stored: nothing, an activation, or norm and rotation of heads.

Rows of a matrix that belong together are packed as neighbors, 2i and 2i + 1: a gate and its up row, or the two numbers
of a head that rotate together. So one program has both, in the products of every number of tokens. Where all numbers of
a head are needed at once, the program that ends last of those that compute them has them.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated
from ridgeline.ops.triton.numbers import sum_pairs, tanh
from ridgeline.ops.triton.rows import pairs_of, store_rows, to_pages


@triton.jit
def neighbors(total):
    """Return rows 0, 2, 4 and so on, and rows 1, 3, 5 and so on, of total [rows, tokens]."""
    return tl.split(tl.permute(tl.reshape(total, [total.shape[0] // 2, 2, total.shape[1]]), (0, 2, 1)))


@triton.jit
def begins_of(token, is_token, kept, K: tl.constexpr, D: tl.constexpr):
    """Return where the keys of tokens begin, and the indices of their first scales: in pages, or in an array."""
    _, _, _, _, pages, slots, strides, _ = kept
    if pages is None:
        start, scale = token * (K * D), token * 0
    else:
        page = tl.load(pages + token, mask=is_token, other=0).to(tl.int64)
        slot = tl.load(slots + token, mask=is_token, other=0)
        start, scale = page * strides[0] + slot * strides[1], page * strides[3] + slot * K
    return start, scale


@triton.jit
def store_heads(total, block, token, is_token, out, gates, turn, kept, FINISH: tl.constexpr):
    """Rotate heads of queries and of keys, total [rows, tokens], and store them, and heads of values and of gates.

    Queries go to out [tokens, H, D], keys and values to pages, or to arrays [tokens, K, D], and gates of attention's
    results to gates [tokens, H, D], if there are some. FINISH: its name, H, K, D, numbers of a head that rotate,
    whether neighbors in a head rotate together, and how pages hold numbers. K is 0 for queries alone.
    """
    H: tl.constexpr = FINISH[1]
    K: tl.constexpr = FINISH[2]
    D: tl.constexpr = FINISH[3]
    DIM: tl.constexpr = FINISH[4]
    a, b = neighbors(total)
    both = block * a.shape[0] + tl.arange(0, a.shape[0])
    head, pair = both // (D // 2), both % (D // 2)
    if DIM == D and not FINISH[5]:
        first, second = pair, pair + D // 2
    elif DIM == 0 or FINISH[5]:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first = tl.where(pair < DIM // 2, pair, 2 * pair)
        second = tl.where(pair < DIM // 2, pair + DIM // 2, 2 * pair + 1)
    if DIM > 0:
        cos, sin = turn
        rotates = ((pair < DIM // 2) & (head < H + K))[:, None] & is_token[None, :]
        angle = token[None, :] * (DIM // 2) + pair[:, None]
        c = tl.load(cos + angle, mask=rotates, other=1.0)
        s = tl.load(sin + angle, mask=rotates, other=0.0)
        a, b = tl.where(rotates, a * c + -b * s, a), tl.where(rotates, b * c + a * s, b)
    begin, end = block * a.shape[0] // (D // 2), (block * a.shape[0] + a.shape[0] - 1) // (D // 2)
    if begin < H:
        is_mine = (head < H)[:, None] & is_token[None, :]
        to = out + token[None, :] * (H * D) + (head * D)[:, None]
        tl.store(to + first[:, None], a, mask=is_mine)
        tl.store(to + second[:, None], b, mask=is_mine)
    if K > 0:
        if end >= H:
            keys, values, _, _, _, _, strides, scales = kept
            start, _ = begins_of(token, is_token, kept, K, D)
            at = start[None, :] + ((head - H) * strides[2])[:, None]
            is_mine = ((head >= H) & (head < H + K))[:, None] & is_token[None, :]
            tl.store(keys + at + first[:, None], to_pages(a, keys.dtype.element_ty, scales[0], FINISH[6]), mask=is_mine)
            tl.store(
                keys + at + second[:, None], to_pages(b, keys.dtype.element_ty, scales[0], FINISH[6]), mask=is_mine
            )
            at -= K * strides[2]
            is_mine = ((head >= H + K) & (head < H + 2 * K))[:, None] & is_token[None, :]
            kept_a = to_pages(a, values.dtype.element_ty, scales[1], FINISH[6])
            kept_b = to_pages(b, values.dtype.element_ty, scales[1], FINISH[6])
            tl.store(values + at + first[:, None], kept_a, mask=is_mine)
            tl.store(values + at + second[:, None], kept_b, mask=is_mine)
    if gates is not None:
        if end >= H + 2 * K:
            to = gates + token[None, :] * (H * D) + ((head - H - 2 * K) * D)[:, None]
            is_mine = ((head >= H + 2 * K) & (head < 2 * H + 2 * K))[:, None] & is_token[None, :]
            tl.store(to + first[:, None], a, mask=is_mine)
            tl.store(to + second[:, None], b, mask=is_mine)


@triton.jit
def finish_head(
    head, token, is_token, rows, whole, out, gates, turn, kept, norms, FINISH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Normalize and rotate one head of some tokens, and store it as `store_heads` does."""
    H: tl.constexpr = FINISH[1]
    K: tl.constexpr = FINISH[2]
    D: tl.constexpr = FINISH[3]
    DIM: tl.constexpr = FINISH[4]
    at = tl.arange(0, BLOCK)
    inside, mine = is_token[:, None] & (at < D)[None, :], whole + (token * rows)[:, None] + head * D
    x = tl.load(mine + at[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    if head < H + K:
        size = 1.0
        if FINISH[7]:
            q_weight, k_weight, offset, eps = norms
            weight = q_weight if head < H else k_weight
            size = tl.rsqrt(sum_pairs(x * x) / D + eps)[:, None]
            x *= size * (offset + tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32))[None, :]
        if DIM > 0:
            cos, sin = turn
            pair, is_first, partner = pairs_of(at, DIM, FINISH[5])
            rotates = at < DIM
            partner, is_turned = tl.where(rotates, partner, at), is_token[:, None] & rotates[None, :]
            other = tl.load(mine + partner[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            if FINISH[7]:
                other *= size * (offset + tl.load(weight + partner, mask=at < D, other=0.0).to(tl.float32))[None, :]
            angle = (token * (DIM // 2))[:, None] + pair[None, :]
            c = tl.load(cos + angle, mask=is_turned, other=1.0)
            s = tl.load(sin + angle, mask=is_turned, other=0.0)
            x = tl.where(rotates[None, :], x * c + tl.where(is_first[None, :], -other, other) * s, x)
    if head < H:
        tl.store(out + ((token * H + head) * D)[:, None] + at[None, :], x, mask=inside)
    if K > 0:
        if (head >= H) & (head < H + 2 * K):
            keys, values, key_scales, value_scales, _, _, strides, scales = kept
            start, first = begins_of(token, is_token, kept, K, D)
            number = (head - H) % K
            begin, index = start + number * strides[2], first + number
            if head < H + K:
                store_rows(x, keys, key_scales, begin, index, is_token, at, 0, 0, scales[0], D, FINISH[6])
            else:
                store_rows(x, values, value_scales, begin, index, is_token, at, 0, 0, scales[1], D, FINISH[6])
    if gates is not None:
        if head >= H + 2 * K:
            tl.store(gates + ((token * H + head - H - 2 * K) * D)[:, None] + at[None, :], x, mask=inside)


@triton.jit
def store_whole_heads(
    total, block, token, tokens, rows, out, gates, turn, kept, norms, whole, finished, FINISH: tl.constexpr
):  # fmt: skip
    """Store sums of a block of rows in whole [tokens, rows]. The program that ends last of those of some heads
    normalizes and rotates these, and stores them as `store_heads` does.

    FINISH: as in `store_heads`, whether queries and keys have norms, and a power of two that is at least D. finished:
    counts the programs of the same heads and tokens that have ended.
    """
    D: tl.constexpr = FINISH[3]
    R: tl.constexpr = total.shape[0]
    T: tl.constexpr = total.shape[1]
    COMMON: tl.constexpr = (D & -D) if (D & -D) < R else R  # the largest common divisor: R is a power of two
    HEADS: tl.constexpr = R // COMMON  # the fewest that fill up whole blocks, and as many as BLOCKS
    BLOCKS: tl.constexpr = D // COMMON
    NUMBERS: tl.constexpr = 512 if R < 64 else 256  # of tokens at once: with more, some case spills a few bytes
    FIT: tl.constexpr = NUMBERS // FINISH[8] if FINISH[8] < NUMBERS else 1
    AT_ONCE: tl.constexpr = FIT if FIT < T else T
    row = block * R + tl.arange(0, R)
    head, number = row // D, row % D
    if FINISH[4] > 0 and not FINISH[5]:  # neighbors become numbers in their own order
        number = tl.where(number < FINISH[4], number // 2 + number % 2 * (FINISH[4] // 2), number)
    to = whole + (token * rows)[None, :] + (head * D + number)[:, None]
    tl.store(to, total, mask=(row < rows)[:, None] & (token < tokens)[None, :])
    tl.debug_barrier()  # all threads have stored before one of them says so
    group = block // BLOCKS
    counter = finished + group * tl.num_programs(0) + tl.program_id(0)
    last = tl.minimum(BLOCKS, tl.num_programs(1) - group * BLOCKS) - 1
    if tl.atomic_add(counter, 1, sem="acq_rel") == last:
        for mine in range(group * HEADS, tl.minimum((group + 1) * HEADS, rows // D)):
            for begin in range(0, T, AT_ONCE):
                here = (tl.program_id(0) * T + begin + tl.arange(0, AT_ONCE)).to(tl.int64)
                finish_head(mine, here, here < tokens, rows, whole, out, gates, turn, kept, norms, FINISH, FINISH[8])
        tl.store(counter, 0)


@triton.jit
def store(
    total, block, token, tokens, rows, out, gates, turn, kept, norms, whole, finished, FINISH: tl.constexpr
):  # fmt: skip
    """Store sums [rows, tokens] of a block of rows.

    FINISH: "rows"; or "activated", a name and whether rows are pairs of a gate and an up row; or "logits", a factor and
    a soft cap, 0 for none; or "heads" or "whole heads", and what `store_heads` or `store_whole_heads` takes.
    turn: cosines and sines of angles. kept: arrays or pages of keys and values, their scales, the pages and slots of
    tokens, strides from a page, a slot, a head and the scales of a page to the next, and the scales of all keys and of
    all values. norms: weights of queries and of keys, offset and eps.
    """
    if FINISH[0] == "heads":
        store_heads(total, block, token, token < tokens, out, gates, turn, kept, FINISH)
    elif FINISH[0] == "whole heads":
        store_whole_heads(
            total, block, token, tokens, rows, out, gates, turn, kept, norms, whole, finished, FINISH
        )  # fmt: skip
    else:
        if FINISH[0] == "activated":
            if FINISH[2]:
                gate, up = neighbors(total)
                total = activated(gate, FINISH[1]) * up
                rows = rows // 2
            else:
                total = activated(total, FINISH[1])
        elif FINISH[0] == "logits":
            total *= FINISH[1]
            if FINISH[2] > 0:
                total = FINISH[2] * tanh(tl.div_rn(total, tl.zeros_like(total) + FINISH[2]))
        row = block * total.shape[0] + tl.arange(0, total.shape[0])
        tl.store(
            out + token[None, :] * rows + row[:, None], total, mask=(row < rows)[:, None] & (token < tokens)[None, :]
        )  # fmt: skip
