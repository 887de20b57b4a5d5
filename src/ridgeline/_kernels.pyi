"""The kernels of the cpu backend (csrc/). Absent where no compiler was there at installation.

Arrays are numpy's, float32 unless it says otherwise; an argument of the wrong type, shape or layout is a TypeError or a
ValueError. Every call lets other threads of Python run while it works.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
T = TypeVar("T")

def isa() -> str:
    """The instruction set in use: avx512, avx2 or portable."""

def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""

class Pool:
    """Threads that work for one call at a time; other callers wait. Safe after a fork."""

    def __init__(self, threads: int) -> None:
        """threads: the caller's included. More than there are cores is slow, and right."""
    @property
    def size(self) -> int: ...
    @property
    def busy_seconds(self) -> float:
        """How long calls have held the pool, so far."""
    @property
    def recording(self) -> bool:
        """Are the calls of this thread written down?"""
    def room(self, shape: tuple[int, ...]) -> Floats:
        """Room of the program that is being written down, free again when the array is gone. ValueError: there is no
        such program."""
    def read_rate(self, bytes: int) -> float:
        """Bytes per second that all threads read of so much memory, which is taken for that: the best of three."""
    def fma_rate(self) -> float:
        """float32 operations per second in registers; a product and its sum are two."""
    def dot_rate(self) -> float:
        """The same of bytes."""

class Rooms:
    """Memory of programs: what one leaves there is there until another one runs."""

    def __init__(self) -> None: ...
    def poison(self) -> None:
        """NaN everywhere, to see that a program makes all that it reads."""

class Program:
    """Calls of kernels that can be made again at once, over the arrays that they were made with."""

    def __init__(self, pool: Pool, rooms: Rooms) -> None: ...
    def know(self, array: Array) -> None:
        """An array that calls may work on, and that stays where it is as long as the program does."""
    def record(self, work: Callable[[], T]) -> T:
        """Run `work`, and write down what this thread calls of the pool's kernels. RuntimeError: another program of
        the pool is being written."""
    def borrow(self, array: Floats) -> Floats:
        """The same array, whose room counts as free: to be read before another program of these rooms runs."""
    @property
    def refusal(self) -> str | None:
        """Why the program must not be run."""
    def __len__(self) -> int: ...
    def __call__(self) -> None:
        """Make all calls again. ValueError: it must not be run."""

# ---- matrices and what is computed with them -------------------------------------------------------------------------

class Matrix:
    """A matrix [rows, columns] as the kernels read it; its weights are copied."""

    def __init__(
        self,
        pool: Pool,
        parts: Sequence[Array],
        kind: Literal["float32", "bfloat16", "float16", "codes"],
        format: Literal["fp32", "bf16", "fp16", "int8", "int4"],
        group: int,
        biases: Sequence[Floats | None],
        interleave: bool,
        scales: Sequence[Floats] = (),
    ) -> None:
        """Pack the parts of a matrix, one below the other.

        Args:
            parts: each [rows, columns]; 16-bit floats as uint16, codes as int8.
            kind: type of the parts.
            format: type in the panels. int8 has a scale for each row, whose largest magnitude is 127; int4 a float16
                scale for each group of a row, whose largest magnitude is 7.5.
            group: columns that share a scale: 32 or 128 for int4, otherwise 0.
            biases: one for each part.
            interleave: whether two parts, gate and up of an MLP, share panels.
            scales: [rows, groups] for each part of codes; none for floats.

        Raises:
            ValueError: for weights that are not finite or too large for the format, and for codes or scales that it
                cannot hold.
        """
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def take(self, pool: Pool, ids: Ints, out: Floats) -> None:
        """Rows, as float32: what products are computed with, to the bit."""

class Norm:
    """out = norm(x), along rows. An RMS norm's offset is part of its weight."""

    def __init__(self, kind: Literal["rms", "layer"], eps: float, weight: Floats, bias: Floats | None) -> None: ...
    def __call__(self, pool: Pool, x: Floats, out: Floats) -> None: ...

def rotate(
    pool: Pool, x: Floats, head_dim: int, first: int, rope_dim: int, interleaved: bool, cos: Floats, sin: Floats
) -> None:
    """Rotate the heads of x [T, heads * head_dim] in place, elements from `first` on. cos, sin: [T, rope_dim / 2]."""

# Of the stages, x and delta are [T, columns]; where there is a delta the residual is x + residual_scale * delta, and is
# written where it is asked for; then comes the norm, where there is one, and the matrix. Int8 and int4 matrices round
# each token's elements to 255 steps: its largest magnitude is 127, and a token that is not finite becomes NaN.

class Projection:
    """out = softcap(scale * matrix(norm(residual)))."""

    def __init__(
        self, pool: Pool, matrix: Matrix, norm: Norm | None, residual_scale: float, scale: float, softcap: float
    ) -> None:
        """softcap: 0 is none."""
    def __call__(
        self, x: Floats, delta: Floats | None, rows: Ints | None, residual: Floats | None, out: Floats
    ) -> None:
        """rows: of x and delta that are taken; None: all."""

class Heads:
    """Queries, keys and values: outs = the products with the parts of the matrix. The first `num_rotated` of them are
    normalized and rotated."""

    def __init__(
        self,
        pool: Pool,
        matrix: Matrix,
        norm: Norm | None,
        residual_scale: float,
        head_dim: int,
        rope_dim: int,
        interleaved: bool,
        over_all: bool,
        norms: Sequence[Norm],
        num_rotated: int,
    ) -> None:
        """rope_dim: 0 is no rotation. norms: one for each rotated part, or none. over_all: one norm over all heads."""
    def __call__(
        self,
        x: Floats,
        delta: Floats | None,
        residual: Floats | None,
        cos: Floats | None,
        sin: Floats | None,
        outs: Sequence[Floats],
    ) -> None: ...

class Mlp:
    """out = down(act(up(norm(residual)))); gated where the first matrix is interleaved."""

    def __init__(
        self,
        pool: Pool,
        up: Matrix,
        down: Matrix,
        norm: Norm | None,
        residual_scale: float,
        activation: str,
        alpha: float,
        limit: float,
    ) -> None:
        """alpha, limit: of clamped_swiglu."""
    def __call__(self, x: Floats, delta: Floats | None, residual: Floats | None, out: Floats) -> None: ...

class Experts:
    """out[t] = sum over c of weights[t, c] * expert ids[t, c] of norm(x[t]), in this order, + plus * sigmoid(gate)."""

    def __init__(
        self,
        pool: Pool,
        up: Sequence[Matrix],
        down: Sequence[Matrix],
        norm: Norm | None,
        activation: str,
        alpha: float,
        limit: float,
    ) -> None:
        """up: interleaved where experts are gated."""
    def __call__(
        self, x: Floats, ids: Ints, weights: Floats, plus: Floats | None, gate: Floats | None, out: Floats
    ) -> None:
        """plus [T, columns of out]; gate [T, 1], of plus."""

def route(
    pool: Pool,
    groups: int,
    open: int,
    best_two: bool,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    logits: Floats,
    bias: Floats | None,
    ids: Ints,
    weights: Floats,
) -> None:
    """Each token's best experts, ids and weights [T, k], from logits [T, experts]: see spec.MoE. groups: 0 is none."""

# ---- attention: tokens of all sequences one after the other, out [T, H * value_dim] --------------------------------

# Keys, values and latents are float32, bfloat16 by its bits (uint16), float16, or int8; a row of the last one has four
# elements more, the bytes of its scale. In pages the scales of a head, [page_tokens], stand behind its numbers.

def write_pages(pool: Pool, pages: Array, x: Floats, write_pages: Ints, write_slots: Ints, transposed: bool) -> None:
    """x [T, K, D], rounded to the type of pages [pages, page_tokens, K, row], in which a part lies as [K, page_tokens,
    D], or, if transposed, as [K, D, page_tokens]. Raises IndexError for a place that is not there, and then nothing is
    written."""

class Attention:
    """Causal attention of one layer: what spec.Attention says of scores."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        scale: float,
        softcap: float,
        window: int,
        pattern: Literal["", "first_tokens", "dilated", "strided"],
        number: int,
    ) -> None:
        """softcap, window: 0 is none. number: of first tokens, of a step, of a stride."""
    def paged(
        self,
        pool: Pool,
        q: Floats,
        keys: Array,
        values: Array,
        starts: Ints,
        lengths: Ints,
        tables: Ints,
        sinks: Floats | None,
        out: Floats,
    ) -> None:
        """keys, values: pages, with keys transposed (see write_pages). starts and lengths [N], tables [N, P]: see
        api.PagedLayout."""
    def dense(
        self,
        pool: Pool,
        q: Floats,
        keys: Array,
        values: Array,
        lengths: Ints,
        sinks: Floats | None,
        out: Floats,
    ) -> None:
        """keys, values [T, K, row] of whole sequences."""
    def paged_latents(
        self, pool: Pool, q: Floats, latents: Array, starts: Ints, lengths: Ints, tables: Ints, out: Floats
    ) -> None:
        """latents: pages [pages, page_tokens, 1, row]; each is every head's key, its beginning every head's value.
        kv_heads: groups of heads that are computed apart."""
    def dense_latents(self, pool: Pool, q: Floats, latents: Array, lengths: Ints, out: Floats) -> None:
        """latents [T, 1, row] of whole sequences."""

def multiply_heads(pool: Pool, matrices: Sequence[Matrix], x: Floats, out: Floats) -> None:
    """out[t, h] = matrices[h] x[t, h]; the last axes dense."""

# ---- recurrent mixers: n sequences of up to m tokens in rows [n * m], lengths [n]. A state `before` becomes `h` or
# `left`; read, write [n]: in which pages of these, where they are pages, of which one may be the same before and after.
# Beyond a sequence's length y is not written ---------------------------------------------------------------

def short_conv(
    pool: Pool,
    x: Floats,
    before: Floats,
    weight: Floats,
    bias: Floats | None,
    lengths: Ints,
    y: Floats,
    left: Floats,
    read: Ints | None,
    write: Ints | None,
) -> None:
    """before, left [n, k - 1, C], weight [k, C]. y is written beyond lengths too."""

def selective_scan(
    pool: Pool,
    x: Floats,
    dt: Floats,
    a: Floats,
    b: Floats,
    c: Floats,
    d: Floats,
    before: Floats,
    lengths: Ints,
    y: Floats,
    h: Floats,
    read: Ints | None,
    write: Ints | None,
) -> None:
    """dt: before softplus. a [S, D], negative. before, h [n, S, D]."""

def linear_scan(
    pool: Pool,
    groups: int,
    x: Floats,
    dt: Floats,
    dt_bias: Floats,
    a: Floats,
    b: Floats,
    c: Floats,
    d: Floats,
    least: float,
    most: float,
    before: Floats,
    lengths: Ints,
    y: Floats,
    h: Floats,
    read: Ints | None,
    write: Ints | None,
) -> None:
    """Mamba-2. a [H], negative. before, h [n, H, S, P]."""

def taylor_scan(
    pool: Pool,
    heads: int,
    q: Floats,
    k: Floats,
    v: Floats,
    before: Floats,
    lengths: Ints,
    y: Floats,
    h: Floats,
    read: Ints | None,
    write: Ints | None,
) -> None:
    """BASED. before, h [n, H, features, P + 1]."""

def lightning_scan(
    pool: Pool,
    q: Floats,
    k: Floats,
    v: Floats,
    decay: Floats,
    before: Floats,
    lengths: Ints,
    y: Floats,
    h: Floats,
    read: Ints | None,
    write: Ints | None,
) -> None:
    """Lightning attention. q, k, v [n * m, H, D], decay [H]. before, h [n, H, D, D], values last."""

def delta_scan(
    pool: Pool,
    key_heads: int,
    q: Floats,
    k: Floats,
    v: Floats,
    decay: Floats,
    beta: Floats,
    rate: Floats,
    dt_bias: Floats,
    before: Floats,
    lengths: Ints,
    y: Floats,
    h: Floats,
    read: Ints | None,
    write: Ints | None,
) -> None:
    """The gated delta rule: see spec.GatedDelta. q, k as they are projected; decay [n * m, H] or [n * m, H * K], beta
    [n * m, H]; rate [H], negative. before, h [n, H, K, P]."""

def norm_gate(pool: Pool, silu: bool, eps: float, y: Floats, z: Floats, weight: Floats, out: Floats) -> None:
    """RMS norm of each head of y, times silu(z) or sigmoid(z). weight: of a head."""

def state_space_scan(
    pool: Pool,
    u: Floats,
    terms: Floats,
    d: Floats,
    before: Floats,
    lengths: Ints,
    y: Floats,
    h: Floats,
    read: Ints | None,
    write: Ints | None,
) -> None:
    """S4 and S4D. terms [blocks, N / 2, 6 or 14, 16]: see state_space.h. before, h [n, N / 2, 2, C]."""

# ---- functions of elements, in rows --------------------------------------------------------------------------------

def add(pool: Pool, a: Floats, b: Floats, factor: float, out: Floats) -> None:
    """a + factor * b"""

def multiply(pool: Pool, a: Floats, b: Floats, out: Floats) -> None: ...
def gate(pool: Pool, a: Floats, b: Floats, out: Floats) -> None:
    """a silu(b)"""

def sigmoid_gate(pool: Pool, a: Floats, b: Floats, out: Floats) -> None:
    """a sigmoid(b)"""

def scale(pool: Pool, x: Floats, number: float, out: Floats) -> None: ...
def softcap(pool: Pool, x: Floats, number: float, out: Floats) -> None:
    """number * tanh(x / number)"""

def activate(pool: Pool, activation: str, alpha: float, limit: float, a: Floats, b: Floats | None, out: Floats) -> None:
    """act(a), or act(a) * b; alpha, limit: of clamped_swiglu, which needs b."""

def gated_norm(pool: Pool, groups: int, eps: float, y: Floats, z: Floats, weight: Floats, out: Floats) -> None:
    """RMS norm of y silu(z), by groups of columns."""

# ---- the two ends of a step ------------------------------------------------------------------------------------------

def embed(pool: Pool, table: Array, kind: str, ids: Ints, out: Floats) -> None:
    """Rows of a table, widened to float32. IndexError: an id that it does not have."""

def rotary(pool: Pool, positions: Ints, frequencies: Floats, factor: float, cos: Floats, sin: Floats) -> None:
    """factor times cosines and sines [n, pairs] of position * frequency."""

def places(
    pool: Pool, table: Ints, rows: Ints, positions: Ints, page_tokens: int, pages: Ints, slots: Ints, tables: Ints
) -> None:
    """Of one token for each sequence: its page and its place there, and the row of the page table up to that page.
    IndexError: the table ends before."""

def best(pool: Pool, logits: Floats, ids: Ints, values: Floats) -> None:
    """The first place of each row's largest number, or of its first NaN, and what stands there."""
