"""The schemes that users name: a method, and the format of the matrices that it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ridgeline.errors import RequestError
from ridgeline.spec.quant import ACTIVATIONS, LARGEST_GROUP, Format, NumberType

Method = Literal["rtn", "clip", "awq", "gptq", "smooth"]
METHODS: tuple[Method, ...] = get_args(Method)
BITS: tuple[NumberType, ...] = ("int8", "int6", "int5", "int4", "int3", "int2")
EXAMPLES = "awq-int4, gptq-int3, clip-int4, rtn-int8, smooth-int8, llm.int8, fp8"
GROUP = 32  # columns that share a scale, in fewer than 8 bits


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to choose codes.

    Attributes:
        method: "rtn" rounds to nearest; "clip" chooses ranges by importance; "awq" and "smooth" scale channels; "gptq"
            makes up for errors.
        format: the format of the matrices.
        act_order, static: see `compress.gptq.GPTQ`.
        clip: whether ranges are chosen by error, in AWQ and GPTQ.
        alpha: share of the difficulty that SmoothQuant moves into weights.
        damping: see `compress.gptq.DAMPING`.
    """

    name: str
    method: Method
    format: Format
    act_order: bool = True
    static: bool = False
    clip: bool = True
    alpha: float = 0.5
    damping: float = 0.01

    @property
    def reads_data(self) -> bool:
        """Return whether calibration data changes the codes or the report."""
        return self.needs_data or self.format.activations == "outliers"

    @property
    def moves_scales(self) -> bool:
        """Return whether scales of channels move into norms. LLM.int8() does so for small columns of outliers."""
        return self.method in ("awq", "smooth") or self.format.activations == "outliers"

    @property
    def needs_data(self) -> bool:
        """Return whether codes depend on calibration data."""
        return self.method != "rtn"


def parse_scheme(
    name: str, *, group: int | None = None, symmetric: bool | None = None, activations: str | None = None
) -> Scheme:
    """Return the scheme of a name such as `awq-int4`, `gptq-int3`, `smooth-int8`, `llm.int8`, `fp8` or `rtn-int8`.

    Args:
        group: columns that share a scale; 0 for a whole row. Default: a row for int8 and fp8, otherwise 32.
        symmetric: whether groups have no zero points. Default: yes for int8 and fp8, otherwise no.
        activations: "exact", "int8" or "fp8". Default: int8 for smooth-int8, otherwise exact.

    Raises:
        RequestError: for an unknown name, or parts that do not go together.
    """
    if name == "llm.int8":
        found = Scheme(name, "rtn", Format("int8", activations="outliers"))
    elif name == "fp8":
        found = Scheme(name, "rtn", Format("fp8"))
    else:
        method, _, numbers = name.partition("-")
        if method not in METHODS or numbers not in (*BITS, "fp8"):
            raise RequestError(f"scheme (--scheme) {name!r} is not known; schemes are such as {EXAMPLES}")
        kind: NumberType = next(n for n in (*BITS, "fp8") if n == numbers)
        found = Scheme(name, next(m for m in METHODS if m == method), _format(kind, method))
    return replace(found, format=_with(found.format, group, symmetric, activations))


def _with(format: Format, group: int | None, symmetric: bool | None, activations: str | None) -> Format:
    """Return a format with the parts that are given. Raises RequestError for parts that do not go together."""
    if group is not None:
        if not 0 <= group <= LARGEST_GROUP:
            raise RequestError(f"group (--group) is {group}; it is a number of columns, or 0 for a scale for each row")
        format = replace(format, group=group)
    if symmetric is not None:
        if not symmetric and format.numbers == "fp8":
            raise RequestError("fp8 has no zero points; leave out --asymmetric")
        format = replace(format, offsets="none" if symmetric else "zero_points")
    if activations is not None:
        known = next((a for a in ACTIVATIONS if a == activations), None)
        if known is None:
            raise RequestError(
                f"activations (--activations) {activations!r} is not known; known are {', '.join(ACTIVATIONS)}"
            )
        if known in ("int8", "outliers") and format.numbers == "fp8":
            raise RequestError("activations in int8 need weights in whole numbers; take --activations fp8 or exact")
        format = replace(format, activations=known)
    return format


def _format(numbers: NumberType, method: str) -> Format:
    if numbers in ("int8", "fp8"):
        return Format(numbers, activations="int8" if method == "smooth" and numbers == "int8" else "exact")
    return Format(numbers, GROUP, offsets="zero_points")
