"""Answer many prompts in one batch, and write a line of JSON for each answer.

    python examples/offline_batch.py --model MODEL < prompts.txt > answers.jsonl

The input has one prompt in each line. All prompts run together, and the answers are in the order of the prompts. For
files of thousands of prompts, `ridgeline generate prompts.jsonl -o answers.jsonl` also resumes after a break.
"""

from __future__ import annotations

import argparse
import json
import sys

from ridgeline import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket", help="A folder, a GGUF file or a hub id. Default: pocket.")
    parser.add_argument("--max-tokens", type=int, default=32, help="Most tokens of an answer. Default: 32.")
    given = parser.parse_args()
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    llm = LLM(given.model)
    for output in llm.generate(prompts, SamplingParams(max_tokens=given.max_tokens, temperature=0)):
        print(json.dumps({"prompt": output.prompt, "answer": output.outputs[0].text}))


if __name__ == "__main__":
    main()
