"""S4 and S4D: both forms of one system, closed forms in float64, HiPPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops import open_table
from ridgeline.ops.reference import s4
from ridgeline.spec import S4, S4D, GatedMLP, Layer, LightningAttention, Mamba, ModelSpec, RMSNorm
from ridgeline.train import state_space
from ridgeline.train.module import LanguageModel
from ridgeline.train.optimizer import Optimizer, OptimizerName

CHANNELS, N = 3, 6
PAIRS = N // 2
CASES = {"s4": S4(CHANNELS, N), "s4d": S4D(CHANNELS, N)}
BOTH = pytest.mark.parametrize("name", CASES)
SIZES = (2, 3, 63, 64, 65, 100, 257)


def weights(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Return weights with steps from 1/50 to 1/2 and decays from slow to fast."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    drawn = {
        "log_dt": torch.linspace(-4, -0.7, CHANNELS, dtype=torch.float64),
        "A_log": 0.5 * normal(CHANNELS, PAIRS) - 1,
        "A_imag": math.pi * torch.arange(PAIRS) + 0.3 * normal(CHANNELS, PAIRS),
    }
    for vector in ("P", "B", "C") if name == "s4" else ("C",):
        drawn[vector] = normal(CHANNELS, 2, PAIRS)
    return drawn | {"D": normal(CHANNELS)}


def draw(n: int, m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs, and states before the first token."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn((n, m, CHANNELS), generator=generator, dtype=torch.float64)
    return u, torch.randn((n, CHANNELS, 2, PAIRS), generator=generator, dtype=torch.float64)


def scan(name: str, u: Tensor, h: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    own = [w.to(u.dtype) for w in weights(name).values()]
    found = torch.full((len(u),), u.shape[1]) if lengths is None else lengths
    return s4.state_space(CASES[name])(u, *own, h, found)


def matrices(name: str, channel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the discrete A, B, C of one channel as full complex matrices of all N conjugate numbers, from the
    definitions: bilinear with a solve (S4), the exponential of a matrix (S4D).
    """
    w = {key: x[channel] for key, x in weights(name).items()}

    def whole(x: Tensor) -> Tensor:
        return torch.cat((torch.complex(x[0], x[1]), torch.complex(x[0], -x[1])))

    diagonal = whole(torch.stack((-w["A_log"].exp(), w["A_imag"])))
    dt, c, one = w["log_dt"].exp(), whole(w["C"]), torch.eye(N, dtype=torch.complex128)
    if name == "s4d":
        a = torch.diag(diagonal)
        b = torch.linalg.solve(a, (torch.linalg.matrix_exp(dt * a) - one) @ torch.ones(N, 1, dtype=a.dtype))[:, 0]
        return torch.linalg.matrix_exp(dt * a), b, c
    p = whole(w["P"])
    a = torch.diag(diagonal) - torch.outer(p, p.conj())
    back = one - dt / 2 * a
    return torch.linalg.solve(back, one + dt / 2 * a), torch.linalg.solve(back, dt * whole(w["B"])), c


def by_definition(name: str, u: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute token by token and channel by channel, with full matrices."""
    ys, left = torch.zeros_like(u), torch.zeros_like(h)
    for channel in range(CHANNELS):
        a, b, c = matrices(name, channel)
        for i in range(len(u)):
            half = torch.complex(h[i, channel, 0], h[i, channel, 1])
            state = torch.cat((half, half.conj()))
            for t in range(u.shape[1]):
                state = a @ state + b * u[i, t, channel]
                ys[i, t, channel] = (c @ state).real + weights(name)["D"][channel] * u[i, t, channel]
            left[i, channel] = torch.stack((state[:PAIRS].real, state[:PAIRS].imag))
    return ys, left


@BOTH
@pytest.mark.parametrize("size", SIZES)
def test_the_convolution_is_the_definition(name: str, size: int) -> None:
    u, h = draw(2, size)
    (y, left), (wanted, state) = scan(name, u, h), by_definition(name, u, h)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(left, state, rtol=1e-10, atol=1e-10)


@BOTH
def test_the_recurrence_is_the_convolution(name: str) -> None:
    u, h = draw(2, 150)
    wanted, state = scan(name, u, h)
    ys = []
    for t in range(u.shape[1]):
        y, h = scan(name, u[:, t : t + 1], h)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 1), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, state, rtol=1e-10, atol=1e-10)


@BOTH
def test_the_kernel_is_the_powers(name: str) -> None:
    """Check three parts of a block: its kernel C A^l B, the change of the state by a token, and the outputs from a
    state.
    """
    own = [w for key, w in weights(name).items() if key != "D"]
    build: Callable[..., Any] = s4._dplr if name == "s4" else s4._diagonal
    block = build(*own)[2](64)
    for channel in range(CHANNELS):
        a, b, c = matrices(name, channel)
        wanted = [(c @ torch.linalg.matrix_power(a, k) @ b).real for k in range(64)]
        torch.testing.assert_close(block.kernel[channel], torch.stack(wanted), rtol=1e-11, atol=1e-11)
        for k in (0, 1, 40, 63):
            adds = torch.linalg.matrix_power(a, 63 - k) @ b
            torch.testing.assert_close(block.into[channel, k], s4._real(adds[:PAIRS]), rtol=1e-11, atol=1e-11)
            sees = c @ torch.linalg.matrix_power(a, k + 1)
            halves = torch.cat((2 * sees[:PAIRS].real, -2 * sees[:PAIRS].imag))
            torch.testing.assert_close(block.out[channel, :, k], halves, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 5, 31, 32, 100, 257])
def test_the_generating_function_has_no_bad_node(size: int) -> None:
    """With an even length, one node is w = -1, where the paper's 2 / (1 + w) and 2 / dt (1 - w) / (1 + w) are infinite.
    The value there is C (I - A^L) (I + A)^-1 B.
    """
    w = weights("s4")
    a, dt = torch.complex(-w["A_log"].exp(), w["A_imag"]), w["log_dt"].exp()[:, None]
    p, b = (s4._pairs(w[name]) for name in "PB")
    for channel in range(CHANNELS):
        discrete, drive, seen = matrices("s4", channel)
        ending = seen - seen @ torch.linalg.matrix_power(discrete, size)
        only = slice(channel, channel + 1)
        found = s4._kernel(2 / dt[only], a[only], p[only], b[only], ending[None, :PAIRS], size)[0]
        wanted = [(seen @ torch.linalg.matrix_power(discrete, k) @ drive).real for k in range(size)]
        torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-11, atol=1e-11)
        if size % 2 == 0:
            one = torch.eye(N, dtype=torch.complex128)
            at_minus_one = (ending @ torch.linalg.solve(one + discrete, drive)).real
            torch.testing.assert_close(torch.fft.rfft(found)[-1].real, at_minus_one, rtol=1e-11, atol=1e-11)


@BOTH
def test_a_sequence_as_one_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s4, "S4_BLOCK", 256)
    u, h = draw(1, 256)
    torch.testing.assert_close(scan(name, u, h)[0], by_definition(name, u, h)[0], rtol=1e-10, atol=1e-10)


@BOTH
def test_padding_changes_nothing(name: str) -> None:
    lengths = torch.tensor([1, 64, 65, 100, 128, 130])
    u, h = draw(6, 130)
    for i, n in enumerate(lengths.tolist()):
        u[i, n:] = u[i, n - 1]  # a bucket is padded with its last token
    y, left = scan(name, u, h, lengths)
    for i, n in enumerate(lengths.tolist()):
        wanted, state = by_definition(name, u[i : i + 1, :n], h[i : i + 1])
        torch.testing.assert_close(y[i : i + 1, :n], wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(left[i : i + 1], state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parts", [(1, 99), (37, 63), (16, 48, 36), (64, 36), (99, 1)])
@BOTH
def test_a_state_can_be_continued_anywhere(name: str, parts: tuple[int, ...]) -> None:
    u, h = draw(2, 100)
    whole, state = scan(name, u, h)
    ys = []
    for part in u.split(list(parts), 1):
        y, h = scan(name, part, h)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, state, rtol=1e-10, atol=1e-10)


@BOTH
def test_gradients_are_those_of_the_recurrence(name: str) -> None:
    u, h = draw(1, 70)
    found = []
    for chunk in (70, 1):
        own = {key: w.clone().requires_grad_() for key, w in weights(name).items()}
        inputs, state, ys = u.clone().requires_grad_(), h, []
        for part in inputs.split(chunk, 1):
            y, state = s4.state_space(CASES[name])(part, *own.values(), state, torch.tensor([part.shape[1]]))
            ys.append(y)
        torch.cat(ys, 1).square().sum().backward()
        found.append({"u": inputs.grad, **{key: w.grad for key, w in own.items()}})
    for key, gradient in found[0].items():
        assert gradient.abs().max() > 1e-3, key
        torch.testing.assert_close(gradient, found[1][key], rtol=1e-8, atol=1e-8)


# ---- initial weights for training ------------------------------------------------------------------------------------


def begun(mixer: S4 | S4D) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    kind = mixer.initial_state_matrix
    made = {w.name: state_space.initial(kind, w, generator) for w in mixer.weights(mixer.channels)}
    return {name: x for name, x in made.items() if x is not None}


@pytest.mark.parametrize("size", [2, 8, 64])
def test_s4_begins_as_hippo_legs(size: int) -> None:
    """The initial diagonal minus P P* is HiPPO-LegS in another basis, so the same polynomials of the past are kept."""
    a, b = state_space.hippo_legs(size)
    assert a[size - 1, 0] == pytest.approx(-((2 * size - 1) ** 0.5)) and a[0, 0] == -1 and a[0, 1] == 0
    w = begun(S4(2, size))
    assert set(w) == {"log_dt", "A_log", "A_imag", "P", "B", "C", "D"}
    assert all(torch.equal(w[name][0], w[name][1]) for name in ("A_log", "A_imag", "P", "B"))

    def whole(x: Tensor) -> Tensor:
        half = torch.complex(x[0], x[1]).to(torch.complex128)
        return torch.cat((half, half.conj()))

    diagonal = whole(torch.stack((-w["A_log"][0].exp(), w["A_imag"][0])))
    p = whole(w["P"][0])
    kept = torch.diag(diagonal) - torch.outer(p, p.conj())
    # In any basis, equal systems have equal eigenvalues and equal responses B* (s - A)^-1 B.
    for s in (0.1, 1.0, 10.0 + 5j):
        one = torch.eye(size, dtype=torch.complex128)
        drive = whole(w["B"][0])
        found = drive.conj() @ torch.linalg.solve(s * one - kept, drive)
        wanted = b.to(torch.complex128) @ torch.linalg.solve(s * one - a, b.to(torch.complex128))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.linalg.det(one - kept).real, torch.linalg.det(one - a).real, rtol=1e-3, atol=0.0)


def test_s4d_begins_as_s4d_lin() -> None:
    w = begun(S4D(400, 8))
    torch.testing.assert_close(w["A_log"].exp(), torch.full((400, 4), 0.5))
    torch.testing.assert_close(w["A_imag"][7], math.pi * torch.arange(4.0))
    steps = w["log_dt"].exp()
    assert 1e-3 <= steps.min() < 2e-3 and 5e-2 < steps.max() <= 1e-1
    assert float(w["C"].square().sum(1).mean()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("mixer", [S4(8, 64), S4D(8, 64)])
def test_a_long_memory_survives_float32(mixer: S4 | S4D) -> None:
    """With initial weights and 4,096 tokens, both forms in float32 stay close to float64."""
    own = [x for name, x in begun(mixer).items() if not name.startswith("out")]
    u = torch.randn((1, 4096, 8), generator=torch.Generator().manual_seed(1))
    h = torch.zeros(1, 8, 2, 32)
    run = s4.state_space(mixer)
    exact, state = run(u.double(), *own, h.double(), torch.tensor([4096]))
    scale = float(exact.std())
    y, left = run(u, *own, h, torch.tensor([4096]))
    assert (y - exact).abs().max() < 2e-5 * scale
    for part in u.split(1, 1):
        last, h = run(part, *own, h, torch.tensor([1]))
    assert (last[:, 0] - exact[:, -1]).abs().max() < 2e-5 * scale
    for found in (left, h):
        assert (found - state).abs().max() < 2e-5 * float(state.abs().max())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_does_not_apply_to_state_decays(optimizer: OptimizerName) -> None:
    """Weight decay applies only to matrices, and not to parameters of a state space with two axes. Training must lower
    the loss.
    """
    mixers = (S4(16, 8), S4D(16, 8), Mamba(16, 4, 4, 2), LightningAttention(2, 8, RMSNorm()))
    layers = tuple(Layer(mixer, GatedMLP(24), RMSNorm()) for mixer in mixers)
    model = LanguageModel(ModelSpec("x", 50, 16, 64, layers, RMSNorm()), open_table("reference"), 64)
    names = {id(p): name for name, p in model.weights().items()}
    trained = Optimizer(model.weights(), optimizer, 0.1)
    groups = [group for part in trained._parts for group in part.param_groups]
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {w.name for w in model.spec.weights() if w.is_matrix}
    tokens = torch.randint(3, 50, (60,), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(3):
        loss = model(tokens, torch.cat((torch.arange(40), torch.arange(20))), (40, 20), tokens.roll(-1))
        loss.backward()
        losses.append(loss.item())
        trained.step(1e-2, 1.0)
    assert losses[2] < losses[0]
    assert all(torch.isfinite(p).all() for p in model.weights().values())
