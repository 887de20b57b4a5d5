"""Compare methods of quantization on a model: python bench/methods.py MODEL --text FILE [--bits 4 3 2] [--draws 3]

Prints the KL of each method to the stored model, as a share of that of rounding to nearest: weights only, exact
activations, groups of 32 with zero points. The gates: GPTQ at most 0.62 (0.5 at 2 bits); AWQ at most 0.95 at 4 bits and
1.05 at 3.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import emit

from ridgeline.compress import Options, quantize

SCHEMES = ("gptq", "awq", "clip")
GATES = {("gptq", 4): 0.62, ("gptq", 3): 0.62, ("gptq", 2): 0.5, ("awq", 4): 0.95, ("awq", 3): 1.05}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    for bits in args.bits:
        for method in SCHEMES:
            options = [Options(args.sequences, args.length, seed, speed=False) for seed in range(args.draws)]
            found = [measure(args.model, f"{method}-int{bits}", args.text, o) for o in options]
            shares = [round(kl / rtn, 3) for kl, rtn in found]
            limit = GATES.get((method, bits), float("inf"))
            emit(
                f"methods: {Path(args.model).name}, {method}-int{bits}", max(shares) <= limit, shares=shares,
                rtn=[round(rtn, 4) for _, rtn in found],
            )  # fmt: skip


def measure(model: str, scheme: str, texts: list[str], options: Options) -> tuple[float, float]:
    """Return the KL of a scheme and that of rounding to nearest, on the held-out part of the texts."""
    with tempfile.TemporaryDirectory() as folder:
        report = quantize(model, scheme, out=Path(folder) / "out", data=texts, format="floats", options=options)
    assert report.comparison is not None
    found = [report.comparison.others[name].kl for name in (scheme, "rtn")]
    assert found[0] is not None and found[1] is not None
    return found[0].value, found[1].value


if __name__ == "__main__":
    main()
