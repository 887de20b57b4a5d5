"""Compare the throughput of embeddings with sentence-transformers, on the same texts, CPU and threads.

    python bench/embeddings.py MODEL --peer ENV/bin/python

The peer runs in an environment of its own that has sentence-transformers. Rounds alternate, so that other work on the
machine slows both; each figure is the median. Before any time is printed, the vectors must agree: the least cosine
similarity is the gate. `--weights int8` rounds our weights.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from ridgeline import LLM

DRIVER = Path(__file__).with_name("peer_drivers") / "drive_sentence_transformers.py"
GATE = {"auto": 0.9999, "int8": 0.99}  # least cosine similarity, by the format of our weights
WORDS = "the of a model text cat sat on mat runs language fast query document river green engine system price".split()
MEDIAN, SIGMA = 40.0, 0.8  # words of a text: a log-normal distribution


def texts(count: int, longest: int, seed: int = 1) -> list[str]:
    """Return texts whose numbers of words are log-normal, at most `longest` words."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, count).astype(int), 1, longest)
    return [" ".join(rng.choice(WORDS, n)) for n in lengths]


class Peer:
    """sentence-transformers in its own process."""

    def __init__(self, python: str, model: str, given: list[str], threads: int, batch: int) -> None:
        self._process = subprocess.Popen(
            [python, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._ask({"model": model, "texts": given, "threads": threads, "batch": batch})

    def round(self) -> tuple[float, np.ndarray]:
        """Return the seconds of one round, and the vectors."""
        found = self._ask({})
        rows = np.frombuffer(base64.b64decode(found["rows"]), "<f4").reshape(found["shape"])
        return found["seconds"], rows

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _ask(self, message: dict) -> dict:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the peer ended; run its driver by hand to see why")
        return dict(json.loads(line))


def main() -> None:
    """Print a row for each system, after the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    llm = LLM(flags.model, weights=flags.weights, threads=flags.threads)
    given = texts(flags.count, llm.max_model_len - 2)
    tokens = sum(len(llm.encode(text)) for text in given)
    peer = Peer(flags.peer, flags.model, given, flags.threads, flags.batch)
    ours, theirs = [], []
    for _ in range(flags.rounds):
        begin = time.perf_counter()
        found = llm.embed(given)
        ours.append(time.perf_counter() - begin)
        seconds, rows = peer.round()
        theirs.append(seconds)
    peer.close()
    least = float((found * rows).sum(1).min() / 1.0)
    if least < GATE[flags.weights]:
        sys.exit(f"the vectors differ: the least cosine similarity is {least:.5f}, below {GATE[flags.weights]}")
    print(f"{flags.count} texts, {tokens} tokens, {flags.threads} threads, least cosine similarity {least:.6f}")
    for name, each in (("ridgeline", ours), ("sentence-transformers", theirs)):
        mid = median(each)
        print(
            f"{name:24}{flags.count / mid:8.1f} texts/s {tokens / mid:10.0f} tokens/s  "
            f"best {flags.count / min(each):.1f}"
        )
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    print(f"ratio {median(theirs) / median(ours):.2f}, of single rounds {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
