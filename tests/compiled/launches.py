"""Launches of every kernel at the shapes of an 8B model, on torch's meta device: nothing is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from compiled.building import Launched, Recorder
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import (
    Buckets,
    PagedKeyValues,
    PagedLayout,
    PagedRows,
    PageTarget,
    QuantizedMatrix,
    Rotary,
    Segments,
    SequenceBucket,
    Weights,
)
from ridgeline.ops.draws import DRAW_WORDS, TRIAL_WORDS
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend, TorchMemory
from ridgeline.ops.stages import AttentionInput, Head, LatentInput, MLPBlock, RecurrentBlock
from ridgeline.ops.table import GPU_BACKEND
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.latent import paged_latent_attention
from ridgeline.ops.triton.packing import pack_codes, pack_plain
from ridgeline.ops.triton.paged import paged_attention
from ridgeline.ops.triton.products import product_of
from ridgeline.ops.triton.tokens import Normalizer, accept, best, draw, write_pages
from ridgeline.quant import StoredLinear
from ridgeline.runtime.again import Again, sizes
from ridgeline.runtime.again import segments as segments_of
from ridgeline.spec import MLP, Attention, GatedMLP, LatentAttention, LayerNorm, MoE, RecurrentMixer, RMSNorm, Rope
from ridgeline.spec.activation import Activation
from ridgeline.spec.quant import PLAIN, Format, format_of
from ridgeline.spec.storage import SCALE_BYTES

WIDTH = 4096
LLAMA = Attention(32, 8, 128, 128**-0.5, rope=Rope(128))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(name: str, rows: int, columns: int) -> QuantizedMatrix:
    format = format_of(name)
    groups = rows, format.num_groups(columns)
    codes = torch.uint8 if format.numbers == "fp8" else torch.int8
    zeros = meta(*groups, dtype=torch.int8) if format.offsets == "zero_points" else None
    return QuantizedMatrix(format, meta(rows, columns, dtype=codes), meta(*groups), zeros)


def product(name: str, tokens: int) -> list[Launched]:
    """Return the launches of a product of some tokens with a matrix of 4096 x 4096 in a format, or a type of floats."""
    dtype = {PLAIN.name: torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(name)
    packed = pack_codes(matrix(name, WIDTH, WIDTH)) if dtype is None else pack_plain(meta(WIDTH, WIDTH, dtype=dtype))
    recorder = Recorder()
    product_of(packed, meta(WIDTH), recorder)(meta(tokens, WIDTH), meta(tokens, WIDTH))
    return recorder.launches


def attention(
    case: Attention, tokens: int, sequences: int, dtype: torch.dtype, page: int = 16, *, is_tree: bool = False,
    described: bool = False,
) -> list[Launched]:  # fmt: skip
    """Return the launch of attention over pages for sequences of up to 8,192 tokens."""
    recorder = Recorder()
    row = case.head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)
    keys = meta(4096, 2, page, case.num_kv_heads, row, dtype=dtype)
    q = meta(tokens, case.num_heads, case.head_dim)
    sinks = meta(case.num_heads) if case.sinks else None
    layout = layout_of(tokens, sequences, page, is_tree=is_tree)
    paged_attention(case, recorder, described=described)(q, PagedKeyValues(keys[:, 0], keys[:, 1], layout), sinks)
    return recorder.launches


def layout_of(tokens: int, sequences: int, page: int, *, is_tree: bool = False) -> PagedLayout:
    """Return a step's tokens in pages of sequences of up to 8,192 tokens."""
    integers = torch.int64
    tables = meta(sequences, 8192 // page, dtype=integers)
    several = [meta(n, dtype=integers) for n in (tokens, tokens, sequences, sequences)]
    return PagedLayout(*several, tables, lambda: Buckets((), several[0]), several[0] if is_tree else None)


def latents(case: LatentAttention, tokens: int, sequences: int, dtype: torch.dtype) -> list[Launched]:
    """Return the launches of attention over latents in pages, with its product before and that after it."""
    recorder = Recorder()
    pages = meta(4096, 16, 1, case.row + (SCALE_BYTES if dtype == torch.int8 else 0), dtype=dtype)
    kv_b = meta(case.num_heads, case.qk_nope_head_dim + case.v_head_dim, case.kv_lora_rank, dtype=torch.bfloat16)
    q = meta(tokens, case.num_heads, case.qk_head_dim)
    paged_latent_attention(case, recorder)(q, PagedRows((pages,), layout_of(tokens, sequences, 16)), kv_b)
    return recorder.launches


def latent_input(
    case: LatentAttention, width: int, tokens: int, dtype: torch.dtype = torch.bfloat16, *, is_paged: bool = True
) -> list[Launched]:
    """Return the launches of the input of attention over latents, the norm included.

    is_paged: whether latents go into pages of a type, which our kernel of attention reads.
    """
    recorder = Recorder()
    shapes = {w.name.removesuffix(".weight"): w.shape for w in case.weights(width) if len(w.shape) == 2}
    arrays = {w.name: meta(*w.shape) for w in case.weights(width) if len(w.shape) == 1}
    up = case.num_heads, case.qk_nope_head_dim + case.v_head_dim, case.kv_lora_rank
    arrays |= {"norm.weight": meta(width), "kv_b.weight": meta(*up, dtype=torch.bfloat16)}
    weights, reader = Weights(linears(shapes, gpu(recorder)), arrays), GPU_BACKEND if is_paged else None
    stage = gpu(recorder).stage(api.LATENT_INPUT, LatentInput(case, RMSNorm(), 1.0, reader), weights)
    pages = meta(4096, 16, 1, case.row + (SCALE_BYTES if dtype == torch.int8 else 0), dtype=dtype)
    half, at = case.qk_rope_head_dim // 2, meta(tokens, dtype=torch.int64)
    target = PageTarget((pages,), at, at) if is_paged else None
    stage(meta(tokens, width), meta(tokens, width), Rotary(meta(tokens, half), meta(tokens, half)), target)
    return recorder.launches


def rows() -> list[Launched]:
    """Return the launches of kernels over rows, at the sizes of an 8B model."""
    recorder, integers = Recorder(), torch.int64
    arena = meta(64, 2, 16, 8, 128, dtype=torch.float16)
    Normalizer(RMSNorm(), meta(WIDTH), None, recorder)(meta(8, WIDTH), meta(8, WIDTH))
    rounds = pack_codes(matrix("int8", WIDTH, WIDTH))
    Normalizer(RMSNorm(), meta(WIDTH), None, recorder, rounds)(meta(8, WIDTH), meta(8, WIDTH))
    Normalizer(LayerNorm(), meta(WIDTH), meta(WIDTH), recorder)(meta(8, WIDTH), None, 1.0, meta(2, dtype=integers))
    case, at = Attention(32, 8, 128, 1.0), meta(8, dtype=integers)
    write_pages(case, recorder)((arena[:, 0], arena[:, 1]), (meta(8, 8, 128), meta(8, 8, 128)), at, at)
    narrow = meta(64, 2, 16, 8, 128 + SCALE_BYTES, dtype=torch.int8), meta(64, 2, 16, 8, 128, dtype=torch.uint8)
    for arena in narrow:
        write_pages(case, recorder)((arena[:, 0], arena[:, 1]), (meta(8, 8, 128), meta(8, 8, 128)), at, at)
    best(recorder)(meta(8, 128256))
    for ids in (None, meta(128256, dtype=integers)):
        draw(recorder)(meta(8, 128256), meta(8 * DRAW_WORDS, dtype=integers), ids)
    trials = meta(8 * TRIAL_WORDS, dtype=integers)
    accept(recorder)(meta(8, 128256), meta(8 * DRAW_WORDS, dtype=integers), trials)
    return recorder.launches


def preparing() -> list[Launched]:
    """Return the launches that prepare and end a recorded step: positions, and tokens that stay on the device."""
    recorder, integers = Recorder(), torch.int32
    table, inputs = gpu(recorder), [meta(8, dtype=integers) for _ in range(3)]
    table.primitive(api.DECODE_LAYOUT)(meta(257, 8192, dtype=integers), *inputs, 16)
    ids = table.primitive(api.KNOWN_TOKENS)(inputs[0], meta(257, dtype=torch.int64), inputs[1])
    table.primitive(api.KEEP_TOKENS)(meta(257, dtype=torch.int64), inputs[1], ids)
    return recorder.launches


def norms(width: int) -> list[Launched]:
    """Return the launches of norms of rows of a width, as floats and rounded to int8."""
    recorder, rounds = Recorder(), pack_codes(matrix("int8", width, width))
    for case, bias in ((RMSNorm(), None), (LayerNorm(), meta(width))):
        for packed in (None, rounds):
            Normalizer(case, meta(width), bias, recorder, packed)(meta(8, width), meta(8, width))
    return recorder.launches


def finished(name: str, tokens: int) -> list[Launched]:
    """Return the launches of products that rotate and write into pages, or activate, in a format; and of one that first
    normalizes heads, and writes into pages in int8.
    """
    recorder, format = Recorder(), PLAIN if name == PLAIN.name else format_of(name)
    rotating(recorder, LLAMA, format, tokens)
    activating(recorder, GatedMLP(14336), format, tokens)
    rotating(recorder, replace(LLAMA, qk_norm=RMSNorm()), format, tokens, torch.int8)
    return [x for x in recorder.launches if x.arguments.get("FINISH", ("rows",)) != ("rows",)]


def activations() -> list[Launched]:
    """Return the launches of products with every activation, of one that rotates neighbors in a head and has gates, and
    of one that caps logits.
    """
    recorder = Recorder()
    for name in get_args(Activation):
        activating(recorder, MLP(4096, name), PLAIN, 8)
    rotating(recorder, replace(LLAMA, rope=Rope(64, interleaved=True), out_gate=True), PLAIN, 8)
    weights = Weights(linears({"head": (WIDTH, WIDTH)}, gpu(recorder)), {"norm.weight": meta(WIDTH)})
    gpu(recorder).stage(api.HEAD, Head(RMSNorm(), 1.0, 0.5, 30.0), weights)(meta(8, WIDTH), meta(8, WIDTH), None)
    return [x for x in recorder.launches if x.arguments.get("FINISH", ("rows",)) != ("rows",)]


def experts(case: MoE, width: int, format: Format, tokens: int) -> list[Launched]:
    """Return the launches of a layer of experts, the norm, the router and a shared expert included."""
    recorder = Recorder()
    table, inner = gpu(recorder), case.intermediate_size
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    matrices = {n: [stored(format, *shape, table)] * case.num_experts for n, shape in shapes.items()}
    found = {"router": stored(PLAIN, case.num_experts, width, table)}
    if case.shared is not None:
        wide = case.shared.intermediate_size
        of_shared = {"gate": (wide, width), "up": (wide, width), "down": (width, wide)}
        found |= {f"shared.{name}": stored(format, *shape, table) for name, shape in of_shared.items()}
        if case.shared_gate:
            found["shared_gate"] = stored(PLAIN, 1, width, table)
    weights = Weights(found, {"norm.weight": meta(width)}, matrices)
    table.stage(api.MLP_BLOCK, MLPBlock(case, RMSNorm(), 1.0), weights)(meta(tokens, width), meta(tokens, width))
    return recorder.launches


def stored(format: Format, rows: int, columns: int, table: OpsTable) -> StoredLinear:
    plain = not format.is_lossy
    data = meta(rows, columns, dtype=torch.bfloat16) if plain else matrix(format.name, rows, columns)
    return StoredLinear(data, None, table, format)


def recurrent(mixer: RecurrentMixer, width: int, sequences: int, tokens: int, drafts: int = 0) -> list[Launched]:
    """Return the launches of a recurrent block for some sequences of some tokens each, whose states are in pages.

    drafts: how many of these tokens are drafts; there are as many accepted ones, and states are copied.
    """
    recorder = Recorder()
    table, integers = gpu(recorder), torch.int64
    shapes = {w.name: w.shape for w in mixer.weights(width)}
    matrices = {n: shape for n, shape in shapes.items() if len(shape) == 2 and n.endswith(".weight")}
    arrays = {name: meta(*shape) for name, shape in shapes.items() if name not in matrices}
    weights = Weights(
        {n.removesuffix(".weight"): stored(PLAIN, *shape, table) for n, shape in matrices.items()},
        {**arrays, "norm.weight": meta(width)},
    )
    stage = table.stage(api.RECURRENT_BLOCK, RecurrentBlock(mixer, RMSNorm(), 1.0), weights)
    at = [meta(sequences, dtype=integers) for _ in range(3)]
    states = [table.primitive(api.READ_STATE)(meta(64, *shape), *at) for shape in mixer.state().parts]
    count = sequences * tokens
    rows = meta(sequences, tokens, dtype=integers)
    segments, kept = Segments((SequenceBucket(at[0], rows, at[1]),), meta(count, dtype=integers), at[2]), ()
    if drafts:
        given = Again(*(meta(size, dtype=integers) for size in sizes(sequences, count, drafts)))
        segments = segments_of(given, at[0], drafts, lambda x, columns: x.view(-1, columns), has_drafts=True)
        inputs = stage(meta(count, width), meta(count, width), states, (), segments)[3]
        kept = tuple(meta(sequences * drafts, *x.shape[1:]) for x in inputs)
        recorder.launches.clear()
    left = stage(meta(count, width), meta(count, width), states, kept, segments)[2]
    for state in left:
        table.primitive(api.WRITE_STATE)(meta(64), at[2], state)
    return recorder.launches


def linears(shapes: dict[str, tuple[int, int]], table: OpsTable, format: Format = PLAIN) -> dict[str, StoredLinear]:
    return {n: stored(format, *shape, table) for n, shape in shapes.items()}


def activating(recorder: Recorder, mlp: MLP | GatedMLP, format: Format, tokens: int) -> None:
    """Launch the stage of an MLP."""
    inner, gate = mlp.intermediate_size, ["gate"] if isinstance(mlp, GatedMLP) else []
    shapes = dict.fromkeys([*gate, "up"], (inner, WIDTH)) | {"down": (WIDTH, inner)}
    weights = Weights(linears(shapes, gpu(recorder), format), {"norm.weight": meta(WIDTH)})
    stage = gpu(recorder).stage(api.MLP_BLOCK, MLPBlock(mlp, RMSNorm(), 1.0), weights)
    stage(meta(tokens, WIDTH), meta(tokens, WIDTH))


def rotating(
    recorder: Recorder, mixer: Attention, format: Format, tokens: int, dtype: torch.dtype = torch.float16
) -> None:
    """Launch the input of attention, for pages in a type."""
    q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    shapes = {"q": (q, WIDTH), "k": (kv, WIDTH), "v": (kv, WIDTH)}
    if mixer.out_gate:
        shapes["out_gate"] = q, WIDTH
    vectors = {"norm.weight": meta(WIDTH), "q_norm.weight": meta(mixer.head_dim), "k_norm.weight": meta(mixer.head_dim)}
    case = AttentionInput(mixer, RMSNorm(), 1.0)
    stage = gpu(recorder).stage(api.ATTENTION_INPUT, case, Weights(linears(shapes, gpu(recorder), format), vectors))
    assert mixer.rope is not None
    row = mixer.head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)
    half, arena = mixer.rope.dim // 2, meta(64, 2, 16, mixer.num_kv_heads, row, dtype=dtype)
    at = meta(tokens, dtype=torch.int64)
    target = PageTarget((arena[:, 0], arena[:, 1]), at, at)
    stage(meta(tokens, WIDTH), meta(tokens, WIDTH), Rotary(meta(tokens, half), meta(tokens, half)), target)


def gpu(recorder: Recorder) -> OpsTable:
    """Return the table of device cuda over the meta device."""
    backends = TritonBackend(recorder), SdpaBackend(), ReferenceBackend()
    return OpsTable(TorchMemory("meta"), backends)
