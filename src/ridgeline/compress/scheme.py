"""The schemes that users name: a method, and the format of the matrices that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ridgeline.errors import RequestError
from ridgeline.load.gguf.blocks import TYPES
from ridgeline.load.gguf.encode import is_searched
from ridgeline.load.gguf.stored import format_of_block
from ridgeline.spec.quant import ACTIVATIONS, LARGEST_GROUP, PLAIN, Format, Method
from ridgeline.spec.schemes import BITS, scheme_of

__all__ = ["BITS", "Scheme", "parse_scheme"]

# Types of GGUF files that a whole model can be written in, as llama-quantize does, by the name of the scheme.
GGUF_TYPES: Mapping[str, str] = MappingProxyType(
    {kind.lower(): kind for kind in ("Q8_0", "Q6_K", "Q4_K", "Q4_0", "F16", "BF16")}
)
EXAMPLES = "awq-int4, gptq-int3, qat-int3, clip-int4, rtn-int8, smooth-int8, llm.int8, fp8, fp8-block, q4_k, f16"
KEEP, MOST_KEPT = 0.01, 0.1  # shares of columns that stay in 16 bits: the default, and the largest
BLOCK = 128  # rows and columns of a block of fp8-block, as in DeepSeek-V3
FP8: Mapping[str, Format] = {
    "fp8": Format("fp8"), "fp8-tensor": Format("fp8", rows=0), "fp8-block": Format("fp8", BLOCK, BLOCK),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to choose codes.

    Attributes:
        method: "rtn" rounds to nearest; "clip" chooses ranges by importance; "awq" and "smooth" scale channels; "gptq"
            makes up for errors; "qat" trains the codes of "gptq"; "keep" stores the columns with the largest inputs in
            16 bits; "type" takes a type of GGUF files.
        format: the format of the matrices; that of most with a type of GGUF files.
        gguf: the type of GGUF files; "" for other methods.
        act_order, static: see `compress.gptq.GPTQ`.
        clip: whether ranges are chosen by error, in AWQ and GPTQ.
        alpha: share of the difficulty that SmoothQuant moves into weights.
        damping: see `compress.gptq.DAMPING`.
        keep: share of the columns of each matrix that "keep" stores in 16 bits.
    """

    name: str
    method: Method
    format: Format
    act_order: bool = True
    static: bool = False
    clip: bool = True
    alpha: float = 0.5
    damping: float = 0.01
    gguf: str = ""
    keep: float = KEEP

    @property
    def is_trained(self) -> bool:
        """Return whether codes are trained after they were chosen."""
        return self.method == "qat"

    @property
    def start(self) -> Scheme:
        """Return the scheme that chooses the codes before they are trained; the scheme itself if they are not."""
        name = self.name.replace("qat", "gptq", 1)
        return replace(self, name=name, method="gptq") if self.is_trained else self

    @property
    def reads_data(self) -> bool:
        """Return whether calibration data changes the codes or the report."""
        return self.needs_data or self.format.activations == "outliers" or is_searched(self.gguf)

    @property
    def moves_scales(self) -> bool:
        """Return whether scales of channels move into norms. LLM.int8() does so for small columns of outliers."""
        return self.method in ("awq", "smooth") or self.format.activations == "outliers"

    @property
    def needs_data(self) -> bool:
        """Return whether codes depend on calibration data."""
        return self.method not in ("rtn", "type")


def parse_scheme(
    name: str, *, group: int | None = None, symmetric: bool | None = None, activations: str | None = None,
    keep: float | None = None,
) -> Scheme:  # fmt: skip
    """Return the scheme of a name such as `awq-int4`, `gptq-int3`, `smooth-int8`, `llm.int8`, `fp8-block` or `q4_k`.

    Args:
        group: columns that share a scale; 0 for a whole row. Default: a row for int8 and fp8, otherwise 32. For
            fp8-block, the rows and columns of a block, 128 by default.
        symmetric: whether groups have no zero points. Default: yes for int8 and fp8, otherwise no.
        activations: "exact", "int8" or "fp8". Default: int8 for smooth-int8, otherwise exact.
        keep: share of the columns that keep-TYPE stores in 16 bits, at most 0.1. Default: 0.01.

    Raises:
        RequestError: for an unknown name, or parts that do not go together.
    """
    if name in GGUF_TYPES:
        return _typed(name, {"--group": group, "--symmetric": symmetric, "--activations": activations, "--keep": keep})
    found: tuple[Method, Format] | None = ("rtn", FP8[name]) if name in FP8 else scheme_of(name)
    if found is None:
        raise RequestError(f"scheme (--scheme) {name!r} is not known; schemes are such as {EXAMPLES}")
    method, format = found
    return _keeping(Scheme(name, method, _with(format, group, symmetric, activations)), keep)


def _typed(name: str, given: Mapping[str, object]) -> Scheme:
    """Return the scheme of a type of GGUF files. Raises RequestError for options that the type decides."""
    if extra := [flag for flag, value in given.items() if value is not None]:
        raise RequestError(
            f"scheme (--scheme) {name} is a type of GGUF files, which decides this; leave out {extra[0]}"
        )
    kind = TYPES[GGUF_TYPES[name]]
    return Scheme(name, "type", PLAIN if kind.is_float else format_of_block(kind), gguf=kind.name)


def _keeping(scheme: Scheme, keep: float | None) -> Scheme:
    """Return a scheme with a share of columns to keep. Raises RequestError for parts that do not go together."""
    if scheme.method != "keep":
        if keep is not None:
            raise RequestError(
                f"keep (--keep) is for the schemes keep-TYPE, such as keep-int4, and not for {scheme.name}"
            )
        return scheme
    if scheme.format.activations != "exact":
        raise RequestError(
            f"{scheme.name} multiplies columns in 16 bits with exact activations; leave out --activations"
        )
    share = KEEP if keep is None else keep
    if not 0 < share <= MOST_KEPT:
        raise RequestError(f"keep (--keep) is {share:g} of the columns; it must be above 0, and at most {MOST_KEPT:g}")
    return replace(scheme, keep=share)


def _with(format: Format, group: int | None, symmetric: bool | None, activations: str | None) -> Format:
    """Return a format with the parts that are given. Raises RequestError for parts that do not go together."""
    if group is not None:
        if not 0 <= group <= LARGEST_GROUP:
            raise RequestError(f"group (--group) is {group}; it is a number of columns, or 0 for a scale for each row")
        if format.rows == 0:
            raise RequestError("fp8-tensor has one scale for each matrix; leave out --group")
        if format.rows > 1 and not group:
            raise RequestError("group (--group) is 0; fp8-block needs a size of blocks, such as 128")
        format = replace(format, group=group, rows=group if format.rows > 1 else 1)
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
        if known == "bf16":
            raise RequestError(
                "activations in bf16 are stored in no format of checkpoints; quantize with exact ones, and open the "
                "model with --activations bf16"
            )
        if known in ("int8", "outliers") and format.numbers == "fp8":
            raise RequestError("activations in int8 need weights in whole numbers; take --activations fp8 or exact")
        format = replace(format, activations=known)
    return format
