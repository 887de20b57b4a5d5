"""Measure how long a large input pauses another client's stream: python bench/pauses.py [MODEL] [--rounds N]

One client streams from `ridgeline serve`, while another sends inputs that are large, deep, or slow to compile as a
grammar. Each line gives the longest time between two pieces of the stream, as the median over rounds, beside the same
without input. The limit on characters is raised, so that whole texts are tokenized. The gate: each input has an answer
below status 500, and the stream goes on until the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import emit

WORDS = "word and "
MIB = 1 << 20


def completion(text: str, **fields: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": text, "max_tokens": 16, **fields}).encode()


def inputs() -> dict[str, tuple[str, bytes]]:
    """Return (path, body) of each input by its name."""
    lazy = "(.*a.{20}b|.*b.{25}c)*"
    return {
        "nothing": ("/v1/models", b""),
        "a short prompt": completion("def f("),
        "4 MiB of text": completion(WORDS * (4 * MIB // len(WORDS))),
        "15 MiB of text": completion(WORDS * (15 * MIB // len(WORDS))),
        "15 MiB to /tokenize": ("/tokenize", json.dumps({"prompt": WORDS * (15 * MIB // len(WORDS))}).encode()),
        "10 MiB of integers": ("/v1/completions", b'{"prompt":[' + b"123456789," * MIB + b"1]}"),
        "3 MiB of empty lists": ("/v1/completions", b'{"prompt":"x","metadata":{"a":[' + b"[]," * MIB + b"1]}}"),
        "a slow pattern, n = 8": completion("x", n=8, structured_outputs={"regex": lazy}, max_tokens=64),
        "a grammar of 200,000 a": completion("x", structured_outputs={"regex": "a" * 200_000}),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    command = [sys.executable, "-m", "ridgeline", "serve", options.model, "--port", "0", "--quiet",
               "--max-prompt-chars", str(16 * MIB)]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        ready = r"^serving .* at http://127.0.0.1:(\d+)"
        port = next(int(found[1]) for line in server.stderr if (found := re.search(ready, line)))
        try:
            for name, (path, body) in inputs().items():
                found = [measure(port, path, body) for _ in range(options.rounds)]
                emit(
                    f"pauses: {Path(options.model).name}, {name}", all(f["status"] < 500 for f in found),
                    **{key: round(statistics.median(f[key] for f in found), 1) for key in found[0]},
                    rss_mb=memory(server.pid),
                )  # fmt: skip
        finally:
            server.terminate()


def measure(port: int, path: str, body: bytes) -> dict[str, float]:
    """Send an input while another client streams; return the longest pause, and the time of the answer."""
    with streaming(port) as arrivals:
        time.sleep(1)
        start = time.perf_counter()
        status = send(port, path, body)
        end = time.perf_counter()
        time.sleep(0.2)
        times = [t for t in arrivals if start - 0.1 <= t <= end + 0.2]
    pause = max(b - a for a, b in pairwise(times))
    return {"pause_ms": 1e3 * pause, "answer_ms": 1e3 * (end - start), "status": status}


@contextmanager
def streaming(port: int) -> Iterator[list[float]]:
    """Stream answers one after another in a thread; yield the list to which arrival times are added."""
    arrivals, over = list[float](), threading.Event()
    body = json.dumps({"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "stream": True})

    def run() -> None:
        while not over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            while not over.is_set() and answer.read1(65536):
                arrivals.append(time.perf_counter())
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield arrivals
    finally:
        over.set()
        thread.join()


def send(port: int, path: str, body: bytes) -> int:
    """Return the status of the answer; without a body, nothing is sent for a second."""
    if not body:
        time.sleep(1)
        return 200
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def memory(pid: int) -> int:
    """Return the resident megabytes of the HTTP process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) // 1024 if found else 0


if __name__ == "__main__":
    main()
