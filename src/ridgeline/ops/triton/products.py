"""Products with a stored matrix on a GPU, as `ops.api.Product`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeline.ops.api import BY_ROW, Linear, QuantizedMatrix
from ridgeline.ops.reference import quant
from ridgeline.ops.triton.dense import dense_product
from ridgeline.ops.triton.launch import Compiled, Counters, Launch
from ridgeline.ops.triton.packing import FILLED, FLOATS, MOST_COLUMNS, ROWS, Packed, pack_codes, pack_plain, unpack
from ridgeline.ops.triton.tilings import LEAST_TOKENS, Block, Tilings, tilings_on
from ridgeline.ops.triton.whole import round_tokens, whole_product
from ridgeline.spec.quant import NUMBERS

ROUND_BLOCK = 1024  # numbers of a token that are rounded at once
NORM_TOKENS = 2  # most tokens that each program of a product normalizes for itself; more have a kernel of their own
ROUNDED_TOKENS = 8  # most tokens that each program of a product rounds for itself; more are rounded by one kernel
PEAK_BLOCK = 128  # numbers of each of these tokens that are read at once to find the largest
SPLIT_TILES = 8  # least number of tiles in a split of a matrix
PROGRAMS = 96  # programs that keep a GPU busy: matrices with fewer tiles of rows are divided into splits
APART_TOKENS = 64  # most tokens for which splits are programs of their own


def splits_of(packed: Packed) -> int:
    """Return into how many splits the columns of a matrix are divided: a fact of its shape, never of a batch."""
    splits = 1
    while splits < 4 and packed.row_tiles * splits < PROGRAMS and packed.tiles // (2 * splits) >= SPLIT_TILES:
        splits *= 2
    return splits


class Finish(NamedTuple):
    """The end of a product before it is stored, as `finish.store` takes it; by default nothing."""

    how: tuple[Any, ...] = ("rows",)
    cos: Tensor | None = None
    sin: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    gates: Tensor | None = None
    pages: Tensor | None = None
    slots: Tensor | None = None
    page_stride: int = 0
    slot_stride: int = 0
    head_stride: int = 0
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    scale_stride: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    offset: float = 0.0
    eps: float = 0.0
    whole: Tensor | None = None
    fresh: Tensor | None = None
    matrices: Tensor | None = None
    matrix_stride: int = 0
    row_stride: int = 0
    column_stride: int = 0
    latents: Tensor | None = None
    latents_stride: int = 0

    def arguments(self, counters: Counters, programs: int) -> dict[str, Any]:
        """Return the arguments of a kernel that multiplies with so many programs."""
        found = self._asdict()
        finished = None if self.whole is None else counters(programs, self.whole.device)
        return {"FINISH": found.pop("how"), "finished": finished, **found}


STORED = Finish()


class Rounded(NamedTuple):
    """Tokens as whole numbers [T, filled], int8, for products with a matrix of `filled` columns; and their scales."""

    steps: Tensor
    token_scales: Tensor

    @classmethod
    def empty(cls, packed: Packed, tokens: int) -> Rounded:
        """Return room for tokens that a matrix is multiplied with."""
        steps = torch.empty(
            (tokens, packed.tiles * packed.tiling.width), dtype=torch.int8, device=packed.codes.device
        )  # fmt: skip
        return cls(steps, torch.empty(tokens, dtype=torch.float32, device=steps.device))


class Unnormalized(NamedTuple):
    """Few tokens x + scale * delta, whose norm is a part of the product with them; it writes their sums to total.

    x: [T, columns]. The other names are those of `tokens.Normalizer`. block: a power of two that is at least columns.
    """

    x: Tensor
    delta: Tensor | None
    total: Tensor | None
    weight: Tensor
    bias: Tensor | None
    scale: float
    offset: float
    eps: float
    is_layer: bool
    block: int

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `dense_product` for its norm."""
        return {
            "delta": self.delta, "total": self.total, "norm_weight": self.weight, "norm_bias": self.bias,
            "norm_scale": self.scale, "norm_offset": self.offset, "norm_eps": self.eps,
            "NORM": (self.delta is not None, self.bias is not None, self.is_layer, self.block),
        }  # fmt: skip


NO_NORM: dict[str, Any] = {
    **dict.fromkeys(("delta", "total", "norm_weight", "norm_bias", "NORM")),
    **dict.fromkeys(("norm_scale", "norm_offset", "norm_eps"), 0.0),
}  # fmt: skip


class MatrixProduct(Protocol):
    """Multiplies tokens with a packed matrix."""

    def __call__(self, x: Any, out: Tensor, finish: Finish = STORED) -> None: ...


def pack_together(linears: Sequence[Linear], order: Tensor | None = None) -> Packed:
    """Pack matrices that `refuses_linear` and `refuses_together` do not refuse, one below the other.

    Floats are rounded first where the format says so. order: which row of all matrices each packed row is.
    """
    data: list[Any] = [linear.data for linear in linears]
    format = linears[0].format
    if not format.is_lossy:
        whole = torch.cat(data)
        return pack_plain(whole if order is None else whole[order], format)
    coded = [part if isinstance(part, QuantizedMatrix) else quant.quantize(format)(part) for part in data]
    if len(coded) > 1:
        parts = {n: torch.cat([getattr(c, n) for c in coded]) for n in BY_ROW if getattr(coded[0], n) is not None}
        coded = [replace(coded[0], format=replace(format, rows=1), **parts)]
    return pack_codes(coded[0] if order is None else coded[0].rows(order))


def _bias_of(linears: Sequence[Linear], order: Tensor | None) -> Tensor | None:
    biases: list[Any] = [linear.bias for linear in linears]
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    rows = [linear.data.shape[0] for linear in linears]
    whole = torch.cat([given.new_zeros(n) if b is None else b for n, b in zip(rows, biases, strict=True)])
    return whole if order is None else whole[order]


def refuses_together(linears: Sequence[Linear]) -> str | None:
    """Return why matrices that one kernel multiplies with at once cannot be packed as one; None if they can."""
    if len({linear.format for linear in linears}) > 1:
        return "formats differ"
    if len({getattr(linear.data, "input_scale", None) for linear in linears}) > 1:
        return "scales of the input differ"
    return None


def refuses_linear(linear: Linear) -> str | None:
    """Return why no kernel multiplies with a matrix whose format has one; None if one does."""
    data: Any = linear.data
    if isinstance(data, QuantizedMatrix):
        if data.permutation is not None:
            return "columns have an order of their own"
    elif not linear.format.is_lossy and data.dtype not in FLOATS:
        return f"kernels multiply no plain matrices in {str(data.dtype).removeprefix('torch.')}"
    if data.shape[1] > MOST_COLUMNS:
        return f"a row has {data.shape[1]} columns; kernels take {MOST_COLUMNS} at most"
    return None


class Dense:
    """A product with tokens in bfloat16 slices."""

    def __init__(self, packed: Packed, bias: Tensor | None, launch: Launch, tilings: Tilings | None = None) -> None:
        self._packed, self._bias, self._launch = packed, bias, launch
        self._splits, self._counters = splits_of(packed), Counters()
        self._tilings = tilings or tilings_on(packed.codes.device)
        most = packed.row_tiles * (APART_TOKENS // LEAST_TOKENS)  # blocks of a product whose splits are programs
        self._arrived = torch.zeros(most, dtype=torch.int32, device=packed.codes.device)

    def __call__(
        self, given: Tensor | Unnormalized, out: Tensor, finish: Finish = STORED, beside: Tensor | None = None,
        beside_row: int = 0,
    ) -> None:  # fmt: skip
        """Multiply tokens; rows from `beside_row` on, a multiple of FILLED, with other tokens of the same strides."""
        x, norm = (given.x, given.arguments()) if isinstance(given, Unnormalized) else (given, NO_NORM)
        tokens, block = x.shape[0], self._tilings.block("dense", self._packed.tiling.kind, x.shape[0])
        arguments, grid = self.arguments(x, -(-tokens // block.tokens), block)
        self._launch(
            dense_product, grid, block.compiled,
            **arguments, beside=beside, beside_row=beside_row, out=out, arrived=self._arrived,
            tokens=tokens, x_stride=x.stride(0), BLOCK_T=block.tokens, **norm,
            **finish.arguments(self._counters, grid[0] * grid[1]),
        )  # fmt: skip

    def arguments(self, x: Tensor, token_blocks: int, block: Block) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return the arguments of a kernel that calls `dense.sum_splits`, and its grid."""
        packed, t, splits = self._packed, self._packed.tiling, self._splits
        blocks = token_blocks, -(-packed.row_tiles * ROWS // block.rows)
        is_apart = splits > 1 and x.shape[0] <= APART_TOKENS
        cells = blocks[0] * blocks[1] * splits * block.tokens * block.rows if is_apart else 1
        found = {
            "x": x, "codes": packed.codes, "scales": packed.scales, "zero_points": packed.zero_points,
            "bias": self._bias, "parts": x.new_empty(cells), "rows": packed.rows, "columns": packed.columns,
            "tiles": packed.tiles, "groups": packed.groups, "split_tiles": -(-packed.tiles // splits), "KIND": t.kind,
            "LOW": low_of(packed), "HAS_ZEROS": packed.zero_points is not None, "HAS_BIAS": self._bias is not None,
            "SLICES": slices_of(packed), "ROWS": ROWS, "COLUMNS": t.columns, "HALVES": t.halves, "GROUP": t.group,
            "SPLITS": splits, "APART": is_apart, "BLOCK_R": block.rows,
        }  # fmt: skip
        return found, (*blocks, splits) if is_apart else blocks


def round_rows(packed: Packed, x: Tensor, launch: Launch) -> Rounded:
    """Return tokens [T, columns] as a product with a matrix takes them."""
    found, given = Rounded.empty(packed, x.shape[0]), packed.input_scale
    launch(
        round_tokens, (x.shape[0],), Compiled(4),
        x=x, steps=found.steps, token_scales=found.token_scales, columns=packed.columns, filled=found.steps.shape[1],
        x_stride=x.stride(0), given=1.0 if given is None else given, HAS_SCALE=given is not None, BLOCK=ROUND_BLOCK,
    )  # fmt: skip
    return found


class Whole:
    """A product with tokens that are rounded to int8."""

    def __init__(self, packed: Packed, bias: Tensor | None, launch: Launch, tilings: Tilings | None = None) -> None:
        self._packed, self._bias, self._launch, self._counters = packed, bias, launch, Counters()
        self._tilings = tilings or tilings_on(packed.codes.device)

    def __call__(self, x: Tensor | Rounded, out: Tensor, finish: Finish = STORED) -> None:
        packed, t = self._packed, self._packed.tiling
        if not isinstance(x, Rounded) and len(x) > ROUNDED_TOKENS:
            x = round_rows(packed, x, self._launch)
        given, token_scales = x if isinstance(x, Rounded) else (x, None)
        tokens, input_scale = given.shape[0], packed.input_scale
        block = self._tilings.block("whole", t.kind, tokens)
        blocks = -(-tokens // block.tokens), -(-packed.row_tiles * ROWS // block.rows)
        self._launch(
            whole_product, blocks, block.compiled,
            x=given, token_scales=token_scales, codes=packed.codes, scales=packed.scales,
            zero_points=packed.zero_points, bias=self._bias, out=out, tokens=tokens, rows=packed.rows,
            columns=packed.columns, x_stride=given.stride(0), tiles=packed.tiles, groups=packed.groups,
            given=1.0 if input_scale is None else input_scale, KIND=t.kind, LOW=low_of(packed),
            HAS_ZEROS=packed.zero_points is not None, HAS_BIAS=self._bias is not None, ROWS=ROWS, COLUMNS=t.columns,
            HALVES=t.halves, GROUP=t.group, UNIT=t.unit, ROUNDS=token_scales is None,
            HAS_SCALE=input_scale is not None, BLOCK=PEAK_BLOCK, BLOCK_T=block.tokens, BLOCK_R=block.rows,
            **finish.arguments(self._counters, blocks[0] * blocks[1]),
        )  # fmt: skip


def slices_of(packed: Packed) -> int:
    """Return how many bfloat16 numbers stand for one number of a token: two are as good as exact ones."""
    return 1 if packed.format.activations == "bf16" else 2


def low_of(packed: Packed) -> int:
    """Return the number of code 0 of a format whose codes lie two to a byte; 0 for others."""
    return NUMBERS[packed.format.numbers].low if packed.tiling.kind == "nibbles" else 0


def product_of(
    packed: Packed, bias: Tensor | None, launch: Launch, tilings: Tilings | None = None
) -> MatrixProduct:  # fmt: skip
    """Return the kernel for a packed matrix. tilings: None for those of its device."""
    return (Whole if packed.format.activations == "int8" else Dense)(packed, bias, launch, tilings)


class StoredProduct:
    """The product with a matrix, or with several of one format and input, one below the other: the stage PRODUCT.

    order: which row of all matrices each packed row is; None: they are packed as they are.
    """

    def __init__(self, linears: Sequence[Linear], launch: Launch, order: Sequence[int] | None = None) -> None:
        given: Any = linears[0].data
        device = (given.codes if isinstance(given, QuantizedMatrix) else given).device
        index = None if order is None else torch.tensor(order, device=device)
        self._packed, self._bias = pack_together(linears, index), _bias_of(linears, index)
        self._multiply = product_of(self._packed, self._bias, launch)

    @property
    def rows(self) -> int:
        """Return the number of rows of all matrices."""
        return self._packed.rows

    @property
    def parts(self) -> tuple[Packed, Tensor | None, int]:
        """Return the matrix, its bias, and into how many splits its columns are divided."""
        return self._packed, self._bias, 1 if self.rounds else splits_of(self._packed)

    @property
    def dense(self) -> Dense | None:
        """Return the kernel if it takes exact tokens, for kernels that multiply with the matrix themselves."""
        return self._multiply if isinstance(self._multiply, Dense) else None

    @property
    def rounds(self) -> Packed | None:
        """Return the matrix if it takes rounded tokens, for kernels that round what they compute."""
        return self._packed if self._packed.format.activations == "int8" else None

    def __call__(self, x: Tensor | Rounded | Unnormalized) -> Tensor:
        if isinstance(x, Rounded | Unnormalized):
            return self.into(x, self._packed.rows)
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        return self.into(rows, self._packed.rows).view(*x.shape[:-1], self._packed.rows)

    def into(self, x: Tensor | Rounded | Unnormalized, *shape: int, finish: Finish = STORED) -> Tensor:
        """Multiply tokens [T, columns], do what follows, and return the result [T, *shape]."""
        out = self.room(x, *shape)
        if out.shape[0]:
            self._multiply(x, out, finish)
        return out

    def room(self, x: Tensor | Rounded | Unnormalized, *shape: int) -> Tensor:
        """Return room for results [T, *shape] of T tokens."""
        tokens = len(x[0] if isinstance(x, Rounded | Unnormalized) else x)
        return torch.empty((tokens, *shape), dtype=torch.float32, device=self._packed.codes.device)

    def dequantize(self) -> Tensor:
        found: Any = unpack(self._packed)
        return quant.dequantize(self._packed.format)(found) if isinstance(found, QuantizedMatrix) else found.float()


class TwoProducts:
    """The products of two inputs of one width with a matrix each, in one launch where the matrices can be packed."""

    def __init__(self, linears: Sequence[Linear], launch: Launch) -> None:
        self._rows = [linear.data.shape[0] for linear in linears]
        is_one = refuses_together(linears) is None and self._rows[0] % FILLED == 0
        groups = [[*linears]] if is_one and linears[0].format.activations != "int8" else [[one] for one in linears]
        self._products = [StoredProduct(group, launch) for group in groups]

    def __call__(self, x: Tensor, other: Tensor) -> Sequence[Tensor]:
        """Return the products of x and of another input, both [T, columns]."""
        if len(self._products) == 2:
            return [product(given) for product, given in zip(self._products, (x, other), strict=True)]
        if x.stride() != other.stride() or x.stride(-1) != 1:
            x, other = x.contiguous(), other.contiguous()
        (product,) = self._products
        out = product.room(x, product.rows)
        if len(x):
            assert product.dense is not None
            product.dense(x, out, beside=other, beside_row=self._rows[0])
        return out.split(self._rows, -1)
