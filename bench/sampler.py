"""Measure the time to choose tokens: python bench/sampler.py [--rows 32] [--vocabulary 49152]

Prints median milliseconds for one step of all rows. Scores are normal with deviation 3, like a language model that is
unsure, which is the slow case. The gate: every row alone gives the same token as in the batch.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import emit, median_seconds

from ridgeline import SamplingParams
from ridgeline.sample.sampler import NoiseKey, SampleRow, sample

ROUNDS = 25
HISTORY = 1000  # tokens of the prompt, and the number of tokens of output
CASES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "all filters": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": ((5, 1.0),), "bad_token_ids": (7, 8),
    },
    "all filters but top_k": {
        "temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": ((5, 1.0),), "bad_token_ids": (7, 8),
    },
    "DRY": {"temperature": 0.8, "dry_multiplier": 0.8},
    "XTC": {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    "greedy, 20 logprobs": {"temperature": 0.0, "logprobs": 20},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(options.rows, options.vocabulary)) * 3).astype(np.float32)
    prompt, output = (rng.integers(0, options.vocabulary, HISTORY).tolist() for _ in range(2))
    for name, fields in CASES.items():
        params = SamplingParams(**fields)
        rows = [SampleRow.start(params, prompt, NoiseKey(i, 0), (), output) for i in range(options.rows)]
        alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(options.rows)]
        took = median_seconds(lambda rows=rows: sample(logits, rows), ROUNDS)
        emit(
            f"sampler: {name}", sample(logits, rows) == alone, rows=options.rows, vocabulary=options.vocabulary,
            ms_per_step=round(took * 1e3, 3),
        )  # fmt: skip


if __name__ == "__main__":
    main()
