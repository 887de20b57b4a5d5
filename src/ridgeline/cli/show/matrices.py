"""List the matrices of a model: the scheme of each, its bytes, its bits a weight, and the kernel that multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.cli.show.tables import Column, Table

if TYPE_CHECKING:
    from ridgeline.cli.flags.known import StoredMatrices
    from ridgeline.spec import ModelSpec
    from ridgeline.spec.dtype import DType
    from ridgeline.spec.quant import Format


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One matrix, or all experts of a weight.

    scheme: how it is in memory. stored: its scheme in the checkpoint, where that is another one. bits: bits of a weight
    in memory, scales included. kernel: the backend of its products; "rows" for a table whose rows are looked up, "rows
    of the head" if they are looked up in the tied head, so that the table takes no memory.
    """

    name: str
    scheme: str
    stored: str
    num_bytes: int
    bits: float
    kernel: str


def matrix_rows(spec: ModelSpec, stored: StoredMatrices, dtype: DType) -> Iterator[MatrixRow]:
    """Yield the matrices of a model in the order of its weights; a tied head is the last one."""
    from ridgeline.ops import api, open_table
    from ridgeline.spec import Weight
    from ridgeline.spec.footprint import TABLES, one_matrix, packed_types, rows_of_head

    table = open_table("cpu")
    types = packed_types(spec, stored.formats, dtype, stored.dtypes)
    head = Weight("head.weight", (spec.vocab_size, spec.hidden_size))
    for weight in (*spec.weights(), *((head,) if spec.tie_word_embeddings else ())):
        format = stored.formats.stored(weight)
        if format is None:
            continue
        kind = types.get(TABLES[0] if weight is head else weight.name, dtype)
        size = one_matrix(weight, spec, stored.formats, kind)
        if weight.name in TABLES:
            kernel = "rows of the head" if rows_of_head(weight, spec, format) else "rows"
        else:
            kernel = table.choose(api.PRODUCT, format).backend
        was = stored.dequantized.get(weight.name)
        yield MatrixRow(
            weight.name, _scheme(format, kind), was.name if was else "", size,
            8 * size / weight.num_params, kernel,
        )  # fmt: skip


def _scheme(format: Format, kind: DType) -> str:
    """Return the name of a format. kind: the type of a matrix that is not rounded."""
    if format.is_lossy or format.activations == "exact":
        return format.name if format.is_lossy else kind
    return f"{kind}, activations {format.activations}"


def matrix_table(rows: Sequence[MatrixRow]) -> Table:
    """Return a table with one row for equal matrices of several layers."""
    from ridgeline.spec.text import index_ranges, num_bytes

    columns = (
        Column("matrix", right=False), Column("layers", right=False, drop=1), Column("scheme", right=False),
        Column("bytes each"), Column("bits"), Column("kernel", right=False, wraps=True),
    )  # fmt: skip
    out = Table("Matrices", columns)
    groups: dict[tuple[str, str, str, int, float, str], list[int]] = {}
    for row in rows:
        layer, name = _split(row.name)
        key = name, row.scheme, row.stored, row.num_bytes, row.bits, row.kernel
        groups.setdefault(key, []).extend([] if layer is None else [layer])
    for (name, scheme, stored, size, bits, kernel), layers in groups.items():
        said = f"{kernel}, dequantized from {stored}" if stored else kernel
        out.add_row(name, index_ranges(layers) if layers else "", scheme, num_bytes(size), f"{bits:.4g}", said)
    return out


def _split(name: str) -> tuple[int | None, str]:
    """Return the layer of a weight, and the rest of its name without `weight`."""
    short = name.removesuffix(".weight")
    if not short.startswith("layers."):
        return None, short
    _, layer, rest = short.split(".", 2)
    return int(layer), rest
