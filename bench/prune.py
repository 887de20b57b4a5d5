"""Compare what ranks parts in pruning: python bench/prune.py MODEL --text FILES [--keep mlp=0.5] [--seeds 3]

Prints the loss on a held-out part, in nats per token, right after pruning by activation, by the norms of weights and by
chance, each with several seeds: they draw the calibration sequences, the held-out part and the random ranks. The gate:
activation loses less than weights, and weights less than chance, with each seed.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from statistics import mean

from common import emit

from ridgeline.compress.prune import PruneOptions, parse_keep, prune

IMPORTANCE = ("activation", "weights", "random")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--keep", default="mlp=0.5")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=8192)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"original": [], **{name: [] for name in IMPORTANCE}}
    for seed in range(args.seeds):
        for name in IMPORTANCE:
            options = PruneOptions(
                importance=name, seed=seed, sequences=args.sequences, length=args.length,
                held_out_tokens=args.held_out, threads=args.threads,
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                report = prune(
                    args.model, parse_keep(args.keep), out=Path(folder) / "out", data=args.text, options=options
                )
            assert report.comparison is not None
            found[name].append(math.log(report.comparison.others["pruned"].perplexity.value))
        found["original"].append(math.log(report.comparison.original.perplexity.value))
    rows = zip(found["activation"], found["weights"], found["random"], strict=True)
    is_ordered = all(a < b < c for a, b, c in rows)
    figures = {name: " ".join(f"{loss:.3f}" for loss in losses) for name, losses in found.items()}
    means = {f"{name}_mean": round(mean(losses), 3) for name, losses in found.items()}
    emit(f"prune: {Path(args.model).name}, {args.keep}", is_ordered, **figures, **means)


if __name__ == "__main__":
    main()
