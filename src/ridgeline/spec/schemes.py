"""Names of schemes: a method that chooses codes, and the format of the matrices that it makes."""

from __future__ import annotations

import re
from typing import Final

from ridgeline.spec.quant import LARGEST_GROUP, METHODS, Format, Method, NumberType

BITS: Final[tuple[NumberType, ...]] = ("int8", "int6", "int5", "int4", "int3", "int2")
GROUP: Final = 32  # columns that share a scale, in fewer than 8 bits
_NAME = re.compile(rf"(?P<method>{'|'.join(METHODS)})-(?P<numbers>{'|'.join(BITS)}|fp8)(?:-(?P<group>[1-9]\d*))?")


def scheme_of(name: str) -> tuple[Method, Format] | None:
    """Return the method and the format of a name such as `awq-int4`, `gptq-int3-128`, `llm.int8`; None for others.

    A number at the end is the size of groups. Without one, int8 and fp8 have a scale for each row, the others groups of
    32 with zero points.
    """
    if name == "llm.int8":
        return "rtn", Format("int8", activations="outliers")
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    method = next(m for m in METHODS if m == match["method"])
    numbers: NumberType = next(n for n in (*BITS, "fp8") if n == match["numbers"])
    group = int(match["group"] or 0)
    if group > LARGEST_GROUP:
        return None
    if numbers in ("int8", "fp8"):
        is_rounded = method == "smooth" and numbers == "int8"
        return method, Format(numbers, group, activations="int8" if is_rounded else "exact")
    return method, Format(numbers, group or GROUP, offsets="zero_points")
