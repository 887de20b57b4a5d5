"""Measure what drafts cost: python bench/verification.py [--shapes pocket,S,M] [--weights int8] [--drafts 8]

A verification of 1 + k tokens of each sequence is timed beside a step of one token of each, for k = 1 .. --drafts, in
turn, on the cpu device, with --sequences sequences (1): `ratio` is the median over rounds of their ratio within a
round, `best` the ratio of the shortest times. Steps run from recordings, as the engine's do, up to the best token of
each row. S, M and L are the shapes of peer_shapes.py with random weights; pocket has its own weights. The gate: every
step is recorded, and its best tokens are those of a pass without pages that rounds keys and values as pages do.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peer_shapes
from common import emit

from ridgeline import LLM
from ridgeline.engine import Engine
from ridgeline.runtime.padding import OFTEN
from ridgeline.sched.work import PageDelta, StepPlan, Work
from ridgeline.settings import EngineOptions, resolve

BARS = {"pocket": 1.6, "S": 1.3, "M": 1.2}  # for 4 drafts
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Steps:
    """A model and sequences of random tokens, `context` of which are in pages."""

    def __init__(self, model: str, weights: str, context: int, drafts: int, threads: int, sequences: int) -> None:
        llm = LLM(
            model, device="cpu", weights=weights, max_model_len=context + drafts + 1, skip_tokenizer_init=True,
            threads=threads,
        )  # fmt: skip
        self._loaded, options = llm.loaded, EngineOptions(num_speculative_tokens=drafts, max_num_seqs=sequences)
        config = resolve(
            llm.loaded.spec, context + drafts + 1, options, free_bytes=sequences << 30, fixed_len=True,
            kv_cache_dtype=llm.loaded.storage.dtype,
        )  # fmt: skip
        self._runner = Engine(llm.loaded, config)._runner
        rng = np.random.default_rng(0)
        ids = rng.integers(0, llm.loaded.spec.vocab_size, (sequences, context + drafts + 1))
        self._ids = [tuple(row.tolist()) for row in ids]
        self._context, sizes = context, [g.num_pages(context + drafts + 1) for g in config.groups]
        for row in range(sequences):
            pages = tuple(
                PageDelta(i, row, 0, tuple(range(1 + row * size, 1 + (row + 1) * size))) for i, size in enumerate(sizes)
            )
            prompt = Work(row, row, 0, 0, self._ids[row][:context], sample=False, replay_from=0, deltas=pages)
            self._runner.forward(StepPlan(0, (prompt,)))

    def run(self, drafts: int) -> tuple[bool, list[int]]:
        """Verify some drafts; return whether the step was recorded, and the best token of each row."""
        first, end = self._context, self._context + 1 + drafts
        works = tuple(
            Work(row, row, 0, first, ids[first:end], sample=True, replay_from=first, num_draft=drafts)
            for row, ids in enumerate(self._ids)
        )
        forward = self._runner.forward(StepPlan(0, works))
        assert forward is not None
        found = forward.best()
        return found is not None, [] if found is None else found.tokens.tolist()[: len(works) * (1 + drafts)]

    def wanted(self, drafts: int) -> list[int]:
        rows: list[int] = []
        for ids in self._ids:
            step = self._loaded.dense_step([ids[: self._context + 1 + drafts]])
            logits = self._loaded.model.logits(self._loaded.model.forward(step))
            rows += np.asarray(logits)[self._context :].argmax(1).tolist()
        return rows


def measure(shape: str, args: argparse.Namespace) -> None:
    model = shape if shape not in peer_shapes.CONFIGS else str(make(shape, args.work))
    steps = Steps(model, args.weights, args.context, args.drafts, args.threads, args.sequences)
    clock, times = CLOCKS[args.clock], np.zeros((args.rounds, args.drafts + 1))
    depths = range(args.drafts + 1)
    # Each recording is made here; those of several sequences when they are usual (runtime/padding.py).
    gate = all(steps.run(k)[0] for k in depths for _ in range(OFTEN + 1)) or not args.gate
    if args.gate:
        gate = gate and steps.run(args.drafts)[1] == steps.wanted(args.drafts)
    for row in times:
        for k in depths:
            begin = clock()
            steps.run(k)
            row[k] = clock() - begin
    least = times.min(0)
    ratios = [statistics.median(times[:, k] / times[:, 0]) for k in depths]
    emit(
        f"verification {shape}", gate, weights=args.weights, sequences=args.sequences,
        context=args.context, clock=args.clock,
        token_ms=round(1e3 * float(least[0]), 3), ratio=[round(float(x), 3) for x in ratios[1:]],
        best=[round(float(x), 3) for x in (least / least[0])[1:]],
        bar_of_4_drafts=BARS.get(shape) if args.sequences == 1 else None,
    )  # fmt: skip


def make(shape: str, work: Path) -> Path:
    return peer_shapes.make_model(shape, work / "models" / shape / "hf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="pocket,S,M", help="pocket, S, M or L, separated by commas")
    parser.add_argument("--weights", default="auto", help="format of weights, as in --weights of ridgeline")
    parser.add_argument("--drafts", type=int, default=8, help="largest number of drafts; default: 8")
    parser.add_argument("--context", type=int, default=128, help="tokens in pages before the step; default: 128")
    parser.add_argument("--sequences", type=int, default=1, help="number of sequences in the step; default: 1")
    parser.add_argument("--threads", type=int, default=None, help="number of threads; default: all physical cores")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a busy machine")
    parser.add_argument("--gate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ridgeline-peers")
    args = parser.parse_args()
    for shape in args.shapes.split(","):
        measure(shape, args)


if __name__ == "__main__":
    main()
