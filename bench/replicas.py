"""Measure what Ray adds to a request, and which part of shared prefixes the router finds.

    ridgeline serve pocket --replicas 2 --port 8001
    ridgeline serve pocket --replicas 2 --port 8002 --ray local
    python bench/replicas.py http://127.0.0.1:8001 http://127.0.0.1:8002

The servers are asked in turn, so that other work on the machine slows both. Times are medians of requests for 16
tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from statistics import median

import httpx

BLOCK = 16  # tokens of a page
ROUNDS = 60
FAMILIES, ASKED, SHARED, OWN = 12, 10, 320, 40  # prompts that share their beginning, and lengths in tokens


def ask(client: httpx.Client, url: str, prompt: Sequence[int], tokens: int) -> tuple[float, float, int]:
    """Return the seconds to the first token and to the last one, and the number of cached tokens."""
    start, first, cached = time.perf_counter(), None, 0
    body = {
        "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = time.perf_counter() if first is None else first
                usage = json.loads(line[6:]).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
    assert first is not None
    return first - start, time.perf_counter() - start, cached


def latencies(client: httpx.Client, urls: Sequence[str], concurrency: int) -> None:
    """Print the median times of each server, and the difference to the first one."""
    chance, found = Random(concurrency), {url: list[tuple[float, float, int]]() for url in urls}
    with ThreadPoolExecutor(concurrency) as pool:
        for _ in range(max(8, ROUNDS // concurrency)):
            for url in urls:
                prompts = [[chance.randrange(3, 1000) for _ in range(32)] for _ in range(concurrency)]
                found[url] += pool.map(lambda prompt, url=url: ask(client, url, prompt, 16), prompts)
    base = None
    for url, values in found.items():
        ttft, total = (median(each[i] for each in values) * 1e3 for i in (0, 1))
        base = base or (ttft, total)
        added = f"{ttft - base[0]:+6.2f} {total - base[1]:+6.2f}"
        print(f"concurrency {concurrency:>2}  {url}  first {ttft:7.2f} ms  last {total:7.2f} ms  added {added}")


def hits(client: httpx.Client, url: str) -> None:
    """Print the cached tokens of prompts with shared beginnings, beside those of one endless cache, and the loads."""
    chance = Random(0)
    shared = [[chance.randrange(3, 1000) for _ in range(SHARED)] for _ in range(FAMILIES)]
    prompts = [
        [*shared[i % FAMILIES], *(chance.randrange(3, 1000) for _ in range(OWN))] for i in range(FAMILIES * ASKED)
    ]
    chance.shuffle(prompts)
    before = client.get(f"{url}/live").json()["replicas"]
    seen, oracle, cached = set[tuple[int, ...]](), 0, 0
    for start in range(0, len(prompts), 4):  # four at once; they do not see each other in the endless cache either
        group = prompts[start : start + 4]
        for prompt in group:
            blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
            oracle += BLOCK * sum(block in seen for block in blocks)
        seen |= {tuple(prompt[:end]) for prompt in group for end in range(BLOCK, len(prompt) + 1, BLOCK)}
        with ThreadPoolExecutor(4) as pool:
            cached += sum(each[2] for each in pool.map(lambda prompt: ask(client, url, prompt, 4), group))
    after = client.get(f"{url}/live").json()["replicas"]
    loads = [b["routed"] - a["routed"] for a, b in zip(before, after, strict=True)]
    ratio = max(loads) * len(loads) / sum(loads)
    print(f"{url}  cached {cached} of {oracle} ({cached / oracle:.3f})  loads {loads}  max/mean {ratio:.2f}")


def main() -> None:
    """Ask the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL", help="servers; differences are to the first one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    given = parser.parse_args()
    with httpx.Client(timeout=120, limits=httpx.Limits(max_connections=64)) as client:
        for concurrency in given.concurrency:
            latencies(client, given.urls, concurrency)
        for url in given.urls:
            hits(client, url)


if __name__ == "__main__":
    main()
