"""Time a decode step by the type of keys and values, and count the memory of the state, in the whole engine.

    python bench/state.py --shape M --weights int8 --context 8192

All types run in turn in one process, over the pages of a context that was filled without a prefill. It prints the
least time of a step and the median, and the tokens per second of both.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

from peer_shapes import COMMON, CONFIGS

from ridgeline.archs import spec_from_config
from ridgeline.measure.steps import Steps, load_random
from ridgeline.spec.storage import STORAGES, state_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=CONFIGS, default="M")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument(
        "--types", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32", "float16"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a round")
    args = parser.parse_args()
    spec = spec_from_config(CONFIGS[args.shape] | COMMON)
    loaded = load_random(spec, dtype="bfloat16", weights=args.weights, device="cpu")
    length = args.context + args.steps + 16
    engines = {t: Steps(replace(loaded, storage=STORAGES[t]), 1, length) for t in args.types}
    clock: dict[str, list[float]] = {t: [] for t in args.types}
    for _ in range(args.rounds):
        for name, steps in engines.items():
            clock[name] += [step.seconds for step in steps.decodes(1, args.context, args.steps)][1:]
    print(f"{args.shape}, {args.weights}, {args.context} tokens, {loaded.table.memory.device}")
    for name in args.types:
        mixers = [layer.mixer for layer in spec.layers if layer.mixer]
        size = sum(state_bytes(m.state(), STORAGES[name], args.context) for m in mixers)
        times = f"{min(clock[name]) * 1e3:8.2f} {median(clock[name]) * 1e3:8.2f} ms"
        rates = f"{1 / min(clock[name]):7.2f} {1 / median(clock[name]):7.2f} tokens/s"
        print(f"{name:9} {times} {rates} {size / 1e9:6.3f} GB")


if __name__ == "__main__":
    main()
