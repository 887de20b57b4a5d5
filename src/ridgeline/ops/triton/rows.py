"""Kernels whose programs compute one row each: norms, activations, writes into pages, the best logit."""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated
from ridgeline.ops.triton.numbers import nearest, step_sizes, steps_of, sum_row


@triton.jit
def normalized(x, weight, bias, at, inside, width, offset, eps, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr):
    """Return the norm of a row x, which has zeros behind its `width` numbers. Sums are sums of pairs, so the norm has
    the same bits in every kernel.
    """
    if IS_LAYER:
        x = tl.where(inside, x - sum_row(x) / width, 0.0)
    x *= tl.rsqrt(sum_row(x * x) / width + eps)
    x *= offset + tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def sum_and_norm(
    residual, delta, total, source, row, at, inside, is_owner, width, stride, scale, weight, bias, offset, eps,
    HAS_DELTA: tl.constexpr, HAS_TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr,
):  # fmt: skip
    """Return the norm of the sum of row `source` of two arrays. Its owner stores the sum as row `row` of total."""
    x = tl.load(residual + source * stride + at, mask=inside, other=0.0)
    if HAS_DELTA:
        x += scale * tl.load(delta + source * width + at, mask=inside, other=0.0)
    if HAS_TOTAL:
        tl.store(total + row * width + at, x, mask=inside & is_owner)
    return normalized(x, weight, bias, at, inside, width, offset, eps, HAS_BIAS, IS_LAYER)


@triton.jit
def normalize(
    residual, delta, rows, weight, bias, total, out, token_scales, width, filled, stride, scale, offset, eps, given,
    HAS_DELTA: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_LAYER: tl.constexpr, ROUNDS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute total = residual + scale * delta and out = norm(total) for one row, or for the row that `rows` names.

    ROUNDS: the norm becomes whole numbers out [rows, filled], with zeros behind its columns, and token_scales [rows],
    as in `whole.round_tokens`.
    """
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = sum_and_norm(
        residual, delta, total, source, row, at, inside, True, width, stride, scale, weight, bias, offset, eps,
        HAS_DELTA, HAS_TOTAL, HAS_BIAS, IS_LAYER,
    )  # fmt: skip
    if ROUNDS:
        size = tl.where(inside, tl.abs(x), 0.0)
        is_finite = tl.min((size < float("inf")).to(tl.int32), 0) == 1
        step, inverse = step_sizes(tl.max(size, 0), is_finite, given, HAS_SCALE)
        tl.store(token_scales + row, step)
        tl.store(out + row * filled + at, steps_of(tl.where(inside, x, 0.0), inverse, is_finite), mask=at < filled)
    else:
        tl.store(out + row * width + at, x, mask=inside)


@triton.jit
def activate(x, out, width, stride, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out = act(x) for rows of `width` numbers."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x_here = tl.load(x + row * stride + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, activated(x_here, NAME), mask=inside)


@triton.jit
def pairs_of(at, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the angle of each of DIM numbers that rotate, whether it is the first of its pair, and the other one."""
    if INTERLEAVED:
        pair, is_first, other = at // 2, at % 2 == 0, at ^ 1
    else:
        half = DIM // 2
        pair, is_first, other = at % half, at < half, tl.where(at < half, at + half, at - half)
    return pair, is_first, other


@triton.jit
def to_floats(x, dtype: tl.constexpr):
    """Return x in a type of floats. Finite numbers beyond float16 become its largest one."""
    if dtype == tl.float16:
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -65504.0), 65504.0), x)
    return x.to(dtype)


@triton.jit
def to_e4m3(x):
    """Return x, of a magnitude of at most 448 or NaN, as a byte of e4m3, rounded to nearest, ties to even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = nearest(size * 512.0).to(tl.int32)  # multiples of 2^-9 below 2^-6
    code = tl.where(size < 0.015625, small, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def to_pages(x, dtype: tl.constexpr, scale, KIND: tl.constexpr):
    """Return x as pages hold it whose numbers have no scales of their own: floats, or e4m3 of x divided by `scale`."""
    if KIND == "fp8":
        steps = tl.div_rn(x, tl.zeros_like(x) + scale)
        is_finite = tl.abs(steps) < float("inf")
        found = to_e4m3(tl.where(is_finite, tl.minimum(tl.maximum(steps, -448.0), 448.0), float("nan")))
    else:
        found = to_floats(x, dtype)
    return found


@triton.jit
def rounded_int8(x):
    """Return each row of x as whole numbers of at most 127, and its scale. Rows that are not finite become zeros with a
    scale of NaN; those without a reciprocal of their scale become zeros.
    """
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) == 1
    scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([x.shape[0]], 127.0, tl.float32))
    is_whole = is_finite & (scale > 2.938735877055719e-39)  # 2^-128, whose reciprocal is infinite
    inverse = tl.div_rn(tl.full([x.shape[0]], 1.0, tl.float32), tl.where(is_whole, scale, 1.0))
    numbers = nearest(tl.where(is_whole[:, None], x * inverse[:, None], 0.0)).to(tl.int8)
    return numbers, tl.where(is_finite, tl.where(is_whole, scale, 0.0), float("nan"))


@triton.jit
def store_rows(
    x, pages, scales, begin, head, is_head, at, row, slot_scale, scale, D: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Store rows x [HEADS, WIDTH] in the type of pages; begin: where the row of each head begins."""
    is_cell = is_head[:, None] & (at < D)[None, :]
    if KIND == "int8":
        found, sizes = rounded_int8(x)
        tl.store(scales + slot_scale + head, sizes, mask=is_head)
    else:
        found = to_pages(x, pages.dtype.element_ty, scale, KIND)
    tl.store(pages + row + begin[:, None] + at[None, :], found, mask=is_cell)


@triton.jit
def write_rows(
    k, v, keys, values, key_scales, value_scales, pages, slots, k_stride, v_stride, page_stride, slot_stride,
    head_stride, scale_stride, k_scale, v_scale, K: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    KIND: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one token into its slot, or its latents as keys alone (PARTS is 1).

    Finite numbers beyond float16 become its largest one, and those beyond fp8 its largest. HEADS and WIDTH are powers
    of two that are at least K and D.
    """
    token, head, at = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, WIDTH)
    is_head = head < K
    inside = is_head[:, None] & (at < D)[None, :]
    page, slot = tl.load(pages + token).to(tl.int64), tl.load(slots + token)
    row, slot_scale = page * page_stride + slot * slot_stride, page * scale_stride + slot * K
    source, begin = head[:, None] * D + at[None, :], head * head_stride
    x = tl.load(k + token * k_stride + source, mask=inside, other=0.0)
    store_rows(x, keys, key_scales, begin, head, is_head, at, row, slot_scale, k_scale, D, KIND)
    if PARTS == 2:
        x = tl.load(v + token * v_stride + source, mask=inside, other=0.0)
        store_rows(x, values, value_scales, begin, head, is_head, at, row, slot_scale, v_scale, D, KIND)


@triton.jit
def first_best(value, index, AXIS: tl.constexpr = 0):
    """Return the largest of `value` along an axis, and its least index. NaN comes before all numbers."""
    is_nan = value != value
    rank = tl.where(is_nan, float("inf"), value)
    top = tl.max(rank, AXIS)
    any_nan = tl.max(is_nan.to(tl.int32), AXIS) > 0
    is_best = tl.where(tl.expand_dims(any_nan, AXIS), is_nan, rank == tl.expand_dims(top, AXIS))
    least = tl.min(tl.where(is_best, index, 0x7FFFFFFF), AXIS)
    return tl.where(any_nan, float("nan"), top), least


@triton.jit
def best_of_parts(logits, ids, values, vocabulary, BLOCK: tl.constexpr):
    """Find the best logit of one part of one row: ids and values are [rows, parts]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    x = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf"))
    value, index = first_best(x, tl.where(inside, at, 0x7FFFFFFF))
    tl.store(values + row * tl.num_programs(1) + part, value)
    tl.store(ids + row * tl.num_programs(1) + part, index)


@triton.jit
def best_of_rows(part_ids, part_values, ids, values, parts, BLOCK: tl.constexpr):
    """Find the best of the parts of one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < parts
    x = tl.load(part_values + row * parts + at, mask=inside, other=float("-inf"))
    index = tl.load(part_ids + row * parts + at, mask=inside, other=0x7FFFFFFF)
    value, found = first_best(x, index)
    tl.store(values + row, value)
    tl.store(ids + row, found.to(tl.int64))
