"""Ask two models the same questions, and print their answers and speeds side by side.

    python examples/compare_models.py MODEL SMALLER "The capital of France is"

`examples/evaluation.py` compares two models by figures instead.
"""

from __future__ import annotations

import argparse
from statistics import fmean

from ridgeline import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "first", nargs="?", default="pocket", help="A folder, a GGUF file or a hub id. Default: pocket."
    )
    parser.add_argument("second", nargs="?", default="pocket-draft", help="The other model. Default: pocket-draft.")
    parser.add_argument("prompts", nargs="*", default=["def __init__(self", "import"], help="Prompts for both models.")
    given = parser.parse_args()
    greedy = SamplingParams(max_tokens=24, temperature=0)
    answers = {}
    for name in (given.first, given.second):  # one after the other: only one model is in memory
        answers[name] = LLM(name).generate(given.prompts, greedy)
    for i, prompt in enumerate(given.prompts):
        print(f"prompt: {prompt!r}")
        for name, outputs in answers.items():
            print(f"  {name}: {outputs[i].outputs[0].text!r}")
    for name, outputs in answers.items():
        times = [output.timing.tpot_s for output in outputs if output.timing.tpot_s is not None]
        print(f"{name}: {fmean(times) * 1e3:.1f} ms per token" if times else f"{name}: no second token")


if __name__ == "__main__":
    main()
