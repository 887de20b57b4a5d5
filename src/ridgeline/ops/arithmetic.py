"""Say with which arithmetic tokens are multiplied with the matrices of a format."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.ops import api
from ridgeline.ops.table import CPU, GPU_BACKEND, OpsTable
from ridgeline.spec.quant import Activations, Format

SLICED = {
    "exact": "each number of a token is two slices of bfloat16, which differ from it by at most 2^-17 of it; "
    "--activations bf16 takes one",
    "bf16": "each number of a token is one slice of bfloat16, which differs from it by at most 2^-8 of it",
}
ROUNDED: dict[Activations, str] = {
    "exact": "numbers of tokens stay as they are computed",
    "bf16": "each number of a token is rounded to bfloat16",
    "int8": "tokens are rounded to int8, and sums of whole numbers are exact",
    "outliers": "numbers of tokens are rounded to int8, except those of 6 or more",
    "fp8": "tokens are rounded to fp8",
}
IN_UNITS = "numbers of tokens are float32, and two slices of bfloat16 where a matrix unit multiplies plain matrices"


def arithmetic(format: Format, backend: str) -> str:
    """Return one clause about the products of a format. backend: the name of the one that serves them."""
    if backend == CPU and format.activations == "exact":
        return IN_UNITS
    sliced = SLICED.get(format.activations) if backend in (GPU_BACKEND, "torchlib") else None
    return sliced or ROUNDED[format.activations]


def arithmetic_lines(formats: Iterable[Format], backend: str | None = None, table: OpsTable | None = None) -> list[str]:
    """Return a line for each format. backend: the name of the one that serves them; None: the choice of `table`."""
    found = []
    for format in sorted(formats, key=lambda format: format.name):
        serving = backend or (table.choose(api.PRODUCT, format).backend if table else "")
        found.append(f"products with {format.name} matrices, activations {format.activations}: "
                     f"{arithmetic(format, serving)}")  # fmt: skip
    return found
