"""Compare each setting that the engine chooses with its two neighbors: python bench/settings.py [--model pocket | S]

    batch    max_num_seqs: twice as many requests as the chosen batch, with short prompts
    chunk    max_num_batched_tokens: prompts of the longest context, with one token of answer
    page     block_size: 32 requests that decode together
    threads  the same, with 8 requests
    preempt  recompute and swap: 12 requests of 256 tokens in the end, with pages for a third of them

Neighbors are half and twice the chosen value. Each value runs the same requests in turn, for some rounds, and has its
median. `share` is the time of the best value, divided by that of the chosen one; the goal is 0.95. `others` is the
share of the machine that other programs used; with more than a tenth, the line says nothing. The model has random
weights unless it is pocket: S has the shape of SmolLM2-135M. The machine must be calibrated.

The gate: every request got all its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import peer_shapes
from common import emit

from ridgeline.engine import Engine, Session
from ridgeline.llm import LLM
from ridgeline.measure.quiet import OthersLoad
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.settings.advice import Advice, machine_advice
from ridgeline.settings.preempt import PreemptCost
from ridgeline.spec.request import OutputChunk, SamplingParams
from ridgeline.system import num_cores

SETTINGS = ("batch", "chunk", "page", "threads", "preempt")
PREEMPTION = {"recompute": PreemptCost(0.0, 1.0), "swap": PreemptCost(1.0, 0.0)}
SPACE = 256 << 20  # bytes of swap space


@dataclass(frozen=True)
class Load:
    """Requests that all arrive at the start: how many, and the tokens of the prompt and of the answer of each."""

    requests: int
    prompt: int
    answer: int


class Bench:
    """A model that was loaded once for each number of threads, and the settings that were chosen for it."""

    def __init__(self, model: str, weights: str) -> None:
        self._model, self._weights = model, weights
        self.llm = self.load(None)
        loaded, found = self.llm.loaded, self.llm.config
        assert found is not None
        advice = machine_advice(loaded.spec, loaded.weights, loaded.storage.dtype)
        if advice is None:
            raise SystemExit("this machine is not calibrated; run `ridgeline calibrate` first")
        self.advice: Advice = advice
        self.chosen: EngineConfig = found

    def load(self, threads: int | None) -> LLM:
        if self._model == "pocket":
            return LLM("pocket", skip_tokenizer_init=True, threads=threads, weights=self._weights)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(peer_shapes.config_of(self._model)), encoding="utf-8")
            return LLM(
                folder, skip_tokenizer_init=True, threads=threads, weights=self._weights, load_format="dummy",
                max_model_len=1024,
            )  # fmt: skip

    def run_of(
        self, load: Load, llm: LLM | None = None, cost: PreemptCost | None = None, length: int | None = None,
        **options: Any,
    ) -> Run:  # fmt: skip
        """Return a run of a load with some settings given, and all others as chosen.

        length: tokens of the longest sequence; default: as chosen.
        """
        loaded, memory = (llm or self.llm).loaded, self.llm.loaded.table.memory
        longest, given = length or self.chosen.max_model_len, EngineOptions(speculative="off", **options)
        config = resolve(
            loaded.spec, longest, given, fixed_len=True,
            free_bytes=self.chosen.free_bytes, fraction=0.5, weights=loaded.stored_weights,
            float_bytes=memory.float_bytes, advice=self.advice,
        )  # fmt: skip
        return Run(Engine(loaded, replace(config, preempt=cost or config.preempt)), load, loaded.spec.vocab_size)


class Run:
    """Times a load through one engine. preempted: how often a sequence was, in all runs."""

    def __init__(self, engine: Engine, load: Load, vocab_size: int) -> None:
        self._session, self._load, self._vocab, self._count = Session(engine, None), load, vocab_size, 0

    def __call__(self) -> float:
        load, rng, tokens = self._load, np.random.default_rng(0), 0
        self._count += 1
        params = SamplingParams(max_tokens=load.answer, temperature=0, ignore_eos=True)

        def sink(chunk: OutputChunk) -> None:
            nonlocal tokens
            tokens += len(chunk.token_ids)

        for i in range(load.requests):
            ids = rng.integers(0, self._vocab, load.prompt).tolist()
            request = GenerationRequest(ids, params, (NoiseKey(0, i),), cache_salt=f"run {self._count}")
            self._session.add(request, sink)
        start = time.perf_counter()
        while len(self._session):
            self._session.step()
        seconds = time.perf_counter() - start
        if tokens != load.requests * load.answer:
            raise SystemExit(f"{tokens} tokens came, not {load.requests * load.answer}")
        return seconds

    def preempted(self) -> int:
        stats = self._session.stats()
        return stats.preempted_recompute + stats.preempted_swap if stats else 0


def around(value: int, least: int = 1, most: int = 1 << 20) -> list[int]:
    """Return half the value, the value and twice the value, as far as they are allowed."""
    return [n for n in (value // 2, value, 2 * value) if least <= n <= most]


def runs_of(bench: Bench, setting: str) -> tuple[Any, Mapping[Any, Run]]:
    """Return the chosen value of a setting, and a run for it and for each of its neighbors."""
    chosen, longest = bench.chosen, bench.chosen.max_model_len
    if setting == "batch":
        value = chosen.max_num_seqs
        load = Load(2 * value, 8, 8)
        tokens = max(2 * value, chosen.max_num_batched_tokens)
        return value, {
            n: bench.run_of(load, max_num_seqs=n, max_num_batched_tokens=tokens) for n in around(value)
        }  # fmt: skip
    if setting == "chunk":
        value = chosen.max_num_batched_tokens
        load = Load(2, longest - 1, 1)
        return value, {
            n: bench.run_of(load, max_num_seqs=16, max_num_batched_tokens=n) for n in around(value, 16, longest)
        }  # fmt: skip
    if setting == "page":
        value, load = chosen.block_size, Load(32, 200, 50)
        return value, {n: bench.run_of(load, block_size=n) for n in around(value)}
    if setting == "threads":
        value, load = chosen.threads or 1, Load(8, 200, 100)
        return value, {n: bench.run_of(load, bench.load(n)) for n in around(value, most=num_cores())}
    load, group = Load(12, 64, 192), chosen.groups[0]
    length = load.prompt + load.answer
    pages = load.requests // 3 * group.num_pages(length) * sum(g.page_bytes for g in chosen.groups)
    engine = {"kv_cache_memory_bytes": pages, "swap_space_bytes": SPACE, "length": length}
    value = bench.advice.preempt(length, group.num_pages(length) * group.page_bytes)
    return value, {name: bench.run_of(load, cost=forced, **engine) for name, forced in PREEMPTION.items()}


def compare(bench: Bench, setting: str, rounds: int, case: str) -> None:
    chosen, runs = runs_of(bench, setting)
    for run in runs.values():
        run()  # warms up
    others, taken = OthersLoad(), dict[Any, list[float]]()
    for _ in range(rounds):
        for value, run in runs.items():
            taken.setdefault(value, []).append(run())
    medians = {value: statistics.median(times) for value, times in taken.items()}
    emit(
        f"{case}: {setting}", chosen in medians, chosen=chosen, share=round(share(medians, chosen), 3),
        others=round(others.share(), 3), seconds={str(value): round(s, 4) for value, s in medians.items()},
        preempted=sum(run.preempted() for run in runs.values()),
    )  # fmt: skip


def share(medians: Mapping[Any, float], chosen: Any) -> float:
    """Return the time of the best value, divided by that of the chosen one."""
    return min(medians.values()) / medians[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pocket", help="pocket, or a shape of peer_shapes.py; default: pocket")
    parser.add_argument("--weights", default="auto", help="format of the weights; default: auto")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    bench = Bench(args.model, args.weights)
    for setting in args.settings:
        compare(bench, setting, args.rounds, f"{args.model}, {args.weights}")


if __name__ == "__main__":
    main()
