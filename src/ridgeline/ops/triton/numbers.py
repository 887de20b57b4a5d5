"""Numbers inside of kernels: slices of floats, codes as bfloat16, and sums in a fixed order."""

import triton
import triton.language as tl


@triton.jit
def slice_of(x, SLICES: tl.constexpr):
    """Return x, float32, as a bfloat16 and the rest of it as another one, which is not used if SLICES is 1.

    The two differ from x by 2^-17 of it at most; the first alone by 2^-8.
    """
    high = x.to(tl.bfloat16)
    if SLICES == 1:
        low = high
    else:
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return high, low


@triton.jit
def e4m3(codes):
    """Return bytes of e4m3 as float32. No unit for fp8 is needed, so every GPU computes the same numbers."""
    bits = codes.to(tl.uint32)
    wide = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    number = wide.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the exponents' offsets differ by that
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def nearest(x):
    """Return x, of a magnitude below 2^22, rounded to a whole number, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def step_sizes(peak, is_finite, given, HAS_SCALE: tl.constexpr):
    """Return the scale of a token of int8 whose largest magnitude is `peak`, and the factor that makes its numbers.

    given: the scale of all tokens instead. The scale of a token that is not finite is NaN.
    """
    peak = tl.maximum(peak, 7.888609052210118e-31)  # 2^-100
    if HAS_SCALE:
        scale = given
        inverse = tl.div_rn(1.0, given)
    else:
        scale = tl.div_rn(peak, 127.0)
        inverse = tl.div_rn(127.0, peak)
    return tl.where(is_finite, scale, float("nan")), inverse


@triton.jit
def steps_of(x, inverse, is_finite):
    """Return numbers of a token as whole numbers of at most 127; those of a token that is not finite are zeros."""
    found = nearest(tl.minimum(tl.maximum(x * inverse, -127.0), 127.0))
    return tl.where(is_finite, found, 0.0).to(tl.int8)


@triton.jit
def sum_pairs(x):
    """Return the sum of each row of x [rows, columns]: neighbors are added, then neighbors of these sums, and so on.

    The order does not depend on how the compiler gives numbers to threads. There are a power of two of columns.
    """
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = a + b
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def sum_pairs_across(x):
    """Return what `sum_pairs` returns, for rows that the threads of a program share.

    Threads exchange numbers, where tl.split would copy all of them through shared memory. A sum of two has one order.
    """
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def sum_row(x):
    """Return the sum of x [n] in a fixed order: numbers 2,048 apart are added as pairs, and then their sums.

    A thread has the former in its registers, in every block of threads.
    """
    N: tl.constexpr = x.shape[0]
    ROW: tl.constexpr = 2048 if N > 2048 else N
    parts = sum_pairs_across(tl.permute(tl.reshape(x, [N // ROW, ROW]), (1, 0)))
    return tl.sum(sum_pairs_across(tl.reshape(parts, [1, ROW])), 0)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of float32, to a few units of its last bit."""
    square = x * x
    near = x + x * square * (
        -0.3333333333333333
        + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.02186948853615520))
    )
    far = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * x) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)
