"""Keep processes of contenders loaded, and measure them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import peer_shapes
from common import beyond_caches
from peer_envs import ROOT, PeerError, convert, ensure
from peer_table import CASES, MAX_SEQS, MAX_TOKENS, OURS, Case, Contender

DRIVERS = ROOT / "bench" / "peer_drivers"
# the peak while a peer loads, as a multiple of the weights
MEMORY_FACTOR = {"fp32": 1.6, "bf16": 2.2, "int8": 2.5, "int4": 2.5}
LEFT_FREE = 1.5e9  # bytes
TIMEOUT_S = 600


class Prepared:
    """A contender whose environment and model are ready."""

    def __init__(self, work: Path, shape: str, contender: Contender) -> None:
        """Prepare a contender. Raises PeerError."""
        self.contender, self.shape = contender, shape
        ours = contender.peer == OURS
        self.python = sys.executable if ours else ensure(work, contender.peer)
        self.folder = work / "models" / shape / "hf"
        if contender.converter:
            name = f"{contender.peer}-{contender.form}"
            self.folder = convert(work, shape, name, contender.converter, contender.tool, contender.form)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits per weight of a converted model, from the size of its files if it has some, else from its
        kind.
        """
        if not self.contender.converter:
            return peer_shapes.bits_per_weight(self.shape, self.contender.kind)
        files = (f for name in ("*.gguf", "*.bin", "*.data", "*.onnx") for f in self.folder.glob(name))
        size = sum(f.stat().st_size for f in files if "token" not in f.name)
        return 8 * size / peer_shapes.num_params(self.shape)

    def peak_estimate(self) -> float:
        kind = "fp32" if self.contender.setting == "widened" else self.contender.kind
        return MEMORY_FACTOR[kind] * peer_shapes.weight_bytes(self.shape, kind)


class Process:
    """A loaded contender. load_s counts from the start of its process."""

    def __init__(self, prepared: Prepared, threads: int, how: str = "", max_tokens: int = MAX_TOKENS) -> None:
        """Start the process. how: a word for the driver beside the format. max_tokens: the tokens that it must be able
        to keep. Raises PeerError.
        """
        self.prepared, self.contender, self.warm = prepared, prepared.contender, set[str]()
        self.max_tokens, setting = max_tokens, prepared.contender.how
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        env |= dict(setting.variables)
        script = DRIVERS / f"drive_{self.contender.tool}.py"
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [prepared.python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=env,
        )  # fmt: skip
        try:
            reply = self.ask(
                do="load", path=str(prepared.folder), format=f"{self.contender.form} {how}".strip(), threads=threads,
                max_seqs=MAX_SEQS, max_tokens=max_tokens, options=dict(setting.options),
            )  # fmt: skip
        except PeerError:
            self.stop()
            raise
        self.load_s, self.version = time.perf_counter() - start, reply["version"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        line = ""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            there, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
            if not there:
                raise PeerError(f"no answer within {TIMEOUT_S} s")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise PeerError(f"its process ended with status {self._process.wait(30)}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        return self.ask(do="run", prompts=prompts, tokens=tokens)

    def peak_bytes(self) -> int:
        return int(self.ask(do="memory")["peak_bytes"])

    def resident_bytes(self) -> int:
        return int(self.ask(do="memory")["resident_bytes"])

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class Fleet:
    """Holds loaded contenders. Where memory is short, it unloads the most recently used one, which is needed last."""

    def __init__(self, threads: int) -> None:
        self._threads, self._running = threads, dict[str, Process]()

    def get(self, prepared: Prepared, max_tokens: int = MAX_TOKENS) -> Process:
        """Return the process of a contender; start it if it is not loaded for so many tokens. Raises PeerError."""
        name = prepared.contender.name
        process = self._running.pop(name, None)
        if process and process.max_tokens != max_tokens:
            process.stop()
            process = None
        if process is None:
            while self._running and available_bytes() < prepared.peak_estimate() + LEFT_FREE:
                self._running.pop(next(reversed(self._running))).stop()
            process = Process(prepared, self._threads, max_tokens=max_tokens)
        self._running[name] = process
        return process

    def drop(self, prepared: Prepared) -> None:
        if process := self._running.pop(prepared.contender.name, None):
            process.stop()

    def stop(self) -> None:
        for process in self._running.values():
            process.stop()
        self._running.clear()


BUFFERS = 7  # their median counts, because one machine reads one in ten 1.6 times as fast as the others


class Limits:
    """The limits of the machine, measured between runs with our kernels: bytes and operations per second."""

    def __init__(self, threads: int) -> None:
        from ridgeline import _kernels

        self._pool = _kernels.Pool(threads)
        self.rounds: list[dict[str, float]] = []

    def measure(self) -> dict[str, float]:
        pool = self._pool
        now = {
            "read_gb_s": median(pool.read_rate(beyond_caches()) for _ in range(BUFFERS)),
            "fp32_gflop_s": pool.fma_rate(),
            "int8_gop_s": pool.dot_rate(),
        }
        self.rounds.append({name: value / 1e9 for name, value in now.items()})
        return self.rounds[-1]

    def around(self, number: int) -> list[dict[str, float]]:
        """Return the limits at the begin and at the end of a round, rounded."""
        return [{name: round(v, 2) for name, v in each.items()} for each in self.rounds[number : number + 2]]

    def medians(self) -> dict[str, float]:
        return {name: round(median(r[name] for r in self.rounds), 1) for name in self.rounds[0]}


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def prompts(shape: str, case: str, number: int) -> list[list[int]]:
    """Return random ids: equal for all contenders of a round, different in each round, no special tokens."""
    return random_ids(shape, CASES[case], number)


def random_ids(shape: str, size: Case, number: int) -> list[list[int]]:
    rng = np.random.default_rng((number, size.sequences, size.prompt))
    vocabulary = peer_shapes.CONFIGS[shape]["vocab_size"]
    return rng.integers(0, vocabulary - 3, (size.sequences, size.prompt)).tolist()


def rounds_of(
    fleet: Fleet, ready: list[Prepared], shape: str, case: str, rounds: int, limits: Limits
) -> Iterator[tuple[int, Prepared, dict[str, Any] | PeerError]]:
    """Yield (round, contender, answer of its driver) in the order A B C A B C. One that fails is not run again.

    The machine's limits are measured when a round begins, and when the last one ends.
    """
    tokens, room, failed = CASES[case].answer(shape), CASES[case].room(shape), set[str]()
    for number in range(rounds):
        limits.measure()
        for prepared in ready:
            if prepared.contender.name in failed:
                continue
            try:
                process = fleet.get(prepared, room)
                if case not in process.warm:
                    process.run(prompts(shape, case, 1000 + number), min(tokens, 2))
                    process.warm.add(case)
                yield number, prepared, process.run(prompts(shape, case, number), tokens)
            except PeerError as e:
                failed.add(prepared.contender.name)
                fleet.drop(prepared)
                yield number, prepared, e
    limits.measure()
