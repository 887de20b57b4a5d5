"""A matrix as the checkpoint holds it: float32, bfloat16 or float16, widened to float32 where it meets activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Memory


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """weight [out, in], bias [out] or None.

    `apply` is exact but for float32 rounding of the sum: |apply(x) - (x @ dequantize().T + bias)| is at most
    `bound(in)` times (|x| @ |dequantize()|.T + |bias|), whatever the order of the sum
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
    """

    weight: Array
    bias: Array | None
    kernel: Callable[[Array, Array, Array | None], Array]
    memory: Memory
    scheme: str = "plain"

    @classmethod
    def build(cls, weight: Array, bias: Array | None, table: OpsTable) -> PlainLinear:
        return cls(weight, bias, table.primitive(api.LINEAR), table.memory)

    def apply(self, x: Array) -> Array:
        """x [T, in] -> [T, out], float32."""
        return self.kernel(x, self.weight, self.bias)

    def dequantize(self) -> Array:
        """The matrix in float32, [out, in]."""
        return self.memory.widen(self.weight)

    @staticmethod
    def bound(in_features: int) -> float:
        """The relative error that `apply` may have."""
        terms = in_features + 1
        unit = 2.0**-24
        return terms * unit / (1 - terms * unit)
