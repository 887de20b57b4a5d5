"""Run one peer as a process: requests on stdin, answers on stdout, a JSON line each. Standard library only.

    {"do": "load", "path", "format", "threads", "max_seqs", "max_tokens", "options"} -> {"load_s", "version"}
    {"do": "run", "prompts": [[id]], "tokens": n} -> {"first_s", "tokens_per_s", "tokens": [[id]]}
    {"do": "memory"} -> {"peak_bytes", "resident_bytes", "minor_faults"}, all of this process so far
    {"do": "predict", "prompt", "tokens", "earlier"} -> {"predicted_bytes"}, only from Ridgeline

A run is greedy, never ends early, and prompts have one length. first_s: time until every sequence has its first token.
tokens_per_s: tokens of all sequences per second, from then until the first of them has its last token.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Emit = Callable[[int, int], None]  # sequence, token


class Peer(Protocol):
    """The protocol of a driver. Both methods are timed from outside."""

    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int) -> str:
        """Load the model and return the version. A driver with options has them as further named arguments."""

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        """Generate `tokens` tokens for each prompt; emit each as soon as a caller could have it."""


class Clock:
    """Records when tokens came. Tokens of one step come together: those within `TOGETHER_S` share a stamp."""

    TOGETHER_S = 5e-4

    def __init__(self, count: int, tokens: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.stamps: list[list[float]] = []
        self._each, self._waiting = tokens, count
        self._all_begun = self._first_done = -1  # indices of stamps
        self._total, self._start = 0, time.perf_counter()

    def take(self, sequence: int, token: int) -> None:
        now, mine = time.perf_counter() - self._start, self.tokens[sequence]
        self._total += 1
        if self.stamps and now - self.stamps[-1][0] < self.TOGETHER_S:
            self.stamps[-1][1] = self._total
        else:
            self.stamps.append([now, self._total])
        mine.append(int(token))
        if len(mine) == 1:
            self._waiting -= 1
            self._all_begun = len(self.stamps) - 1
        if len(mine) == self._each and self._first_done < 0:
            self._first_done = len(self.stamps) - 1

    def report(self) -> dict[str, Any]:
        if self._waiting or any(len(t) != self._each for t in self.tokens):
            raise RuntimeError(f"asked for {self._each} tokens each, {[len(t) for t in self.tokens]} came")
        (begin, had), (end, have) = self.stamps[self._all_begun], self.stamps[self._first_done]
        rate = (have - had) / (end - begin) if end > begin else 0.0
        return {"first_s": begin, "tokens_per_s": rate, "tokens": self.tokens}


def answer(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "load":
        start = time.perf_counter()
        sizes = (request["threads"], request["max_seqs"], request["max_tokens"])
        version = peer.load(request["path"], request["format"], *sizes, **request.get("options", {}))
        return {"load_s": time.perf_counter() - start, "version": version}
    if request["do"] == "run":
        clock = Clock(len(request["prompts"]), request["tokens"])
        peer.run(request["prompts"], request["tokens"], clock.take)
        return clock.report()
    if request["do"] == "predict":
        return {"predicted_bytes": peer.predict(request["prompt"], request["tokens"], request["earlier"])}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return {"peak_bytes": memory_bytes("VmHWM"), "resident_bytes": memory_bytes("VmRSS"), "minor_faults": faults}


def memory_bytes(name: str) -> int:
    """Return a figure of this process's memory as Linux states it: VmHWM is the peak of what is resident, VmRSS now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def serve(make: Callable[[], Peer]) -> None:
    """Answer requests until stdin ends. The output of libraries goes to stderr. make: called inside, so that imports
    count as loading.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = make()
    for line in sys.stdin:
        try:
            reply = answer(peer, json.loads(line))
        except Exception as e:
            traceback.print_exc()
            reply = {"error": f"{type(e).__name__}: {e}"[:500]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
