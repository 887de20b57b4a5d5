"""Train heads for pocket, and measure them: python bench/heads.py HEAD ... [--train KIND] [--tokens N]

With --train, the first HEAD is trained before (`ridgeline.train.drafts`), on what pocket says after prompts from the
documents of Python's library that pocket was trained with. Nothing of the held-out documents is read.

Then each HEAD drafts for pocket on held-out contexts (those of bench/pocket.py), greedy, 128 tokens each, with 4
drafts in every step. `value` is the mean of tokens a verification over contexts, with its standard error. Greedy
answers of pocket soon repeat themselves, and repetition makes drafts easy. So each context is measured again with an
answer that ends before eight tokens in a row have occurred in it twice. The gate: all answers are those of pocket
without drafts. HEAD is any value of --speculative, so `ngram` and `pocket-draft` can be measured beside heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from common import emit
from pocket import ANSWER, HELD_OUT, SEED, Bench, contexts

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.evals.documents import Text
from ridgeline.settings import EngineOptions
from ridgeline.train import Corpus, split
from ridgeline.train.drafts import DraftOptions, train_draft

REPEATED = 8  # tokens in a row


class Lines:
    """Prints the lines of a training run; a `Watch` of ridgeline.train.drafts."""

    def say(self, line: str) -> None:
        print(line, flush=True)

    def tokens(self, name: str, total: int) -> Callable[..., None]:
        return lambda tokens, facts="": None


def train(out: Path, options: argparse.Namespace) -> None:
    """Train a head as the options say."""
    corpus = Corpus.stdlib()
    known = split(corpus.documents, HELD_OUT, SEED).train
    chosen = DraftOptions(
        kind=options.train, train_tokens=options.tokens, continuation_tokens=options.continuation_tokens,
        learning_rate=options.learning_rate, warmup_steps=30, draft_steps=options.draft_steps, batch_tokens=2048,
    )  # fmt: skip
    train_draft("pocket", Corpus(corpus.source, corpus.license, known), out, chosen, Lines())


def measure(head: str, prompts: list[list[int]], answers: list[list[int]], engine: EngineOptions, case: str) -> None:
    """Print the tokens a verification of one head."""
    llm = LLM("pocket", speculative=head, engine=engine)
    values, equal = [], True
    for prompt, answer in zip(prompts, answers, strict=True):
        params = SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True)
        before = llm.stats().drafts.copy()
        equal &= list(llm.generate([prompt], params)[0].outputs[0].token_ids) == answer
        counts = llm.stats().drafts.plus(before, -1)
        values += [counts.tokens] if counts.verifications else []
    error = stdev(values) / sqrt(len(values))
    emit(
        f"heads: {Path(head).name}, {case}", equal, drafts=engine.num_speculative_tokens,
        tree=engine.draft_tree, contexts=len(values), tokens=round(fmean(map(len, answers)), 1),
        value=round(fmean(values), 3), standard_error=round(error, 3),
    )  # fmt: skip


def fresh(answer: list[int]) -> list[int]:
    """Return an answer up to the first tokens in a row that have occurred before."""
    seen = set[tuple[int, ...]]()
    for end in range(REPEATED, len(answer) + 1):
        last = tuple(answer[end - REPEATED : end])
        if last in seen:
            return answer[: end - REPEATED]
        seen.add(last)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--train", choices=("medusa", "eagle", "eagle3"))
    parser.add_argument("--tokens", type=int, default=1_600_000, help="tokens to train on")
    parser.add_argument("--continuation-tokens", type=int, default=400_000)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--draft-steps", type=int, help="draft steps in a row that EAGLE heads practise")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--draft-tree", type=int, default=1, help="most tokens after a draft; default: 1, a chain")
    options = parser.parse_args()
    if options.train:
        train(Path(options.heads[0]), options)
    models = Path(ridgeline.__file__).parent / "models"
    held_out = split(Corpus.stdlib().documents, HELD_OUT, SEED).held_out
    folders = {"target": models / "pocket"}
    bench = Bench(folders, argparse.Namespace(out=None), [Text(d.name, d.text) for d in held_out])
    prompts, plain = contexts(bench, options.prompts), bench.llm("target")
    outputs = plain.generate(prompts, SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True))
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    engine = EngineOptions(
        draft_depth="fixed", num_speculative_tokens=options.num_speculative_tokens, draft_tree=options.draft_tree
    )
    for head in options.heads:
        measure(head, prompts, answers, engine, "whole answers")
        measure(head, prompts, [fresh(answer) for answer in answers], engine, "before repetition")


if __name__ == "__main__":
    main()
