"""Recurrences along sequences: one chain over the tokens for each number of a state, for one token as for many.

Token t of sequence i is row i * m + t of all inputs. A state is held in registers while tokens pass. Sums over the
numbers of a state are sums of pairs, whose order no layout of threads changes. So chunks and batches change no bit.
"""

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import activated, sigmoid
from ridgeline.ops.triton.numbers import sum_pairs, sum_row
from ridgeline.spec.taylor import LEAST_FEATURE

LEAST = tl.constexpr(LEAST_FEATURE)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), and x above 20, as torch does."""
    power = tl.exp(tl.where(x > 20.0, 20.0, x))
    whole = 1.0 + power
    # log(1 + p) = p log(w) / (w - 1), where w is the rounded sum: the error of the sum cancels.
    rest = tl.where(whole == 1.0, 1.0, whole - 1.0)
    found = tl.where(whole == 1.0, power, tl.log(whole) * tl.div_rn(power, rest))
    return tl.where(x > 20.0, x, found)


@triton.jit
def state_of(states, rows, sequence, stride, IN_PAGES: tl.constexpr):
    """Return the first number of a sequence's state: in its page, or in an array of all sequences."""
    if IN_PAGES:
        row = tl.load(rows + sequence).to(tl.int64)
    else:
        row = sequence
    return states + row * stride


@triton.jit
def load_state(before, read, fresh, sequence, stride, cell, inside, IN_PAGES: tl.constexpr):
    """Return a part of a sequence's state, zeros if it begins: its memory may hold anything."""
    if IN_PAGES:
        inside &= tl.load(fresh + sequence) == 0
    return tl.load(state_of(before, read, sequence, stride, IN_PAGES) + cell, mask=inside, other=0.0)


@triton.jit
def load_input(
    x, before, read, fresh, sequence, seen, at, inside, x_stride, before_stride, channels, KEPT: tl.constexpr,
    IN_PAGES: tl.constexpr,
):  # fmt: skip
    """Return the input of token `seen`. The state holds KEPT inputs: they belong to the tokens below 0."""
    if seen < 0:
        given = load_state(
            before, read, fresh, sequence, before_stride, (seen + KEPT) * channels + at, inside, IN_PAGES
        )  # fmt: skip
    else:
        given = tl.load(x + seen * x_stride, mask=inside, other=0.0)
    return given


@triton.jit
def filtered(
    x, weight, bias, before, read, fresh, sequence, t, at, inside, x_stride, before_stride, channels,
    KEPT: tl.constexpr, IN_PAGES: tl.constexpr, HAS_BIAS: tl.constexpr, NAME: tl.constexpr,
):  # fmt: skip
    """Return the filtered and activated channels of token t. x: the channels of token 0."""
    total = tl.zeros([at.shape[0]], tl.float32)
    for j in tl.static_range(KEPT + 1):
        seen = t + j - KEPT
        given = load_input(
            x, before, read, fresh, sequence, seen, at, inside, x_stride, before_stride, channels, KEPT, IN_PAGES
        )  # fmt: skip
        total += given * tl.load(weight + at * (KEPT + 1) + j, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if NAME != "none":
        total = activated(total, NAME)
    return total


@triton.jit
def keep_inputs(
    x, before, after, read, fresh, write, sequence, length, at, inside, x_stride, before_stride, after_stride, channels,
    KEPT: tl.constexpr, IN_PAGES: tl.constexpr,
):  # fmt: skip
    """Write the last KEPT inputs of a sequence of `length` tokens. x: the channels of token 0."""
    target = state_of(after, write, sequence, after_stride, IN_PAGES)
    for j in tl.static_range(KEPT):  # row j comes from a later row, so that both may be one page
        seen = length + j - KEPT
        given = load_input(
            x, before, read, fresh, sequence, seen, at, inside, x_stride, before_stride, channels, KEPT, IN_PAGES
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read before one of them writes
        tl.store(target + j * channels + at, given, mask=inside)


@triton.jit
def convolve(
    x, weight, bias, y, before, after, read, fresh, write, lengths, m, x_stride, before_stride, after_stride, channels,
    KEPT: tl.constexpr, IN_PAGES: tl.constexpr, HAS_BIAS: tl.constexpr, NAME: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Filter TOKENS tokens of one sequence over KEPT tokens before each, and activate them.

    The program of the first tokens also writes the last KEPT inputs, because it alone reads those of the step before.
    """
    sequence = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, length = at < channels, tl.load(lengths + sequence).to(tl.int32)
    x += sequence * m * x_stride + at
    first = tl.program_id(1) * TOKENS
    for t in range(first, tl.minimum(first + TOKENS, length)):
        found = filtered(
            x, weight, bias, before, read, fresh, sequence, t, at, inside, x_stride, before_stride, channels, KEPT,
            IN_PAGES, HAS_BIAS, NAME,
        )  # fmt: skip
        tl.store(y + (sequence * m + t) * channels + at, found, mask=inside)
    if first == 0:
        keep_inputs(
            x, before, after, read, fresh, write, sequence, length, at, inside, x_stride, before_stride, after_stride,
            channels, KEPT, IN_PAGES,
        )  # fmt: skip


@triton.jit
def step_of(dt, least, most):
    """Return the step of Mamba-2, softplus(dt) limited to [least, most]. NaN stays NaN."""
    step = tl.maximum(softplus(dt), least, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(step, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def linear_scan(
    x, b, c, dt, dt_bias, a_log, skip, decays, y, before, after, read, fresh, write, lengths, m, x_stride, b_stride,
    c_stride, dt_stride, before_stride, after_stride, least, most, X_HEAD: tl.constexpr, B_HEAD: tl.constexpr,
    C_HEAD: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr,
    IS_SSD: tl.constexpr, IN_PAGES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute h = decay h + x b^T and y = h c for a part of one head of one sequence; h is [WIDTH, STATES].

    Mamba-2 (IS_SSD): dt = softplus(dt + bias), limited to [least, most]; x is multiplied by dt; the decay is
    exp(dt a); and skip x is added to y. Lightning attention: the decay of a head is one number.
    SHARED: heads that share b and c. X_HEAD, B_HEAD, C_HEAD: numbers from a head to the next.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, s = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    is_p, is_s = p < WIDTH, s < STATES
    inside, cell = is_p[:, None] & is_s[None, :], (head * WIDTH + p)[:, None] * STATES + s[None, :]
    h = load_state(before, read, fresh, sequence, before_stride, cell, inside, IN_PAGES)
    group = head // SHARED
    if IS_SSD:
        rate, plus = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
        through = tl.load(skip + head).to(tl.float32)
    else:
        decay = tl.load(decays + head)
    for t in range(tl.load(lengths + sequence).to(tl.int32)):
        row = sequence * m + t
        x_here = tl.load(x + row * x_stride + head * X_HEAD + p, mask=is_p, other=0.0)
        b_here = tl.load(b + row * b_stride + group * B_HEAD + s, mask=is_s, other=0.0)
        c_here = tl.load(c + row * c_stride + group * C_HEAD + s, mask=is_s, other=0.0)
        given = x_here
        if IS_SSD:
            step = step_of(tl.load(dt + row * dt_stride + head) + plus, least, most)
            decay, given = tl.exp(step * rate), step * x_here
        h = decay * h + given[:, None] * b_here[None, :]
        found = sum_pairs(h * c_here[None, :])
        if IS_SSD:
            found += through * x_here
        tl.store(y + row * (HEADS * WIDTH) + head * WIDTH + p, found, mask=is_p)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    tl.store(state_of(after, write, sequence, after_stride, IN_PAGES) + cell, h, mask=inside)


@triton.jit
def selective_scan(
    x, dt, b, c, z, a_log, skip, y, before, after, read, fresh, write, lengths, m, x_stride, dt_stride, b_stride,
    c_stride, z_stride, before_stride, after_stride, channels, STATES: tl.constexpr, IN_PAGES: tl.constexpr,
    HAS_GATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute Mamba's h = exp(dt A) h + dt x b^T and y = h c + skip x for some channels of one sequence.

    HAS_GATE: y is multiplied by silu(z).
    """
    sequence = tl.program_id(1).to(tl.int64)
    at, s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_S)
    is_at, is_s = at < channels, s < STATES
    inside, cell = is_at[:, None] & is_s[None, :], at[:, None] * STATES + s[None, :]
    h = load_state(before, read, fresh, sequence, before_stride, cell, inside, IN_PAGES)
    rate = -tl.exp(tl.load(a_log + cell, mask=inside, other=0.0).to(tl.float32))
    through = tl.load(skip + at, mask=is_at, other=0.0).to(tl.float32)
    for t in range(tl.load(lengths + sequence).to(tl.int32)):
        row = sequence * m + t
        x_here = tl.load(x + row * x_stride + at, mask=is_at, other=0.0)
        step = softplus(tl.load(dt + row * dt_stride + at, mask=is_at, other=0.0))
        b_here = tl.load(b + row * b_stride + s, mask=is_s, other=0.0)
        c_here = tl.load(c + row * c_stride + s, mask=is_s, other=0.0)
        h = tl.exp(step[:, None] * rate) * h + (step * x_here)[:, None] * b_here[None, :]
        found = sum_pairs(h * c_here[None, :]) + through * x_here
        if HAS_GATE:
            found *= activated(tl.load(z + row * z_stride + at, mask=is_at, other=0.0), "silu")
        tl.store(y + row * channels + at, found, mask=is_at)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    tl.store(state_of(after, write, sequence, after_stride, IN_PAGES) + cell, h, mask=inside)


@triton.jit
def unit(x):
    """Return x [n] divided by its length, as in `ops.reference.delta`."""
    size = sum_pairs(tl.reshape(x * x, [1, x.shape[0]]))
    return x * tl.reshape(tl.broadcast_to(tl.rsqrt(size + 1e-6)[:, None], [1, x.shape[0]]), [x.shape[0]])


@triton.jit
def delta_of(h, q, k, v, decay, beta, reach):
    """Return the state [values, keys] after one token of the delta rule, and its result [values]. beta: a pointer."""
    h = tl.exp(decay)[None, :] * h
    error = v - sum_pairs(h * k[None, :])
    error *= reach * sigmoid(tl.load(beta))
    h += k[None, :] * error[:, None]
    return h, sum_pairs(h * q[None, :])


@triton.jit
def delta_scan(
    q, k, v, decay, beta, a_log, dt_bias, y, before, after, read, fresh, write, lengths, m, q_stride, k_stride,
    v_stride, decay_stride, beta_stride, before_stride, after_stride, scale, reach, SHARED: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BY_CHANNEL: tl.constexpr, IN_PAGES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gated delta rule for a part of one head's values: S = a S; S = S + beta k (v - S^T k)^T; y = S^T q.

    S is [KEYS, WIDTH], and here a part of it is held as [values, keys]. BY_CHANNEL: a has a number for each channel of
    a key, otherwise one for each head. SHARED: heads that share a query and a key.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, s = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_p, is_s, of_key = p < WIDTH, s < KEYS, head // SHARED * KEYS
    inside, cell = is_p[:, None] & is_s[None, :], (head * KEYS + s)[None, :] * WIDTH + p[:, None]
    h = load_state(before, read, fresh, sequence, before_stride, cell, inside, IN_PAGES)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    of_decay = head * KEYS + s if BY_CHANNEL else s * 0 + head
    plus = tl.load(dt_bias + of_decay, mask=is_s, other=0.0).to(tl.float32)
    for t in range(tl.load(lengths + sequence).to(tl.int32)):
        row = sequence * m + t
        q_here = unit(tl.load(q + row * q_stride + of_key + s, mask=is_s, other=0.0)) * scale
        k_here = unit(tl.load(k + row * k_stride + of_key + s, mask=is_s, other=0.0))
        v_here = tl.load(v + row * v_stride + head * WIDTH + p, mask=is_p, other=0.0)
        step = softplus(tl.load(decay + row * decay_stride + of_decay, mask=is_s, other=0.0) + plus)
        h, found = delta_of(h, q_here, k_here, v_here, rate * step, beta + row * beta_stride + head, reach)
        tl.store(y + row * (HEADS * WIDTH) + head * WIDTH + p, found, mask=is_p)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    tl.store(state_of(after, write, sequence, after_stride, IN_PAGES) + cell, h, mask=inside)


@triton.jit
def term(terms, index, of, inside, size):
    """Return the real and the imaginary part of a coefficient of each number of a state."""
    real = tl.load(terms + 2 * index * size + of, mask=inside, other=0.0)
    return real, tl.load(terms + (2 * index + 1) * size + of, mask=inside, other=0.0)


@triton.jit
def real_sum(factor, factor_i, h, h_i):
    """Return the sum of Re(x h) for each row, where the factor is the conjugate of x."""
    return sum_pairs(factor * h + factor_i * h_i)


@triton.jit
def state_space_scan(
    u, terms, skip, y, before, after, read, fresh, write, lengths, m, u_stride, before_stride, after_stride, channels,
    MODES: tl.constexpr, LOW_RANK: tl.constexpr, NAME: tl.constexpr, IN_PAGES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute h = a h + b u and act(y = 2 Re(c h) + skip u) for some channels of one sequence; `ops.s4` has the terms.

    h is [channels, 2, MODES]: real parts, and then imaginary ones. LOW_RANK: S4, otherwise S4D.
    """
    sequence = tl.program_id(1).to(tl.int64)
    at, s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_M)
    is_at, is_s = at < channels, s < MODES
    inside, of, size = is_at[:, None] & is_s[None, :], at[:, None] * MODES + s[None, :], channels * MODES
    cell = at[:, None] * (2 * MODES) + s[None, :]
    h = load_state(before, read, fresh, sequence, before_stride, cell, inside, IN_PAGES)
    h_i = load_state(before, read, fresh, sequence, before_stride, cell + MODES, inside, IN_PAGES)
    a, a_i = term(terms, 0, of, inside, size)
    b, b_i = term(terms, 1, of, inside, size)
    c, c_i = term(terms, 2, of, inside, size)
    if LOW_RANK:
        e, e_i = term(terms, 3, of, inside, size)
        g, g_i = term(terms, 4, of, inside, size)
        p, p_i = term(terms, 5, of, inside, size)
        q, q_i = term(terms, 6, of, inside, size)
    through = tl.load(skip + at, mask=is_at, other=0.0).to(tl.float32)
    for t in range(tl.load(lengths + sequence).to(tl.int32)):
        row = sequence * m + t
        u_here = tl.load(u + row * u_stride + at, mask=is_at, other=0.0)
        added, added_i = b * u_here[:, None], b_i * u_here[:, None]
        if LOW_RANK:
            first, second = real_sum(p, p_i, h, h_i)[:, None], real_sum(q, q_i, h, h_i)[:, None]
            added, added_i = added + e * first + g * second, added_i + e_i * first + g_i * second
        h, h_i = a * h - a_i * h_i + added, a * h_i + a_i * h + added_i
        found = real_sum(c, c_i, h, h_i) + through * u_here
        if NAME != "none":
            found = activated(found, NAME)
        tl.store(y + row * channels + at, found, mask=is_at)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    target = state_of(after, write, sequence, after_stride, IN_PAGES)
    tl.store(target + cell, h, mask=inside)
    tl.store(target + cell + MODES, h_i, mask=inside)


@triton.jit
def taylor_features(x, s, scale, DIM: tl.constexpr):
    """Return the features s < 1 + DIM + DIM^2 of a query or a key x [DIM]: 1, x, and products of two; 0 beyond them."""
    square = s - 1 - DIM
    is_line, is_square = (s > 0) & (s <= DIM), (square >= 0) & (square < DIM * DIM)
    one = scale * tl.load(x + tl.where(is_line, s - 1, square // DIM), mask=is_line | is_square, other=0.0)
    other = scale * tl.load(x + square % DIM, mask=is_square, other=0.0)
    found = tl.where(is_square, one * other * 0.7071067811865476, one)
    return tl.where(s == 0, 1.0, found)


@triton.jit
def softmax_features(x, s, DIM: tl.constexpr):
    """Return the features s < 2 DIM of a query or a key x [DIM]: softmax(x), softmax(-x), each at least LEAST; 0 beyond
    them.
    """
    found = tl.load(x + s % DIM, mask=s < 2 * DIM, other=0.0)
    found = tl.where(s < DIM, found, -found)
    first, second = s < DIM, (s >= DIM) & (s < 2 * DIM)
    most = tl.where(
        first, tl.max(tl.where(first, found, -float("inf")), 0), tl.max(tl.where(second, found, -float("inf")), 0)
    )
    found = tl.where(first | second, tl.exp(found - most), 0.0)
    sums = tl.where(first, sum_row(tl.where(first, found, 0.0)), sum_row(tl.where(second, found, 0.0)))
    found = tl.div_rn(found, sums)
    return tl.where((first | second) & (found < LEAST), LEAST, found)  # NaN stays


@triton.jit
def linear_features(x, s, scale, DIM: tl.constexpr, HEDGEHOG: tl.constexpr):
    """Return the features of a query or a key for each s."""
    if HEDGEHOG:
        return softmax_features(x, s, DIM)
    return taylor_features(x, s, scale, DIM)


@triton.jit
def taylor_scan(
    q, k, v, y, before, after, read, fresh, write, lengths, arrived, m, q_stride, k_stride, v_stride, before_stride,
    after_stride, scale, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEDGEHOG: tl.constexpr,
    IN_PAGES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute linear attention's h = h + [v, 1] f(k)^T and y = h f(q), without its last number and divided by it, for
    a part of one head of one sequence. h is [WIDTH + 1, features].

    Each program also computes the last row, which sums weights. The program that ends last writes it, because all of
    them have read it then.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    FEATURES: tl.constexpr = 2 * DIM if HEDGEHOG else 1 + DIM + DIM * DIM
    p, s = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    is_p, is_s, first = p < WIDTH, s < FEATURES, head * (WIDTH + 1)
    inside, cell = is_p[:, None] & is_s[None, :], (first + p)[:, None] * FEATURES + s[None, :]
    h = load_state(before, read, fresh, sequence, before_stride, cell, inside, IN_PAGES)
    sums_cell = (first + WIDTH) * FEATURES + s
    sums = load_state(before, read, fresh, sequence, before_stride, sums_cell, is_s, IN_PAGES)
    for t in range(tl.load(lengths + sequence).to(tl.int32)):
        row = sequence * m + t
        key = linear_features(k + row * k_stride + head * DIM, s, scale, DIM, HEDGEHOG)
        query = linear_features(q + row * q_stride + head * DIM, s, scale, DIM, HEDGEHOG)
        v_here = tl.load(v + row * v_stride + head * WIDTH + p, mask=is_p, other=0.0)
        h += v_here[:, None] * key[None, :]
        sums += key
        weight = sum_pairs(tl.reshape(sums * query, [1, BLOCK_S]))
        found = tl.div_rn(sum_pairs(h * query[None, :]), tl.zeros([BLOCK_P], tl.float32) + weight)
        tl.store(y + row * (HEADS * WIDTH) + head * WIDTH + p, found, mask=is_p)
    target = state_of(after, write, sequence, after_stride, IN_PAGES)
    tl.debug_barrier()  # all threads have read the state before, which may be in the same page
    tl.store(target + cell, h, mask=inside)
    counter = arrived + sequence * HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(target + sums_cell, sums, mask=is_s)
        tl.store(counter, 0)


@triton.jit
def gated(x, gate, weight, inside, size, offset, eps, NAME: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Return norm(x act(gate)), or norm(x) act(gate). weight: pointers to those of the norm."""
    gate = sigmoid(gate) if NAME == "sigmoid" else activated(gate, NAME)
    if GATE_FIRST:
        x *= gate
    x *= tl.rsqrt(sum_row(x * x) / size + eps)
    x *= offset + tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        x *= gate
    return x


@triton.jit
def gated_rows(
    y, z, weight, out, y_stride, z_stride, size, offset, eps, NAME: tl.constexpr, GATE_FIRST: tl.constexpr,
    BY_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize and gate one group of one row: norm(y silu(z)), or norm(y) act(z). BY_GROUP: groups share `weight`."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(y + row * y_stride + first + at, mask=inside, other=0.0)
    gate = tl.load(z + row * z_stride + first + at, mask=inside, other=0.0)
    of_group = weight + at if BY_GROUP else weight + first + at
    x = gated(x, gate, of_group, inside, size, offset, eps, NAME, GATE_FIRST)
    tl.store(out + row * (tl.num_programs(1) * size) + first + at, x, mask=inside)


@triton.jit
def multiply_rows(
    y, z, out, y_stride, z_stride, width, NAME: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute y z, y silu(z) or y sigmoid(z) for a part of one row. BY_ROW: z has one number for each row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(z + row * z_stride + (at * 0 if BY_ROW else at), mask=inside, other=0.0)
    if NAME == "sigmoid":
        gate = sigmoid(gate)
    elif NAME != "none":
        gate = activated(gate, NAME)
    x = tl.load(y + row * y_stride + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, x * gate, mask=inside)
