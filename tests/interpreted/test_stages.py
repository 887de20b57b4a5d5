"""Stages of few launches against their compositions, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from interpreted.guarded import guarded, interpreted, reference, serves
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import PageTarget, Rotary, Weights
from ridgeline.ops.reference.backend import ReferenceBackend
from ridgeline.ops.stages import AttentionInput, Head, LatentInput, MLPBlock
from ridgeline.ops.triton import products, tokens
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.latent import HeadProduct
from ridgeline.ops.triton.launch import Compiled
from ridgeline.quant import StoredLinear
from ridgeline.spec import MLP, Attention, GatedMLP, LatentAttention, LayerNorm, Norm, RMSNorm, Rope
from ridgeline.spec.quant import PLAIN, Format, format_of

TABLE, REFERENCE = interpreted(), reference()
WIDTH, TOKENS = 63, 5


def weights(table: OpsTable, shapes: dict[str, tuple[int, int]], vectors: dict[str, int], format: Format) -> Weights:
    """Return random weights: matrices in bfloat16, with a bias where the name says so by a `+`, and vectors."""
    generator = torch.Generator().manual_seed(3)
    linears: dict[str, Any] = {}
    for name, shape in shapes.items():
        matrix, bias = (
            torch.randn(shape, generator=generator).bfloat16() / 8,
            torch.randn(shape[0], generator=generator),
        )
        linears[name.strip("+")] = StoredLinear(matrix, bias if "+" in name else None, table, format)
    return Weights(linears, {name: torch.rand(n, generator=generator) + 0.5 for name, n in vectors.items()})


def inputs(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(tokens, WIDTH, generator=generator), torch.randn(tokens, WIDTH, generator=generator)


def rotary(dim: int, tokens: int = TOKENS) -> Rotary:
    angles = torch.arange(tokens)[:, None] * torch.rand(dim // 2, generator=torch.Generator().manual_seed(5))
    return Rotary(angles.cos(), angles.sin())


def agree(op: Any, case: Any, shapes: dict[str, tuple[int, int]], vectors: dict[str, int], *args: Any,
          format: Format = PLAIN) -> None:  # fmt: skip
    """Compare a stage with its composition, and one token alone with that token in the batch."""
    assert serves(TABLE, op, case)
    stage, same = (t.stage(op, case, weights(t, shapes, vectors, format)) for t in (TABLE, REFERENCE))
    got, wanted = stage(*args), same(*args)
    for a, b in zip(got, wanted, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize(
    ("mixer", "name", "dtype"),
    [
        (Attention(4, 2, 20, 0.2, rope=Rope(20)), "auto", torch.float16),
        (Attention(4, 2, 20, 0.2, rope=Rope(8, interleaved=True), qk_norm=RMSNorm(1e-5, 1.0)), "auto", torch.int8),
        (Attention(4, 1, 16, 0.2, rope=Rope(12)), "auto", torch.bfloat16),
        (Attention(2, 2, 20, 0.2, rope=Rope(20, interleaved=True)), "int8", torch.int8),
        (Attention(2, 1, 16, 0.2), "int4-asym", torch.float32),
        (Attention(2, 1, 20, 0.2, rope=Rope(8), out_gate=True), "auto", torch.bfloat16),
        (Attention(2, 1, 20, 0.2, rope=Rope(20), out_gate=True, qk_norm=RMSNorm()), "int8", torch.float16),
        (Attention(2, 1, 128, 0.2, rope=Rope(96), qk_norm=RMSNorm()), "auto", torch.uint8),
        (Attention(4, 2, 48, 0.2, rope=Rope(48), out_gate=True), "int8", torch.int8),
        (Attention(2, 1, 16, 0.2, rope=Rope(16)), "auto", torch.uint8),
        (Attention(3, 1, 7, 0.2), "auto", torch.float16),
    ],
)  # fmt: skip
def test_attention_input(mixer: Attention, name: str, dtype: torch.dtype) -> None:
    """Queries, keys and values as in the composition; and in pages the keys and values that would be written there."""
    q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    shapes = {"q+": (q, WIDTH), "k": (kv, WIDTH), "v+": (kv, WIDTH)}
    gate = {"out_gate": (q, WIDTH)} if mixer.out_gate else {}
    shapes |= gate
    vectors = {"norm.weight": WIDTH, "q_norm.weight": mixer.head_dim, "k_norm.weight": mixer.head_dim}
    residual, delta = inputs()
    format = PLAIN if name == "auto" else format_of(name)
    turn = rotary(mixer.rope.dim) if mixer.rope else None
    case = AttentionInput(mixer, RMSNorm(), 0.7)
    agree(api.ATTENTION_INPUT, case, shapes, vectors, residual, delta, turn, format=format)
    agree(api.QUERY_INPUT, case, {"q": (q, WIDTH)} | gate, vectors, residual, delta, turn, format=format)
    stage = TABLE.stage(api.ATTENTION_INPUT, case, weights(TABLE, shapes, vectors, format))
    write, found = TABLE.primitive(api.WRITE_PAGES, mixer), []
    for direct in (True, False):
        target = target_of(mixer, dtype)
        total, q_found, _, k, v = stage(residual, delta, turn, target if direct else None)
        if k is not None:
            write(target.parts, (k, v), target.pages, target.slots, target.scales)
        found.append((total, q_found, *(x.view(torch.uint8) for x in target.parts)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def target_of(mixer: Attention, dtype: torch.dtype, tokens: int = TOKENS) -> PageTarget:
    """Return slots in pages of 4 tokens, one page apart, for tokens in a step."""
    row = mixer.head_dim + 4 * (dtype == torch.int8)
    arena = torch.full((2 * tokens, 2, 4, mixer.num_kv_heads, row), 9).to(dtype)
    at = torch.arange(tokens)
    return PageTarget((arena[:, 0], arena[:, 1]), 2 * at.flip(0), at % 4, (0.05, 0.02))


LATENTS = LatentAttention(3, 37, 20, 10, 8, 0.2, RMSNorm(1e-5), rope=Rope(10))


@pytest.mark.parametrize(
    ("mixer", "name"),
    [
        (LATENTS, "auto"), (replace(LATENTS, q_lora_rank=50, rope=Rope(10, interleaved=True)), "int8"),
        (replace(LATENTS, q_lora_rank=63, rope=None, latent_norm=RMSNorm(1e-6, 1.0)), "auto"),
    ],
)  # fmt: skip
def test_latent_input(mixer: LatentAttention, name: str) -> None:
    width, rank = mixer.num_heads * mixer.qk_head_dim, mixer.q_lora_rank
    shapes = {"q": (width, WIDTH)} if rank is None else {"q_a+": (rank, WIDTH), "q_b": (width, rank)}
    vectors = {"norm.weight": WIDTH, "q_a_norm.weight": rank or 1, "kv_a_norm.weight": mixer.kv_lora_rank}
    residual, delta = inputs()
    case, format = LatentInput(mixer, RMSNorm(), 0.7), PLAIN if name == "auto" else format_of(name)
    for given in (delta, None):
        agree(
            api.LATENT_INPUT, case, shapes | {"kv_a+": (mixer.row, WIDTH)}, vectors, residual, given, rotary(10),
            format=format,
        )  # fmt: skip


def test_the_latent_of_a_token_is_the_same_alone_and_in_a_batch() -> None:
    residual, delta = inputs(70)
    turn, mixer = rotary(10, 70), replace(LATENTS, q_lora_rank=50)
    shapes = {"q_a": (50, WIDTH), "q_b": (90, 50), "kv_a": (47, WIDTH)}
    vectors = {"norm.weight": WIDTH, "q_a_norm.weight": 50, "kv_a_norm.weight": 37}
    stage = TABLE.stage(api.LATENT_INPUT, LatentInput(mixer, RMSNorm(), 1.0), weights(TABLE, shapes, vectors, PLAIN))
    alone = stage(residual[69:], delta[69:], Rotary(turn.cos[69:], turn.sin[69:]))
    for whole, one in zip(stage(residual, delta, turn), alone, strict=True):
        assert torch.equal(whole[69], one[0])


@pytest.mark.parametrize(
    ("tokens", "dtype", "rope"),
    [
        (5, torch.bfloat16, Rope(10)), (70, torch.int8, Rope(10, interleaved=True)), (5, torch.uint8, None),
        (1, torch.float32, Rope(10)),
    ],
)  # fmt: skip
def test_queries_in_the_space_of_latents(tokens: int, dtype: torch.dtype, rope: Rope | None) -> None:
    """One launch writes latents and maps queries, with the bits of kernels of their own; it is the product of few
    queries. Three heads of 96 numbers are two groups of whole blocks.
    """
    mixer = replace(LATENTS, num_heads=3, kv_lora_rank=70, qk_nope_head_dim=86, q_lora_rank=50, rope=rope)
    (residual, delta), turn = inputs(tokens), rotary(10, tokens)
    shapes = {"q_a": (50, WIDTH), "q_b": (288, 50), "kv_a": (80, WIDTH)}
    vectors = {"norm.weight": WIDTH, "q_a_norm.weight": 50, "kv_a_norm.weight": 70}
    given = weights(TABLE, shapes, vectors, PLAIN)
    kv_b = torch.randn(3, 94, 70, generator=torch.Generator().manual_seed(8)).bfloat16()
    given = Weights(given.linears, {**given.arrays, "kv_b.weight": kv_b})
    row, at = mixer.row + 4 * (dtype == torch.int8), torch.arange(tokens)
    found = []
    for reader in ("triton", "reference"):
        stage = TABLE.stage(api.LATENT_INPUT, LatentInput(mixer, RMSNorm(), 0.7, reader), given)
        target = PageTarget((torch.full((2 * tokens, 4, 1, row), 9).to(dtype),), 2 * at.flip(0), at % 4, (0.05, 0.05))
        total, q, latents = stage(residual, delta, turn, target)
        if reader == "triton":
            assert latents is None
            queries = q.queries
            alone = stage(residual[-1:], delta[-1:], Rotary(turn.cos[-1:], turn.sin[-1:]), PageTarget(
                (torch.zeros_like(target.parts[0]),), target.pages[-1:], target.slots[-1:], target.scales
            ))[1]  # fmt: skip
            assert torch.equal(alone.queries[0], queries[-1])
        else:
            TABLE.primitive(api.WRITE_PAGES, mixer)(target.parts, (latents,), target.pages, target.slots, target.scales)
            queries = HeadProduct(guarded)(q, kv_b[:, :86].mT, 10)
        found.append((total, queries, target.parts[0].view(torch.uint8)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_mlp_block(activation: Any) -> None:
    residual, delta = inputs()
    shapes, vectors = {"gate": (100, WIDTH), "up": (100, WIDTH), "down+": (WIDTH, 100)}, {"norm.weight": WIDTH}
    agree(api.MLP_BLOCK, MLPBlock(GatedMLP(100, activation), RMSNorm(), 1.0), shapes, vectors, residual, delta)
    del shapes["gate"]
    case = MLPBlock(MLP(100, activation), LayerNorm(), 1.0)
    agree(api.MLP_BLOCK, case, shapes, vectors | {"norm.bias": WIDTH}, residual, None)


def test_head() -> None:
    residual, delta = inputs()
    case, shapes, vectors = Head(RMSNorm(), 1.0, 1.0, None), {"head": (257, WIDTH)}, {"norm.weight": WIDTH}
    agree(api.HEAD, case, shapes, vectors, residual, delta, torch.tensor([4, 0]))
    agree(api.HEAD, case, shapes, vectors, residual, None, None)
    agree(api.HEAD, Head(RMSNorm(), 1.0, 0.3, 2.0), shapes, vectors, residual, delta, None)
    agree(api.HEAD, Head(RMSNorm(), 1.0, 1.0, 2.0), shapes, vectors, residual, delta, None, format=format_of("int8"))
    scaled = Head(RMSNorm(), 1.0, 0.3, 2.0)
    got, wanted = (t.stage(api.HEAD, scaled, weights(t, shapes, vectors, PLAIN)) for t in (TABLE, REFERENCE))
    torch.testing.assert_close(got.project(residual), wanted.project(residual), rtol=3e-4, atol=3e-4)
    assert got.rows is None


def test_a_token_is_the_same_alone_and_in_a_batch() -> None:
    """Its MLP, its query, and its key and value in pages."""
    residual, delta = inputs(70)
    shapes, vectors = {"gate": (100, WIDTH), "up": (100, WIDTH), "down": (WIDTH, 100)}, {"norm.weight": WIDTH}
    case = MLPBlock(GatedMLP(100), RMSNorm(), 1.0)
    stage = TABLE.stage(api.MLP_BLOCK, case, weights(TABLE, shapes, vectors, PLAIN))
    for whole, alone in zip(stage(residual, delta), stage(residual[69:], delta[69:]), strict=True):
        assert torch.equal(whole[69], alone[0])
    mixer, turn, found = Attention(3, 1, 20, 0.2, rope=Rope(20)), rotary(20, 70), []
    shapes = {"q": (60, WIDTH), "k": (20, WIDTH), "v": (20, WIDTH)}
    into = TABLE.stage(
        api.ATTENTION_INPUT, AttentionInput(mixer, RMSNorm(), 1.0), weights(TABLE, shapes, vectors, PLAIN)
    )
    for first in (0, 69):
        (k, v), pages, slots, scales = target_of(mixer, torch.bfloat16, 70)
        target = PageTarget((k, v), pages[first:], slots[first:], scales)
        _, q, *_ = into(residual[first:], delta[first:], Rotary(turn.cos[first:], turn.sin[first:]), target)
        found.append((q[-1], k[pages[69], slots[69]], v[pages[69], slots[69]]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "norm", "has_delta"),
    [("auto", RMSNorm(1e-2, 0.5), True), ("auto", LayerNorm(1e-2), True), ("fp8", RMSNorm(), False)],
)
def test_a_norm_within_a_product_has_the_same_bits(
    name: str, norm: Norm, has_delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens take no launch for the norms of an MLP and of latents of queries; splits have programs of their own.

    Poisoned room for the sum is written once, and inputs are rows of a wider array.
    """
    monkeypatch.setattr(products, "SPLIT_TILES", 1)
    started = list[str]()

    def launch(kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
        started.append(kernel.fn.__name__)
        guarded(kernel, grid, compiled, **arguments)

    table = OpsTable(TABLE.memory, (TritonBackend(launch), ReferenceBackend()))
    generator, format = torch.Generator().manual_seed(6), PLAIN if name == "auto" else format_of(name)
    residual = torch.randn(2, 307, generator=generator)[:, :300] * 9
    shapes = dict.fromkeys(("gate", "up"), (70, 300)) | {"down": (300, 70)}
    shapes |= {"q_a+": (50, 300), "q_b": (90, 50), "kv_a": (47, 300)}
    vectors = {"norm.weight": 300, "norm.bias": 300, "q_a_norm.weight": 50, "kv_a_norm.weight": 37}
    given = weights(table, shapes, vectors, format)
    if isinstance(norm, RMSNorm):
        del given.arrays["norm.bias"]
    mlp = table.stage(api.MLP_BLOCK, MLPBlock(GatedMLP(70), norm, 0.7), given)
    latents = table.stage(api.LATENT_INPUT, LatentInput(replace(LATENTS, q_lora_rank=50), norm, 0.7), given)
    more = torch.randn(2, 300, generator=generator) if has_delta else None
    found = []
    for most in (2, 0):
        monkeypatch.setattr(tokens, "NORM_TOKENS", most)
        started.clear()
        found.append((*mlp(residual, more), *latents(residual, more, rotary(10, 2))))
        assert started.count("normalize") == (0 if most else 3) and started.count("dense_product") == 4
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["auto", "int8"])
def test_a_normalized_head_is_the_same_alone_and_in_a_batch(name: str) -> None:
    """Programs have 128 rows of 70 tokens, and 64 or 32 rows of one; splits are programs of their own, or not."""
    mixer, turn, found = Attention(2, 1, 128, 0.2, rope=Rope(128), qk_norm=RMSNorm()), rotary(128, 70), []
    generator = torch.Generator().manual_seed(6)
    residual = torch.randn(70, 1024, generator=generator)
    shapes = {"q": (256, 1024), "k": (128, 1024), "v": (128, 1024)}
    vectors = {"norm.weight": 1024, "q_norm.weight": 128, "k_norm.weight": 128}
    given = weights(TABLE, shapes, vectors, PLAIN if name == "auto" else format_of(name))
    stage = TABLE.stage(api.ATTENTION_INPUT, AttentionInput(mixer, RMSNorm(), 1.0), given)
    for first in (0, 69):
        (k, v), pages, slots, scales = target_of(mixer, torch.int8, 70)
        target = PageTarget((k, v), pages[first:], slots[first:], scales)
        _, q, *_ = stage(residual[first:], None, Rotary(turn.cos[first:], turn.sin[first:]), target)
        found.append((q[-1], k[pages[69]], v[pages[69]]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("op", "case", "reason"),
    [
        (api.LATENT_INPUT, LatentInput(replace(LATENTS, latent_norm=LayerNorm()), RMSNorm(), 1.0), "RMSNorm alone"),
        (api.MLP_BLOCK, MLPBlock(GatedMLP(8), None, 1.0), "the input has no norm"),
        (api.HEAD, Head(None, 1.0, 1.0, 30.0), "the input has no norm"),
    ],
)  # fmt: skip
def test_other_cases_are_refused_with_a_reason(op: Any, case: Any, reason: str) -> None:
    assert reason in dict(TABLE.choose(op, case).refusals)["triton"]
