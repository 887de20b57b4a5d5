"""Recurrent layers that decode: the convolution, the recurrence, and the norm and the gate of one token in one launch.

Inputs that several programs read are written into the state by the one of them that ends last, because all of them have
read it then. It also normalizes and gates their results. The arithmetic is that of the kernels in `scans.py`, and so
are the bits. States are in pages.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated, sigmoid
from ridgeline.ops.triton.numbers import sum_pairs
from ridgeline.ops.triton.rows import normalized
from ridgeline.ops.triton.scans import (
    delta_of,
    filtered,
    gated,
    keep_inputs,
    load_state,
    softplus,
    state_of,
    step_of,
    unit,
)


@triton.jit
def is_last_of(counter, programs):
    """Return whether all other programs have counted this counter before, and set it to zero then."""
    tl.debug_barrier()  # all threads have read and stored before one of them says so
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    tl.debug_barrier()  # other threads read what the counted programs stored
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def seen(
    x, weight, bias, pages, where, at, inside, stride, channels, KEPT: tl.constexpr, HAS_BIAS: tl.constexpr,
    NAME: tl.constexpr,
):  # fmt: skip
    """Return filtered channels of a sequence's token, whose inputs begin at x. where: read, fresh, write, sequence."""
    return filtered(
        x + at, weight, bias, pages, where[0], where[1], where[3], 0, at, inside, 0, stride, channels, KEPT, True,
        HAS_BIAS, NAME,
    )  # fmt: skip


@triton.jit
def keep(x, pages, where, at, inside, stride, channels, KEPT: tl.constexpr):
    """Write the token of a sequence into the inputs that its state keeps."""
    keep_inputs(
        x + at, pages, pages, where[0], where[1], where[2], where[3], 1, at, inside, 0, stride, stride, channels, KEPT,
        True,
    )  # fmt: skip


@triton.jit
def delta_step(
    q, k, v, decay, beta, z, q_weight, k_weight, v_weight, a_log, dt_bias, norm_weight, y, q_pages, k_pages, v_pages,
    pages, read, fresh, write, arrived, q_stride, k_stride, v_stride, decay_stride, beta_stride, z_stride, q_page,
    k_page, v_page, page, scale, reach, offset, eps, KEPT: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, BY_CHANNEL: tl.constexpr, NAME: tl.constexpr, GATE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute one token of `scans.delta_scan` after `scans.convolve` for q, k and v, and `scans.gated_rows` after it.

    y: [sequences, HEADS * WIDTH]. q_page, k_page, v_page, page: numbers from a page to the next of each part of the
    state. arrived: counts the programs of each sequence that share a query and a key.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    where = read, fresh, write, sequence
    p, s = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_p, is_s, key, keys = p < WIDTH, s < KEYS, head // SHARED, HEADS // SHARED
    of_key, of_value = key * KEYS + s, head * WIDTH + p
    inside, cell = is_p[:, None] & is_s[None, :], (head * KEYS + s)[None, :] * WIDTH + p[:, None]
    h = load_state(pages, read, fresh, sequence, page, cell, inside, True)
    q, k, v = q + sequence * q_stride, k + sequence * k_stride, v + sequence * v_stride
    q_here = seen(q, q_weight, None, q_pages, where, of_key, is_s, q_page, keys * KEYS, KEPT, False, NAME)
    k_here = seen(k, k_weight, None, k_pages, where, of_key, is_s, k_page, keys * KEYS, KEPT, False, NAME)
    v_here = seen(v, v_weight, None, v_pages, where, of_value, is_p, v_page, HEADS * WIDTH, KEPT, False, NAME)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    of_decay = head * KEYS + s if BY_CHANNEL else s * 0 + head
    plus = tl.load(dt_bias + of_decay, mask=is_s, other=0.0).to(tl.float32)
    step = softplus(tl.load(decay + sequence * decay_stride + of_decay, mask=is_s, other=0.0) + plus)
    q_here, k_here, beta = unit(q_here) * scale, unit(k_here), beta + sequence * beta_stride + head
    h, found = delta_of(h, q_here, k_here, v_here, rate * step, beta, reach)
    y, z = y + sequence * (HEADS * WIDTH), z + sequence * z_stride
    tl.store(y + of_value, found, mask=is_p)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    tl.store(state_of(pages, write, sequence, page, True) + cell, h, mask=inside)
    keep(v, v_pages, where, of_value, is_p, v_page, HEADS * WIDTH, KEPT)
    if is_last_of(arrived + sequence * keys + key, SHARED * tl.num_programs(0)):
        keep(q, q_pages, where, of_key, is_s, q_page, keys * KEYS, KEPT)
        keep(k, k_pages, where, of_key, is_s, k_page, keys * KEYS, KEPT)
        at = tl.arange(0, BLOCK_W)
        for member in range(SHARED):
            mine, is_at = (key * SHARED + member) * WIDTH + at, at < WIDTH
            x = tl.load(y + mine, mask=is_at, other=0.0, cache_modifier=".cg")
            gate = tl.load(z + mine, mask=is_at, other=0.0)
            tl.store(y + mine, gated(x, gate, norm_weight + at, is_at, WIDTH, offset, eps, GATE, False), mask=is_at)


@triton.jit
def ssd_step(
    x, dt, z, weight, bias, dt_bias, a_log, skip, norm_weight, y, kept, pages, read, fresh, write, arrived,
    x_stride, dt_stride, z_stride, kept_page, page, least, most, offset, eps, KEPT: tl.constexpr, SHARED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, HAS_BIAS: tl.constexpr, NAME: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Compute one token of Mamba-2's `scans.linear_scan` after `scans.convolve`, and `scans.gated_rows` after it.

    x: inputs of the convolution, those of all heads before b and c. y: [sequences, HEADS * WIDTH]. kept: pages of the
    inputs that the state keeps. kept_page, page: numbers from a page to the next of each part of the state. arrived:
    counts the programs of each sequence whose heads share b and c.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    where, groups = (read, fresh, write, sequence), HEADS // SHARED
    p, s, group = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S), head // SHARED
    is_p, is_s, inner = p < WIDTH, s < STATES, HEADS * WIDTH
    of_x, of_b = head * WIDTH + p, inner + group * STATES + s
    of_c, channels = of_b + groups * STATES, inner + 2 * groups * STATES
    inside, cell = is_p[:, None] & is_s[None, :], (head * WIDTH + p)[:, None] * STATES + s[None, :]
    x += sequence * x_stride
    x_here = seen(x, weight, bias, kept, where, of_x, is_p, kept_page, channels, KEPT, HAS_BIAS, NAME)
    b_here = seen(x, weight, bias, kept, where, of_b, is_s, kept_page, channels, KEPT, HAS_BIAS, NAME)
    c_here = seen(x, weight, bias, kept, where, of_c, is_s, kept_page, channels, KEPT, HAS_BIAS, NAME)
    h = load_state(pages, read, fresh, sequence, page, cell, inside, True)
    rate, plus = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    step = step_of(tl.load(dt + sequence * dt_stride + head) + plus, least, most)
    h = tl.exp(step * rate) * h + (step * x_here)[:, None] * b_here[None, :]
    found = sum_pairs(h * c_here[None, :]) + tl.load(skip + head).to(tl.float32) * x_here
    y, z = y + sequence * inner, z + sequence * z_stride
    tl.store(y + of_x, found, mask=is_p)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    tl.store(state_of(pages, write, sequence, page, True) + cell, h, mask=inside)
    keep(x, kept, where, of_x, is_p, kept_page, channels, KEPT)
    if is_last_of(arrived + sequence * groups + group, SHARED * tl.num_programs(0)):
        keep(x, kept, where, of_b, is_s, kept_page, channels, KEPT)
        keep(x, kept, where, of_c, is_s, kept_page, channels, KEPT)
        at = tl.arange(0, BLOCK_G)
        mine, is_at = group * (SHARED * WIDTH) + at, at < SHARED * WIDTH
        results = tl.load(y + mine, mask=is_at, other=0.0, cache_modifier=".cg")
        gate = tl.load(z + mine, mask=is_at, other=0.0)
        results = gated(results, gate, norm_weight + mine, is_at, SHARED * WIDTH, offset, eps, "silu", True)
        tl.store(y + mine, results, mask=is_at)


@triton.jit
def lightning_step(
    qkv, z, decays, norm_weight, y, pages, read, fresh, write, arrived, qkv_stride, z_stride, page, offset, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, NAME: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one token of lightning attention's `scans.linear_scan`, with the activation before it, and the norm and
    the gate after it.

    qkv: query, key and value of each head. arrived: counts the programs of each sequence.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, s = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    is_p, is_s = p < WIDTH, s < WIDTH
    inside, cell = is_p[:, None] & is_s[None, :], (head * WIDTH + p)[:, None] * WIDTH + s[None, :]
    qkv += sequence * qkv_stride + head * (3 * WIDTH)
    q = activated(tl.load(qkv + s, mask=is_s, other=0.0), NAME)
    k = activated(tl.load(qkv + WIDTH + s, mask=is_s, other=0.0), NAME)
    v = activated(tl.load(qkv + 2 * WIDTH + p, mask=is_p, other=0.0), NAME)
    h = load_state(pages, read, fresh, sequence, page, cell, inside, True)
    h = tl.load(decays + head) * h + v[:, None] * k[None, :]
    y, z = y + sequence * (HEADS * WIDTH), z + sequence * z_stride
    tl.store(y + head * WIDTH + p, sum_pairs(h * q[None, :]), mask=is_p)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    tl.store(state_of(pages, write, sequence, page, True) + cell, h, mask=inside)
    if is_last_of(arrived + sequence, HEADS * tl.num_programs(0)):
        at = tl.arange(0, BLOCK_N)
        is_at = at < HEADS * WIDTH
        results = tl.load(y + at, mask=is_at, other=0.0, cache_modifier=".cg")
        results = normalized(results, norm_weight, None, at, is_at, HEADS * WIDTH, offset, eps, False, False)
        tl.store(y + at, results * sigmoid(tl.load(z + at, mask=is_at, other=0.0)), mask=is_at)


@triton.jit
def convolution_step(
    x, before, after, weight, bias, y, kept, read, fresh, write, x_stride, kept_page, channels, KEPT: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, NAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one token of y = after * act(conv(before * x)) for some channels of one sequence.

    x, before and after: rows of `x_stride`. kept: pages of the inputs that the state keeps.
    """
    sequence, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, mine = at < channels, sequence * x_stride + at
    own = tl.load(x + mine, mask=inside, other=0.0)
    if HAS_BEFORE:
        own = tl.load(before + mine, mask=inside, other=0.0) * own
    total = tl.zeros([BLOCK], tl.float32)
    target = state_of(kept, write, sequence, kept_page, True)
    for j in tl.static_range(KEPT):
        given = load_state(kept, read, fresh, sequence, kept_page, j * channels + at, inside, True)
        total += given * tl.load(weight + at * (KEPT + 1) + j, mask=inside, other=0.0).to(tl.float32)
        if j > 0:  # row j was read, and becomes row j - 1, which was read before
            tl.store(target + (j - 1) * channels + at, given, mask=inside)
        tl.debug_barrier()  # all threads have read before one of them writes
    tl.store(target + (KEPT - 1) * channels + at, own, mask=inside)
    total += own * tl.load(weight + at * (KEPT + 1) + KEPT, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if NAME != "none":
        total = activated(total, NAME)
    tl.store(y + sequence * channels + at, tl.load(after + mine, mask=inside, other=0.0) * total, mask=inside)
