"""The gated delta rule: chunks equal the recurrence, padding changes nothing, and states can be continued anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.ops import open_table
from ridgeline.ops.reference import delta
from ridgeline.spec import (
    Attention,
    DeltaMixer,
    GatedDelta,
    GatedMLP,
    KimiDelta,
    Layer,
    ModelSpec,
    RMSNorm,
    Rope,
)
from ridgeline.train.module import LanguageModel

GROUPED = GatedDelta(num_heads=4, num_key_heads=2, key_dim=6, head_dim=5, conv_size=4, norm=RMSNorm())
SINGLE = GatedDelta(num_heads=3, num_key_heads=3, key_dim=4, head_dim=7, conv_size=4, norm=RMSNorm(), reach=1.5)
BY_CHANNEL = KimiDelta(num_heads=3, head_dim=6, conv_size=4, rank=4, norm=RMSNorm())
CASES = pytest.mark.parametrize("case", [GROUPED, SINGLE, BY_CHANNEL], ids=["grouped", "single", "by channel"])
SIZES = (1, 2, 63, 64, 100, 257)
ALONG = ("q", "k", "v", "decay", "beta")


def draw(case: DeltaMixer, n: int, m: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, decays = case.num_heads, case.num_heads * (case.key_dim if isinstance(case, KimiDelta) else 1)
    out = {name: normal(n, m, size) for name, size in zip("qkv", case.sizes, strict=True)}
    out |= {"decay": normal(n, m, decays), "beta": normal(n, m, heads)}
    out |= {"a_log": torch.linspace(-2, 1.5, heads, dtype=torch.float64), "dt_bias": normal(decays)}
    return {**out, "h": normal(n, heads, case.key_dim, case.head_dim)}


def run(case: DeltaMixer, v: dict[str, Tensor], lengths: Tensor) -> tuple[Tensor, Tensor]:
    return delta.delta_rule(case)(*v.values(), lengths)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_definition(case: DeltaMixer, v: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute S = (I - beta k k^T) a S + beta k v^T in each head: arXiv:2412.06464, equation 10, and 2510.26692,
    equation 1.
    """
    ys, states = [], list(v["h"].unbind(1))
    per_key = case.num_heads // case.num_key_heads
    for t in range(v["q"].shape[1]):
        q, k = (v[name][:, t].unflatten(-1, (case.num_key_heads, -1)) for name in "qk")
        value, beta = v["v"][:, t].unflatten(-1, (case.num_heads, -1)), case.reach * v["beta"][:, t].sigmoid()
        steps = torch.log1p((v["decay"][:, t] + v["dt_bias"]).exp()).unflatten(-1, (case.num_heads, -1))
        y = []
        for i in range(case.num_heads):
            key, query = unit(k[:, i // per_key]), unit(q[:, i // per_key]) / case.key_dim**0.5
            decayed = torch.exp(-v["a_log"][i].exp() * steps[:, i])[..., None] * states[i]
            erased = decayed - beta[:, i, None, None] * torch.einsum("nk,nj,njp->nkp", key, key, decayed)
            states[i] = erased + beta[:, i, None, None] * torch.einsum("nk,np->nkp", key, value[:, i])
            y.append(torch.einsum("nkp,nk->np", states[i], query))
        ys.append(torch.cat(y, -1))
    return torch.stack(ys, 1), torch.stack(states, 1)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
@CASES
def test_chunks_are_the_recurrence(case: DeltaMixer, size: int) -> None:
    v = draw(case, 2, size)
    for got, wanted in zip(run(case, v, torch.full((2,), size)), by_definition(case, v), strict=True):
        close(got, wanted)


@CASES
def test_padding_changes_nothing(case: DeltaMixer) -> None:
    v, lengths = draw(case, 4, 100), torch.tensor([1, 17, 64, 100])
    for i, n in enumerate(lengths.tolist()):
        for name in ALONG:
            v[name][i, n:] = v[name][i, n - 1]  # a bucket is padded with its last token
    y, h = run(case, v, lengths)
    for i, n in enumerate(lengths.tolist()):
        alone = {**v, "h": v["h"][i : i + 1], **{name: v[name][i : i + 1, :n] for name in ALONG}}
        wanted_y, wanted_h = by_definition(case, alone)
        close(y[i : i + 1, :n], wanted_y)
        close(h[i : i + 1], wanted_h)


@pytest.mark.parametrize("parts", [(1, 99), (37, 63), (16, 48, 36), (64, 36), (99, 1), (1,) * 5 + (95,)])
@CASES
def test_a_state_can_be_continued_anywhere(case: DeltaMixer, parts: tuple[int, ...]) -> None:
    v = draw(case, 2, 100)
    h, at, ys = v["h"], 0, []
    for n in parts:
        part = {**v, "h": h, **{name: v[name][:, at : at + n] for name in ALONG}}
        y, h = run(case, part, torch.full((2,), n))
        ys.append(y)
        at += n
    whole_y, whole_h = run(case, v, torch.full((2,), 100))
    close(torch.cat(ys, 1), whole_y)
    close(h, whole_h)


@pytest.mark.parametrize("step", [20.0, 90.0])
@CASES
def test_fast_decays_neither_overflow_nor_divide(case: DeltaMixer, step: float) -> None:
    """exp of a running sum alone would be 0, and its inverse infinite."""
    v = {name: t.float() for name, t in draw(case, 1, 200).items()}
    # every third decay is fast, the others are slow
    v["decay"] = v["decay"] + step * (torch.arange(200) % 3 == 0)[:, None]
    y, h = run(case, v, torch.tensor([200]))
    exact_y, exact_h = by_definition(case, {name: t.double() for name, t in v.items()})
    torch.testing.assert_close(y.double(), exact_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h.double(), exact_h, rtol=1e-4, atol=1e-5)


@CASES
def test_the_same_key_again_and_again(case: DeltaMixer) -> None:
    """Equal keys are the worst case for the triangular system of a chunk: each token undoes the one before it."""
    v = {name: t.float() for name, t in draw(case, 1, 130).items()}
    v["k"], v["beta"], v["decay"] = v["k"][:, :1].expand_as(v["k"]), v["beta"] + 20, v["decay"] - 20
    y, h = run(case, v, torch.tensor([130]))
    exact_y, exact_h = by_definition(case, {name: t.double() for name, t in v.items()})
    torch.testing.assert_close(y.double(), exact_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h.double(), exact_h, rtol=1e-4, atol=1e-5)


@CASES
def test_gradients_are_those_of_the_recurrence(case: DeltaMixer) -> None:
    found = []
    for compute in (lambda u: run(case, u, torch.tensor([70])), lambda u: by_definition(case, u)):
        u = {name: t.clone().requires_grad_() for name, t in draw(case, 1, 70).items()}
        y, h = compute(u)
        (y.square().sum() + h.square().sum()).backward()
        found.append({name: t.grad for name, t in u.items()})
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-8, atol=1e-8)


@CASES
def test_the_output_is_normalized_and_gated_head_by_head(case: DeltaMixer) -> None:
    generator = torch.Generator().manual_seed(0)
    y, z = (torch.randn((3, case.num_heads * case.head_dim), generator=generator) for _ in range(2))
    weight = torch.randn(case.head_dim, generator=generator)
    got = delta.norm_gate(case)(y, z, weight)
    for i in range(case.num_heads):
        part = slice(i * case.head_dim, (i + 1) * case.head_dim)
        normed = y[:, part] / (y[:, part].square().mean(-1, keepdim=True) + case.norm.eps).sqrt() * weight
        act = z[:, part].sigmoid() * (z[:, part] if isinstance(case, GatedDelta) else 1.0)
        torch.testing.assert_close(got[:, part], normed * act)


def test_training_begins_with_norms_of_one() -> None:
    """The norms of the stream and of attention's heads are stored as weight - 1; the norm of a delta layer is not."""
    norm = RMSNorm(offset=1.0)
    attention = Attention(2, 1, 8, 0.3, Rope(4), qk_norm=norm, out_gate=True)
    layers = tuple(Layer(mixer, GatedMLP(16), norm) for mixer in (GROUPED, BY_CHANNEL, attention))
    model = LanguageModel(ModelSpec("x", 20, 16, 64, layers, norm), open_table("reference"), 64)
    for name, weight in model.weights().items():
        if name.endswith("norm.weight"):
            assert (weight == (1.0 if "gate_norm" in name else 0.0)).all(), name
    steps = model.weights()["layers.1.mixer.dt_bias"]
    assert (torch.nn.functional.softplus(steps) < 0.1001).all() and steps.std() > 0.5
    tokens, positions = torch.arange(20), torch.arange(20)
    model(tokens, positions, (20,), tokens.roll(-1)).backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in model.weights().values())
