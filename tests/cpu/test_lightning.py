"""Lightning attention: chunks equal the recurrence and the quadratic form, and states can be continued anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.ops.reference import recurrent as r
from ridgeline.spec import LightningAttention, RMSNorm

HEADS, D = 3, 4
CASE = LightningAttention(HEADS, D, RMSNorm(1e-6), slope_scale=0.7)
Inputs = tuple[Tensor, Tensor, Tensor]


def draw(n: int, m: int) -> tuple[Inputs, Tensor]:
    """Return q, k, v, and states before the first token."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((n, m, HEADS, D), generator=generator, dtype=torch.float64) for _ in range(3))
    return (q, k, v), torch.randn((n, HEADS, D, D), generator=generator, dtype=torch.float64)


def attend(inputs: Inputs, h: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    n, m = inputs[0].shape[:2]
    return r.lightning_attention(CASE)(*inputs, h, torch.full((n,), m) if lengths is None else lengths)


def by_definition(inputs: Inputs, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute arXiv:2401.04658, equation 2, token by token: the state decays, then adds the token."""
    ys, decay = [], torch.exp(-0.7 * 2.0 ** (-8 * torch.arange(1, HEADS + 1).double() / HEADS))[:, None, None]
    for q, k, v in zip(*(t.unbind(1) for t in inputs), strict=True):
        h = decay * h + v[..., :, None] * k[..., None, :]
        ys.append((h @ q[..., None])[..., 0].flatten(1))
    return torch.stack(ys, 1), h


@pytest.mark.parametrize("size", [1, 2, 33, 63, 64, 100, 257])
def test_chunks_are_the_recurrence(size: int) -> None:
    inputs, h = draw(2, size)
    (y, left), (wanted, state) = attend(inputs, h), by_definition(inputs, h)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(left, state, rtol=1e-10, atol=1e-10)


def test_it_is_a_masked_product() -> None:
    inputs, h = draw(1, 100)
    y, _ = attend(inputs, torch.zeros_like(h))
    q, k, v = (t[0].transpose(0, 1) for t in inputs)
    distance = (torch.arange(100)[:, None] - torch.arange(100)).double()
    weights = torch.exp(-torch.tensor(CASE.slopes, dtype=torch.float64)[:, None, None] * distance).tril()
    wanted = ((q @ k.transpose(1, 2)) * weights) @ v
    torch.testing.assert_close(y[0], wanted.transpose(0, 1).flatten(1), rtol=1e-10, atol=1e-10)


def test_padding_changes_nothing() -> None:
    lengths = torch.tensor([1, 64, 100])
    inputs, h = draw(3, 100)
    y, left = attend(inputs, h, lengths)
    for i, n in enumerate(lengths.tolist()):
        q, k, v = (t[i : i + 1, :n] for t in inputs)
        wanted, state = by_definition((q, k, v), h[i : i + 1])
        torch.testing.assert_close(y[i : i + 1, :n], wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(left[i : i + 1], state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parts", [(1, 99), (37, 63), (16, 48, 36), (64, 36), (99, 1)])
def test_a_state_can_be_continued_anywhere(parts: tuple[int, ...]) -> None:
    inputs, h = draw(2, 100)
    whole, state = attend(inputs, h)
    ys = []
    for q, k, v in zip(*(t.split(list(parts), 1) for t in inputs), strict=True):
        y, h = attend((q, k, v), h)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, state, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_the_recurrence() -> None:
    inputs, h = draw(1, 70)
    found = []
    for run in (attend, by_definition):
        q, k, v = (t.clone().requires_grad_() for t in inputs)
        run((q, k, v), h)[0].square().sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
