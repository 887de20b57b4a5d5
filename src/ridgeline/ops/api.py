"""The table of kernels, as signatures: what every operation takes, returns and promises.

Shapes: T tokens of all sequences in one row (flattened, ragged), `width` the hidden size, H query heads, K key and
value heads, D elements per head. Activations are float32. Every op is pure, it returns new
arrays; only WRITE_PAGES writes, into the arena.

*Primitives* are the definition. *Stages* are what a kernel may fuse; the default of a stage is the composition of
its primitives (`stages.py`), so a backend may take any subset of either. An op is picked once per *case*, when
modules are built: the case is the part of the ModelSpec that the op serves, which holds all that a kernel must know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from ridgeline.spec.dtype import DType
from ridgeline.spec.quant import Format
from ridgeline.spec.storage import StateDType

F = TypeVar("F", bound=Callable[..., Any])


class Array(Protocol):
    """An array of whichever library the backend uses. Only ops look inside."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Product(Protocol):
    """A matrix that is ready to be multiplied with: x [..., in] -> [..., out], bias and all."""

    def __call__(self, x: Array) -> Array: ...
    def dequantize(self) -> Array:
        """The numbers that it multiplies with, float32 [out, in]."""
        ...


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix [out, in] as codes. Number (i, j) is (codes[i, j] - zero point) x scale, with the zero point and the
    scale of its group; absent zero points are 0. `format` says how many neighbors make a group.
    """

    format: Format
    codes: Array  # [out, in], int8
    scales: Array  # [out, groups], float32
    zero_points: Array | None = None  # [out, groups], int8
    permutation: Array | None = None  # [in], integers: column j multiplies element permutation[j] of the input

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays that the matrix consists of."""
        parts = (self.codes, self.scales, self.zero_points, self.permutation)
        return tuple(part for part in parts if part is not None)


class Linear(Protocol):
    """A matrix of a model: `apply(x) ~= x @ dequantize().T + bias`, within the bound of its scheme (see quant/), plus
    its low-rank term where it has one.

    A stage that is one kernel takes `data` [out, in] and `bias` [out] as they are, and packs them in `format`. A stage
    that is composed calls `prepare` once, before `apply`.
    """

    @property
    def format(self) -> Format: ...
    @property
    def data(self) -> Array | QuantizedMatrix: ...
    @property
    def bias(self) -> Array | None: ...
    @property
    def low_rank(self) -> object | None: ...
    @property
    def apply(self) -> Product: ...
    def prepare(self) -> None: ...


class Rotary(NamedTuple):
    """Rotation of each token: cosines and sines, [T, rope.dim / 2], the attention factor multiplied in."""

    cos: Array
    sin: Array


# Keys, values and latents below are as they are stored: float32, or bfloat16, float16 or int8, the last one with the
# four bytes of its scale behind each row of numbers. Kernels read them as float32. See spec.storage.


class DenseKeyValues(NamedTuple):
    """Keys and values of whole sequences, one after the other: [T, K, D], with each sequence's length."""

    keys: Array
    values: Array
    lengths: tuple[int, ...]


class DenseRows(NamedTuple):
    """A layer's state of whole sequences, one after the other: each part [T, *shape], with each sequence's length."""

    parts: tuple[Array, ...]
    lengths: tuple[int, ...]


class Bucket(NamedTuple):
    """Sequences of a step whose queries and contexts are of like length, padded to one shape: n sequences, at most m
    queries each, P pages of keys each. A sequence with fewer repeats its last query; missing pages are page 0.
    """

    rows: Array  # [n, m], of the step's T tokens
    positions: Array  # [n, m], of the queries
    pages: Array  # [n, P], in the arena
    first: Array  # [n, P], the position of the first key of each page


class Buckets(NamedTuple):
    """A step's sequences in buckets."""

    buckets: tuple[Bucket, ...]
    order: Array  # [T], where each token's result stands when the buckets' [n * m] results are laid end to end


@dataclass(frozen=True)
class PagedLayout:
    """Where one step reads and writes in the pages of one state group; made once, shared by the group's layers.

    It says so twice: to kernels that walk through page tables, and in buckets, made when they are first asked for, to
    those that want rectangles.
    """

    write_pages: Array  # [T]
    write_slots: Array  # [T], the token's place in its page
    starts: Array  # [N], the position of each sequence's first query
    lengths: Array  # [N], queries of each sequence
    tables: Array  # [N, P], pages by index; 0 where there is none, or none that is read
    fill_buckets: Callable[[], Buckets]

    @cached_property
    def _buckets(self) -> Buckets:
        return self.fill_buckets()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets.buckets

    @property
    def order(self) -> Array:
        return self._buckets.order


class PagedKeyValues(NamedTuple):
    """Keys and values of one layer in the arena: [pages, page_tokens, K, D] views. Page 0 holds nothing.

    What stands where inside a page's view is the device's own business, and that of all of its backends alike.
    """

    keys: Array
    values: Array
    layout: PagedLayout


class PagedRows(NamedTuple):
    """A layer's state in the arena, part by part: [pages, page_tokens, *shape] views. Page 0 holds nothing."""

    parts: tuple[Array, ...]
    layout: PagedLayout


class SequenceBucket(NamedTuple):
    """Sequences of a step with numbers of tokens alike, padded to one: n sequences, at most m tokens each. A sequence
    with fewer repeats its last token.
    """

    members: Array  # [n], of the step's sequences
    rows: Array  # [n, m], of the step's T tokens; see Segments
    lengths: Array  # [n], tokens


class Segments(NamedTuple):
    """How a step's T tokens fall into its N sequences, for what runs along each of them.

    Drafts run on from the states that the tokens before them leave, and leave none themselves: what they were given is
    kept instead. Where drafts were accepted, what was kept of those R tokens runs once more, before the step's own:
    rows of buckets count from the first of the R.
    """

    buckets: tuple[SequenceBucket, ...]
    order: Array  # [T], where each token's result stands when all results [n * m], drafts' last, are laid end to end
    sequence_order: Array  # [N], where each sequence's state stands when the buckets' [n] are
    drafts: tuple[SequenceBucket, ...] = ()
    keep: Array | None = None  # [D], which of the T tokens are drafts; None where there are none


class SnapshotLayout(NamedTuple):
    """Where one step finds and leaves the states of its N sequences, in the pages of one snapshot group."""

    read: Array  # [N], pages; of a sequence that begins, page 0
    fresh: Array  # [N], 1 where a sequence begins and there is nothing to read, else 0
    write: Array  # [N]


States = Sequence[Array]  # of a layer: [N, *shape] for each part of its mixer's state
Kept = Sequence[Array]  # of a layer: what goes along of R or D tokens, [tokens, *shape] each; none where there are no


@dataclass(frozen=True, slots=True)
class Op(Generic[F]):
    """The name of an operation; `F` is its signature."""

    name: str
    level: Literal["primitive", "stage"]


# ---- primitives: (arguments) -> result; the case in brackets ---------------------------------------------

# (table [n, width], ids [T]) -> [T, width] [no case]
EMBEDDING: Op[Callable[[Array, Array], Array]] = Op("embedding", "primitive")
# (x [T, in], weight [out, in], bias [out] or None) -> [T, out] [no case]
LINEAR: Op[Callable[[Array, Array, Array | None], Array]] = Op("linear", "primitive")
# (x [..., n], weight [n], bias [n] or None) -> [..., n] [RMSNorm or LayerNorm]
NORM: Op[Callable[[Array, Array, Array | None], Array]] = Op("norm", "primitive")
# (positions [T], inverse frequencies [dim / 2] or, of each token, [T, dim / 2], attention factor) -> Rotary [no case]
ROTARY: Op[Callable[[Array, Array, float], Rotary]] = Op("rotary", "primitive")
# (x [T, heads, D], rotary) -> [T, heads, D] [Rope]
ROPE: Op[Callable[[Array, Rotary], Array]] = Op("rope", "primitive")
# (x [T, heads * D], heads) -> [T, heads, D] [no case]
SPLIT_HEADS: Op[Callable[[Array, int], Array]] = Op("split_heads", "primitive")
# (q [T, H, D], keys and values, sinks [H] or None) -> [T, H * D]: causal, within each sequence [Attention]
ATTENTION: Op[Callable[[Array, DenseKeyValues, Array | None], Array]] = Op("attention", "primitive")
# (q [T, H, D], keys and values in pages, sinks [H] or None) -> [T, H * D]: causal, each query over its own sequence
# [Attention]
PAGED_ATTENTION: Op[Callable[[Array, PagedKeyValues, Array | None], Array]] = Op("paged_attention", "primitive")
# (q [T, H, nope + rope], latents [T, 1, rank + rope], kv_b [H, nope + value, rank]) -> [T, H * value]: causal, within
# each sequence [LatentAttention]
LATENT_ATTENTION: Op[Callable[[Array, DenseRows, Array], Array]] = Op("latent_attention", "primitive")
# (q, latents in pages, kv_b) -> [T, H * value]: causal, each query over its own sequence [LatentAttention]
PAGED_LATENT_ATTENTION: Op[Callable[[Array, PagedRows, Array], Array]] = Op("paged_latent_attention", "primitive")
# (each part's pages [pages, page_tokens, *shape], each part [T, *shape], write pages [T], write slots [T]) -> None, in
# place [Attention, LatentAttention]
WRITE_PAGES: Op[Callable[[Sequence[Array], Sequence[Array], Array, Array], None]] = Op("write_pages", "primitive")
# (rows of a part [T, heads, numbers]) -> as they are stored: what a page would hold of them, in the order of
# spec.storage.Storage.stored [Storage]
STORE_ROWS: Op[Callable[[Array], Array]] = Op("store_rows", "primitive")
# (x) -> act(x) [MLP, ungated MoE]; (gate, up) -> act(gate) * up [GatedMLP, MoE], or what ClampedSwiGLU says of them
ACTIVATION: Op[Callable[..., Array]] = Op("activation", "primitive")
# (a, b, scale) -> a + scale * b [no case]
ADD: Op[Callable[[Array, Array, float], Array]] = Op("add", "primitive")
# (x, factor) -> factor * x [no case]
SCALE: Op[Callable[[Array, float], Array]] = Op("scale", "primitive")
# (x, cap) -> cap * tanh(x / cap) [no case]
SOFTCAP: Op[Callable[[Array, float], Array]] = Op("softcap", "primitive")
# (x [T, width], rows [n]) -> [n, width] [no case]
TAKE: Op[Callable[[Array, Array], Array]] = Op("take", "primitive")
# (x [..., n], start, stop) -> [..., stop - start] [no case]
CUT: Op[Callable[[Array, int, int], Array]] = Op("cut", "primitive")
# (a [..., n], b [..., m]) -> [..., n + m] [no case]
JOIN: Op[Callable[[Array, Array], Array]] = Op("join", "primitive")
# (router logits [T, experts], choice bias [experts] where there is one) -> expert ids [T, k], weights [T, k] [MoE]
ROUTE: Op[Callable[..., tuple[Array, Array]]] = Op("route", "primitive")
# (x [T, width], expert ids [T, k], weights [T, k], expert) -> [T, width]: of each token, the weighted sum of what its
# experts make of it; expert(e, x [n, width]) -> [n, width] is asked once for all tokens of an expert [MoE]
Expert = Callable[[int, Array], Array]
EXPERTS: Op[Callable[[Array, Array, Array, Expert], Array]] = Op("experts", "primitive")
# (weight [out, in]) -> the matrix as codes, rounded to nearest. Raises ValueError for weights that cannot be rounded:
# infinities, NaN, or magnitudes beyond the format's scales [Format]
QUANTIZE: Op[Callable[[Array], QuantizedMatrix]] = Op("quantize", "primitive")
# (matrix) -> [out, in], float32, its columns in the order of the input [Format]
DEQUANTIZE: Op[Callable[[QuantizedMatrix], Array]] = Op("dequantize", "primitive")
# (x [..., in], matrix, bias [out] or None) -> [..., out]. Each token of x is rounded to 255 steps: its largest
# magnitude is 127; a token that is not finite becomes NaN [Format]
QUANTIZED_LINEAR: Op[Callable[[Array, QuantizedMatrix, Array | None], Array]] = Op("quantized_linear", "primitive")

# (pages [pages, *shape], read [N], fresh [N], write [N]) -> [N, *shape], zeros where a sequence begins: a copy, or what
# stands for it until the states are written; `write` is where that will be [no case]
READ_STATE: Op[Callable[[Array, Array, Array, Array], Array]] = Op("read_state", "primitive")
# (pages [pages, *shape], write [N], states [N, *shape]) -> None, in place [no case]
WRITE_STATE: Op[Callable[[Array, Array, Array], None]] = Op("write_state", "primitive")
# (parts, each [n, m, *shape] or [n, *shape]; axes to lay end to end: 1 or 2; order) -> [*order, *shape] [no case]
GATHER: Op[Callable[[Sequence[Array], int, Array], Array]] = Op("gather", "primitive")
# (x [..., sum of sizes], sizes) -> a part [..., size] for each [no case]
SPLIT: Op[Callable[[Array, Sequence[int]], Sequence[Array]]] = Op("split", "primitive")
# (x [n, m, C], before [n, k - 1, C], weight [C, 1, k], bias [C] or None, lengths [n]) -> y [n, m, C], the k - 1 tokens
# before what comes next: each channel's own filter over a token and the k - 1 before it [no case]
SHORT_CONV: Op[Callable[[Array, Array, Array, Array | None, Array], tuple[Array, Array]]] = Op(
    "short_conv", "primitive"
)
# (x [n, m, D], dt [n, m, D], A_log [D, S], B and C [n, m, S], D [D], h [n, D, S], lengths [n]) -> y [n, m, D], h
# [Mamba]
SELECTIVE_SCAN: Op[Callable[..., tuple[Array, Array]]] = Op("selective_scan", "primitive")
# (x [n, m, inner], dt [n, m, H], dt_bias, A_log [H], B and C [n, m, G * S], D [H], h [n, H, P, S], lengths [n]) ->
# y [n, m, inner], h [Mamba2]
SSD: Op[Callable[..., tuple[Array, Array]]] = Op("ssd", "primitive")
# (x [n, m, H * D], the same of k, v [n, m, H * P], sums h [n, H, P + 1, features], lengths [n]) -> y [n, m, H * P], h
# [TaylorAttention]
TAYLOR_ATTENTION: Op[Callable[[Array, Array, Array, Array, Array], tuple[Array, Array]]] = Op(
    "taylor_attention", "primitive"
)
# (u [n, m, C], log_dt [C], A_log and A_imag [C, N / 2], P and B (S4's), C [C, 2, N / 2], D [C], h [n, C, 2, N / 2],
# lengths [n]) -> y [n, m, C], h [S4 or S4D]
STATE_SPACE: Op[Callable[..., tuple[Array, Array]]] = Op("state_space", "primitive")
# (q, k and v [n, m, H, D], h [n, H, D, D], lengths [n]) -> y [n, m, H * D], h [LightningAttention]
LIGHTNING_ATTENTION: Op[Callable[[Array, Array, Array, Array, Array], tuple[Array, Array]]] = Op(
    "lightning_attention", "primitive"
)
# (q and k [n, m, key heads * K], v [n, m, H * P], decay [n, m, H or H * K], beta [n, m, H], A_log [H], dt_bias [H or
# H * K], h [n, H, K, P], lengths [n]) -> y [n, m, H * P], h [GatedDelta or KimiDelta]
DELTA_RULE: Op[Callable[..., tuple[Array, Array]]] = Op("delta_rule", "primitive")
# (y [..., H * P], z [..., H * P], weight [P]) -> norm(y), of each head, times act(z) [GatedDelta or KimiDelta]
NORM_GATE: Op[Callable[[Array, Array, Array], Array]] = Op("norm_gate", "primitive")
# (a, b) -> a * b [no case]
MULTIPLY: Op[Callable[[Array, Array], Array]] = Op("multiply", "primitive")
# (y, z) -> y silu(z) [no case]
GATE: Op[Callable[[Array, Array], Array]] = Op("gate", "primitive")
# (y [..., n], z [..., n or 1]) -> y sigmoid(z) [no case]
SIGMOID_GATE: Op[Callable[[Array, Array], Array]] = Op("sigmoid_gate", "primitive")
# (y [..., inner], z [..., inner], weight [inner]) -> norm(y silu(z)) by groups [Mamba2]
GATED_NORM: Op[Callable[[Array, Array, Array], Array]] = Op("gated_norm", "primitive")

# (page table [rows, P], rows [n], positions [n], page tokens) -> write pages [n], write slots [n], tables [n, P] up to
# there: the layout of a step of one token for each of n sequences [no case]
PLACES: Op[Callable[[Array, Array, Array, int], tuple[Array, Array, Array]]] = Op("places", "primitive")
# (logits [n, vocabulary]) -> ids [n] of the largest, of equals the first, of NaN the first where there is one; and what
# stands there [n] [no case]
BEST: Op[Callable[[Array], tuple[Array, Array]]] = Op("best", "primitive")

# ---- stages: they begin with residual add and norm, and end before the point where a tensor-parallel reduce, a
# post-norm, an adapter or a capture may come --------------------------------------------------------------------

# (residual, delta or None, rotary or None) -> residual, q [T, H, D], its gate [T, H * D] or None, k [T, K, D],
# v [T, K, D] [stages.AttentionInput]
ATTENTION_INPUT: Op[Callable[[Array, Array | None, Rotary | None], tuple[Array, Array, Array | None, Array, Array]]] = (
    Op("attention_input", "stage")
)
# (residual, delta or None, rotary or None) -> residual, q [T, H, D], its gate or None, where keys are another layer's
# [stages.AttentionInput]
QUERY_INPUT: Op[Callable[[Array, Array | None, Rotary | None], tuple[Array, Array, Array | None]]] = Op(
    "query_input", "stage"
)
# (residual, delta or None, rotary or None) -> residual, q [T, H, nope + rope], latents [T, 1, rank + rope]
# [stages.LatentInput]
LATENT_INPUT: Op[Callable[[Array, Array | None, Rotary | None], tuple[Array, Array, Array]]] = Op(
    "latent_input", "stage"
)
# (attended [T, H * D], its gate or None) -> delta [T, width] [Attention or LatentAttention]
ATTENTION_OUTPUT: Op[Callable[[Array, Array | None], Array]] = Op("attention_output", "stage")
# (residual, delta or None, states, what was kept of R tokens, segments) -> residual, delta [T, width], states, what is
# to be kept of D drafts [stages.RecurrentBlock]
RECURRENT_BLOCK: Op[Callable[[Array, Array | None, States, Kept, Segments], tuple[Array, Array, States, Kept]]] = Op(
    "recurrent_block", "stage"
)
# (residual, delta or None) -> residual, delta [stages.MLPBlock]
MLP_BLOCK: Op[Callable[[Array, Array | None], tuple[Array, Array]]] = Op("mlp_block", "stage")
# (x [..., in]) -> [..., out]: one matrix, "matrix" [Format]
PRODUCT: Op[Product] = Op("product", "stage")
# (x [T, width], expert ids [T, k], weights [T, k]) -> [T, width]: as the primitive, with their matrices [MoE]
EXPERT_BLOCK: Op[Callable[[Array, Array, Array], Array]] = Op("expert_block", "stage")
# (residual, delta or None, rows [n] or None for all) -> logits [n, vocabulary] [stages.Head]
HeadStage = Callable[[Array, Array | None, Array | None], Array]
HEAD: Op[HeadStage] = Op("head", "stage")

PRIMITIVES: tuple[Op[Any], ...] = (
    EMBEDDING, LINEAR, NORM, ROTARY, ROPE, SPLIT_HEADS, ATTENTION, PAGED_ATTENTION,
    LATENT_ATTENTION, PAGED_LATENT_ATTENTION,
    WRITE_PAGES, STORE_ROWS, ACTIVATION, ADD, SCALE, SOFTCAP, TAKE, CUT, JOIN,
    ROUTE, EXPERTS, QUANTIZE, DEQUANTIZE, QUANTIZED_LINEAR,
    READ_STATE, WRITE_STATE, GATHER, SPLIT, MULTIPLY, GATE, SIGMOID_GATE, GATED_NORM,
    SHORT_CONV, SELECTIVE_SCAN, SSD, TAYLOR_ATTENTION, LIGHTNING_ATTENTION, STATE_SPACE,
    DELTA_RULE, NORM_GATE, PLACES, BEST,
)  # fmt: skip
STAGES: tuple[Op[Any], ...] = (
    ATTENTION_INPUT, QUERY_INPUT, LATENT_INPUT, ATTENTION_OUTPUT, RECURRENT_BLOCK, PRODUCT, EXPERT_BLOCK, MLP_BLOCK,
    HEAD,
)  # fmt: skip


class Weights(NamedTuple):
    """The weights of one stage, by their names in the spec: matrices as Linear, those of experts as one for each, the
    rest as arrays.
    """

    linears: Mapping[str, Linear]
    arrays: Mapping[str, Array]
    experts: Mapping[str, Sequence[Linear]] = MappingProxyType({})

    def vector(self, name: str) -> Array | None:
        return self.arrays.get(name)

    def parted(self, name: str) -> tuple[Weights, Weights]:
        """Those but one matrix, and that matrix: of the stages before and after what has none."""
        others = {n: w for n, w in self.linears.items() if n != name}
        return self._replace(linears=others), Weights({name: self.linears[name]}, {})

    def under(self, prefix: str) -> Weights:
        """Those of a part, whose names begin with `prefix`, by the rest of the name."""
        linears = {n.removeprefix(prefix): w for n, w in self.linears.items() if n.startswith(prefix)}
        return Weights(linears, {n.removeprefix(prefix): w for n, w in self.arrays.items() if n.startswith(prefix)})


class Memory(Protocol):
    """Where arrays live: the way in and out of the backend's library."""

    @property
    def device(self) -> str:
        """As `resolve_device` names it."""
        ...

    @property
    def on_host(self) -> bool:
        """Is it this machine's main memory? Then weights that keep their type stay views of their files."""
        ...

    @property
    def float_bytes(self) -> int:
        """Bytes of a number in the type in which models compute here."""
        ...

    def put(self, host: np.ndarray[Any, Any], dtype: str, to: str) -> Array:
        """A host array of `dtype` elements (bfloat16 as uint16) as an array of type `to`; shared if it can be."""
        ...

    def integers(self, values: np.ndarray[Any, Any]) -> Array:
        """Token ids, positions and row numbers."""
        ...

    def get(self, array: Array) -> np.ndarray[Any, Any]:
        """A host copy, float32."""
        ...

    def free_bytes(self) -> int | None:
        """Memory of the device that can be had now; None where that is not known."""
        ...

    def widen(self, array: Array) -> Array:
        """The array in float32, on the device."""
        ...

    def pages(self, num_pages: int, num_bytes: int) -> Array:
        """A new array of bytes [num_pages, num_bytes] for state; its contents are undefined."""
        ...

    def page_view(self, pages: Array, offset: int, shape: tuple[int, ...], dtype: StateDType) -> Array:
        """What lies from byte `offset` of every page on, as [num_pages, *shape] of `dtype`, sharing memory.

        offset and the bytes of a page: multiples of 4.
        """
        ...

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """A new array of zeros, in the type in which models compute here."""
        ...

    def copy_pages(self, pages: Array, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages onto others, in place; no target is also a source."""
        ...

    def pages_out(self, pages: Array, index: Sequence[int]) -> np.ndarray[Any, Any]:
        """Host copies of some pages, [len(index), num_bytes]."""
        ...

    def pages_in(self, pages: Array, index: Sequence[int], host: np.ndarray[Any, Any]) -> None:
        """Write host copies back, in place."""
        ...

    def random(self, shape: tuple[int, ...], dtype: DType, std: float, seed: int) -> Array:
        """Normal noise around 0, the same for the same seed on the same device kind."""
        ...


class Backend(Protocol):
    """One source of kernels."""

    @property
    def name(self) -> str: ...

    def refuses(self, op: Op[Any], case: object) -> str | None:
        """Return why this backend cannot serve `op` for `case`; None if it can."""
        ...

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        """Return why the stage must be composed for these weights; None if this backend can fuse it."""
        ...

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]: ...

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]: ...
