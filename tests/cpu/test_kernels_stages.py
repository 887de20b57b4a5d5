"""The stages of the cpu backend: close to their definition in the reference's primitives in float64, and the same bits
in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from oracle.problems import expert_weights
from ridgeline.nn.binding import bind
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Op, Rotary, Weights
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.ops.reference.backend import ReferenceBackend, TorchMemory
from ridgeline.ops.stages import AttentionInput, Head, MLPBlock
from ridgeline.spec import MLP, Attention, ClampedSwiGLU, GatedMLP, LayerNorm, MoE, RMSNorm, Rope, Ungated
from ridgeline.spec.quant import FORMATS, Format

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from ridgeline.ops.cpu.backend import CpuBackend  # noqa: E402

WIDTH = 100
AS_STORED = FORMATS["auto"]
REFERENCE = OpsTable(TorchMemory("cpu"), (ReferenceBackend(),))
RMS, ZERO_CENTERED, LAYER = RMSNorm(1e-5), RMSNorm(1e-6, offset=1.0), LayerNorm(1e-5)


def rng(*key: int) -> np.random.Generator:
    return np.random.default_rng([13, *key])


def draw(*shape: int, key: int = 0, scale: float = 1.0) -> np.ndarray:
    return (rng(key, *shape).normal(size=shape) * scale).astype(np.float32)


class Cpu:
    """Holds the cpu backend's side of a test."""

    def __init__(self, threads: int = 1) -> None:
        self.backend = CpuBackend(kernels.Pool(threads))
        self.table = OpsTable(NumpyMemory(), (self.backend,))

    def stage(self, op: Op[Any], case: Any, arrays: dict[str, np.ndarray]) -> Any:
        return self.backend.stage(op, case, weights(arrays, self.table))

    def primitive(self, op: Op[Any], case: Any = None) -> Any:
        return self.backend.primitive(op, case)

    def experts(self, case: MoE, matrices: Any, biases: Any, format: Format = AS_STORED) -> Any:
        return self.table.stage(api.EXPERT_BLOCK, case, expert_weights(matrices, biases, self.table, format))


def weights(arrays: dict[str, np.ndarray], table: Any) -> Weights:
    """Return weights in the form in which a model binds them."""
    return bind({n if n.startswith("norm.") else f"part.{n}": a for n, a in arrays.items()}, table, "part", "norm")


def wide(x: Any) -> Any:
    """Convert numpy arrays to float64 tensors."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.astype(np.float64) if x.dtype != np.int64 else x)
    if isinstance(x, dict):
        return {name: wide(a) for name, a in x.items()}
    return Rotary(*(wide(a) for a in x)) if isinstance(x, Rotary) else x


def compare(op: Op[Any], case: Any, arrays: dict[str, np.ndarray], args: Sequence[Any], *, size: float) -> Any:
    """Run a stage and its definition. size: rounding errors of a result, in units of 2^-24 of its largest element."""
    got = Cpu().stage(op, case, arrays)(*args)
    wanted = REFERENCE.stage(op, case, weights(wide(arrays), REFERENCE))(*(wide(a) for a in args))
    results = got if isinstance(got, tuple) else (got,)
    for a, b in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        exact = b.numpy()
        assert a.dtype == np.float32
        assert a.shape == exact.shape
        assert np.abs(a - exact).max(initial=0.0) <= size * 2.0**-24 * np.abs(exact).max(initial=1.0)
    return got


def same_bits(a: Any, b: Any) -> bool:
    pairs = (
        [(x, y) for x, y in zip(a, b, strict=True) if x is not None or y is not None]
        if isinstance(a, tuple)
        else [(a, b)]
    )
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def norm_weights(name: str, norm: Any, size: int) -> dict[str, np.ndarray]:
    if norm is None:
        return {}
    found = {f"{name}.weight": 1 + draw(size, key=3, scale=0.1)}
    return {**found, f"{name}.bias": draw(size, key=4, scale=0.1)} if isinstance(norm, LayerNorm) else found


def linear_weights(name: str, n_in: int, n_out: int, bias: bool) -> dict[str, np.ndarray]:
    found = {f"{name}.weight": draw(n_out, n_in, key=len(name), scale=n_in**-0.5)}
    return {**found, f"{name}.bias": draw(n_out, key=6)} if bias else found


def rotary(tokens: int, rope: Rope | None) -> Rotary | None:
    if rope is None:
        return None
    angles = np.arange(tokens)[:, None] * 0.3 + np.arange(rope.dim // 2)
    return Rotary(
        np.cos(angles).astype(np.float32) * np.float32(1.1), np.sin(angles).astype(np.float32) * np.float32(1.1)
    )


# ---- queries, keys and values ----------------------------------------------------------------------------------------

PLAIN = Attention(4, 2, 64, 0.125, Rope(64))
MIXERS = {
    "plain": PLAIN,
    "no rotation": replace(PLAIN, rope=None),
    "pairs": replace(PLAIN, rope=Rope(64, interleaved=True)),
    "part of a head": replace(PLAIN, rope=Rope(24)),
    "part of a head, pairs": replace(PLAIN, rope=Rope(24, interleaved=True)),
    "biases": replace(PLAIN, qkv_bias=True),
    "norms of heads": replace(PLAIN, qk_norm=RMS),
    "zero-centered": replace(PLAIN, qk_norm=ZERO_CENTERED),
    "layer norms": replace(PLAIN, qk_norm=LAYER),
    "one norm": replace(PLAIN, qk_norm=RMS, qk_norm_over="all_heads"),
    "one head": Attention(1, 1, 32, 0.2, Rope(32)),
    "odd heads": Attention(3, 1, 10, 0.3, Rope(6), qk_norm=RMS, qkv_bias=True),
    "a gate": replace(PLAIN, out_gate=True, qk_norm=RMS),
    "wide heads": Attention(2, 1, 96, 0.1, Rope(96), qk_norm=RMS),
}


def attention_arrays(m: Attention, norm: Any, *, keys: bool = True) -> dict[str, np.ndarray]:
    arrays = norm_weights("norm", norm, WIDTH)
    for name, heads in (("q", m.num_heads), ("k", m.num_kv_heads), ("v", m.num_kv_heads))[: 3 if keys else 1]:
        arrays |= linear_weights(name, WIDTH, heads * m.head_dim, m.qkv_bias)
        if m.qk_norm and name != "v":
            per_head = m.qk_norm_over == "head"
            arrays |= norm_weights(f"{name}_norm", m.qk_norm, m.head_dim if per_head else heads * m.head_dim)
    if m.out_gate:
        arrays |= linear_weights("out_gate", WIDTH, m.num_heads * m.head_dim, m.qkv_bias)
    return arrays


@pytest.mark.parametrize("tokens", [1, 3, 63])
@pytest.mark.parametrize("name", MIXERS)
def test_attention_input(name: str, tokens: int) -> None:
    m = MIXERS[name]
    residual, delta = draw(tokens, WIDTH), draw(tokens, WIDTH, key=1)
    for norm, given, scale in ((RMS, delta, 1.0), (LAYER, delta, 0.22), (ZERO_CENTERED, None, 1.0), (None, delta, 1.0)):
        case, arrays = AttentionInput(m, norm, scale), attention_arrays(m, norm)
        compare(api.ATTENTION_INPUT, case, arrays, (residual, given, rotary(tokens, m.rope)), size=250)
        arrays = attention_arrays(m, norm, keys=False)
        compare(api.QUERY_INPUT, case, arrays, (residual, given, rotary(tokens, m.rope)), size=250)


@pytest.mark.parametrize("name", MIXERS)
def test_heads_in_any_batch(name: str) -> None:
    m = MIXERS[name]
    case, arrays = AttentionInput(m, RMS, 1.0), attention_arrays(m, RMS)
    residual, delta, angles = draw(530, WIDTH), draw(530, WIDTH, key=1), rotary(530, m.rope)
    whole = Cpu().stage(api.ATTENTION_INPUT, case, arrays)(residual, delta, angles)
    for threads in (1, 2, 4):
        run = Cpu(threads).stage(api.ATTENTION_INPUT, case, arrays)
        for begin, end in ((0, 1), (7, 8), (3, 36), (400, 530)):
            some = Rotary(*(a[begin:end] for a in angles)) if angles else None
            assert same_bits(
                run(residual[begin:end], delta[begin:end], some), tuple(a if a is None else a[begin:end] for a in whole)
            )


def test_inputs_stay_as_they_are_and_no_delta_is_no_copy() -> None:
    arrays = attention_arrays(PLAIN, RMS)
    residual, delta = draw(5, WIDTH), draw(5, WIDTH, key=1)
    before = residual.copy(), delta.copy()
    run = Cpu().stage(api.ATTENTION_INPUT, AttentionInput(PLAIN, RMS, 1.0), arrays)
    total = run(residual, delta, rotary(5, PLAIN.rope))[0]
    assert same_bits((residual, delta), before)
    assert same_bits(total, residual + delta)
    assert run(residual, None, rotary(5, PLAIN.rope))[0] is residual


@pytest.mark.parametrize("bias", [False, True])
def test_attention_output(bias: bool) -> None:
    case = replace(PLAIN, out_bias=bias)
    arrays = linear_weights("o", 256, WIDTH, bias)
    compare(api.ATTENTION_OUTPUT, case, arrays, (draw(63, 256), None), size=150)
    compare(api.ATTENTION_OUTPUT, case, arrays, (draw(63, 256), 3 * draw(63, 256, key=1)), size=150)


# ---- MLPs ------------------------------------------------------------------------------------------------------------

MLPS = [
    kind(257, act, bias)
    for kind in (GatedMLP, MLP)
    for act in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    for bias in (False, True)
]


def mlp_arrays(mlp: Any, norm: Any) -> dict[str, np.ndarray]:
    arrays = norm_weights("norm", norm, WIDTH) | linear_weights("down", mlp.intermediate_size, WIDTH, mlp.bias)
    for name in ("gate", "up") if isinstance(mlp, GatedMLP) else ("up",):
        arrays |= linear_weights(name, WIDTH, mlp.intermediate_size, mlp.bias)
    return arrays


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("mlp", MLPS, ids=str)
def test_mlp_block(mlp: Any, tokens: int) -> None:
    residual, delta = draw(tokens, WIDTH), draw(tokens, WIDTH, key=1)
    for norm, given, scale in ((RMS, delta, 1.0), (LAYER, delta, 0.22), (None, None, 1.0)):
        compare(api.MLP_BLOCK, MLPBlock(mlp, norm, scale), mlp_arrays(mlp, norm), (residual, given), size=300)


def test_mlps_in_any_batch() -> None:
    case = MLPBlock(GatedMLP(257), RMS, 1.0)
    residual, delta = draw(1100, WIDTH), draw(1100, WIDTH, key=1)
    whole = Cpu().stage(api.MLP_BLOCK, case, mlp_arrays(case.mlp, RMS))(residual, delta)
    for threads in (1, 2, 4):
        run = Cpu(threads).stage(api.MLP_BLOCK, case, mlp_arrays(case.mlp, RMS))
        for begin, end in ((0, 1), (500, 510), (1, 34), (0, 1100)):
            assert same_bits(run(residual[begin:end], delta[begin:end]), tuple(a[begin:end] for a in whole))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_weights_of_16_bits(kind: str) -> None:
    """Matrices of 16-bit types give the bits of float32 matrices with the same values; types may be mixed.

    bfloat16 with the arithmetic of a matrix unit has other bits, from tokens that lose up to 2^-17 of each number.
    """
    case, narrow = MLPBlock(GatedMLP(257), RMS, 1.0), ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16
    arrays = mlp_arrays(case.mlp, RMS)
    rounded = {n: a.astype(narrow) if a.ndim == 2 else a for n, a in arrays.items()}
    widened = {n: a.astype(np.float32) for n, a in rounded.items()}
    mixed = {n: a.astype(np.float32) if n == "gate.weight" else a for n, a in rounded.items()}
    args = draw(5, WIDTH), draw(5, WIDTH, key=1)
    results = [Cpu().stage(api.MLP_BLOCK, case, a)(*args) for a in (rounded, widened, mixed)]
    if kind == "bfloat16" and not kernels.bf16_refusal():
        for found in (results[0], results[2]):
            for a, b in zip(results[1], found, strict=True):
                assert np.abs(b - a).max() < 2.0**-15 * np.abs(a).max()
        return
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


# ---- the head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [RMS, LAYER, ZERO_CENTERED], ids=str)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.13, None), (1.0, 3.0), (0.5, 30.0)])
def test_head(norm: Any, scale: float, softcap: float | None) -> None:
    case = Head(norm, 0.5, scale, softcap)
    arrays = norm_weights("norm", norm, WIDTH) | linear_weights("head", WIDTH, 1000, False)
    residual, delta = draw(9, WIDTH), draw(9, WIDTH, key=1)
    for rows in (None, np.array([8]), np.array([3, 3, 0]), np.zeros(0, np.int64)):
        compare(api.HEAD, case, arrays, (residual, delta, rows), size=250)
        compare(api.HEAD, case, arrays, (residual, None, rows), size=250)


# ---- experts ---------------------------------------------------------------------------------------------------------


def expert_arrays(case: MoE) -> tuple[list[Any], list[Any] | None]:
    e, inner = case.num_experts, case.intermediate_size
    shapes = (inner, WIDTH), (inner, WIDTH), (WIDTH, inner)
    matrices: list[Any] = [draw(e, *s, key=i, scale=s[1] ** -0.5) for i, s in enumerate(shapes)]
    biases: list[Any] = [draw(e, n, key=i) for i, n in enumerate((inner, inner, WIDTH))]
    if not case.gated:
        matrices[0] = biases[0] = None
    return matrices, biases if case.bias else None


def choices(tokens: int, case: MoE) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([rng(t).permutation(case.num_experts)[: case.num_experts_per_tok] for t in range(tokens)]).reshape(
        tokens, -1
    )
    return ids, np.abs(draw(tokens, case.num_experts_per_tok, key=9))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiGLU(1.7, 0.5), Ungated("relu2")], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_experts(activation: Any, bias: bool) -> None:
    case = MoE(7, 3, 70, activation, bias=bias)
    x, (matrices, biases) = draw(63, WIDTH), expert_arrays(case)
    ids, scores = choices(63, case)
    got = Cpu().experts(case, matrices, biases)(x, ids, scores)
    exact = expert_weights([w if w is None else wide(w) for w in matrices],
                           biases and [b if b is None else wide(b) for b in biases], REFERENCE)  # fmt: skip
    wanted = REFERENCE.stage(api.EXPERT_BLOCK, case, exact)(wide(x), wide(ids), wide(scores)).numpy()
    assert np.abs(got - wanted).max() <= 300 * 2.0**-24 * np.abs(wanted).max()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_experts_in_any_batch(format: Format) -> None:
    case = MoE(5, 2, 70)
    x, arrays = draw(130, WIDTH), expert_arrays(case)
    ids, scores = choices(130, case)
    whole = Cpu().experts(case, *arrays, format)(x, ids, scores)
    for threads in (1, 2, 4):
        run = Cpu(threads).experts(case, *arrays, format)
        for begin, end in ((0, 1), (64, 77), (1, 130), (3, 3)):
            some = slice(begin, end)
            assert same_bits(run(x[some], ids[some], scores[some]), whole[some])
    with pytest.raises(IndexError, match="expert 5 of 5"):
        run(x[:1], np.array([[0, 5]]), scores[:1])


# ---- primitives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 63, 100, 257])
@pytest.mark.parametrize("case", [RMS, ZERO_CENTERED, LAYER], ids=str)
def test_norm(case: Any, size: int) -> None:
    arrays = norm_weights("n", case, size)
    x, weight, bias = draw(5, 3, size + 9)[..., 4:-5], arrays["n.weight"], arrays.get("n.bias")
    got = Cpu().primitive(api.NORM, case)(x, weight, bias)
    wanted = REFERENCE.primitive(api.NORM, case)(wide(x), wide(weight), wide(bias)).numpy()
    assert got.shape == x.shape
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-5 if case is LAYER else 2e-6)


@pytest.mark.parametrize("case", [Rope(10), Rope(6), Rope(10, interleaved=True), Rope(4, interleaved=True)], ids=str)
def test_rope(case: Rope) -> None:
    x, angles = draw(7, 3, 14)[..., 2:-2], rotary(7, case)
    before = x.copy()
    got = Cpu().primitive(api.ROPE, case)(x, angles)
    wanted = REFERENCE.primitive(api.ROPE, case)(wide(x), wide(angles)).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    assert same_bits(np.ascontiguousarray(x), before)


def test_a_product_of_any_axes() -> None:
    x, weight, bias = draw(3, 5, 60)[..., 10:], draw(33, 50), draw(33, key=1)
    for given in (weight, weight.astype(ml_dtypes.bfloat16), weight.astype(np.float16)):
        for b in (None, bias):
            arrays = {"matrix.weight": given} | ({} if b is None else {"matrix.bias": b})
            run = Cpu().stage(api.PRODUCT, AS_STORED, arrays)
            wanted = x.astype(np.float64) @ given.astype(np.float64).T + (0 if b is None else b)
            np.testing.assert_allclose(run(x), wanted, rtol=1e-5, atol=1e-4)
            assert np.array_equal(run.dequantize(), given.astype(np.float32))


def test_cases_without_a_kernel_are_refused_with_a_reason() -> None:
    backend = Cpu().backend
    assert backend.refuses(api.MLP_BLOCK, MLPBlock(GatedMLP(8), RMS, 1.0)) is None
    assert backend.refuses(api.GATHER, None) == "moves numbers only, as numpy does"
