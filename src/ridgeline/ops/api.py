"""Signatures of all operations: arguments, results and contracts.

Shapes: T tokens of all sequences, flattened; `width` is the hidden size; H query heads, K key and value heads, D
elements per head. Activations are float32. Ops return new arrays; only WRITE_PAGES and WRITE_STATE write in place,
into the arena, and KEEP_TOKENS.

*Primitives* define the results. *Stages* are sequences of primitives that a kernel may fuse; by default a stage is the
composition of its primitives (`stages.py`), so that a backend may serve any subset of both. A backend is chosen once
for each *case*, when modules are built. The case is the part of the ModelSpec with all facts that a kernel needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from ridgeline.ops.arrays import ARRAYS as ARRAYS
from ridgeline.ops.arrays import BY_ROW as BY_ROW
from ridgeline.ops.arrays import Array as Array
from ridgeline.ops.arrays import QuantizedMatrix as QuantizedMatrix
from ridgeline.ops.arrays import QuantizedStack as QuantizedStack
from ridgeline.ops.low_rank import SlotTerms as SlotTerms
from ridgeline.ops.paged import Bucket as Bucket
from ridgeline.ops.paged import Buckets as Buckets
from ridgeline.ops.paged import BucketTree as BucketTree
from ridgeline.ops.paged import DenseKeyValues as DenseKeyValues
from ridgeline.ops.paged import DenseRows as DenseRows
from ridgeline.ops.paged import PagedKeyValues as PagedKeyValues
from ridgeline.ops.paged import PagedLayout as PagedLayout
from ridgeline.ops.paged import PagedRows as PagedRows
from ridgeline.ops.paged import PageTarget as PageTarget
from ridgeline.ops.paged import Selection as Selection
from ridgeline.spec.dtype import DType
from ridgeline.spec.quant import Format
from ridgeline.spec.storage import KVScales, StateDType

F = TypeVar("F", bound=Callable[..., Any])


class Product(Protocol):
    """The product with a matrix: x [..., in] -> [..., out], bias included."""

    def __call__(self, x: Array) -> Array: ...
    def dequantize(self) -> Array:
        """Return the matrix, float32 [out, in]."""
        ...


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
    def unfused(self) -> str | None:
        """Return why a stage over this matrix must be composed; None if it may be fused."""
        ...

    @property
    def apply(self) -> Product: ...
    def prepare(self) -> None: ...


class Rotary(NamedTuple):
    """Rotation of each token: cosines and sines times the attention factor, [T, rope.dim / 2]."""

    cos: Array
    sin: Array


class SequenceBucket(NamedTuple):
    """Sequences of a step with similar numbers of tokens, padded to m tokens each. Padding repeats a sequence's last
    token.
    """

    members: Array  # [n], indices of sequences of the step
    rows: Array  # [n, m], indices into the step's T tokens; see Segments
    lengths: Array  # [n], number of tokens


class Segments(NamedTuple):
    """The division of a step's T tokens into its N sequences, for recurrent layers.

    Drafts continue from the states after the tokens before them, but their own states are not stored: their inputs are
    kept instead. If drafts are accepted, the kept inputs of those R tokens run again in the next step, before its own
    tokens. Then the rows of buckets count from the first of these R tokens.
    """

    buckets: tuple[SequenceBucket, ...]
    order: Array  # [T], index of each token's result in all concatenated results [n * m], with drafts at the end
    sequence_order: Array  # [N], index of each sequence's state in the concatenated states [n] of the buckets
    drafts: tuple[SequenceBucket, ...] = ()
    keep: Array | None = None  # [D], indices of the drafts among the T tokens; None without drafts


class SnapshotLayout(NamedTuple):
    """The pages of one snapshot group in which a step reads and writes the states of its N sequences."""

    read: Array  # [N], page numbers; page 0 for a sequence that begins
    fresh: Array  # [N], 1 for a sequence that begins, else 0
    write: Array  # [N]


States = Sequence[Array]  # states of a layer: [N, *shape] for each part of its mixer's state
Kept = Sequence[Array]  # inputs of a layer's recurrence for R or D tokens, [tokens, *shape] each; empty without drafts


class HeadStage(Protocol):
    """The last norm and the head: (residual, delta or None, rows [n] or None for all) -> logits [n, vocabulary]."""

    def __call__(self, residual: Array, delta: Array | None, rows: Array | None) -> Array: ...
    def project(self, x: Array) -> Array:
        """Return the logits of rows [n, width] that are normalized already."""
        ...

    @property
    def rows(self) -> Callable[[Array], Array] | None:
        """Function that returns rows [n, width] of the matrix by their ids [n], float32; None if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Op(Generic[F]):
    """The name of an operation; `F` is its signature."""

    name: str
    level: Literal["primitive", "stage"]


# ---- primitives: (arguments) -> result; the case in brackets ---------------------------------------------

# (table [n, width], ids [T]) -> [T, width] [no case]
EMBEDDING: Op[Callable[[Array, Array], Array]] = Op("embedding", "primitive")
# (table of codes [n, width], ids [T]) -> [T, width] [no case]
QUANTIZED_ROWS: Op[Callable[[QuantizedMatrix, Array], Array]] = Op("quantized_rows", "primitive")
# (x [T, in], weight [out, in], bias [out] or None) -> [T, out] [no case]
LINEAR: Op[Callable[[Array, Array, Array | None], Array]] = Op("linear", "primitive")
# (x [..., n], weight [n], bias [n] or None) -> [..., n] [RMSNorm or LayerNorm]
NORM: Op[Callable[[Array, Array, Array | None], Array]] = Op("norm", "primitive")
# (positions [T], inverse frequencies [dim / 2] or, of each token, [T, dim / 2], attention factor) -> Rotary [no case]
ROTARY: Op[Callable[[Array, Array, float], Rotary]] = Op("rotary", "primitive")
# (x [T, heads, D], rotary) -> [T, heads, D] [Rope]
ROPE: Op[Callable[[Array, Rotary], Array]] = Op("rope", "primitive")
# (q [T, H, D], positions [T]) -> [T, H, D]: each query times the factor of its position [QueryGrowth]
GROW_QUERIES: Op[Callable[[Array, Array], Array]] = Op("grow_queries", "primitive")
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
# (the indexer's queries [T, H, D], its weights [T, H], the layer's state) -> the chosen keys of each query among those
# of its sequence up to its own [IndexedAttention]
SELECT_KEYS: Op[Callable[[Array, Array, DenseRows | PagedRows], Selection]] = Op("select_keys", "primitive")
# (q [T, H, nope + rope], the layer's state, kv_b, the chosen keys) -> [T, H * value] [IndexedAttention]
INDEXED_ATTENTION: Op[Callable[[Array, DenseRows | PagedRows, Array, Selection], Array]] = Op(
    "indexed_attention", "primitive"
)
# (each part's pages [pages, page_tokens, *shape], each part [T, *shape], write pages [T], write slots [T], scales of
# fp8) -> None, written in place [Attention, LatentAttention]
WRITE_PAGES: Op[Callable[[Sequence[Array], Sequence[Array], Array, Array, KVScales], None]] = Op(
    "write_pages", "primitive"
)
# (each part's pages, as in WRITE_PAGES, from pages [n], from slots [n], to pages [n], to slots [n]) -> None: rows are
# moved in place. No target is the source of a later row [Attention, LatentAttention]
MOVE_ROWS: Op[Callable[[Sequence[Array], Array, Array, Array, Array], None]] = Op("move_rows", "primitive")
# (rows of a part [T, heads, numbers], scale of fp8) -> the rows in their stored type, as spec.storage.Storage.stored
# describes [Storage]
STORE_ROWS: Op[Callable[[Array, float], Array]] = Op("store_rows", "primitive")
# (x) -> act(x) [MLP, ungated MoE]; (gate, up) -> act(gate) * up [GatedMLP, MoE], or ClampedSwiGLU of both
ACTIVATION: Op[Callable[..., Array]] = Op("activation", "primitive")
# (x, alpha_p [1], alpha_n [1]) -> the activation [XIELU]
XIELU: Op[Callable[[Array, Array, Array], Array]] = Op("xielu", "primitive")
# (x, limit) -> x limited to -limit..limit [no case]
CLAMP: Op[Callable[[Array, float], Array]] = Op("clamp", "primitive")
# (weights [T, n], rows [n, width]) -> [T, width]: the weighted sums of the rows [no case]
MIX: Op[Callable[[Array, Array], Array]] = Op("mix", "primitive")
# (a, b, scale) -> a + scale * b [no case]
ADD: Op[Callable[[Array, Array, float], Array]] = Op("add", "primitive")
# (x, factor) -> factor * x [no case]
SCALE: Op[Callable[[Array, float], Array]] = Op("scale", "primitive")
# (y [T, out], x [T, in], slots [T], terms) -> [T, out]: rows of slots from 0 on become gain * y + up (down x) + add,
# with the arrays of their slot, in bits that do not depend on other rows; rows of slot -1 stay [no case]
ADD_TERMS: Op[Callable[[Array, Array, Array, SlotTerms], Array]] = Op("add_terms", "primitive")
# (x, cap) -> cap * tanh(x / cap) [no case]
SOFTCAP: Op[Callable[[Array, float], Array]] = Op("softcap", "primitive")
# (x [T, width], rows [n]) -> [n, width] [no case]
TAKE: Op[Callable[[Array, Array], Array]] = Op("take", "primitive")
# (x [..., n], start, stop) -> [..., stop - start] [no case]
CUT: Op[Callable[[Array, int, int], Array]] = Op("cut", "primitive")
# (a [..., n], b [..., m]) -> [..., n + m] [no case]
JOIN: Op[Callable[[Array, Array], Array]] = Op("join", "primitive")
# (router logits [T, experts], choice bias [experts] and factors of the weights [experts] where there are such) ->
# expert ids [T, k], weights [T, k] [MoE]
ROUTE: Op[Callable[..., tuple[Array, Array]]] = Op("route", "primitive")
# (x [T, width], expert ids [T, k], weights [T, k], expert) -> [T, width]: for each token, the weighted sum of its
# experts' results; expert(e, x [n, width]) -> [n, width] is called once for all tokens of an expert [MoE]
Expert = Callable[[int, Array], Array]
EXPERTS: Op[Callable[[Array, Array, Array, Expert], Array]] = Op("experts", "primitive")
# (weight [out, in]) -> the matrix as codes, rounded to nearest. Raises ValueError for weights that cannot be rounded:
# infinities, NaN, or magnitudes beyond the format's scales; and for formats to which nothing is rounded here [Format]
QUANTIZE: Op[Callable[[Array], QuantizedMatrix]] = Op("quantize", "primitive")
# (matrix) -> [out, in], float32, its columns in the order of the input [Format]
DEQUANTIZE: Op[Callable[[QuantizedMatrix], Array]] = Op("dequantize", "primitive")
# (x) -> each number rounded to bfloat16, to nearest, ties to even, in the type of x. Magnitudes of 2^128 (1 - 2^-9) or
# more become infinite; infinities and NaN stay [no case]
ROUND_BF16: Op[Callable[[Array], Array]] = Op("round_bf16", "primitive")
# (x [..., in], matrix, bias [out] or None) -> [..., out]. Each token of x is taken as the format's activations say: in
# int8 its largest magnitude is 127, in fp8 448, unless the matrix has a scale for its input. A token that is not finite
# becomes NaN where it is rounded [Format]
QUANTIZED_LINEAR: Op[Callable[[Array, QuantizedMatrix, Array | None], Array]] = Op("quantized_linear", "primitive")

# (pages [pages, *shape], read [N], fresh [N], write [N]) -> [N, *shape], zeros where a sequence begins: a copy, or an
# object that reads the pages later; `write` are the pages that the states will be written to [no case]
READ_STATE: Op[Callable[[Array, Array, Array, Array], Array]] = Op("read_state", "primitive")
# (pages [pages, *shape], write [N], states [N, *shape]) -> None, in place [no case]
WRITE_STATE: Op[Callable[[Array, Array, Array], None]] = Op("write_state", "primitive")
# (parts, each [n, m, *shape] or [n, *shape]; leading axes to concatenate: 1 or 2; order) -> [*order, *shape] [no case]
GATHER: Op[Callable[[Sequence[Array], int, Array], Array]] = Op("gather", "primitive")
# (x [..., sum of sizes], sizes) -> a part [..., size] for each [no case]
SPLIT: Op[Callable[[Array, Sequence[int]], Sequence[Array]]] = Op("split", "primitive")
# (x [n, m, C], before [n, k - 1, C], weight [C, 1, k], bias [C] or None, lengths [n]) -> y [n, m, C], the k - 1 tokens
# before what comes next: each channel has a filter over a token and the k - 1 before it [no case]
SHORT_CONV: Op[Callable[[Array, Array, Array, Array | None, Array], tuple[Array, Array]]] = Op(
    "short_conv", "primitive"
)
# (x [n, m, D], dt [n, m, D], A_log [D, S], B and C [n, m, S], D [D], h [n, D, S], lengths [n]) -> y [n, m, D], h
# [Mamba]
SELECTIVE_SCAN: Op[Callable[..., tuple[Array, Array]]] = Op("selective_scan", "primitive")
# (x [n, m, inner], dt [n, m, H], dt_bias, A_log [H], B and C [n, m, G * S], D [H], h [n, H, P, S], lengths [n]) ->
# y [n, m, inner], h [Mamba2]
SSD: Op[Callable[..., tuple[Array, Array]]] = Op("ssd", "primitive")
# (q and k [n, m, H * D], v [n, m, H * P], sums h [n, H, P + 1, features], lengths [n]) -> y [n, m, H * P], h
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
# (x [..., G * in], weight [G, out, in], bias [G, out]) -> [..., G * out]: each part of x with a matrix of its own [no
# case]
BLOCK_LINEAR: Op[Callable[[Array, Array, Array], Array]] = Op("block_linear", "primitive")
# (x, logits of the input gate and of the decay gate [n, m, C] each, decay [C], begun [n, blocks], h [n, C], lengths
# [n]) -> y [n, m, C], begun, h. begun: 0 for a sequence before its first token, else 1 [GatedLRU]
GATED_LRU: Op[Callable[..., tuple[Array, Array, Array]]] = Op("gated_lru", "primitive")
# (a, b of the shape of a, or a single number [1]) -> a * b [no case]
MULTIPLY: Op[Callable[[Array, Array], Array]] = Op("multiply", "primitive")
# (y, z) -> y silu(z) [no case]
GATE: Op[Callable[[Array, Array], Array]] = Op("gate", "primitive")
# (y [..., n], z [..., n or 1]) -> y sigmoid(z) [no case]
SIGMOID_GATE: Op[Callable[[Array, Array], Array]] = Op("sigmoid_gate", "primitive")
# (y [T, H * D], z [T, H * D] or [T, H], bias [H] or None) -> y gate_act(z + bias), of each number or head [Attention]
ATTENTION_GATE: Op[Callable[[Array, Array, Array | None], Array]] = Op("attention_gate", "primitive")
# (y [..., inner], z [..., inner], weight [inner]) -> norm(y silu(z)) by groups [Mamba2]
GATED_NORM: Op[Callable[[Array, Array, Array], Array]] = Op("gated_norm", "primitive")

# (page table [rows, P], rows [T], positions [T], last [n], page tokens) -> write pages [T], write slots [T], tables
# [n, P]: the layout of T tokens of n sequences. last: indices of the sequences' last tokens; a table may be undefined
# behind the page of that token [no case]
DECODE_LAYOUT: Op[Callable[[Array, Array, Array, Array, int], tuple[Array, Array, Array]]] = Op(
    "decode_layout", "primitive"
)
# (tokens [T], sampled [rows], rows [T]) -> ids [T]: the tokens, or for a token below 0 the one that its row sampled
# before [no case]
KNOWN_TOKENS: Op[Callable[[Array, Array, Array], Array]] = Op("known_tokens", "primitive")
# (sampled [rows], rows [n], ids [n]) -> None, in place: each row's id becomes the one that it sampled [no case]
KEEP_TOKENS: Op[Callable[[Array, Array, Array], None]] = Op("keep_tokens", "primitive")
# (logits [n, vocabulary]) -> ids [n] of the largest logits, of equal ones the first, or of the first NaN; and those
# logits [n] [no case]
BEST: Op[Callable[[Array], tuple[Array, Array]]] = Op("best", "primitive")
# (logits [n, vocabulary], draws [n * DRAW_WORDS] (draws.py), token ids [vocabulary] or None) -> indices [n] of the
# logits that are drawn, and the largest logits [n] [no case]
DRAW: Op[Callable[[Array, Array, Array | None], tuple[Array, Array]]] = Op("draw", "primitive")
# (logits [n, vocabulary], draws [n * DRAW_WORDS], trials [n * TRIAL_WORDS] (draws.py)) -> tokens [n]: the first draft
# of a row that is accepted, or else the token that is drawn; and the largest logits [n] [no case]
ACCEPT: Op[Callable[[Array, Array, Array], tuple[Array, Array]]] = Op("accept", "primitive")

# ---- stages: they begin with the residual sum and the norm, and end before the point of a tensor-parallel reduce, a
# post-norm or a capture ------------------------------------------------------------------------------------------

# (residual, delta or None, rotary or None, pages that keys and values go to, or None) -> residual, q [T, H, D], its
# gate [T, H * D] or None, k [T, K, D], v [T, K, D]; k and v are None if the kernel wrote them into the pages
# [stages.AttentionInput]
ATTENTION_INPUT: Op[
    Callable[
        [Array, Array | None, Rotary | None, PageTarget | None],
        tuple[Array, Array, Array | None, Array | None, Array | None],
    ]
] = Op("attention_input", "stage")
# (residual, delta or None, rotary or None) -> residual, q [T, H, D], its gate or None, for keys of another layer
# [stages.AttentionInput]
QUERY_INPUT: Op[Callable[[Array, Array | None, Rotary | None], tuple[Array, Array, Array | None]]] = Op(
    "query_input", "stage"
)
# (residual, delta or None, rotary or None, pages that latents go to, or None) -> residual, q [T, H, nope + rope] or,
# with pages, what PAGED_LATENT_ATTENTION of the same backend takes instead, and latents [T, 1, rank + rope], None if
# the kernel wrote them into the pages [stages.LatentInput]
LATENT_INPUT: Op[
    Callable[[Array, Array | None, Rotary | None, PageTarget | None], tuple[Array, Array, Array | None]]
] = Op("latent_input", "stage")
# (residual, delta or None, rotary or None) -> residual, q [T, H, nope + rope], latents [T, 1, rank + rope], the
# indexer's keys [T, 1, D], queries [T, heads, D] and weights [T, heads] [ops.indexed.IndexedInput]
INDEXED_INPUT: Op[Callable[[Array, Array | None, Rotary | None], tuple[Array, ...]]] = Op("indexed_input", "stage")
# (attended [T, H * D], its gate or None) -> delta [T, width] [Attention or LatentAttention]
ATTENTION_OUTPUT: Op[Callable[[Array, Array | None], Array]] = Op("attention_output", "stage")
# (residual, delta or None, states, kept inputs of R tokens, segments) -> residual, delta [T, width], states, inputs of
# D drafts to keep [stages.RecurrentBlock]
RECURRENT_BLOCK: Op[Callable[[Array, Array | None, States, Kept, Segments], tuple[Array, Array, States, Kept]]] = Op(
    "recurrent_block", "stage"
)
# (residual, delta or None) -> residual, delta [stages.MLPBlock]
MLP_BLOCK: Op[Callable[[Array, Array | None], tuple[Array, Array]]] = Op("mlp_block", "stage")
# (x [..., in]) -> [..., out]: one matrix, "matrix" [Format]
PRODUCT: Op[Product] = Op("product", "stage")
# (x [T, width], expert ids [T, k], weights [T, k]) -> [T, width]: the primitive EXPERTS over their matrices [MoE]
EXPERT_BLOCK: Op[Callable[[Array, Array, Array], Array]] = Op("expert_block", "stage")
# (residual, delta or None, rows [n] or None for all) -> logits [n, vocabulary] [stages.Head]
HEAD: Op[HeadStage] = Op("head", "stage")

PRIMITIVES: tuple[Op[Any], ...] = (
    EMBEDDING, LINEAR, NORM, ROTARY, ROPE, GROW_QUERIES, SPLIT_HEADS, ATTENTION, PAGED_ATTENTION,
    LATENT_ATTENTION, PAGED_LATENT_ATTENTION, SELECT_KEYS, INDEXED_ATTENTION,
    WRITE_PAGES, MOVE_ROWS, STORE_ROWS, ACTIVATION, XIELU, CLAMP, MIX, ADD, ADD_TERMS, SCALE, SOFTCAP, TAKE, CUT,
    JOIN,
    ROUTE, EXPERTS, QUANTIZE, DEQUANTIZE, QUANTIZED_LINEAR, QUANTIZED_ROWS,
    READ_STATE, WRITE_STATE, GATHER, SPLIT, MULTIPLY, GATE, SIGMOID_GATE, ATTENTION_GATE, GATED_NORM,
    SHORT_CONV, SELECTIVE_SCAN, SSD, TAYLOR_ATTENTION, LIGHTNING_ATTENTION, STATE_SPACE,
    DELTA_RULE, NORM_GATE, BLOCK_LINEAR, GATED_LRU, DECODE_LAYOUT, KNOWN_TOKENS, KEEP_TOKENS, BEST, DRAW, ACCEPT,
)  # fmt: skip
STAGES: tuple[Op[Any], ...] = (
    ATTENTION_INPUT, QUERY_INPUT, LATENT_INPUT, INDEXED_INPUT, ATTENTION_OUTPUT, RECURRENT_BLOCK, PRODUCT,
    EXPERT_BLOCK, MLP_BLOCK, HEAD,
)  # fmt: skip


class Weights(NamedTuple):
    """The weights of one stage by their names in the spec: matrices as Linear, a Linear for each expert, the rest as
    arrays.
    """

    linears: Mapping[str, Linear]
    arrays: Mapping[str, Array]
    experts: Mapping[str, Sequence[Linear]] = MappingProxyType({})

    def vector(self, name: str) -> Array | None:
        return self.arrays.get(name)

    def parted(self, name: str) -> tuple[Weights, Weights]:
        """Return the weights without one matrix, and that matrix with the bias of a gate: for the stages before and
        after attention.
        """
        others = {n: w for n, w in self.linears.items() if n != name}
        after = {n: array for n, array in self.arrays.items() if n == "gate_bias"}
        return self._replace(linears=others), Weights({name: self.linears[name]}, after)

    def under(self, prefix: str) -> Weights:
        """Return the weights whose names begin with `prefix`, by the rest of the name."""
        linears = {n.removeprefix(prefix): w for n, w in self.linears.items() if n.startswith(prefix)}
        return Weights(linears, {n.removeprefix(prefix): w for n, w in self.arrays.items() if n.startswith(prefix)})


class Memory(Protocol):
    """Moves arrays in and out of the backend's library."""

    @property
    def device(self) -> str:
        """Return the device's name, as `resolve_device` returns it."""
        ...

    @property
    def on_host(self) -> bool:
        """Return whether this is main memory. Then weights that keep their type stay views of their files."""
        ...

    @property
    def float_bytes(self) -> int:
        """Return the bytes of one number in the type in which models compute on this device."""
        ...

    def put(self, host: np.ndarray[Any, Any], dtype: str, to: str) -> Array:
        """Return a host array of `dtype` (bfloat16 as uint16) as an array of type `to`, sharing memory if possible."""
        ...

    def integers(self, values: np.ndarray[Any, Any]) -> Array:
        """Return token ids, positions or indices as an array."""
        ...

    def quantized(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Return a matrix of codes, whose parts are host arrays, on the device."""
        ...

    def get(self, array: Array) -> np.ndarray[Any, Any]:
        """Return a float32 array on the host."""
        ...

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Return an array on the host in its own type, for other ranks."""
        ...

    def from_host(self, host: np.ndarray[Any, Any]) -> Array:
        """Return an array of `to_host`, of this rank or of another one, on the device."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free memory of the device; None where it is unknown."""
        ...

    def guard(self) -> AbstractContextManager[None]:
        """Return a context whose errors of the device are a DeviceError of one line.

        It is a DeviceMemoryError where the device has too little memory.
        """
        ...

    def widen(self, array: Array) -> Array:
        """Return the array in float32, on the device."""
        ...

    def pages(self, num_pages: int, num_bytes: int) -> Array:
        """Return a new array of bytes [num_pages, num_bytes] for state; its contents are undefined."""
        ...

    def page_view(self, pages: Array, offset: int, shape: tuple[int, ...], dtype: StateDType) -> Array:
        """Return the bytes of every page from `offset` on as a view [num_pages, *shape] of `dtype`.

        offset and the bytes of a page must be multiples of 4.
        """
        ...

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return a new array of zeros, in the type in which models compute on this device."""
        ...

    def copy_pages(self, pages: Array, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages onto others, in place; no target is also a source."""
        ...

    def pages_out(self, pages: Array, index: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return host copies of some pages, [len(index), num_bytes]."""
        ...

    def pages_in(self, pages: Array, index: Sequence[int], host: np.ndarray[Any, Any]) -> None:
        """Write host copies back, in place."""
        ...

    def random(self, shape: tuple[int, ...], dtype: DType, std: float, seed: int) -> Array:
        """Return normal noise around 0; a seed always gives the same noise on one kind of device."""
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
