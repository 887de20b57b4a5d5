"""The end of a product before its results are stored: nothing, an activation, or the rotation of heads.

Rows of a matrix that belong together are packed as neighbors, 2i and 2i + 1: a gate and its up row, or the two numbers
of a head that rotate together. So one program has both, in the products of every number of tokens.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated
from ridgeline.ops.triton.numbers import tanh
from ridgeline.ops.triton.rows import to_floats


@triton.jit
def neighbors(total):
    """Return rows 0, 2, 4 and so on, and rows 1, 3, 5 and so on, of total [rows, tokens]."""
    return tl.split(tl.permute(tl.reshape(total, [total.shape[0] // 2, 2, total.shape[1]]), (0, 2, 1)))


@triton.jit
def store_heads(
    total, block, token, is_token, out, cos, sin, keys, values, gates, pages, slots, page_stride, slot_stride,
    head_stride, FINISH: tl.constexpr,
):  # fmt: skip
    """Rotate heads of queries and of keys, total [rows, tokens], and store them, and heads of values and of gates.

    Queries go to out [tokens, H, D], keys and values to pages, or to arrays [tokens, K, D], and gates of attention's
    results to gates [tokens, H, D], if there are some. FINISH: its name, H, K, D, numbers of a head that rotate,
    whether neighbors in a head rotate together, and whether keys and values go to pages. K is 0 for queries alone.
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
    if K > 0:  # noqa: SIM102 - Triton evaluates the first condition, and a program the second
        if end >= H:
            start = token * (K * D)
            if FINISH[6]:
                page = tl.load(pages + token, mask=is_token, other=0).to(tl.int64)
                start = page * page_stride + tl.load(slots + token, mask=is_token, other=0) * slot_stride
            kept_a, kept_b = to_floats(a, keys.dtype.element_ty), to_floats(b, keys.dtype.element_ty)
            at = start[None, :] + ((head - H) * head_stride)[:, None]
            is_mine = ((head >= H) & (head < H + K))[:, None] & is_token[None, :]
            tl.store(keys + at + first[:, None], kept_a, mask=is_mine)
            tl.store(keys + at + second[:, None], kept_b, mask=is_mine)
            at -= K * head_stride
            is_mine = ((head >= H + K) & (head < H + 2 * K))[:, None] & is_token[None, :]
            tl.store(values + at + first[:, None], kept_a, mask=is_mine)
            tl.store(values + at + second[:, None], kept_b, mask=is_mine)
    if gates is not None:  # noqa: SIM102 - Triton evaluates the first condition, and a program the second
        if end >= H + 2 * K:
            to = gates + token[None, :] * (H * D) + ((head - H - 2 * K) * D)[:, None]
            is_mine = ((head >= H + 2 * K) & (head < 2 * H + 2 * K))[:, None] & is_token[None, :]
            tl.store(to + first[:, None], a, mask=is_mine)
            tl.store(to + second[:, None], b, mask=is_mine)


@triton.jit
def store(
    total, block, token, is_token, rows, out, cos, sin, keys, values, gates, pages, slots, page_stride, slot_stride,
    head_stride, FINISH: tl.constexpr,
):  # fmt: skip
    """Store sums [rows, tokens] of a block of rows.

    FINISH: "rows"; or "activated", a name and whether rows are pairs of a gate and an up row; or "logits", a factor and
    a soft cap, 0 for none; or "heads" and what `store_heads` takes.
    """
    if FINISH[0] == "heads":
        store_heads(
            total, block, token, is_token, out, cos, sin, keys, values, gates, pages, slots, page_stride, slot_stride,
            head_stride, FINISH,
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
            out + token[None, :] * rows + row[:, None], total, mask=(row < rows)[:, None] & is_token[None, :]
        )  # fmt: skip
