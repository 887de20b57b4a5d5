"""The types of GGUF tensors: how many weights a block has, its bytes, and the range of its codes.

Numbers, sizes and layouts are those of ggml. A row of a tensor is a whole number of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type of a tensor.

    number: its number in files. weights, size: weights and bytes of a block. group: weights that share a scale; 0 for
    floats. codes: the least and the largest code of a weight. has_minima: whether a group also has a minimum.
    """

    name: str
    number: int
    weights: int
    size: int
    group: int = 0
    codes: tuple[int, int] = (0, 0)
    has_minima: bool = False

    @property
    def is_float(self) -> bool:
        return self.group == 0

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row. Raises ValueError if the row is not a whole number of blocks."""
        blocks, rest = divmod(columns, self.weights)
        if rest:
            raise ValueError(f"rows of {columns} are not a multiple of the {self.weights} weights in a block")
        return blocks * self.size


_TYPES = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("BF16", 30, 1, 2),
    BlockType("Q4_0", 2, 32, 18, 32, (-8, 7)),
    BlockType("Q4_1", 3, 32, 20, 32, (0, 15), True),
    BlockType("Q5_0", 6, 32, 22, 32, (-16, 15)),
    BlockType("Q5_1", 7, 32, 24, 32, (0, 31), True),
    BlockType("Q8_0", 8, 32, 34, 32, (-128, 127)),
    BlockType("Q2_K", 10, 256, 84, 16, (0, 3), True),
    BlockType("Q3_K", 11, 256, 110, 16, (-4, 3)),
    BlockType("Q4_K", 12, 256, 144, 32, (0, 15), True),
    BlockType("Q5_K", 13, 256, 176, 32, (0, 31), True),
    BlockType("Q6_K", 14, 256, 210, 16, (-32, 31)),
    BlockType("IQ4_NL", 20, 32, 18, 32, (-127, 113)),
    BlockType("IQ4_XS", 23, 256, 136, 32, (-127, 113)),
    BlockType("MXFP4", 39, 32, 17, 32, (-12, 12)),
)
TYPES: Mapping[str, BlockType] = MappingProxyType({t.name: t for t in _TYPES})
BY_NUMBER: Mapping[int, BlockType] = MappingProxyType({t.number: t for t in _TYPES})
# Types of ggml that are not read, for messages.
OTHERS: Mapping[int, str] = MappingProxyType({
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
})  # fmt: skip
