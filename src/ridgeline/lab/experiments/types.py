"""Bytes and ranges of the types of numbers: exact items, which hold on every machine."""

from __future__ import annotations

import numpy as np

from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, equal
from ridgeline.spec.dtype import DTYPE_BYTES
from ridgeline.spec.quant import NUMBERS, format_of

# What the claim says of each type: bytes, and the least and the largest number where it names them.
SAID: dict[str, tuple[float, ...]] = {
    "fp32": (4,), "bf16": (2,), "fp8": (1, -240, 240), "int8": (1, -128, 127), "int4": (0.5, -8, 7),
}  # fmt: skip


def _float8(bias: int, mantissa: int) -> float:
    """Return the largest number with 4 bits of exponent. mantissa: the largest 3 bits at the largest exponent."""
    return float(2 ** (15 - bias) * (1 + mantissa / 8))


def predict(setup: Setup) -> Facts:
    """Compute ranges from bits. e4m3fn gives up one pattern for NaN, e4m3fnuz has another bias, IEEE's one exponent."""
    whole = {f"int{bits}": [bits / 8, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1] for bits in (8, 4)}
    return {
        "types": {"fp32": [4.0], "bf16": [2.0], "fp8": [1.0, -_float8(7, 6), _float8(7, 6)], **whole},
        "e4m3fnuz": _float8(8, 7), "e4m3_of_ieee": _float8(7, 7) / 2,
    }  # fmt: skip


def measure(setup: Setup) -> Facts:
    """Read the bytes and the levels that the kernels use; those of fp8 are the numbers of all 256 codes."""
    levels = np.array(NUMBERS["fp8"].levels)
    found: dict[str, list[float]] = {"fp32": [DTYPE_BYTES["float32"]], "bf16": [DTYPE_BYTES["bfloat16"]]}
    found["fp8"] = [NUMBERS["fp8"].bits / 8, float(np.nanmin(levels)), float(np.nanmax(levels))]
    for name in ("int8", "int4"):
        numbers = NUMBERS[format_of(name).numbers]
        found[name] = [numbers.bits / 8, numbers.low, numbers.high]
    return {"types": found}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Count the types that are not as the claim says."""
    found = measured["types"]
    wrong = [name for name, said in SAID.items() if list(said) != found[name]]
    texts = {"fp8": f"fp8 (e4m3fn) reaches {found['fp8'][2]:g}"}
    seen = ", ".join(texts.get(name, f"{name} has {found[name]}") for name in wrong) or "all types are as said"
    fit = [name for name in SAID if found[name] == predicted["types"][name]]
    return (
        equal(
            25, len(wrong), 0,
            f"{seen}; {predicted['e4m3fnuz']:g} is the end of e4m3fnuz, and of e4m3 with infinities as IEEE has them; "
            f"{len(fit)} of {len(SAID)} types are as their bits say",
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "types",
    "Bytes and ranges of the types of numbers",
    (25,),
    predict,
    measure,
    judge,
    "Predicted are ranges from the bits of exponent and mantissa. Measured are the numbers that the kernels use. The "
    "8-bit floats of GPUs since the H100 are e4m3fn, which has no infinity and therefore reaches 448.",
    timed=False,
)
