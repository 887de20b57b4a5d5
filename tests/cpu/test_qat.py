"""Training with rounded matrices: gradients against torch's own, codes that are stored as they were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.build import make_model, redraw
from oracle.families import CASES
from ridgeline.compress import gptq as gptq_file
from ridgeline.compress.rtn import round_to_nearest
from ridgeline.load.stored import dequantized
from ridgeline.ops.api import QuantizedMatrix, QuantizedStack
from ridgeline.ops.reference import quant as reference
from ridgeline.runtime.load import LoadOptions, pass_model
from ridgeline.spec.quant import Format
from ridgeline.train.qat import Distillation, LearnedMatrix, Original, distill
from ridgeline.train.qat.matrix import _LearnedProduct
from ridgeline.train.qat.rounding import code_limits, gradient_factor, round_activations, round_weights

ASYM, EVEN = Format("int3", 8, offsets="zero_points"), Format("int4", 8)
FORMATS = [
    ASYM, EVEN, Format("int2", 16, offsets="zero_points"), Format("int8"), Format("int8", offsets="zero_points"),
    Format("int5", 8), Format("int6", 0), Format("fp8"), Format("fp8", 8), Format("int4", 8, activations="int8"),
    Format("fp8", activations="fp8"), Format("int8", activations="outliers"),
]  # fmt: skip
NAMES = [f.name for f in FORMATS]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("format", [ASYM, EVEN, Format("int2", 8, offsets="zero_points")], ids=lambda f: f.name)
def test_gradients_are_those_of_torch(format: Format) -> None:
    """Each group is one channel of torch's learnable fake quantization. Some weights are outside of their ranges."""
    weight, upstream = floats(6, 24), floats(6, 24, seed=1)
    scale = (torch.rand(6, 3, generator=torch.Generator().manual_seed(2)) * 0.3 + 0.1).half().float()
    low, high = (int(limit) for limit in code_limits(format))
    zero = torch.zeros(6, 3)
    if format.offsets != "none":
        zero = torch.from_numpy(rng(3).integers(low, high, (6, 3)).astype(np.float32))
    ours = [t.clone().requires_grad_() for t in (weight, scale, zero)]
    found = round_weights(format, *ours)
    found.backward(upstream)
    theirs = [t.reshape(18, *t.shape[2:], -1).squeeze(-1) if t is not weight else t.reshape(18, 8) for t in ours]
    theirs = [t.detach().clone().requires_grad_() for t in theirs]
    factor = gradient_factor(format, 24)
    expected = torch._fake_quantize_learnable_per_channel_affine(*theirs, 0, low, high, factor)
    expected.backward(upstream.reshape(18, 8))
    outside = (ours[0].grad == 0).sum()
    assert 5 < outside < 100
    torch.testing.assert_close(found.reshape(18, 8), expected, rtol=1e-6, atol=1e-6)
    for own, other in zip(ours, theirs, strict=True):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(own.grad.reshape(other.shape), other.grad, rtol=1e-5, atol=1e-6)
    assert factor == pytest.approx((8 * high) ** -0.5)


def test_gradients_of_weights_by_row_are_those_of_torch() -> None:
    format, upstream = Format("int8"), floats(5, 16, seed=1)
    weight, scale = floats(5, 16).requires_grad_(), torch.full((5, 1), 0.01)
    round_weights(format, weight, scale, torch.zeros(5, 1)).backward(upstream)
    other = weight.detach().clone().requires_grad_()
    zeros = torch.zeros(5, dtype=torch.int32)
    torch.fake_quantize_per_channel_affine(other, scale[:, 0], zeros, 0, -127, 127).backward(upstream)
    torch.testing.assert_close(weight.grad, other.grad)
    assert 0 < (weight.grad == 0).sum() < 40


@pytest.mark.parametrize("format", [Format("fp8", 8), ASYM, Format("int6", 0)], ids=lambda f: f.name)
def test_gradients_of_scales_are_finite_differences(format: Format) -> None:
    """With the errors of rounding held, or the codes of weights outside, the product of code and scale is smooth."""
    weight, upstream = floats(4, 16), floats(4, 16, seed=1)
    groups = format.num_groups(16)
    scale = torch.full((4, groups), {"fp8": 2.0**-8, "int3": 0.25, "int6": 2.0**-5}[format.numbers]).requires_grad_()
    zero = torch.ones(4, groups) if format.offsets != "none" else torch.zeros(4, groups)
    found = round_weights(format, weight, scale, zero)
    found.backward(upstream)
    wide_scale = scale.detach().double().repeat_interleave(16 // groups, 1)
    steps = weight.double() / wide_scale
    levels = found.detach().double() / wide_scale
    inside = steps.abs() <= 448 if format.numbers == "fp8" else (levels - steps).abs() <= 0.5
    residual = torch.where(inside, levels - steps, levels)

    def smooth(s: torch.Tensor) -> torch.Tensor:
        wide = s.repeat_interleave(16 // groups, 1)
        out = torch.where(inside, (weight.double() / wide + residual) * wide, residual * wide)
        return (out * upstream.double()).reshape(4, groups, -1).sum(2)

    base, step = scale.detach().double(), 1e-6
    expected = (smooth(base + step) - smooth(base - step)) / (2 * step)
    assert 0 < (~inside).sum() < 50
    np.testing.assert_allclose(scale.grad.double(), expected * gradient_factor(format, 16), rtol=2e-3, atol=1e-5)


def start(format: Format, rows: int = 12, columns: int = 44) -> tuple[torch.Tensor, QuantizedMatrix]:
    weight = floats(rows, columns) * 0.1
    return weight, round_to_nearest(weight.numpy(), format)


@pytest.mark.parametrize("format", FORMATS, ids=NAMES)
def test_codes_are_stored_as_they_are_trained(format: Format) -> None:
    """The first codes are those given. After large changes, the numbers of the codes are the trained ones."""
    weight, initial = start(format)
    matrix = LearnedMatrix(weight, initial)
    first = matrix.codes()
    for name in ("codes", "scales", "zero_points"):
        np.testing.assert_array_equal(getattr(first, name), getattr(initial, name), err_msg=name)
    with torch.no_grad():
        matrix.weight += 0.05 * floats(12, 44, seed=1)
        matrix.scale *= 1 + 0.3 * floats(*matrix.scale.shape, seed=2)
        matrix.scale[0, 0] = -1.0
        matrix.zero += 3 * floats(*matrix.zero.shape, seed=3) if format.offsets != "none" else 0
    matrix.project()
    found = matrix.codes()
    np.testing.assert_array_equal(dequantized(found), matrix.rounded().detach().numpy())
    assert not np.array_equal(found.codes, initial.codes)
    assert (np.asarray(found.scales) > 0).all() and np.isfinite(dequantized(found)).all()


def test_an_order_of_columns_is_kept() -> None:
    weight = floats(16, 32).numpy()
    x = floats(200, 32, seed=1).numpy() * np.linspace(0.1, 3, 32, dtype=np.float32)
    initial = gptq_file.gptq(weight, x.T @ x / 200, ASYM)
    assert initial.permutation is not None
    matrix = LearnedMatrix(torch.from_numpy(weight), initial)
    found = matrix.codes()
    np.testing.assert_array_equal(dequantized(found), dequantized(initial))
    product = _LearnedProduct(matrix, None)
    np.testing.assert_allclose(product(torch.from_numpy(x)).detach(), x @ dequantized(found).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(product.dequantize().detach(), dequantized(found))


@pytest.mark.parametrize("format", [f for f in FORMATS if f.activations != "exact"], ids=lambda f: f.name)
def test_activations_are_rounded_as_in_serving(format: Format) -> None:
    weight, initial = start(format)
    bias, x = floats(12, seed=4), 3 * floats(7, 44, seed=5)
    found = _LearnedProduct(LearnedMatrix(weight, initial), bias)(x)
    parts = {n: torch.from_numpy(np.asarray(getattr(initial, n))) for n in ("codes", "scales")}
    served = reference.quantized_linear(format)(x, QuantizedMatrix(format, **parts), bias)
    torch.testing.assert_close(found.detach(), served, rtol=1e-5, atol=1e-5)
    x.requires_grad_()
    round_activations(format, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


def test_other_formats_are_refused() -> None:
    codes = QuantizedMatrix(Format("nf4", 64), np.zeros((2, 64), np.uint8), np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match="not learned"):
        LearnedMatrix(torch.zeros(2, 64), codes)


SEQUENCES = [[(7 * i * i + 3 * j + i * j) % 90 + 3 for i in range(24)] for j in range(10)]
QUICK = Distillation(tokens=24 * 4 * 12, batch_tokens=96, rate=0.05)


def problem(name: str, folder: Path) -> tuple[Original, dict[str, Any]]:
    """Return a random model of a family, and its matrices rounded to nearest in 3 bits."""
    made = make_model(CASES[name])
    redraw(made, 1)
    made.save_pretrained(folder)
    loaded = pass_model(str(folder), LoadOptions(device="cpu"))
    weights = loaded.model.weights
    codes: dict[str, Any] = {}
    for w in loaded.spec.weights():
        if w.name.startswith("layers.") and w.may_be_rounded:
            own = np.asarray(weights[w.name], np.float32)
            several = [round_to_nearest(m, ASYM) for m in (own if own.ndim > 2 else [own])]
            codes[w.name] = several[0] if own.ndim == 2 else QuantizedStack(several)
    return Original(loaded.spec, weights, loaded.max_model_len), codes


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_moe", "bamba"])
def test_training_brings_the_model_closer(name: str, tmp_path: Path) -> None:
    original, codes = problem(name, tmp_path / "model")
    seen: list[float] = []
    found = distill(
        original, codes, SEQUENCES, QUICK, "reference", tmp_path / "run", on_step=lambda done, of, kl: seen.append(kl)
    )
    assert len(seen) == 12 and np.mean(seen[-3:]) < 0.9 * seen[0]
    assert {n: len(some) for n, some in found.items()} == {
        n: c.shape[0] if isinstance(c, QuantizedStack) else 1 for n, c in codes.items()
    }


def same(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(getattr(a, part), getattr(b, part))
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
        for part in ("codes", "scales", "zero_points")
    )


def test_an_interrupted_run_ends_as_a_whole_one(tmp_path: Path) -> None:
    original, codes = problem("llama_gqa", tmp_path / "model")
    whole = distill(original, codes, SEQUENCES, QUICK, "reference", tmp_path / "whole")

    def stop(done: int, steps: int, kl: float) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(original, codes, SEQUENCES, QUICK, "reference", tmp_path / "run", on_step=stop)
    left: list[int] = []
    again = distill(
        original, codes, SEQUENCES, QUICK, "reference", tmp_path / "run", on_step=lambda done, of, kl: left.append(done)
    )
    assert left == [7, 8, 9, 10, 11, 12]
    assert same(whole, again)
    other = distill(
        original, codes, SEQUENCES, Distillation(QUICK.tokens, 96, seed=1), "reference", tmp_path / "other"
    )  # fmt: skip
    assert not same(whole, other)
