"""The end of a product before its results are stored: nothing, an activation, norm and rotation of heads, or a
convolution along each sequence.

Rows of a matrix that belong together are packed as neighbors, 2i and 2i + 1: a gate and its up row, or the two numbers
of a head that rotate together. So one program has both, in the products of every number of tokens. Where all numbers of
a head are needed at once, the program that ends last of those that compute them has them.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated
from ridgeline.ops.triton.heads import head_product, rotated, write_latents
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
def store_absorbed(
    total, block, token, tokens, rows, out, turn, kept, norms, whole, finished, latent, FINISH: tl.constexpr
):  # fmt: skip
    """Store sums of a block of rows in whole [tokens, rows]. The program that ends last of those of some heads maps
    these into the space of latents, as `heads.absorb` does: out [tokens, H, RANK + DIM]. Latents go into pages.

    All tokens are in one block. FINISH: its name, H, numbers of a latent, numbers of a head before those that rotate,
    those that rotate, whether they do, whether neighbors rotate together, how pages hold numbers, slices of queries,
    powers of two that are at least DIM and at least a row of a page, and the rows and columns of a matrix that are
    multiplied at once. latent: see `store`.
    """
    H: tl.constexpr = FINISH[1]
    RANK: tl.constexpr = FINISH[2]
    STILL: tl.constexpr = FINISH[3]
    DIM: tl.constexpr = FINISH[4]
    D: tl.constexpr = STILL + DIM
    R: tl.constexpr = total.shape[0]
    COMMON: tl.constexpr = (D & -D) if (D & -D) < R else R  # as in `store_whole_heads`
    HEADS: tl.constexpr = R // COMMON
    BLOCKS: tl.constexpr = D // COMMON
    matrices, matrix_strides, latents, latents_stride = latent
    keys, _, key_scales, _, pages, slots, strides, scales = kept
    weight, _, offset, eps = norms
    row, is_token = block * R + tl.arange(0, R), token < tokens
    tl.store(whole + (token * rows)[None, :] + row[:, None], total, mask=(row < rows)[:, None] & is_token[None, :])
    write_latents(
        block, tokens, tl.num_programs(1), latents, latents_stride, weight, turn, offset, eps,
        (keys, key_scales, pages, slots, (strides[0], strides[1], strides[3]), scales[0]),
        RANK, DIM, FINISH[10], FINISH[7], FINISH[5], FINISH[6],
    )  # fmt: skip
    tl.debug_barrier()  # all threads have stored before one of them says so
    group = block // BLOCKS
    last = tl.minimum(BLOCKS, tl.num_programs(1) - group * BLOCKS) - 1
    if tl.atomic_add(finished + group, 1, sem="acq_rel") == last:
        for head in range(group * HEADS, tl.minimum((group + 1) * HEADS, H)):
            mine, to = (whole + token * rows + head * D)[:, None], out + (token * H + head) * (RANK + DIM)
            for begin in range(0, RANK, FINISH[11]):
                head_product(
                    mine, matrices + (tl.full([], 0, tl.int64) + head) * matrix_strides[0], to[None, :], token,
                    begin + tl.arange(0, FINISH[11]), is_token, matrix_strides[1], matrix_strides[2], RANK, STILL,
                    FINISH[8], FINISH[12], ".cg",
                )  # fmt: skip
            at = tl.arange(0, FINISH[9])[None, :]
            inside = is_token[:, None] & (at < DIM)
            end = rotated(
                mine + STILL, at, inside, turn[0], turn[1], token[:, None], DIM, FINISH[5], FINISH[6], ".cg"
            )  # fmt: skip
            tl.store(to[:, None] + RANK + at, end, mask=inside)
        tl.store(finished + group, 0)


@triton.jit
def convolved(total, row, token, is_token, states, filters, FINISH: tl.constexpr):
    """Return total [rows, tokens] whose first rows are channels that are filtered and activated.

    Each token is one of a sequence of its own. FINISH: its name, channels, inputs that a state keeps, whether filters
    have a bias, and an activation. states: pages [KEPT, channels] of inputs, the pages that sequences read and write,
    which sequences begin, and a stride. The arithmetic is that of `scans.filtered`.
    """
    CHANNELS: tl.constexpr = FINISH[1]
    KEPT: tl.constexpr = FINISH[2]
    kept, read, write, fresh, stride = states
    weight, bias = filters
    is_mine = (row < CHANNELS)[:, None] & is_token[None, :]
    begins = tl.load(fresh + token, mask=is_token, other=1) != 0
    source = kept + tl.load(read + token, mask=is_token, other=0).to(tl.int64)[None, :] * stride + row[:, None]
    target = kept + tl.load(write + token, mask=is_token, other=0).to(tl.int64)[None, :] * stride + row[:, None]
    found = tl.zeros([total.shape[0], total.shape[1]], tl.float32)
    for j in tl.static_range(KEPT):
        given = tl.load(source + j * CHANNELS, mask=is_mine & (begins == 0)[None, :], other=0.0)
        found += given * tl.load(weight + row * (KEPT + 1) + j, mask=row < CHANNELS, other=0.0).to(tl.float32)[:, None]
        if j > 0:  # row j was read, and becomes row j - 1, which was read before
            tl.store(target + (j - 1) * CHANNELS, given, mask=is_mine)
        tl.debug_barrier()  # all threads have read before one of them writes
    tl.store(target + (KEPT - 1) * CHANNELS, total, mask=is_mine)
    found += total * tl.load(weight + row * (KEPT + 1) + KEPT, mask=row < CHANNELS, other=0.0).to(tl.float32)[:, None]
    if FINISH[3]:
        found += tl.load(bias + row, mask=row < CHANNELS, other=0.0).to(tl.float32)[:, None]
    if FINISH[4] != "none":
        found = activated(found, FINISH[4])
    return tl.where(is_mine, found, total)


@triton.jit
def store(
    total, block, token, tokens, rows, out, gates, turn, kept, norms, whole, finished, fresh, latent,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Store sums [rows, tokens] of a block of rows.

    FINISH: "rows"; or "activated", a name and whether rows are pairs of a gate and an up row; or "logits", a factor and
    a soft cap, 0 for none; or "heads", "whole heads", "convolved" or "absorbed", and what their functions take.
    turn: cosines and sines of angles. kept: arrays or pages of keys and values, their scales, the pages and slots of
    tokens, strides from a page, a slot, a head and the scales of a page to the next, and the scales of all keys and of
    all values. norms: weights of queries and of keys, offset and eps. latent: the matrices of heads, strides from a
    matrix, a row and a column to the next, and latents with the keys behind them, in rows of a stride.

    "convolved": `kept` has pages of inputs in place of keys, and pages that are read and written in place of pages and
    slots; `norms` has filters and their biases in place of weights. "absorbed": keys are rows of latents, and the
    weights of queries are those of latents.
    """
    if FINISH[0] == "heads":
        store_heads(total, block, token, token < tokens, out, gates, turn, kept, FINISH)
    elif FINISH[0] == "absorbed":
        store_absorbed(total, block, token, tokens, rows, out, turn, kept, norms, whole, finished, latent, FINISH)
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
        if FINISH[0] == "convolved":
            inputs, _, _, _, read, write, strides, _ = kept
            weight, bias, _, _ = norms
            states = inputs, read, write, fresh, strides[0]
            total = convolved(total, row, token, token < tokens, states, (weight, bias), FINISH)
        tl.store(
            out + token[None, :] * rows + row[:, None], total, mask=(row < rows)[:, None] & (token < tokens)[None, :]
        )  # fmt: skip
