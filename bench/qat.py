"""Compare trained codes with GPTQ on the same data: python bench/qat.py MODEL --text FILES [--bits 3]

Prints the KL to the stored model of rounding to nearest, of GPTQ and of QAT: weights only, exact activations, groups of
32 with zero points. Folders stand for the Python files below them. The gate: at 3 bits, QAT has at most half of GPTQ's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from common import emit

from ridgeline.compress import Options, Report, quantize

SHARE = {3: 0.5}  # largest KL as a share of GPTQ's, by bits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[3])
    parser.add_argument("--train-tokens", type=int, default=1_500_000)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    texts = [file for text in args.text for file in files_of(Path(text)) if file.stat().st_size]
    options = Options(args.sequences, args.length, args.seed, None, args.threads, args.train_tokens)
    for bits in args.bits:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            report = quantize(args.model, f"qat-int{bits}", out=Path(folder) / "out", data=texts, options=options)
        rtn, gptq, qat = kls(report)
        emit(
            f"qat: {Path(args.model).name}, {bits} bits", qat <= SHARE.get(bits, 1.0) * gptq, rtn=round(rtn, 4),
            gptq=round(gptq, 4), qat=round(qat, 4), share_of_gptq=round(qat / gptq, 3),
            train_tokens=args.train_tokens, processor_s=round(time.process_time() - start),
        )  # fmt: skip


def files_of(path: Path) -> list[Path]:
    """Return the file, or the Python files below the folder."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def kls(report: Report) -> list[float]:
    """Return the KL of rounding to nearest, of GPTQ and of QAT."""
    assert report.comparison is not None
    found = [quality.kl for quality in report.comparison.others.values()]
    return [kl.value for kl in found if kl is not None]


if __name__ == "__main__":
    main()
