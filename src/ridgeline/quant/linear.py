"""A stored matrix, its product and its low-rank term."""

from __future__ import annotations

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Linear, Product, QuantizedMatrix, Weights
from ridgeline.spec.quant import Format


class LowRank:
    """An additive term of rank r: x -> up(down(x)).

    It is added to the product of a matrix, before what follows in the stage: the norm and rotation of queries and keys,
    the activation of an MLP. A scale such as LoRA's alpha / r belongs in `up` (arXiv:2106.09685).

    Args:
        down: a matrix [r, in]; up: a matrix [out, r]. Neither is prepared yet, and neither has a term of its own.

    Raises:
        ValueError: for matrices that do not follow each other.
    """

    def __init__(self, down: Linear, up: Linear) -> None:
        rank, columns = down.data.shape
        rows, inner = up.data.shape
        if inner != rank:
            raise ValueError(
                f"a low-rank term needs matrices [r, in] and [out, r], not {rank, columns} and {rows, inner}"
            )
        self.down, self.up, self.rank, self.shape = down, up, rank, (rows, columns)


class StoredLinear:
    """A matrix of a model in one format; an `ops.api.Linear`.

    Args:
        data: [out, in] in float32, bfloat16 or float16; or codes and scales in `format`.
        bias: [out], float32, or None.
        table: kernels of the device.
        format: how floats are rounded.
        low_rank: a term that is added to each product, or None.

    Raises:
        ValueError: for codes of another format, or a low-rank term of another shape.
    """

    def __init__(
        self, data: Array | QuantizedMatrix, bias: Array | None, table: OpsTable, format: Format,
        low_rank: LowRank | None = None,
    ) -> None:  # fmt: skip
        if isinstance(data, QuantizedMatrix) and data.format != format:
            raise ValueError(f"codes are {data.format.name}, and the matrix is to be stored as {format.name}")
        if low_rank is not None and low_rank.shape != tuple(data.shape):
            raise ValueError(f"a low-rank term of {low_rank.shape} does not fit a matrix of {tuple(data.shape)}")
        self.format, self.data, self.bias, self.low_rank = format, data, bias, low_rank
        self._table = table
        self._product: Product | None = None

    @property
    def unfused(self) -> str | None:
        """Return why a stage over this matrix must be composed; None if it may be fused."""
        if self.low_rank is None:
            return None
        return "has a low-rank term, which is added to the product before the rest of the stage"

    def prepare(self) -> None:
        """Build the product. The data itself is not kept; the product keeps what it needs of it."""
        if self._product is None:
            product = self._table.stage(api.PRODUCT, self.format, Weights({"matrix": self}, {}))
            self._product = product if self.low_rank is None else _WithTerm(product, self.low_rank, self._table)
            del self.data

    @property
    def apply(self) -> Product:
        """Multiply x [..., in] to [..., out], float32. `prepare` must have been called."""
        assert self._product is not None
        return self._product

    def dequantize(self) -> Array:
        """Return the matrix that `apply` multiplies with, float32 [out, in], without its low-rank term."""
        return self.apply.dequantize()


class _WithTerm:
    """A product with a low-rank term added to it."""

    def __init__(self, product: Product, term: LowRank, table: OpsTable) -> None:
        term.down.prepare()
        term.up.prepare()
        self._product, self._down, self._up = product, term.down.apply, term.up.apply
        self._add = table.primitive(api.ADD)

    def __call__(self, x: Array) -> Array:
        return self._add(self._product(x), self._up(self._down(x)), 1.0)

    def dequantize(self) -> Array:
        return self._product.dequantize()
