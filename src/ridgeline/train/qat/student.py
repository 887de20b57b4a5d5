"""The original and the model whose codes are learned, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ridgeline.nn import Model
from ridgeline.ops import OpsTable
from ridgeline.ops.api import QuantizedMatrix, QuantizedStack
from ridgeline.ops.reference.backend import open_reference, torch_device
from ridgeline.spec import ModelSpec
from ridgeline.spec.quant import PLAIN, FormatTable
from ridgeline.train.qat.matrix import LearnedBackend, LearnedMatrix, LearnedStack

Codes = Mapping[str, tuple[QuantizedMatrix, ...]]  # one matrix, or one for each expert, by the name of the weight


class Student:
    """A model with learned matrices, and its teacher, which has the same weights as floats.

    weights: floats by the spec's names, as numpy arrays. initial: the codes to begin with, by the name of the weight.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], initial: Mapping[str, QuantizedMatrix | QuantizedStack],
        device: str, max_len: int,
    ) -> None:  # fmt: skip
        self.memory, backends = open_reference(device)
        table = OpsTable(self.memory, (LearnedBackend(), *backends))
        where = torch_device(device)
        plain: dict[str, Any] = {
            w.name: torch.from_numpy(np.array(weights[w.name], np.float32)).to(where) for w in spec.weights()
        }
        self._matrices = {name: _learned(plain[name], codes) for name, codes in initial.items()}
        learned: dict[str, Any] = {
            name: LearnedStack(some) if len(plain[name].shape) > 2 else some[0] for name, some in self._matrices.items()
        }
        formats = FormatTable(PLAIN, {name: some[0].format for name, some in self._matrices.items()})
        self.teacher = Model(spec, plain, table, max_len)
        self.model = Model(spec, {**plain, **learned}, table, max_len, formats)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield everything that is learned, with its name: that of the weight, the number of the expert, the kind."""
        for name, some in self._matrices.items():
            for i, matrix in enumerate(some):
                yield from ((f"{name}:{i}:{kind}", parameter) for kind, parameter in matrix.parameters().items())

    def owner(self, name: str) -> tuple[LearnedMatrix, str]:
        """Return the matrix to which a parameter belongs, and its kind."""
        weight, index, kind = name.split(":")
        return self._matrices[weight][int(index)], kind

    def project(self) -> None:
        """Bring all scales and zero points back into the ranges of their formats."""
        for some in self._matrices.values():
            for matrix in some:
                matrix.project()

    def codes(self) -> Codes:
        """Return the codes of all learned matrices."""
        return {name: tuple(matrix.codes() for matrix in some) for name, some in self._matrices.items()}


def _learned(weight: torch.Tensor, codes: QuantizedMatrix | QuantizedStack) -> list[LearnedMatrix]:
    if isinstance(codes, QuantizedMatrix):
        return [LearnedMatrix(weight, codes)]
    return [LearnedMatrix(weight[e], codes[e]) for e in range(codes.shape[0])]
