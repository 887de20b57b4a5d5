"""Measure drafts of known acceptance and cost: python bench/synthetic_drafts.py [--shapes S] [--acceptance 0.8]

The proposer knows the answer without drafts. It proposes --drafts of its tokens, each of them right with probability
--acceptance, and keeps one core busy for --cost of a plain step for each draft. `over_plain` is the median over rounds
of the speed over that without drafts. `formula` is (1 - a^(k + 1)) / (1 - a) / (1 + k c): the same factor for a
verification that takes as long as a plain step. The shapes are those of peer_shapes.py with random weights. The gate:
all answers are equal.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median

import peer_shapes
from common import emit

from ridgeline import LLM, SamplingParams
from ridgeline.propose import Drafts, Wanted
from ridgeline.sched.watcher import NullWatcher
from ridgeline.settings import EngineOptions

VOCABULARY = 1000  # the smallest number of tokens that a model here has


class Known(NullWatcher):
    """Proposes the tokens of an answer that it knows, some of them changed. seconds: time that each draft takes."""

    def __init__(self, acceptance: float) -> None:
        self.answer: list[int] = []
        self.seconds, self._acceptance, self._random = 0.0, acceptance, Random(0)

    def propose(self, states: Sequence[Wanted]) -> Mapping[int, Drafts]:
        found = {}
        for state in states:
            at = len(state.tokens) - state.prompt
            right = self.answer[at : at + state.most]
            tokens = [t if self._random.random() < self._acceptance else (t + 1) % VOCABULARY for t in right]
            end = time.perf_counter() + self.seconds * len(tokens)
            while time.perf_counter() < end:
                pass
            found[state.sequence] = Drafts(tuple(tokens))
        return found


def measure(shape: str, args: argparse.Namespace) -> None:
    folder = str(peer_shapes.make_model(shape, args.work / "models" / shape / "hf"))
    proposer, count = Known(args.acceptance), args.drafts
    options = EngineOptions(num_speculative_tokens=count, draft_depth="fixed")
    plain = LLM(folder, weights=args.weights, skip_tokenizer_init=True)
    drafted = LLM(folder, weights=args.weights, skip_tokenizer_init=True, engine=options, proposer=proposer)
    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
    ratios, equal, step = list[float](), True, 0.0
    for number in range(args.rounds + 1):
        prompt = [{"prompt_token_ids": [Random(number).randrange(VOCABULARY) for _ in range(32)]}]
        found = []
        for llm in (plain, drafted):
            begin = time.perf_counter()
            (out,) = llm.generate(prompt, params)
            found.append((time.perf_counter() - begin - out.timing.ttft_s, list(out.outputs[0].token_ids)))
            if llm is plain:
                proposer.answer = found[0][1]
                took = found[0][0] / (args.tokens - 1)
                step = min(step or took, took)
                proposer.seconds = args.cost * step
        equal &= found[0][1] == found[1][1]
        ratios += [found[0][0] / found[1][0]] if number else []
    counts, a = drafted.stats().drafts, args.acceptance
    emit(
        f"synthetic drafts: {shape}", equal, weights=args.weights, acceptance=a, drafts=count, cost=args.cost,
        over_plain=round(median(ratios), 3), tokens=round(counts.tokens, 3),
        formula=round((1 - a ** (count + 1)) / (1 - a) / (1 + count * args.cost), 3), token_ms=round(1e3 * step, 3),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S", help="S, M or L, separated by commas")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--cost", type=float, default=0.1, help="of a draft, in plain steps")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6, help="rounds after the first one, which is not counted")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ridgeline-peers")
    args = parser.parse_args()
    for shape in args.shapes.split(","):
        measure(shape, args)


if __name__ == "__main__":
    main()
