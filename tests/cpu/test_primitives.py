"""Every primitive of the torch backends against a definition in numpy float64, which is written only here.

Inputs are slices of larger tensors full of NaN, so that a read outside them changes the result. No call may change its
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.problems import expert_weights
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import DenseKeyValues, Op, Rotary
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend, TorchMemory
from ridgeline.spec import (
    MLP,
    XIELU,
    Attention,
    Chunked,
    ClampedSwiGLU,
    Dilated,
    ExpertGroups,
    FirstTokens,
    GatedMLP,
    LayerNorm,
    MoE,
    QueryGrowth,
    RMSNorm,
    Rope,
    SparseMixer,
    Strided,
)

SIZES = (1, 63, 100, 257)
UNIT = 2.0**-24  # half the distance of 1.0 to the next float32
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REFERENCE, SDPA = ReferenceBackend(), SdpaBackend()
TABLE = OpsTable(TorchMemory("reference"), (REFERENCE,))


def rng(*key: int) -> np.random.Generator:
    return np.random.default_rng([7, *key])


def poisoned(x: Tensor) -> Tensor:
    """Return the values as a slice of a tensor whose other elements are NaN, or an invalid id if the values are ids."""
    rest = torch.nan if x.is_floating_point() else 1 << 40
    room = torch.full([n + 4 for n in x.shape], rest, dtype=x.dtype)
    inner = room[tuple(slice(2, n + 2) for n in x.shape)]
    inner.copy_(x)
    return inner


def tensor(x: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return poisoned(torch.from_numpy(np.asarray(x)).to(dtype))


def exact(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def tensors(args: Any) -> list[Tensor]:
    if isinstance(args, Tensor):
        return [args]
    return [t for a in args for t in tensors(a)] if isinstance(args, tuple) else []


def call(op: Op[Any], case: object, *args: Any, backend: Any = REFERENCE) -> Any:
    """Run a primitive; check that it does not change its inputs and returns float32 (or int64 for ids)."""
    before = [t.clone() for t in tensors(args)]
    out = backend.primitive(op, case)(*args)
    for old, new in zip(before, tensors(args), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    assert all(t.dtype in (torch.float32, torch.int64) for t in tensors(out))
    return out


def check(got: Tensor, wanted: np.ndarray, *, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    assert tuple(got.shape) == wanted.shape
    np.testing.assert_allclose(exact(got), wanted, rtol=rtol, atol=atol)


# ---- norms, activations, element by element -----------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [RMSNorm(1e-6), RMSNorm(0.3, offset=1.0), RMSNorm(1e-2, offset=0.25)])
def test_rms_norm(case: RMSNorm, size: int) -> None:
    x, weight = (rng(size, i).normal(size=s).astype(np.float32) for i, s in enumerate(((5, 3, size), (size,))))
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + case.eps) * (case.offset + weight.astype(np.float64))
    check(call(api.NORM, case, tensor(x), tensor(weight), None), wanted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_layer_norm(eps: float, size: int) -> None:
    x, weight, bias = (rng(size, i).normal(1.0, 2.0, s) for i, s in enumerate(((7, size), (size,), (size,))))
    x, weight, bias = (a.astype(np.float32) for a in (x, weight, bias))
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    wanted = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * weight + bias
    # A single element is its own mean, so the exact result is the bias.
    check(call(api.NORM, LayerNorm(eps), tensor(x), tensor(weight), tensor(bias)), wanted, atol=1e-5)


def test_norms_separate_rows() -> None:
    x = torch.randn(4, 63, generator=torch.Generator().manual_seed(0))
    clean = [call(api.NORM, case, x, torch.ones(63), torch.ones(63)) for case in (RMSNorm(), LayerNorm())]
    x[2] = torch.nan
    for case, before in zip((RMSNorm(), LayerNorm()), clean, strict=True):
        after = call(api.NORM, case, x, torch.ones(63), torch.ones(63))
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])
        assert after[2].isnan().all()


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)))(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: Any) -> None:
    x, up = (rng(i).normal(0, 3, (3, 257)).astype(np.float32) for i in range(2))
    wanted = ACTIVATIONS[name](x.astype(np.float64))
    check(call(api.ACTIVATION, MLP(8, name), tensor(x)), wanted)
    check(call(api.ACTIVATION, GatedMLP(8, name), tensor(x), tensor(up)), wanted * up)


def clamped_swiglu(case: ClampedSwiGLU, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, case.limit), np.clip(up, -case.limit, case.limit)
    return gate / (1 + np.exp(-case.alpha * gate)) * (up + 1)


def test_clamped_swiglu() -> None:
    """The gate is clamped only from above; the values are at the limit, on both sides of it and far outside."""
    edge = [-9.0, -2.0, -1.9999, 0.0, 1.9999, 2.0, 2.0001, 9.0]
    gate, up = (rng(i).normal(0, 3, (3, 257)).astype(np.float32) for i in range(2))
    gate[:, :8], up[:, 8:16] = edge, edge
    case = ClampedSwiGLU(1.3, 2.0)
    wanted = clamped_swiglu(case, gate.astype(np.float64), up.astype(np.float64))
    check(call(api.ACTIVATION, MoE(2, 1, 8, case), tensor(gate), tensor(up)), wanted)


def test_xielu() -> None:
    """The two numbers are on both sides of zero, and so are the values (arXiv:2411.13010)."""
    x = rng(3).normal(0, 3, (3, 257)).astype(np.float32)
    wide = x.astype(np.float64)
    for a, b in ((0.7, -1.2), (-2.0, 1.5)):
        right, left = math.log1p(math.exp(a)), 0.5 + math.log1p(math.exp(b))
        bent = np.where(wide > 0, right * wide**2, left * (np.exp(np.minimum(wide, 0)) - 1 - wide)) + 0.5 * wide
        check(call(api.XIELU, XIELU(), tensor(x), tensor([a]), tensor([b])), bent, atol=1e-5)


@pytest.mark.parametrize("over", ["head", "number"])
@pytest.mark.parametrize("act", ["sigmoid", "softplus"])
def test_gates_of_attention(over: Literal["head", "number"], act: Literal["sigmoid", "softplus"]) -> None:
    case = Attention(3, 1, 4, 0.5, out_gate=True, gate_over=over, gate_act=act)
    y, z = rng(5).normal(size=(7, 12)), rng(6).normal(0, 3, (7, 3 if over == "head" else 12))
    factors = 1 / (1 + np.exp(-z)) if act == "sigmoid" else np.log1p(np.exp(z))
    check(call(api.ATTENTION_GATE, case, tensor(y), tensor(z)), y * np.repeat(factors, 12 // z.shape[1], 1))


def test_a_gate_with_a_bias_of_heads() -> None:
    y, z, bias = rng(5).normal(size=(7, 12)), rng(6).normal(0, 3, (7, 12)), rng(7).normal(size=3)
    case = Attention(3, 1, 4, 0.5, out_gate=True, gate_bias=True)
    got = call(api.ATTENTION_GATE, case, tensor(y), tensor(z), tensor(bias))
    check(got, y / (1 + np.exp(-z - np.repeat(bias, 4))))


def test_queries_grow_with_their_position() -> None:
    q, positions = rng(4).normal(size=(7, 2, 3)), np.array([0, 18, 19, 20, 38, 39, 1000])
    for case in (QueryGrowth(0.3, 20), QueryGrowth(0.1, 20, ahead=1)):
        factors = [1 + case.beta * math.log(1 + (p + case.ahead) // case.every) for p in positions.tolist()]
        got = call(api.GROW_QUERIES, case, tensor(q), tensor(positions, torch.int64))
        check(got, q.astype(np.float32) * np.array(factors)[:, None, None])
    powers = (1 + (positions + 1) / 20) ** 0.3
    got = call(api.GROW_QUERIES, QueryGrowth(0.3, 20, 1, "power"), tensor(q), tensor(positions, torch.int64))
    check(got, q * powers[:, None, None])


@pytest.mark.parametrize("size", SIZES)
def test_elementwise(size: int) -> None:
    a, b = (rng(size, i).normal(0, 5, (3, size)).astype(np.float32) for i in range(2))
    wide, other = a.astype(np.float64), b.astype(np.float64)
    check(call(api.ADD, None, tensor(a), tensor(b), 1.0), wide + other)
    check(call(api.ADD, None, tensor(a), tensor(b), 0.22), wide + 0.22 * other)
    check(call(api.SCALE, None, tensor(a), 1.7), 1.7 * wide)
    check(call(api.SOFTCAP, None, tensor(a), 4.0), 4.0 * np.tanh(wide / 4.0))
    check(call(api.CLAMP, None, tensor(a), 4.0), np.minimum(np.maximum(wide, -4.0), 4.0))
    check(call(api.MIX, None, tensor(a), tensor(b.T)), wide @ other.T, rtol=1e-4, atol=1e-3)
    rows = np.array([2, 0, 2])
    check(call(api.TAKE, None, tensor(a), tensor(rows, torch.int64)), wide[rows], rtol=0, atol=0)
    split = call(api.SPLIT_HEADS, None, tensor(np.tile(a, 4)), 4)
    check(split, np.stack([wide] * 4, 1), rtol=0, atol=0)  # a head consists of neighboring elements
    check(call(api.JOIN, None, tensor(a), tensor(b)), np.concatenate((wide, other), 1), rtol=0, atol=0)
    start, stop = size // 3, size // 3 + size // 2
    check(call(api.CUT, None, tensor(a), start, stop), wide[:, start:stop], rtol=0, atol=0)


# ---- matrices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("size", SIZES)
def test_embedding(size: int, dtype: str) -> None:
    table = tensor(rng(size).normal(size=(size, 33)), STORED[dtype])
    ids = rng(size, 1).integers(0, size, 50)
    check(call(api.EMBEDDING, None, table, tensor(ids, torch.int64)), exact(table)[ids], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_linear(size: int, bias: bool, dtype: str) -> None:
    x = tensor(rng(size).normal(size=(5, size)))
    weight = tensor(rng(size, 1).normal(size=(63, size)), STORED[dtype])
    b = tensor(rng(size, 2).normal(size=63)) if bias else None
    got = exact(call(api.LINEAR, None, x, weight, b))
    extra = exact(b) if b is not None else np.zeros(63)
    wanted = exact(x) @ exact(weight).T + extra
    allowed = (size + 2) * UNIT * (np.abs(exact(x)) @ np.abs(exact(weight)).T + np.abs(extra))
    assert (np.abs(got - wanted) <= allowed).all()


# ---- rotation -----------------------------------------------------------------------------------------------


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, case: Rope) -> np.ndarray:
    """Multiply each pair, as a complex number, by cos + i sin."""
    half = case.dim // 2
    out = x.copy()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if case.interleaved else (i, i + half)
        rotated = (x[..., first] + 1j * x[..., second]) * (cos[:, i] + 1j * sin[:, i])[:, None]
        out[..., first], out[..., second] = rotated.real, rotated.imag
    return out


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_rotary(factor: float) -> None:
    positions = np.array([0, 1, 63, 100, 257, 4095, 131071])
    inverse = rng(1).uniform(1e-4, 1, 9).astype(np.float32)
    # The angle is rounded to float32, as in training; only cos and sin may be more exact.
    angle = (positions.astype(np.float32)[:, None] * inverse).astype(np.float64)
    cos, sin = call(api.ROTARY, None, tensor(positions, torch.int64), tensor(inverse), factor)
    check(cos, factor * np.cos(angle), rtol=0, atol=3e-7)
    check(sin, factor * np.sin(angle), rtol=0, atol=3e-7)
    own = np.stack([inverse * np.float32(0.5 + t) for t in range(len(positions))])  # frequencies for each token
    angle = (positions.astype(np.float32)[:, None] * own).astype(np.float64)
    cos, sin = call(api.ROTARY, None, tensor(positions, torch.int64), tensor(own), factor)
    check(cos, factor * np.cos(angle), rtol=0, atol=3e-7)
    check(sin, factor * np.sin(angle), rtol=0, atol=3e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "head_dim"), [(2, 2), (24, 24), (6, 24), (18, 63)])
@pytest.mark.parametrize("size", SIZES)
def test_rope(size: int, dim: int, head_dim: int, interleaved: bool) -> None:
    case = Rope(dim, interleaved=interleaved)
    x = rng(size).normal(size=(size, 3, head_dim)).astype(np.float32)
    angle = rng(size, 1).uniform(0, 6, (size, dim // 2))
    cos, sin = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
    got = call(api.ROPE, case, tensor(x), Rotary(tensor(cos), tensor(sin)))
    check(got, rotate(x.astype(np.float64), cos.astype(np.float64), sin.astype(np.float64), case))
    assert np.array_equal(exact(got)[..., dim:], x[..., dim:])


# ---- attention ----------------------------------------------------------------------------------------------


def keys_of(case: Attention, start: int, i: int) -> list[int]:
    """Return the keys that row i of a sequence which begins at row `start` attends to."""
    window = case.window or 1 << 40
    match case.pattern:
        case FirstTokens(count):
            return [j for j in range(start, i + 1) if i - j < window or j - start < count]
        case Dilated(step):
            return [j for j in range(start, i + 1) if (i - j) % step == 0 and (i - j) // step < window]
        case Strided(stride):
            return [j for j in range(start, i + 1) if i - j < window or (i - j) % stride == 0]
        case Chunked():
            return [j for j in range(start, i + 1) if (j - start) // window == (i - start) // window]
    return [j for j in range(start, i + 1) if i - j < window]


def attend(
    case: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: tuple[int, ...],
    sinks: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Compute each query and each head separately."""
    out = np.zeros(q.shape)
    group, start = case.num_heads // case.num_kv_heads, 0
    for n in lengths:
        for i in range(start, start + n):
            keys = keys_of(case, start, i)
            for h in range(case.num_heads):
                scores = k[keys, h // group] @ q[i, h] * case.scale
                if case.softcap:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                if case.alibi is not None:
                    scores = scores - case.slopes[h] * (i - np.asarray(keys))
                rest = -np.inf if sinks is None else sinks[h]
                highest = max(scores.max(), rest)
                weights = np.exp(scores - highest)
                out[i, h] = weights / (weights.sum() + np.exp(rest - highest)) @ v[keys, h // group]
        start += n
    return out.reshape(len(q), -1)


def qkv(case: Attention, lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q, k and v. Scores have a spread of about 2, so that a wrong scale, mask or head changes much."""
    total, generator = sum(lengths), rng(case.num_heads, case.head_dim, *lengths)
    std = math.sqrt(2 / case.scale) / case.head_dim**0.25
    q = generator.normal(0, std, (total, case.num_heads, case.head_dim))
    k = generator.normal(0, std, (total, case.num_kv_heads, case.head_dim))
    v = generator.normal(0, 1, (total, case.num_kv_heads, case.head_dim))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


CASES = [
    Attention(4, 4, 16, 0.25),
    Attention(6, 2, 5, 0.11),
    Attention(4, 1, 24, 0.2, window=24),
    Attention(2, 2, 8, 0.3, window=1),
    Attention(2, 1, 8, 0.3, window=63),
    Attention(4, 2, 8, 0.3, window=100, softcap=3.0),
    Attention(4, 2, 8, 0.3, softcap=3.0),
    Attention(6, 2, 8, 0.3, sinks=True),
    Attention(4, 1, 8, 0.3, window=24, softcap=3.0, sinks=True),
    Attention(6, 2, 8, 0.3, alibi=8.0),
    Attention(4, 1, 8, 0.3, window=24, softcap=3.0, sinks=True, alibi=4.0),
    Attention(4, 2, 8, 0.3, window=9, pattern=FirstTokens(4)),
    Attention(4, 2, 8, 0.3, window=9, pattern=Dilated(5)),
    Attention(4, 2, 8, 0.3, window=9, pattern=Strided(11), sinks=True),
    Attention(4, 2, 8, 0.3, window=9, pattern=Chunked()),
]


SERVED = [(b, case) for case in CASES for b in (REFERENCE, SDPA) if b.refuses(api.ATTENTION, case) is None]


def sinks_of(case: Attention) -> np.ndarray | None:
    """Return sinks from far below the scores, where a sink has no effect, to far above them,
    where it takes all weight.
    """
    return np.linspace(-30, 30, case.num_heads).astype(np.float32) if case.sinks else None


@pytest.mark.parametrize("lengths", [(1,), (63,), (100, 1, 63), (257,)], ids=str)
@pytest.mark.parametrize(("backend", "case"), SERVED, ids=lambda x: x.name if hasattr(x, "name") else str(x))
def test_attention(case: Attention, lengths: tuple[int, ...], backend: Any) -> None:
    (q, k, v), sinks = qkv(case, lengths), sinks_of(case)
    kv = DenseKeyValues(tensor(k), tensor(v), lengths)
    got = call(api.ATTENTION, case, tensor(q), kv, None if sinks is None else tensor(sinks), backend=backend)
    wanted = attend(case, *(x.astype(np.float64) for x in (q, k, v)), lengths, sinks)
    check(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 600])
def test_attention_over_more_than_a_block_of_queries(window: int | None) -> None:
    """The reference computes 512 rows of scores at a time; the boundary has no effect, even if a window crosses it."""
    case, lengths = Attention(1, 1, 4, 0.5, window=window), (1100, 513)
    q, k, v = qkv(case, lengths)
    got = call(api.ATTENTION, case, tensor(q), DenseKeyValues(tensor(k), tensor(v), lengths))
    check(got, attend(case, *(x.astype(np.float64) for x in (q, k, v)), lengths), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [REFERENCE, SDPA], ids=lambda b: b.name)
@pytest.mark.parametrize("window", [None, 24])
def test_attention_separates_sequences(window: int | None, backend: Any) -> None:
    case, lengths = Attention(4, 2, 16, 0.25, window=window), (63, 30, 100)
    q, k, v = (torch.from_numpy(x) for x in qkv(case, lengths))
    clean = call(api.ATTENTION, case, q, DenseKeyValues(k, v, lengths), backend=backend)
    for x in (q, k, v):
        x[63:93] = torch.nan
    dirty = call(api.ATTENTION, case, q, DenseKeyValues(k, v, lengths), backend=backend)
    assert torch.equal(dirty[:63], clean[:63])
    assert torch.equal(dirty[93:], clean[93:])
    assert dirty[63:93].isnan().all()


@st.composite
def attention_problems(draw: st.DrawFn) -> tuple[Attention, tuple[int, ...]]:
    kv, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    window = draw(st.none() | st.integers(1, 90))
    case = Attention(kv * group, kv, draw(st.integers(1, 40)), draw(st.floats(0.05, 1.0)), window=window)
    return case, tuple(draw(st.lists(st.integers(1, 90), min_size=1, max_size=4)))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(attention_problems())
def test_sdpa_is_the_reference(problem: tuple[Attention, tuple[int, ...]]) -> None:
    case, lengths = problem
    q, k, v = (tensor(x) for x in qkv(case, lengths))
    assert SDPA.refuses(api.ATTENTION, case) is None
    got, wanted = (call(api.ATTENTION, case, q, DenseKeyValues(k, v, lengths), backend=b) for b in (SDPA, REFERENCE))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_sdpa_refuses_cases_that_it_cannot_serve() -> None:
    reason = SDPA.refuses(api.ATTENTION, Attention(2, 2, 8, 0.3, softcap=3.0))
    assert reason is not None and "cap" in reason
    reason = SDPA.refuses(api.ATTENTION, Attention(2, 2, 8, 0.3, sinks=True))
    assert reason is not None and "sinks" in reason
    reason = SDPA.refuses(api.ATTENTION, Attention(2, 2, 8, 0.3, window=4, pattern=Strided(3)))
    assert reason is not None and "windows" in reason
    assert all(SDPA.refuses(op, None) for op in (*api.PRIMITIVES, *api.STAGES) if op is not api.ATTENTION)
    assert [op.name for op in api.PRIMITIVES if REFERENCE.refuses(op, None)] == []
    assert all(REFERENCE.refuses(op, None) for op in api.STAGES)


# ---- mixtures of experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 2), (64, 8), (64, 64)])
@pytest.mark.parametrize("size", SIZES)
def test_route(size: int, experts: int, k: int, normalize: bool) -> None:
    """Logits have few values, so that most choices are between exact ties."""
    case = MoE(experts, k, 8, normalize=normalize)
    logits = rng(size, experts).integers(-1, 3, (size, experts)).astype(np.float64)
    logits[0] = 0.5  # if all are equal, the first k are chosen in order
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = [sorted(range(experts), key=lambda e, row=row: (-row[e], e))[:k] for row in logits]
    chosen = np.take_along_axis(scores, np.array(wanted), 1)
    ids, weights = call(api.ROUTE, case, tensor(logits))
    assert ids.tolist() == wanted
    check(weights, chosen / chosen.sum(-1, keepdims=True) if normalize else chosen)


def test_route_distinguishes_logits_that_a_softmax_does_not() -> None:
    """The exponentials of neighboring logits round to one number, but the greater logit is still chosen first."""
    high = np.float32(0.1)
    low = np.nextafter(high, np.float32(0))
    logits = torch.tensor([[float(low), float(high), 5.0, float(low), float(high)]])
    assert len(set(logits.softmax(-1)[0].tolist())) == 2
    assert call(api.ROUTE, MoE(5, 4, 8), logits)[0].tolist() == [[2, 1, 4, 0]]


def test_a_sparse_mixer_chooses_one_expert_after_the_other() -> None:
    """The definition for one token at a time: a softmax over those near the best, without the ones before."""
    case, logits = MoE(6, 2, 8, normalize=False, scores=SparseMixer(0.2)), rng(5).normal(0, 2, (50, 6))
    ids, weights = call(api.ROUTE, case, tensor(logits))
    for row, chosen, shares in zip(logits.astype(np.float32).astype(np.float64), ids.tolist(), weights, strict=True):
        rest = list(range(6))
        for expert, weight in zip(chosen, shares.tolist(), strict=True):
            best = max(row[e] for e in rest)
            assert row[expert] == best
            near = [e for e in rest if (best - row[e]) / max(abs(row[e]), best) <= 0.4]
            assert weight == pytest.approx(1 / sum(math.exp(row[e] - best) for e in near), rel=1e-5)
            rest.remove(expert)


def test_a_bias_on_logits_decides_the_choice_alone() -> None:
    case = MoE(4, 2, 8, normalize=False, scores="sigmoid", choice_bias=True, rates_logits=True)
    logits, bias = np.array([[3.0, 2.9, 0.5, -4.0]]), np.array([0.0, 0.2, 0.0, 6.0])
    ids, weights = call(api.ROUTE, case, tensor(logits), tensor(bias))
    assert ids.tolist() == [[1, 0]]  # by scores, the bias of the last expert would have been enough
    check(weights, 1 / (1 + np.exp(-logits[:, [1, 0]])))


@pytest.mark.parametrize("score", ["best", "best_two"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("size", SIZES)
def test_route_within_groups(size: int, scores: Any, score: Any) -> None:
    """It chooses the best three of four groups of four, then the best five of these experts; ties go to the lower
    number.
    """
    case = MoE(16, 5, 8, normalize=False, scores=scores, choice_bias=True, groups=ExpertGroups(4, 3, score), scale=2.5)
    logits, bias = rng(size).integers(-1, 3, (size, 16)).astype(np.float64), np.zeros(16)
    bias[[1, 6, 10]] = 0.5, 0.25, -0.5
    exps = np.exp(logits)
    rated = exps / exps.sum(-1, keepdims=True) if scores == "softmax" else 1 / (1 + 1 / exps)
    wanted = []
    for row in (rated + bias).astype(np.float32):  # ties are ties of the stored numbers
        groups = row.reshape(4, 4)
        best = np.sort(groups, 1)[:, ::-1][:, : 1 if score == "best" else 2].sum(1)
        chosen = sorted(range(4), key=lambda g, best=best: (-best[g], g))[:3]
        inside = [e for e in range(16) if e // 4 in chosen]
        wanted.append(sorted(inside, key=lambda e, row=row: (-row[e], e))[:5])
    ids, weights = call(api.ROUTE, case, tensor(logits), tensor(bias))
    assert ids.tolist() == wanted
    check(weights, 2.5 * np.take_along_axis(rated, np.array(wanted), 1))  # the weights do not include the bias


def expert_problem(size: int, k: int, dtype: str) -> tuple[MoE, tuple[Tensor, ...]]:
    case, width, inner = MoE(6, k, 20), 33, 20
    generator = rng(size, k)
    x = tensor(generator.normal(size=(size, width)))
    # no token chooses expert 5
    ids = tensor(np.array([generator.permutation(5)[:k] for _ in range(size)]), torch.int64)
    scores = tensor(generator.uniform(0.1, 1, (size, k)))
    shapes = ((6, inner, width), (6, inner, width), (6, width, inner))
    return case, (x, ids, scores, *(tensor(generator.normal(0, 0.3, s), STORED[dtype]) for s in shapes))


def experts(case: MoE, x: Tensor, ids: Tensor, scores: Tensor, *matrices: Tensor) -> Tensor:
    weights = expert_weights(matrices, None, TABLE)
    return TABLE.stage(api.EXPERT_BLOCK, case, weights)(x, ids, scores)


def run_experts(x: np.ndarray, ids: np.ndarray, scores: np.ndarray, *matrices: np.ndarray) -> np.ndarray:
    gate, up, down = matrices
    out = np.zeros(x.shape)
    for t, row in enumerate(x):
        for e, score in zip(ids[t].astype(int), scores[t], strict=True):
            out[t] += score * (down[e] @ (ACTIVATIONS["silu"](gate[e] @ row) * (up[e] @ row)))
    return out


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_experts(size: int, k: int, dtype: str) -> None:
    case, args = expert_problem(size, k, dtype)
    check(experts(case, *args), run_experts(*map(exact, args)), atol=1e-5)


def test_experts_separate_tokens() -> None:
    case, (x, *rest) = expert_problem(63, 3, "float32")
    clean = experts(case, x, *rest)
    dirty = x.clone()
    dirty[7] = torch.nan
    got = experts(case, dirty, *rest)
    assert got[7].isnan().all()
    others = [i for i in range(63) if i != 7]
    assert torch.equal(got[others], clean[others])


# ---- gradients ----------------------------------------------------------------------------------------------

_LENGTHS = (3, 1, 4)
# Name -> (op, case, shapes of the float64 inputs, arguments made of them), for ops that keep float64.
DIFFERENTIABLE: dict[str, tuple[Any, object, list[tuple[int, ...]], Callable[..., Any]]] = {
    "rms_norm": (api.NORM, RMSNorm(0.1, 1.0), [(3, 5), (5,)], lambda x, w: (x, w, None)),
    "layer_norm": (api.NORM, LayerNorm(0.1), [(3, 5), (5,), (5,)], lambda *a: a),
    "rope": (api.ROPE, Rope(4), [(3, 2, 6), (3, 2), (3, 2)], lambda x, c, s: (x, Rotary(c, s))),
    "rope_pairs": (api.ROPE, Rope(4, 1e4, True), [(3, 2, 6), (3, 2), (3, 2)], lambda x, c, s: (x, Rotary(c, s))),
    "split": (api.SPLIT_HEADS, None, [(3, 6)], lambda x: (x, 2)),
    "mlp": (api.ACTIVATION, MLP(4, "gelu"), [(3, 5)], lambda x: (x,)),
    "gated": (api.ACTIVATION, GatedMLP(4, "silu"), [(3, 5), (3, 5)], lambda *a: a),
    "gated_tanh": (api.ACTIVATION, GatedMLP(4, "gelu_tanh"), [(3, 5), (3, 5)], lambda *a: a),
    "add": (api.ADD, None, [(3, 5), (3, 5)], lambda a, b: (a, b, 0.3)),
    "scale": (api.SCALE, None, [(3, 5)], lambda x: (x, 0.3)),
    "add_terms": (
        api.ADD_TERMS,
        None,
        [(3, 5), (3, 4), (2, 2, 4), (2, 2, 5), (2, 5), (2, 5)],
        lambda y, x, *terms: (y, x, torch.tensor([1, -1, 0]), api.SlotTerms(*terms, torch.tensor([2, 1]))),
    ),
    "softcap": (api.SOFTCAP, None, [(3, 5)], lambda x: (x, 0.8)),
    "mix": (api.MIX, None, [(3, 5), (5, 2)], lambda *a: a),
    "take": (api.TAKE, None, [(4, 3)], lambda x: (x, torch.tensor([2, 0, 2]))),
    "clamped": (api.ACTIVATION, MoE(2, 1, 4, ClampedSwiGLU(1.3, 0.8)), [(3, 5), (3, 5)], lambda *a: a),
    "route": (api.ROUTE, MoE(5, 2, 4), [(4, 5)], lambda x: (x,)),
    "route_groups": (
        api.ROUTE,
        MoE(6, 2, 4, scores="sigmoid", groups=ExpertGroups(3, 2, "best_two"), scale=1.5),
        [(4, 6)],
        lambda x: (x,),
    ),
    "cut": (api.CUT, None, [(3, 6)], lambda x: (x, 2, 5)),
    "join": (api.JOIN, None, [(3, 6), (3, 2)], lambda *a: a),
    "route_raw": (api.ROUTE, MoE(5, 2, 4, normalize=False), [(4, 5)], lambda x: (x,)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    op, case, shapes, arguments = DIFFERENTIABLE[name]
    inputs = tuple(torch.from_numpy(rng(i).normal(size=s)).requires_grad_() for i, s in enumerate(shapes))
    kernel = REFERENCE.primitive(op, case)
    function = (lambda *a: kernel(*arguments(*a))[1]) if op is api.ROUTE else (lambda *a: kernel(*arguments(*a)))
    assert torch.autograd.gradcheck(function, inputs)


def test_gradients_of_attention_with_sinks() -> None:
    case = Attention(4, 2, 3, 0.6, window=2, sinks=True)
    kernel = REFERENCE.primitive(api.ATTENTION, case)
    inputs = tuple(torch.from_numpy(x).double().requires_grad_() for x in (*qkv(case, _LENGTHS), rng(1).normal(size=4)))
    assert torch.autograd.gradcheck(lambda q, k, v, sinks: kernel(q, DenseKeyValues(k, v, _LENGTHS), sinks), inputs)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    ("backend", "softcap"), [(REFERENCE, None), (REFERENCE, 0.7), (SDPA, None)], ids=["reference", "softcap", "sdpa"]
)
def test_gradients_of_attention(softcap: float | None, window: int | None, backend: Any) -> None:
    case = Attention(4, 2, 3, 0.6, window=window, softcap=softcap)
    kernel = backend.primitive(api.ATTENTION, case)
    inputs = tuple(torch.from_numpy(x).double().requires_grad_() for x in qkv(case, _LENGTHS))
    assert torch.autograd.gradcheck(lambda q, k, v: kernel(q, DenseKeyValues(k, v, _LENGTHS)), inputs)


def test_gradients_of_matrices() -> None:
    """linear and embedding compute in float32: their gradients are compared with the closed forms."""
    x, weight, bias, out = (rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(((9, 7), (5, 7), 5, (9, 5))))
    leaves = [torch.from_numpy(a).requires_grad_() for a in (x, weight, bias)]
    call(api.LINEAR, None, *leaves).backward(torch.from_numpy(out))
    wanted = (out @ weight, out.T @ x, out.sum(0))
    for leaf, gradient in zip(leaves, wanted, strict=True):
        np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=1e-5, atol=1e-5)
    table, ids = torch.zeros(6, 5, requires_grad=True), torch.tensor([0, 3, 3, 5, 0, 0, 1, 2, 3])
    call(api.EMBEDDING, None, table, ids).backward(torch.from_numpy(out))
    rows = np.stack([out[ids.numpy() == i].sum(0) for i in range(6)])  # every use of a row counts, unused rows do not
    np.testing.assert_allclose(table.grad.numpy(), rows, rtol=1e-6, atol=1e-6)


def test_gradients_of_experts() -> None:
    """Compare along random directions with differences of the float64 definition."""
    case, (x, ids, *rest) = expert_problem(9, 3, "float32")
    leaves = [t.clone().requires_grad_() for t in (x, *rest)]
    weights = rng(3).normal(size=x.shape)

    def loss(values: list[np.ndarray]) -> float:
        return float((run_experts(values[0], ids.numpy(), *values[1:]) * weights).sum())

    out = experts(case, leaves[0], ids, *leaves[1:])
    out.backward(torch.from_numpy(weights).float())
    start = [exact(t) for t in leaves]
    for i, leaf in enumerate(leaves):
        direction = rng(i, 4).normal(size=leaf.shape)
        step = [a + (1e-5 * direction if j == i else 0) for j, a in enumerate(start)]
        back = [a - (1e-5 * direction if j == i else 0) for j, a in enumerate(start)]
        slope = (loss(step) - loss(back)) / 2e-5
        assert float((exact(leaf.grad) * direction).sum()) == pytest.approx(slope, rel=1e-4)
