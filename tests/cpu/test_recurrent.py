"""Recurrent primitives: chunks equal the recurrence, padding changes nothing, and states can be continued anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oracle.definition_recurrent import opposites
from oracle.problems import NUMPY
from ridgeline.ops import api
from ridgeline.ops.reference import recurrent as r
from ridgeline.spec import Mamba, Mamba2, RMSNorm, TaylorAttention
from ridgeline.spec.taylor import Features

SIZES = (1, 63, 100, 257)
D, S, H, P, G = 6, 5, 4, 3, 2
MAMBA = Mamba(inner_size=D, state_size=S, conv_size=4, dt_rank=2)
MAMBA2 = Mamba2(H, P, S, G, conv_size=4, norm=RMSNorm(1e-5), dt_least=0.05, dt_most=2.0)
Scan = Callable[[dict[str, Tensor], Tensor, Tensor], tuple[Tensor, Tensor]]


def draw(n: int, m: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(n, m, D), "dt": normal(n, m, D), "b": normal(n, m, S), "c": normal(n, m, S),
        "x2": normal(n, m, H * P), "dt2": normal(n, m, H), "b2": normal(n, m, G * S), "c2": normal(n, m, G * S),
        "h": normal(n, D, S), "h2": normal(n, H, P, S),
    }  # fmt: skip


WEIGHTS = {
    "a": torch.linspace(-2, 1.5, D * S, dtype=torch.float64).view(D, S),
    "d": torch.linspace(-1, 1, D, dtype=torch.float64),
    "a2": torch.linspace(-2, 1.5, H, dtype=torch.float64), "d2": torch.linspace(-1, 1, H, dtype=torch.float64),
    "bias2": torch.linspace(-0.5, 0.5, H, dtype=torch.float64),
}  # fmt: skip


def mamba(v: dict[str, Tensor], h: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    w = WEIGHTS
    dtype = v["x"].dtype
    return r.selective_scan(MAMBA)(v["x"], v["dt"], w["a"].to(dtype), v["b"], v["c"], w["d"].to(dtype), h, lengths)


def mamba2(v: dict[str, Tensor], h: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    w = {name: t.to(v["x"].dtype) for name, t in WEIGHTS.items()}
    return r.ssd(MAMBA2)(v["x2"], v["dt2"], w["bias2"], w["a2"], v["b2"], v["c2"], w["d2"], h, lengths)


def mamba_by_definition(v: dict[str, Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute arXiv:2312.00752, equations 2 and 4, with the authors' Euler step for B."""
    ys = []
    for t in range(v["x"].shape[1]):
        dt = F.softplus(v["dt"][:, t])
        h = torch.exp(dt[..., None] * -WEIGHTS["a"].exp()) * h
        h = h + torch.einsum("nd,ns->nds", dt * v["x"][:, t], v["b"][:, t])
        ys.append(torch.einsum("nds,ns->nd", h, v["c"][:, t]) + WEIGHTS["d"] * v["x"][:, t])
    return torch.stack(ys, 1), h


def mamba2_by_definition(v: dict[str, Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute arXiv:2405.21060, equation 2: one number for the decay of each head, B and C for a group of heads."""
    ys = []
    for t in range(v["x"].shape[1]):
        dt = F.softplus(v["dt2"][:, t] + WEIGHTS["bias2"]).clamp(0.05, 2.0)
        b, c = (v[name][:, t].view(-1, G, S) for name in ("b2", "c2"))
        x, heads, y = v["x2"][:, t].view(-1, H, P), [], []
        for i in range(H):
            g = i // (H // G)
            decay = torch.exp(dt[:, i] * -WEIGHTS["a2"][i].exp())[:, None, None]
            heads.append(decay * h[:, i] + dt[:, i, None, None] * x[:, i, :, None] * b[:, g, None])
            y.append((heads[i] @ c[:, g, :, None])[..., 0] + WEIGHTS["d2"][i] * x[:, i])
        h = torch.stack(heads, 1)
        ys.append(torch.cat(y, -1))
    return torch.stack(ys, 1), h


BOTH = [(mamba, mamba_by_definition, "h"), (mamba2, mamba2_by_definition, "h2")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("scan", "definition", "state"), BOTH)
def test_chunks_are_the_recurrence(scan: Scan, definition: Any, state: str, size: int) -> None:
    v = draw(2, size)
    y, h = scan(v, v[state], torch.full((2,), size))
    wanted_y, wanted_h = definition(v, v[state])
    torch.testing.assert_close(y, wanted_y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, wanted_h, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("scan", "definition", "state"), BOTH)
def test_padding_changes_nothing(scan: Scan, definition: Any, state: str) -> None:
    v, lengths = draw(3, 100), torch.tensor([1, 64, 100])
    for i, n in enumerate(lengths.tolist()):
        for name in v:
            if name not in ("h", "h2"):
                v[name][i, n:] = v[name][i, n - 1]  # a bucket is padded with its last token
    y, h = scan(v, v[state], lengths)
    for i, n in enumerate(lengths.tolist()):
        alone = {name: t[i : i + 1, :n] for name, t in v.items()}
        wanted_y, wanted_h = definition(alone, v[state][i : i + 1])
        torch.testing.assert_close(y[i : i + 1, :n], wanted_y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(h[i : i + 1], wanted_h, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parts", [(1, 99), (37, 63), (16, 48, 36), (64, 36), (99, 1)])
@pytest.mark.parametrize(("scan", "definition", "state"), BOTH)
def test_a_state_can_be_continued_anywhere(scan: Scan, definition: Any, state: str, parts: tuple[int, ...]) -> None:
    v = draw(2, 100)
    h, at, ys = v[state], 0, []
    for n in parts:
        part = {name: t[:, at : at + n] for name, t in v.items()}
        y, h = scan(part, h, torch.full((2,), n))
        ys.append(y)
        at += n
    whole_y, whole_h = scan(v, v[state], torch.full((2,), 100))
    torch.testing.assert_close(torch.cat(ys, 1), whole_y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, whole_h, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("scan", "definition", "state"), BOTH)
def test_fast_decays_neither_overflow_nor_divide(scan: Scan, definition: Any, state: str) -> None:
    """exp of a running sum alone would be 0, and its inverse infinite."""
    v = {name: t.float() for name, t in draw(1, 200).items()}
    v["dt"], v["dt2"] = v["dt"] + 20, v["dt2"] + 20
    y, h = scan(v, v[state], torch.tensor([200]))
    assert torch.isfinite(y).all() and torch.isfinite(h).all()


@pytest.mark.parametrize(("scan", "definition", "state"), BOTH)
def test_gradients_are_those_of_the_recurrence(scan: Scan, definition: Any, state: str) -> None:
    v = draw(1, 40)
    found = []
    for run in (lambda u: scan(u, u[state], torch.tensor([40]))[0], lambda u: definition(u, u[state])[0]):
        u = {name: t.clone().requires_grad_() for name, t in v.items()}
        run(u).square().sum().backward()
        found.append({name: t.grad for name, t in u.items() if t.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 5
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-8, atol=1e-8)


BASED = TaylorAttention(num_heads=2, head_dim=3, feature_dim=4)
HEDGEHOG = replace(BASED, features="hedgehog")


def based(n: int, m: int, features: int = 21) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (8, 8, 6)
    q, k, v = (torch.randn((n, m, size), generator=generator, dtype=torch.float64) for size in sizes)
    return q, k, v, torch.zeros((n, 2, 4, features), dtype=torch.float64)


def quadratic(q: Tensor, k: Tensor, v: Tensor, kind: str = "taylor") -> Tensor:
    """Compute softmax attention with exp(s) replaced by 1 + s + s^2 / 2 (arXiv:2402.18668, section 4), or by the sum of
    products of exp(q) / sum(exp(q)) and exp(-q) / sum(exp(-q)) with those of k (arXiv:2402.04347, section 4.1).
    """
    q, k, v = (t.unflatten(-1, (2, -1)) for t in (q, k, v))
    if kind == "hedgehog":
        maps = [[torch.exp(x * sign) / torch.exp(x * sign).sum(-1, keepdim=True) for sign in (1, -1)] for x in (q, k)]
        weights = sum(torch.einsum("nthd,nshd->nhts", a, b) for a, b in zip(*maps, strict=True)).tril()
    else:
        s = torch.einsum("nthd,nshd->nhts", q, k) / 4**0.5
        weights = (1 + s + s.square() / 2).tril()
    return torch.einsum("nhts,nshp->nthp", weights / weights.sum(-1, keepdim=True), v).flatten(2)


@pytest.mark.parametrize("kind", ["taylor", "hedgehog"])
@pytest.mark.parametrize("size", SIZES)
def test_linear_attention_is_its_quadratic_form(size: int, kind: Features) -> None:
    case = replace(BASED, features=kind)
    q, k, v, h = based(2, size, case.num_features)
    run = r.taylor_attention(case)
    wanted = quadratic(q, k, v, kind)
    y, sums = run(q, k, v, h, torch.full((2,), size))
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    at, parts = h, []
    for n in (1, size // 2, size - 1 - size // 2):
        if n > 0 and size > 1:
            begin = sum(p.shape[1] for p in parts)
            part = (t[:, begin : begin + n] for t in (q, k, v))
            y, at = run(*part, at, torch.full((2,), n))
            parts.append(y)
    if parts:
        torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(at, sums, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("m", [1, 20])
def test_opposite_queries_and_keys_have_a_mean(m: int) -> None:
    *given, wanted = opposites(m)
    q, k, v, h = (torch.from_numpy(x).requires_grad_() for x in given)
    y, _ = r.taylor_attention(HEDGEHOG)(q, k, v, h, torch.tensor([m]))
    of_numpy, _ = NUMPY.primitive(api.TAYLOR_ATTENTION, HEDGEHOG)(*given, np.array([m]))
    for found in (y.detach().numpy(), of_numpy):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_padding_of_taylor_attention_changes_nothing() -> None:
    q, k, v, h = based(2, 70)
    y, sums = r.taylor_attention(BASED)(q, k, v, h, torch.tensor([70, 9]))
    alone, own = r.taylor_attention(BASED)(q[1:, :9], k[1:, :9], v[1:, :9], h[1:], torch.tensor([9]))
    torch.testing.assert_close(y[1:, :9], alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sums[1:], own, rtol=1e-10, atol=1e-10)


def test_features_multiply_to_the_taylor_series() -> None:
    q, k = torch.randn((2, 50, 16), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s = (q * k).sum(-1) / 4
    found = (r._taylor_features(q) * r._taylor_features(k)).sum(-1)
    torch.testing.assert_close(found, 1 + s + s.square() / 2, rtol=1e-12, atol=1e-12)
    assert r._taylor_features(q).shape[-1] == TaylorAttention(1, 1, 16).num_features == 273


@pytest.mark.parametrize("m", [1, 2, 7])
def test_a_short_convolution_is_torchs(m: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((2, m, 5), (5, 1, 4), (5,)))
    before = torch.randn((2, 3, 5), generator=generator)
    lengths = torch.tensor([m, max(1, m - 1)])
    y, left = r.short_conv(x, before, weight, bias, lengths)
    seen = torch.cat((before, x), 1)
    wanted = F.conv1d(seen.transpose(1, 2), weight, bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(y, wanted)
    for i, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(left[i], seen[i, n : n + 3])


def test_a_state_that_was_never_written_is_zero() -> None:
    pages = torch.full((4, 2, 3), torch.nan)
    pages[2] = 5.0
    states = r.read_state(torch.float32)(
        pages, torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1]), torch.tensor([1, 2, 3])
    )
    assert states[0].eq(0).all() and states[1].eq(5).all() and states[2].eq(0).all()
    r.write_state(pages, torch.tensor([1]), torch.ones(1, 2, 3))
    assert pages[1].eq(1).all() and pages[2].eq(5).all() and pages[3].isnan().all()
