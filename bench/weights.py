"""Measure each format of weights: python bench/weights.py MODEL [--text FILE ...] [--limit-tokens N]

It compares each format with the stored model by its quality on texts. A process for each format measures the time to
load and the peak of resident memory. The gate: fewer bits or longer groups are never better than chance allows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from common import emit

from ridgeline import LLM, SamplingParams
from ridgeline.evals import encode_texts, measure_divergence, read_texts
from ridgeline.spec.quant import FORMATS

PROMPT, NEW = 128, 16  # tokens of the prompt, and new tokens, that run before the peak is read


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--limit-tokens", type=int, default=20_000)
    parser.add_argument("--child", choices=FORMATS)
    args = parser.parse_args()
    if args.child:
        child(args.model, args.child)
        return
    name = Path(args.model).name
    losses = quality(args.model, args.text, args.limit_tokens) if args.text else {}
    for format in FORMATS:
        command = [sys.executable, __file__, args.model, "--child", format]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, peak, weights = map(float, run.stdout.split())
        found = losses.get(format, {})
        emit(
            f"weights: {name}, {format}", found.get("kl", 0.0) <= 2.0, load_s=round(seconds, 2),
            peak_mib=round(peak), weights_mib=round(weights, 2), **found,
        )  # fmt: skip


def child(model: str, format: str) -> None:
    """Load, answer, and print seconds to load, the peak in MiB, and the weights in MiB."""
    start = time.perf_counter()
    llm = LLM(model, weights=format, skip_tokenizer_init=True)
    seconds = time.perf_counter() - start
    ids = [i % llm.loaded.spec.vocab_size for i in range(min(PROMPT, llm.max_model_len - NEW))]
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(seconds, peak / 1024, llm.loaded.weight_bytes / 2**20)


def quality(model: str, texts: list[str], limit: int) -> dict[str, dict[str, float]]:
    """Return for each format: KL to the stored model, agreement, perplexity."""
    plain = LLM(model)
    assert plain.tokenizer is not None
    documents = encode_texts(read_texts(texts), plain.tokenizer, limit)
    found = {}
    for format in FORMATS:
        d = measure_divergence(plain.loaded, LLM(model, weights=format).loaded, documents)
        found[format] = {
            "kl": round(d.kl.value, 5), "top1_agreement": round(d.top1_agreement.value, 4),
            "perplexity": round(d.other.perplexity.value, 4),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
