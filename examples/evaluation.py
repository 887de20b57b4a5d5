"""Measure how well a model predicts a text, and compare it with a second model token by token.

    python examples/evaluation.py MODEL --text book.txt
    python examples/evaluation.py MODEL --text book.txt --dtype bfloat16 --against MODEL

`ridgeline evaluate` prints the same figures; this program shows how to get them in Python.
"""

from __future__ import annotations

import argparse

from ridgeline import LLM
from ridgeline.evals import encode_texts, measure_divergence, measure_perplexity, read_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="pocket", help="A folder, a GGUF file or a hub id. Default: pocket."
    )
    parser.add_argument("--text", default=__file__, help="A UTF-8 file or a folder of them. Default: this program.")
    parser.add_argument("--dtype", default="auto", help="Type of the weights. Default: as they are stored.")
    parser.add_argument("--against", help="The original model, to compare with. Default: none.")
    given = parser.parse_args()
    llm = LLM(given.model, cache="off", dtype=given.dtype)
    documents = list(encode_texts(read_texts([given.text]), llm.tokenizer))
    found = measure_perplexity(llm.loaded, documents)
    print(f"perplexity: {found.perplexity.value:.3f} over {found.num_tokens:,} tokens")
    if given.against:
        original = LLM(given.against, cache="off")
        apart = measure_divergence(original.loaded, llm.loaded, documents)
        print(f"divergence from the original: {apart.kl.value:.2e} nats per token")
        print(f"same most likely token: {apart.top1_agreement.value:.2%}")


if __name__ == "__main__":
    main()
