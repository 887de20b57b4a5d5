"""Products with stored matrices by the kernels that torch calls: cuBLAS on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.ops.api import Linear, QuantizedMatrix, Weights
from ridgeline.ops.reference import quant
from ridgeline.ops.reference.stored import FP8_MOST, to_fp8
from ridgeline.spec.quant import Format

LEAST_ROWS = 32  # torch's product of int8 takes more than 16 tokens
ALIGNED = 16  # rows and columns of codes are filled up to a multiple
FP8 = torch.float8_e4m3fn
Multiply = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]


def refuses_product(case: Format) -> str | None:
    """Return why torch has no product for matrices of a format; None if it has one."""
    if not case.is_lossy:
        return None
    if case.group or case.offsets != "none" or case.block or case.rows != 1:
        return "torch multiplies with one scale for each row, without groups, blocks or zero points"
    if (case.numbers, case.activations) not in (("int8", "int8"), ("fp8", "fp8")):
        return f"torch multiplies int8 with int8 and fp8 with fp8, not {case.numbers} with {case.activations}"
    return None


def refuses_matrix(linear: Linear) -> str | None:
    """Return why torch does not multiply with a matrix whose format it takes; None if it does."""
    data: Any = linear.data
    if isinstance(data, QuantizedMatrix):
        return None if data.permutation is None else "columns have an order of their own"
    if not linear.format.is_lossy and data.dtype != torch.bfloat16:
        return f"plain matrices are multiplied in bfloat16, not in {str(data.dtype).removeprefix('torch.')}"
    return None


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32, of two bfloat16 matrices. torch's CPU product has no result of another type."""
    return torch.mm(x, weight.T, out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float().T


def dense(weight: Tensor, slices: int) -> Multiply:
    """Return the product with a bfloat16 matrix. slices: bfloat16 numbers that stand for one number of a token."""

    def run(x: Tensor) -> Tensor:
        high = x.bfloat16()
        if slices == 1:
            return multiply(high, weight)
        both = multiply(torch.cat((high, (x - high.float()).bfloat16())), weight)
        return both[: len(x)] + both[len(x) :]

    return run


def _filled(codes: Tensor) -> Tensor:
    """Return codes whose rows and columns are filled up with zeros."""
    return F.pad(codes, (0, -codes.shape[1] % ALIGNED, 0, -codes.shape[0] % ALIGNED))


def whole(matrix: QuantizedMatrix) -> Multiply:
    """Return the product of int8 with tokens rounded to int8. Sums are exact, so it has the bits of the definition."""
    part: Any = matrix
    codes, scales, rows = _filled(part.codes), part.scales[:, 0], part.codes.shape[0]

    def run(x: Tensor) -> Tensor:
        scale, inverse = quant.token_scales(x, 127, matrix.input_scale)
        steps = torch.where(scale.isfinite(), (x * inverse).round().clamp(-127, 127), torch.zeros_like(x))
        more = max(0, LEAST_ROWS - len(x))
        sums = torch._int_mm(F.pad(steps, (0, codes.shape[1] - x.shape[1], 0, more)).to(torch.int8), codes.T)
        return sums[: len(x), :rows].float() * scales * scale

    return run


def scaled(matrix: QuantizedMatrix) -> Multiply:
    """Return the product of fp8 with tokens rounded to fp8. The scales multiply its float32 results."""
    part: Any = matrix
    codes, scales, rows = _filled(part.codes).view(FP8), part.scales[:, 0], part.codes.shape[0]
    one = torch.ones((), device=codes.device)

    def run(x: Tensor) -> Tensor:
        scale, _ = quant.token_scales(x, FP8_MOST, matrix.input_scale)
        steps = to_fp8((x / scale).clamp(-FP8_MOST, FP8_MOST).float())
        filled = F.pad(steps, (0, codes.shape[1] - x.shape[1], 0, -len(x) % ALIGNED)).view(FP8)
        sums = torch._scaled_mm(filled, codes.T, one, one, out_dtype=torch.float32, use_fast_accum=False)
        return sums[: len(x), :rows] * scales * scale

    return run


class TorchProduct:
    """The stage PRODUCT."""

    def __init__(self, case: Format, weights: Weights) -> None:
        linear = weights.linears["matrix"]
        data: Any = linear.data
        if case.is_lossy and not isinstance(data, QuantizedMatrix):
            data = quant.quantize(case)(data)
        self._case, self._data, self._bias = case, data, linear.bias
        if case.is_lossy:
            self._multiply = whole(data) if case.activations == "int8" else scaled(data)
        else:
            self._multiply = dense(data, 1 if case.activations == "bf16" else 2)

    def __call__(self, x: Tensor) -> Tensor:
        bias: Any = self._bias
        out = self._multiply(x.reshape(-1, x.shape[-1])).to(x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], -1)

    def dequantize(self) -> Tensor:
        return quant.dequantize(self._case)(self._data) if self._case.is_lossy else self._data.float()
