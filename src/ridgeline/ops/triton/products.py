"""Products with a stored matrix on a GPU, as `ops.api.Product`."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeline.ops.api import Linear, QuantizedMatrix
from ridgeline.ops.reference import quant
from ridgeline.ops.triton.dense import dense_product
from ridgeline.ops.triton.launch import Compiled, Launch
from ridgeline.ops.triton.packing import MOST_COLUMNS, ROWS, Packed, pack_codes, pack_plain, unpack
from ridgeline.ops.triton.whole import round_tokens, whole_product
from ridgeline.spec.quant import NUMBERS

ROUND_BLOCK = 1024  # numbers of a token that are rounded at once
SPLIT_TILES = 8  # least number of tiles in a split of a matrix
PROGRAMS = 96  # programs that keep a GPU busy: matrices with fewer tiles of rows are divided into splits
APART_TOKENS = 64  # most tokens for which splits are programs of their own


class Block(NamedTuple):
    """The part of a product that one program computes, and how it is compiled."""

    tokens: int
    rows: int
    compiled: Compiled


def dense_block(tokens: int) -> Block:
    """Return the block for a number of tokens. It changes no result: rows are whole tiles in all of them."""
    if tokens <= 16:
        return Block(16, 64, Compiled(4, 4))
    if tokens <= 32:
        return Block(32, 64, Compiled(4, 4))
    return Block(64, 64, Compiled(4, 3)) if tokens <= APART_TOKENS else Block(64, 128, Compiled(8, 3))


def whole_block(tokens: int) -> Block:
    """Return the block for a number of tokens. Sums of whole numbers are exact, so it changes no result."""
    if tokens <= 16:
        return Block(16, 32, Compiled(2, 4))
    return Block(32, 64, Compiled(4, 4)) if tokens <= 32 else Block(64, 128, Compiled(8, 3))


def splits_of(packed: Packed) -> int:
    """Return into how many splits the columns of a matrix are divided: a fact of its shape, never of a batch."""
    splits = 1
    while splits < 4 and packed.row_tiles * splits < PROGRAMS and packed.tiles // (2 * splits) >= SPLIT_TILES:
        splits *= 2
    return splits


class MatrixProduct(Protocol):
    """Multiplies tokens with a packed matrix."""

    def __call__(self, x: Tensor, out: Tensor) -> None: ...


def pack(linear: Linear) -> Packed:
    """Pack a matrix that `refuses_linear` does not refuse. Floats are rounded first where the format says so."""
    data: Any = linear.data
    if isinstance(data, QuantizedMatrix):
        return pack_codes(data)
    return pack_codes(quant.quantize(linear.format)(data)) if linear.format.is_lossy else pack_plain(data)


def refuses_linear(linear: Linear) -> str | None:
    """Return why no kernel multiplies with a matrix whose format has one; None if one does."""
    data: Any = linear.data
    if isinstance(data, QuantizedMatrix):
        if data.permutation is not None:
            return "columns have an order of their own"
    elif not linear.format.is_lossy and data.dtype != torch.bfloat16:
        return f"kernels multiply plain matrices in bfloat16, not in {str(data.dtype).removeprefix('torch.')}"
    if data.shape[1] > MOST_COLUMNS:
        return f"a row has {data.shape[1]} columns; kernels take {MOST_COLUMNS} at most"
    return None


class Dense:
    """A product with exact activations.

    slices: bfloat16 numbers that stand for one number of a token: 2, or 1 for products that are faster and less exact.
    """

    def __init__(self, packed: Packed, bias: Tensor | None, slices: int, launch: Launch) -> None:
        self._packed, self._bias, self._slices, self._launch = packed, bias, slices, launch
        self._splits = splits_of(packed)
        self._arrived = torch.zeros(packed.row_tiles, dtype=torch.int32, device=packed.codes.device)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        packed, t = self._packed, self._packed.tiling
        tokens, splits, block = x.shape[0], self._splits, dense_block(x.shape[0])
        blocks = -(-tokens // block.tokens), -(-packed.row_tiles * ROWS // block.rows)
        is_apart = splits > 1 and tokens <= APART_TOKENS
        cells = blocks[0] * blocks[1] * splits * block.tokens * block.rows if is_apart else 1
        grid = (*blocks, splits) if is_apart else blocks
        self._launch(
            dense_product, grid, block.compiled,
            x=x, codes=packed.codes, scales=packed.scales, zero_points=packed.zero_points, bias=self._bias, out=out,
            parts=x.new_empty(cells), arrived=self._arrived, tokens=tokens, rows=packed.rows, columns=packed.columns,
            x_stride=x.stride(0), tiles=packed.tiles, groups=packed.groups, split_tiles=-(-packed.tiles // splits),
            KIND=t.kind, LOW=low_of(packed), HAS_ZEROS=packed.zero_points is not None, HAS_BIAS=self._bias is not None,
            SLICES=self._slices, ROWS=ROWS, COLUMNS=t.columns, HALVES=t.halves, GROUP=t.group, SPLITS=splits,
            APART=is_apart, BLOCK_T=block.tokens, BLOCK_R=block.rows,
        )  # fmt: skip


class Whole:
    """A product with tokens that are rounded to int8."""

    def __init__(self, packed: Packed, bias: Tensor | None, launch: Launch) -> None:
        self._packed, self._bias, self._launch = packed, bias, launch

    def __call__(self, x: Tensor, out: Tensor) -> None:
        packed, t, tokens = self._packed, self._packed.tiling, x.shape[0]
        filled = packed.tiles * t.width
        steps = torch.empty((tokens, filled), dtype=torch.int8, device=x.device)
        token_scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
        given = packed.input_scale
        self._launch(
            round_tokens, (tokens,), Compiled(4),
            x=x, steps=steps, token_scales=token_scales, columns=packed.columns, filled=filled, x_stride=x.stride(0),
            given=1.0 if given is None else given, HAS_SCALE=given is not None, BLOCK=ROUND_BLOCK,
        )  # fmt: skip
        block = whole_block(tokens)
        self._launch(
            whole_product, (-(-tokens // block.tokens), -(-packed.row_tiles * ROWS // block.rows)), block.compiled,
            steps=steps, token_scales=token_scales, codes=packed.codes, scales=packed.scales,
            zero_points=packed.zero_points, bias=self._bias, out=out, tokens=tokens, rows=packed.rows, filled=filled,
            tiles=packed.tiles, groups=packed.groups, KIND=t.kind, LOW=low_of(packed),
            HAS_ZEROS=packed.zero_points is not None, HAS_BIAS=self._bias is not None, ROWS=ROWS, COLUMNS=t.columns,
            HALVES=t.halves, GROUP=t.group, UNIT=t.unit, BLOCK_T=block.tokens, BLOCK_R=block.rows,
        )  # fmt: skip


def low_of(packed: Packed) -> int:
    """Return the number of code 0 of a format whose codes lie two to a byte; 0 for others."""
    return NUMBERS[packed.format.numbers].low if packed.tiling.kind == "nibbles" else 0


def product_of(packed: Packed, bias: Tensor | None, slices: int, launch: Launch) -> MatrixProduct:
    """Return the kernel for a packed matrix."""
    if packed.format.activations == "int8":
        return Whole(packed, bias, launch)
    return Dense(packed, bias, slices, launch)


class StoredProduct:
    """The stage PRODUCT."""

    def __init__(self, linear: Linear, slices: int, launch: Launch) -> None:
        bias: Any = linear.bias
        self._packed = pack(linear)
        self._multiply = product_of(self._packed, bias, slices, launch)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = x.new_empty((rows.shape[0], self._packed.rows))
        if rows.shape[0]:
            self._multiply(rows, out)
        return out.view(*x.shape[:-1], self._packed.rows)

    def dequantize(self) -> Tensor:
        found: Any = unpack(self._packed)
        return quant.dequantize(self._packed.format)(found) if isinstance(found, QuantizedMatrix) else found.float()
