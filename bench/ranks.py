"""Time what ranks of a model add: gathering parts of several sizes, and a decoded token with 1 rank and with more.

python bench/ranks.py [--ranks 2] [--model pocket] [--rounds 5]
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import time
from itertools import combinations
from statistics import median

import numpy as np

from ridgeline import LLM, SamplingParams
from ridgeline.runtime.rank_group import RankGroup, shared_bytes

CALLS = 2000
SIZES = (4 << 10, 16 << 10, 256 << 10, 4 << 20)


def gathers(size: int) -> dict[int, float]:
    """Return the median seconds of gathering parts, by the bytes of a part. Each rank is a process."""
    memory = mmap.mmap(-1, shared_bytes(size))
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low, high in combinations(range(size), 2):
        peers[low][high], peers[high][low] = socket.socketpair()
    rank = next((rank for rank in range(1, size) if os.fork() == 0), 0)
    group = RankGroup(rank, size, memory, peers[rank])
    found = {}
    for count in SIZES:
        part = np.random.default_rng(rank).integers(0, 256, count, np.uint8)
        times = []
        for _ in range(max(50, CALLS * 4096 // count)):
            start = time.perf_counter()
            parts = group.gather(part)
            times.append(time.perf_counter() - start)
        assert all(
            np.array_equal(each, np.random.default_rng(i).integers(0, 256, count, np.uint8))
            for i, each in enumerate(parts)
        )
        found[count] = median(times)
    group.gather(np.zeros(1))
    if rank:
        os._exit(0)
    return found


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="Number of ranks. Default: 2.")
    parser.add_argument("--model", default="pocket", help="The model. Default: pocket.")
    parser.add_argument("--rounds", type=int, default=5, help="Answers of each kind, in turn. Default: 5.")
    args = parser.parse_args()
    for count, seconds in gathers(args.ranks).items():
        print(f"gather {count:>9,} bytes a rank  {1e6 * seconds:8.0f} us")
    llms = {size: LLM(args.model, tensor_parallel_size=size) for size in (1, args.ranks)}
    times: dict[int, list[float]] = {size: [] for size in llms}
    tokens = {}
    for _ in range(args.rounds):
        for size, llm in llms.items():
            start = time.perf_counter()
            (output,) = llm.generate(["def f(x):"], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
            times[size].append((time.perf_counter() - start) / 100)
            tokens[size] = output.outputs[0].token_ids
    assert tokens[1] == tokens[args.ranks], "ranks gave other tokens"
    for size, found in times.items():
        threads = llms[size].config.threads
        print(f"{size} rank{'s' if size > 1 else ' '}  {1e3 * median(found):.2f} ms a token, {threads} threads each")


if __name__ == "__main__":
    main()
