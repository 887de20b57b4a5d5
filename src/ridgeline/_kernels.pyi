"""The kernels of the cpu backend (csrc/). The module is missing where no compiler was found at installation.

Arrays are numpy's, float32 unless stated otherwise. An argument of the wrong type, shape or layout raises TypeError or
ValueError. Calls release the GIL.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
T = TypeVar("T")

def isa() -> str:
    """Return the instruction set in use, one of `isas()`."""

def isas() -> list[str]:
    """Return the instruction sets that were compiled, best first."""

def matrix_unit() -> Literal["none", "emulated", "amx"]:
    """Return the matrix unit that products may use, and attention over state of 16 bits uses.

    RIDGELINE_MATRIX_UNIT selects one.
    """

def attends_in_unit(type: str) -> bool:
    """Return whether this process computes attention over state of this type, such as "float16", in its matrix unit."""

def rounded_refusal() -> str:
    """Return why this process cannot round attention to bfloat16; empty if it can."""

def unit_refusal() -> str:
    """Return why there is no matrix unit, or an empty string."""

def bf16_refusal() -> str:
    """Return why products of bf16 do not have the arithmetic of a matrix unit, or an empty string."""

def dots_refusal() -> str:
    """Return why products of bf16 with bf16 are no dot products of the processor, or an empty string."""

def usable_cores() -> int:
    """Return the number of physical cores that this process may use, at least 1."""

class Pool:
    """A pool of threads that serves one call at a time; other callers wait. It may be used after a fork."""

    def __init__(self, threads: int) -> None:
        """threads: number of threads, including the caller's. More threads than cores are slow; results are equal."""
    @property
    def size(self) -> int: ...
    @property
    def busy_seconds(self) -> float:
        """Seconds for which calls have held the pool so far."""
    rounds_attention: bool
    """Whether attention over state of 16 bits rounds queries, keys, values and weights to bfloat16; False at first.

    Raises ValueError where `rounded_refusal` says why it cannot.
    """
    @property
    def recording(self) -> bool:
        """Return whether the calls of this thread are being recorded."""
    def room(self, shape: tuple[int, ...]) -> Floats:
        """Return memory of the program that is being recorded, which is free again when the array is deleted. Raises
        ValueError if no program is being recorded."""
    def keep(self, constant: Floats) -> None:
        """Let a program that is being recorded use an array whose numbers never change, and keep it alive."""
    def read_rate(self, bytes: int) -> float:
        """Return the bytes per second at which all threads read newly allocated memory: the best of three runs."""
    def fma_rate(self) -> float:
        """Return float32 operations per second in registers; a multiply-add counts as two."""
    def dot_rate(self) -> float:
        """Return operations per second on bytes; a multiply-add counts as two."""
    def bf16_rate(self) -> float:
        """Return float32 operations per second of dot products of bf16 in registers; 0 where none are used."""
    def unit_rate(self) -> float:
        """Return operations per second on bytes in the processor's matrix unit; 0 without one."""
    def unit_bf16_rate(self) -> float:
        """Return operations per second on bf16 in the processor's matrix unit; 0 where it does not serve bf16."""

class Rooms:
    """Memory that programs share. Results of one program stay until another one runs."""

    def __init__(self) -> None: ...
    def poison(self) -> None:
        """Fill the memory with NaN, to check that a program writes all that it reads."""

class Program:
    """Recorded kernel calls that can be repeated over the same arrays."""

    def __init__(self, pool: Pool, rooms: Rooms) -> None: ...
    def know(self, array: Array) -> None:
        """Register an array that calls may use. It must not move as long as the program exists."""
    def record(self, work: Callable[[], T]) -> T:
        """Run `work`, and record the kernels of the pool that this thread calls. Raises RuntimeError if another program
        of the pool is being recorded."""
    def borrow(self, array: Floats) -> Floats:
        """Return the same array with its memory marked as free: read it before another program of this memory runs."""
    @property
    def refusal(self) -> str | None:
        """The reason why the program must not run; None if it may."""
    def __len__(self) -> int: ...
    def __call__(self) -> None:
        """Repeat all calls. Raises ValueError if the program must not run."""

# ---- matrices and what is computed with them -------------------------------------------------------------------------

class Matrix:
    """A matrix [rows, columns] in the layout of the kernels. Its weights are copied."""

    def __init__(
        self,
        pool: Pool,
        parts: Sequence[Array],
        kind: Literal["float32", "bfloat16", "float16", "codes"],
        format: Literal["fp32", "bf16", "fp16", "int8", "int4", "int3", "int2", "fp8", "int5", "int6"],
        group: int,
        biases: Sequence[Floats | None],
        interleave: bool,
        scales: Sequence[Floats] = (),
        offset_kind: Literal["none", "zero_points", "minimums"] = "none",
        offsets: Sequence[Array] = (),
        tokens: Literal["exact", "bf16", "int8"] | None = None,
        wide: bool = False,
        permutation: Ints | None = None,
        factor: float = 1.0,
        input_scale: float = 0.0,
        block: int = 0,
        factors: Sequence[Array] = (),
        min_factors: Sequence[Array] = (),
    ) -> None:
        """Pack the parts of a matrix, one below the other.

        Args:
            parts: each [rows, columns]; 16-bit floats as uint16, codes as int8, those of fp8 as their bytes.
            kind: type of the parts. Floats are rounded to whole numbers without offsets only.
            format: type of the numbers in the panels.
            group: columns that share a float16 scale, a multiple of 32 up to 256; 0 for a float32 scale for each row.
            biases: one for each part.
            interleave: whether two parts, gate and up of an MLP, share panels.
            scales: [rows, groups] for each part of codes; none for floats.
            offset_kind: what groups have besides a scale.
            offsets: [rows, groups] for each part of codes: zero points as int8, minimums as float32.
            tokens: how tokens are taken: as floats, each number rounded to bfloat16, or each token rounded to int8, for
                whole numbers only. None: int8 for whole numbers, and exact otherwise.
            wide: whether scales of groups are float32.
            permutation: column j multiplies element permutation[j] of a token; None for columns in order.
            factor: a power of two; scales and minimums divided by it are float16 numbers.
            input_scale: scale of all rounded tokens; 0 for a scale for each token.

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
    @property
    def in_tiles(self) -> bool:
        """Whether products have the arithmetic of a matrix unit for bf16, with and without it."""
    @property
    def in_dots(self) -> bool:
        """Whether products are the processor's dot products of bf16, which have bits of their own."""
    @property
    def unit_from(self) -> int | None:
        """The least number of tokens for which the matrix unit is used; None for never. It changes no bit. To set it
        for a format that no unit serves in this process is a ValueError."""
    @unit_from.setter
    def unit_from(self, tokens: int | None) -> None: ...
    def take(self, pool: Pool, ids: Ints, out: Floats) -> None:
        """Write rows in float32: exactly the numbers that products use."""

class Norm:
    """out = norm(x), along rows. An RMS norm's offset is part of its weight."""

    def __init__(self, kind: Literal["rms", "layer"], eps: float, weight: Floats, bias: Floats | None) -> None: ...
    def __call__(self, pool: Pool, x: Floats, out: Floats) -> None: ...

def rotate(
    pool: Pool, x: Floats, head_dim: int, first: int, rope_dim: int, interleaved: bool, cos: Floats, sin: Floats
) -> None:
    """Rotate the heads of x [T, heads * head_dim] in place, elements from `first` on. cos, sin: [T, rope_dim / 2]."""

# In stages, x and delta are [T, columns]. With a delta, the residual is x + residual_scale * delta, and is written if
# an array for it is given. The optional norm and the matrix follow. Int8 and int4 matrices round each token's elements
# to 255 steps: its largest magnitude is 127, and a token that is not finite becomes NaN.

class Projection:
    """out = softcap(scale * matrix(norm(residual)))."""

    def __init__(
        self, pool: Pool, matrix: Matrix, norm: Norm | None, residual_scale: float, scale: float, softcap: float
    ) -> None:
        """softcap: limit of the results; 0 for none."""
    def __call__(
        self, x: Floats, delta: Floats | None, rows: Ints | None, residual: Floats | None, out: Floats
    ) -> None:
        """rows: indices of the rows of x and delta to use; None for all."""

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
        """rope_dim: rotated elements of a head; 0 for no rotation. norms: one for each rotated part, or none. over_all:
        whether one norm covers all heads."""
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
    """out = down(act(up(norm(residual)))). An interleaved first matrix is gate and up of a gated MLP."""

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
        """alpha, limit: parameters of clamped_swiglu."""
    def __call__(self, x: Floats, delta: Floats | None, residual: Floats | None, out: Floats) -> None: ...

class Experts:
    """out[t] = sum over c, in order, of weights[t, c] * expert[ids[t, c]](norm(x[t])), then + plus * sigmoid(gate)."""

    def __init__(
        self,
        pool: Pool,
        up: Sequence[Matrix],
        down: Sequence[Matrix],
        norm: Norm | None,
        activation: str,
        alpha: float,
        limit: float,
        identities: int = 0,
        share: float = 1.0,
    ) -> None:
        """up: matrices of the experts, interleaved if experts are gated."""
    def __call__(
        self, x: Floats, ids: Ints, weights: Floats, plus: Floats | None, gate: Floats | None, out: Floats
    ) -> None:
        """plus: [T, columns of out] or None. gate: the gate of plus, [T, 1] or None."""

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
    """Write each token's best experts, ids and weights [T, k], from logits [T, experts]; see spec.MoE. groups: number
    of groups; 0 for none."""

# ---- attention: tokens of all sequences one after the other, out [T, H * value_dim] --------------------------------

# Keys, values and latents are float32, bfloat16 as uint16, float16, int8, or e4m3 as uint8. A row of int8 ends with the
# four bytes of its scale. In pages, the scales of a head, [page_tokens], follow its numbers. All numbers of an array of
# e4m3 have one scale, which is an argument; other types ignore it.

def write_pages(
    pool: Pool, pages: Array, x: Floats, write_pages: Ints, write_slots: Ints, transposed: bool, scale: float = 1.0
) -> None:
    """Write x [T, K, D] in the type of pages [pages, page_tokens, K, row]. A page is laid out as [K, page_tokens, D],
    or as [K, D, page_tokens] if transposed. Raises IndexError, and writes nothing, for a page or slot that does not
    exist."""

def move_rows(
    pool: Pool, pages: Array, from_pages: Ints, from_slots: Ints, to_pages: Ints, to_slots: Ints, transposed: bool
) -> None:
    """Move rows of pages, as write_pages lays them out, one after the other. Raises IndexError, and moves nothing, for
    a page or slot that does not exist."""

def select_keys(
    pool: Pool, q: Floats, weights: Floats, keys: Floats, limits: Ints, seen: Ints | None, ids: Ints, counts: Ints
) -> None:
    """Choose the best keys of n queries of one sequence. q: [n, heads, numbers]; weights: [n, heads]; keys: [S,
    numbers]; limits: [n], the keys before which each query sees; seen: [n, S], 1 for keys that it sees, or None for
    all -> ids [n, k], ascending, and counts [n]."""

class Attention:
    """Attention of one layer; see spec.Attention."""

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
        block: int = 1,
    ) -> None:
        """softcap, window: 0 for none. number: parameter of the pattern: first tokens, step or stride. block: tokens
        that see each other and all before them."""
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
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        paths: Ints | None = None,
    ) -> None:
        """keys, values: pages, with keys transposed (see write_pages). starts and lengths [N], tables [N, P], paths
        [T]: see api.PagedLayout. Raises ValueError for paths that are no tree."""
    def dense(
        self,
        pool: Pool,
        q: Floats,
        keys: Array,
        values: Array,
        lengths: Ints,
        sinks: Floats | None,
        out: Floats,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """keys, values [T, K, row] of whole sequences."""
    def paged_latents(
        self, pool: Pool, q: Floats, latents: Array, starts: Ints, lengths: Ints, tables: Ints, out: Floats,
        scale: float = 1.0, paths: Ints | None = None,
    ) -> None:  # fmt: skip
        """latents: pages [pages, page_tokens, 1, row]. A latent is the key of all heads, and its first numbers are the
        value of all heads. kv_heads: groups of heads that are computed separately."""
    def dense_latents(
        self, pool: Pool, q: Floats, latents: Array, lengths: Ints, out: Floats, scale: float = 1.0
    ) -> None:
        """latents [T, 1, row] of whole sequences."""

def multiply_heads(pool: Pool, matrices: Sequence[Matrix], x: Floats, out: Floats) -> None:
    """out[t, h] = matrices[h] x[t, h]. Elements of x beyond the columns of the matrices are copied behind the result.

    x: [T, heads, columns + rest]; out: [T, heads, rows + rest]; the last axes must be dense."""

# ---- recurrent mixers: n sequences of up to m tokens in rows [n * m], lengths [n]. Kernels read the state `before` and
# write `h` or `left`. If these arrays are pages, read and write [n] are page numbers, which may be equal. y is not
# written beyond a sequence's length ------------------------------------------------------------------------

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
    """A short convolution. before, left [n, k - 1, C], weight [k, C]. y is also written beyond lengths."""

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
    """The scan of Mamba. dt: before softplus. a [S, D], negative. before, h [n, S, D]."""

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
    is_hedgehog: bool,
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

def gated_lru(
    pool: Pool,
    x: Floats,
    into: Floats,
    gate: Floats,
    decay: Floats,
    begun: Floats,
    before: Floats,
    lengths: Ints,
    y: Floats,
    begins: Floats,
    h: Floats,
    begun_read: Ints | None = None,
    begun_write: Ints | None = None,
    read: Ints | None = None,
    write: Ints | None = None,
) -> None:
    """Compute the real-gated linear recurrent unit. x, into, gate [n * m, C], decay [C], negative. begun,
    begins [n, blocks], before, h [n, C].
    """

def delta_scan(
    pool: Pool,
    key_heads: int,
    reach: float,
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
    """The gated delta rule; see spec.GatedDelta. q, k: before normalization; decay [n * m, H] or [n * m, H * K], beta
    [n * m, H]; rate [H], negative. before, h [n, H, K, P]."""

def begin_states(pool: Pool, pages: Floats, read: Ints, fresh: Ints, write: Ints, found: Ints) -> None:
    """Fill the pages that sequences write with zeros where they begin.

    found: gets the page that each sequence reads: its own new one where it begins, else that of `read`. Raises
    IndexError for a page outside of the array.
    """

def norm_gate(pool: Pool, silu: bool, eps: float, y: Floats, z: Floats, weight: Floats, out: Floats) -> None:
    """RMS norm of each head of y, times silu(z) or sigmoid(z). weight: the norm's weight for one head."""

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
def add_low_rank(
    pool: Pool, y: Floats, x: Floats, slots: Ints, down: Floats, up: Floats, gain: Floats, add: Floats, ranks: Ints,
    out: Floats,
) -> None: ...  # fmt: skip
def gate(pool: Pool, a: Floats, b: Floats, out: Floats) -> None:
    """a silu(b)"""

def sigmoid_gate(pool: Pool, a: Floats, b: Floats, out: Floats) -> None:
    """a sigmoid(b)"""

def scale(pool: Pool, x: Floats, number: float, out: Floats) -> None: ...
def softcap(pool: Pool, x: Floats, number: float, out: Floats) -> None:
    """number * tanh(x / number)"""

def activate(pool: Pool, activation: str, alpha: float, limit: float, a: Floats, b: Floats | None, out: Floats) -> None:
    """act(a), or act(a) * b. alpha, limit: parameters of clamped_swiglu, which needs b."""

def gated_norm(pool: Pool, groups: int, eps: float, y: Floats, z: Floats, weight: Floats, out: Floats) -> None:
    """RMS norm of y silu(z), by groups of columns."""

# ---- the two ends of a step ------------------------------------------------------------------------------------------

def embed(pool: Pool, table: Array, kind: str, ids: Ints, out: Floats) -> None:
    """Write rows of a table in float32. Raises IndexError for an id outside of the table."""

def write_rows(pool: Pool, to: Floats, rows: Ints, x: Floats) -> None:
    """Copy each row of x [n, width] to a row of an array. Raises IndexError for a row outside of it."""

def take_rows(pool: Pool, x: Floats, more: Floats | None, rows: Ints, out: Floats) -> None:
    """Copy rows of x [n, heads, columns] to out. Rows from n on are those of `more`. Raises IndexError for others."""

def rotary(pool: Pool, positions: Ints, frequencies: Floats, factor: float, cos: Floats, sin: Floats) -> None:
    """factor times cosines and sines [n, pairs] of position * frequency."""

def decode_layout(
    pool: Pool,
    table: Ints,
    rows: Ints,
    positions: Ints,
    last: Ints,
    page_tokens: int,
    pages: Ints,
    slots: Ints,
    tables: Ints,
) -> None:
    """Write the page and the slot of each token, and for each sequence the row of the page table up to the page of its
    last token, whose index is in `last`. Raises IndexError if the table is too short."""

def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Return the 256 random bits of a key and a counter, as four words (Philox4x64-10)."""

def draw_logits(logits: Floats, top: float, temperature: float, key: tuple[int, int, int, int]) -> int:
    """Return the index with the largest (logit - top) / temperature + noise; see ridgeline.sample.noise.draw_logits.

    temperature: above 1e-30.
    """

def likely(logits: Floats, top: float, temperature: float, least: float, found: Ints) -> tuple[int, float]:
    """Find the tokens whose score (logit - top) / temperature is at least `least`, up to rounding in float32.

    found [n + 1]: their ids are written to it, ascending. Returns their number, and the sum of e^score of all others.
    least: above -80. temperature: above 1e-30.
    """

def longest_match(
    text: np.ndarray[Any, np.dtype[np.int32]],
    last: np.ndarray[Any, np.dtype[np.int32]],
    least: int,
    most: int,
    candidates: int,
) -> tuple[int, int]:
    """The length of the longest part of a text that equals the last tokens of `last`, and the index behind it; (0, 0)
    if it is shorter than `least`. Of equally long parts, the latest one counts. No part is longer than `most`, and only
    the latest `candidates` of them are looked at.
    """

def draw_scores(scores: Doubles, ids: Ints | None, key: tuple[int, int, int, int]) -> int:
    """Return the index with the largest sum of score and noise; see ridgeline.sample.noise.draw."""

def draw_rows(pool: Pool, logits: Floats, draws: Ints, token_ids: Ints | None, ids: Ints, values: Floats) -> None:
    """Write the index that each row draws, and the row's largest logit; see ridgeline.ops.draws.draw."""

def best(pool: Pool, logits: Floats, ids: Ints, values: Floats) -> None:
    """Write the index of each row's first NaN, or else of its first largest number, and that number."""
