"""Measure resident memory after many different prompts beside llama.cpp: python bench/resident.py [--context 2048]

Both programs read one GGUF file in Q8_0 with random weights (peer_shapes.py) and reserve the same context; llama.cpp
has one batch of that size, and micro-batches of 512. Prompts of one length, which have nothing in common, are answered
one by one. A line for each program has its resident memory after loading and after each 50 prompts, and its page
faults; ours also has the memory that was predicted. The last line has the ratio at the end; the bar is 1.1.

The gate: the first prompt, which is asked again at the end, has its first answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peer_shapes
from common import emit
from gguf import FileOf, write
from peer_envs import ensure
from peer_run import Process
from peer_table import OURS, Contender

BAR = 1.1  # times llama.cpp's resident memory
EVERY = 50  # prompts between two measurements
KIND = "Q8_0"


def measure(args: argparse.Namespace, prepared: FileOf) -> tuple[int, bool]:
    """Print the memory of a program; return its resident bytes at the end, and whether its answers were right."""
    process = Process(prepared, args.threads, max_tokens=args.context)
    ours = prepared.contender.peer == OURS
    rng, size = np.random.default_rng(0), peer_shapes.CONFIGS[args.shape]["vocab_size"] - 3
    prompts = [rng.integers(0, size, args.length).tolist() for _ in range(args.prompts)]
    found: dict[str, list[Any]] = {"prompts": [], "resident_mb": [], "minor_faults": [], "predicted_mb": []}

    def note(done: int) -> int:
        memory = process.ask(do="memory")
        found["prompts"].append(done)
        found["resident_mb"].append(round(memory["resident_bytes"] / 1e6, 1))
        found["minor_faults"].append(memory["minor_faults"])
        if ours:
            length = args.length if done else 0
            reply = process.ask(do="predict", prompt=length, tokens=args.tokens, earlier=max(done - 1, 0))
            found["predicted_mb"].append(round(reply["predicted_bytes"] / 1e6, 1))
        return int(memory["resident_bytes"])

    try:
        note(0)
        first = process.run(prompts[:1], args.tokens)["tokens"]
        for done, prompt in enumerate(prompts[1:], 2):
            process.run([prompt], args.tokens)
            if done % EVERY == 0 or done == len(prompts):
                last = note(done)
        right = process.run(prompts[:1], args.tokens)["tokens"] == first
    finally:
        process.stop()
    values = {name: column for name, column in found.items() if column}
    emit(f"resident: {prepared.contender.name}", right, shape=args.shape, context=args.context, **values)
    return last, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="S", choices="SML")
    parser.add_argument("--prompts", type=int, default=200, help="number of prompts, at least 2; default: 200")
    parser.add_argument("--length", type=int, default=512, help="tokens of each prompt; default: 512")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each answer; default: 8")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the longest context; default: 2048")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ridgeline-peers")
    parser.add_argument("--python", help="a Python with llama-cpp-python; default: one is installed under --work")
    parser.add_argument("--file", type=Path, help="the GGUF file; default: one is written under --work")
    args = parser.parse_args()
    work = args.work.resolve()
    path = args.file or write(args.shape, KIND, work)
    theirs = args.python or ensure(work, "llama.cpp")
    peer = Contender("llama.cpp", KIND, KIND, "llama_cpp")
    last, right = measure(
        args, FileOf(Contender(OURS, "auto/int8", KIND, "ridgeline"), args.shape, sys.executable, path)
    )
    other, also = measure(args, FileOf(peer, args.shape, theirs, path.parent))
    ratio = round(last / other, 3)
    sizes = {"prompts": args.prompts, "length": args.length, "tokens": args.tokens, "context": args.context}
    emit(
        "resident: ratio", right and also, shape=args.shape, **sizes, over_llama_cpp=ratio, bar=BAR, holds=ratio <= BAR
    )


if __name__ == "__main__":
    main()
