"""Compare Ridgeline with transformers on tiny models: largest difference of logits, greedy tokens, margins.

`python -m oracle.compare`, with tests/ on the path, prints the table of docs/models.md, or the rows of some cases.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oracle.build import build, double, oracle_greedy, oracle_logits, oracle_margins
from oracle.case import Case, greedy_prompt, prompts
from oracle.families import CASES
from ridgeline import LLM, SamplingParams


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. error: largest |difference| of any logit from transformers in float64, which is equal
    on every CPU. margin: smallest lead of a greedy token, in float64.
    """

    error: float
    logit_std: float
    greedy_equal: bool | None
    margin: float | None


def compare(case: Case, folder: Path, **options: object) -> Comparison:
    """Build the case's model into `folder`, run it with both programs, and compare the results."""
    model = build(case, folder)
    llm = LLM(str(folder), max_model_len=case.max_model_len, **options)
    sequences = prompts(case)
    exact = double(model)
    wanted = oracle_logits(exact, sequences)
    error = max(float(np.abs(a - b).max()) for a, b in zip(llm.logits(sequences), wanted, strict=True))
    std = float(np.concatenate(wanted).std())
    if not case.greedy_tokens:
        return Comparison(error, std, None, None)
    prompt = greedy_prompt(case)
    ids, _ = oracle_greedy(model, prompt, case.greedy_tokens)
    params = SamplingParams(max_tokens=case.greedy_tokens, temperature=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    margin = float(oracle_margins(exact, prompt, ids).min())
    return Comparison(error, std, output.outputs[0].token_ids == ids, margin)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m oracle.compare", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help="names of oracle cases; default all")
    names = parser.parse_args(arguments).cases
    print("| case | family | largest error | logit std | 64 greedy tokens | smallest margin (float64) |")
    print("|---|---|---|---|---|---|")
    for name, case in ((name, CASES[name]) for name in names):
        with tempfile.TemporaryDirectory() as folder:
            c = compare(case, Path(folder))
        greedy = {True: "equal", False: "DIFFERENT", None: "-"}[c.greedy_equal]
        margin = f"{c.margin:.1e}" if c.margin is not None else "-"
        print(f"| {name} | {case.model_type} | {c.error:.1e} | {c.logit_std:.2f} | {greedy} | {margin} |", flush=True)


if __name__ == "__main__":
    main()
