"""Matrices whose codes, scales and zero points are learned, and the backend that multiplies with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.errors import DeviceError
from ridgeline.ops import api
from ridgeline.ops.api import Op, QuantizedMatrix, Weights
from ridgeline.spec.quant import NUMBERS, Format
from ridgeline.train.qat.rounding import (
    check_format,
    code_limits,
    grouped,
    least_scale,
    round_activations,
    round_groups,
    round_weights,
    step_of,
    ungrouped,
)

# How far a weight may begin from the number of its code, in units of the scale. As much is left to the next number, so
# that noise of the first updates does not undo the choice of the codes.
MARGIN = 0.25


class LearnedMatrix:
    """A matrix [out, in] in a format: floats that are rounded in each forward pass, scales and zero points.

    Args:
        weight: the matrix as it is stored, a float32 tensor [out, in].
        initial: codes to begin with, as numpy arrays. The floats begin between the numbers of these codes and `weight`.

    Raises:
        ValueError: for a format whose scales more than one row shares, and for a float type other than e4m3.
    """

    def __init__(self, weight: Tensor, initial: QuantizedMatrix) -> None:
        check_format(initial.format)
        self.format, self.shape = initial.format, initial.shape
        self.permutation = _put(initial.permutation, weight.device, torch.int64)
        scale, zero = (_put(a, weight.device, torch.float32) for a in (initial.scales, initial.zero_points))
        codes = _put(initial.codes, weight.device, torch.int64)
        assert scale is not None and codes is not None
        self._has_zeros = zero is not None
        zero = torch.zeros_like(scale) if zero is None else zero
        levels = NUMBERS[self.format.numbers].levels
        numbers = torch.tensor(levels, device=weight.device)[codes] if levels else codes.float()
        ordered = weight if self.permutation is None else weight[:, self.permutation]
        self.weight = nn.Parameter(_near(self.format, ordered, numbers, scale, zero))
        self.scale = nn.Parameter(scale)
        self.zero = nn.Parameter(zero, requires_grad=self._has_zeros)

    def rounded(self) -> Tensor:
        """Return the matrix as it is multiplied, [out, in] in the order of its codes, with gradients."""
        return round_weights(self.format, self.weight, self.scale, self.zero)

    @torch.no_grad()
    def project(self) -> None:
        """Bring scales and zero points back into the range of the format."""
        self.scale.clamp_(least_scale(self.format))
        self.zero.clamp_(*code_limits(self.format))

    @torch.no_grad()
    def codes(self) -> QuantizedMatrix:
        """Return the codes, whose numbers are those of `rounded` to the bit."""
        found = round_groups(self.format, grouped(self.format, self.weight), self.scale, self.zero)
        codes = ungrouped(found.codes, self.shape[1])
        if NUMBERS[self.format.numbers].levels:
            kept = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            kept = codes.char()
        zeros = _numpy(found.zero[..., 0].char()) if self._has_zeros else None
        scales, order = _numpy(found.scale[..., 0]), _numpy(self.permutation)
        return QuantizedMatrix(self.format, _numpy(kept), scales, zeros, permutation=order)

    @property
    def unit(self) -> float:
        """Return the mean distance of neighboring numbers."""
        return float(self.scale.detach().mean()) * step_of(self.format)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is learned, by kind."""
        return {"weight": self.weight, "scale": self.scale, **({"zero": self.zero} if self._has_zeros else {})}


def _put(array: Any, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.array(array)).to(device, dtype)


def _numpy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.contiguous().cpu().numpy()


def _near(format: Format, weight: Tensor, numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the weights nearest to the given ones that are within MARGIN of the numbers of these codes [out, in].

    For a float type, whose numbers have no equal distances, these are the numbers of the codes themselves.
    """
    wide, levels = scale[..., None], grouped(format, numbers) - zero[..., None]
    found = levels * wide
    if not NUMBERS[format.numbers].levels:
        found = grouped(format, weight).clamp((levels - MARGIN) * wide, (levels + MARGIN) * wide)
    return ungrouped(found, weight.shape[1])


class LearnedStack:
    """Matrices of one shape and format, [experts, out, in]. The first index chooses one."""

    def __init__(self, matrices: Sequence[LearnedMatrix]) -> None:
        self._matrices = tuple(matrices)
        self.shape = (len(matrices), *matrices[0].shape)

    def __getitem__(self, index: int) -> LearnedMatrix:
        return self._matrices[index]


class _LearnedProduct:
    """The product with a learned matrix; an `ops.api.Product`."""

    def __init__(self, matrix: LearnedMatrix, bias: Tensor | None) -> None:
        self._matrix, self._bias = matrix, bias

    def __call__(self, x: Tensor) -> Tensor:
        matrix = self._matrix
        x = round_activations(matrix.format, x)
        if matrix.permutation is not None:
            x = x[..., matrix.permutation]
        return F.linear(x, matrix.rounded(), self._bias)

    def dequantize(self) -> Tensor:
        """Return the matrix [out, in] in the order of its inputs."""
        matrix = self._matrix
        found = matrix.rounded()
        if matrix.permutation is None:
            return found
        return torch.empty_like(found).index_copy(1, matrix.permutation, found)


class LearnedBackend:
    """Serves products with learned matrices, and refuses all else; an `ops.api.Backend`."""

    name = "learned"

    def refuses(self, op: Op[Any], case: object) -> str | None:
        return None if op is api.PRODUCT and isinstance(case, Format) and case.is_lossy else "learned products only"

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return None

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        raise DeviceError(f"the learned backend has no {op.name}")

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        matrix: Any = weights.linears["matrix"]
        return _LearnedProduct(matrix.data, matrix.bias)
