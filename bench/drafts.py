"""Measure decoding with drafts beside decoding without: python bench/drafts.py MODEL DRAFTS ... [--batches 1,4,16]

DRAFTS: values of --speculative: ngram, a draft model, a folder of a head. Each batch of prompts is answered by each of
them in turn, with chosen and with fixed depth, after a first round that is not counted.

`over_plain` is the median of tokens a second over that of decoding without drafts. `tokens` is the mean of tokens a
verification. The gate: all answers are equal.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from common import emit

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.settings import EngineOptions

PLAIN = "off"
FIXED = " fixed"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4, help="rounds, the first of which is not counted")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--text", help="text whose parts are the prompts; default: a file of Ridgeline")
    parser.add_argument("--no-chosen", action="store_true", help="measure fixed depths only")
    args = parser.parse_args()
    kinds = (FIXED,) if args.no_chosen else ("", FIXED)
    names = [PLAIN, *(f"{draft}{kind}" for draft in args.drafts for kind in kinds)]
    llms = {name: open_llm(args.model, name, args.num_speculative_tokens) for name in names}
    prompts = read_prompts(Path(args.text or Path(ridgeline.__file__).parent / "llm.py"))
    for batch in map(int, args.batches.split(",")):
        measure(llms, prompts, batch, args)


def open_llm(model: str, name: str, most: int) -> LLM:
    if name == PLAIN:
        return LLM(model)
    depth = "fixed" if name.endswith(FIXED) else "chosen"
    options = EngineOptions(draft_depth=depth, num_speculative_tokens=most)
    return LLM(model, speculative=name.removesuffix(FIXED), engine=options)


def read_prompts(path: Path) -> list[str]:
    """Return the ends of the paragraphs of a text."""
    return [part[-300:] for part in path.read_text(encoding="utf-8").split("\n\n") if len(part) > 60]


def measure(llms: dict[str, LLM], prompts: list[str], batch: int, args: argparse.Namespace) -> None:
    """Answer a batch of prompts in each way, in turn, and print the results."""
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    tokens, before, equal = {}, {name: llm.stats().drafts.copy() for name, llm in llms.items()}, True
    for number in range(args.rounds):
        some = [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]
        params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True, seed=number)
        answers = []
        for name, llm in llms.items():
            begin = time.perf_counter()
            found = llm.generate(some, params)
            speeds[name].append(batch * args.tokens / (time.perf_counter() - begin))
            answers.append([x.outputs[0].token_ids for x in found])
        equal &= all(answer == answers[0] for answer in answers)
    medians = {name: median(found[1:]) for name, found in speeds.items()}
    for name, llm in llms.items():
        counts = llm.stats().drafts.plus(before[name], -1)
        tokens[name] = round(counts.tokens, 2) if counts.verifications else None
    emit(
        f"drafts: batch {batch}, temperature {args.temperature:g}", equal,
        tokens_per_s={name: round(x) for name, x in medians.items()},
        over_plain={name: round(x / medians[PLAIN], 2) for name, x in medians.items() if name != PLAIN},
        tokens={name: x for name, x in tokens.items() if name != PLAIN},
    )  # fmt: skip


if __name__ == "__main__":
    main()
