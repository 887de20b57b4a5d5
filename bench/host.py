"""Measure what a decode step costs besides its kernels: python bench/host.py [--weights bf16 ...] [--profile]

Prints one JSON line for each format and batch: medians of a step of the whole session (scheduler, forward pass,
sampler, detokenizer) on the shape of SmolLM2-135M, of the time in which kernels held the threads, and the rest as a
share. The gate: every answer in the batch equals the answer that the same prompt gets alone.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from common import emit

from ridgeline import LLM, SamplingParams
from ridgeline.spec.request import OutputChunk

SHAPE = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, WARM = 128, 8  # tokens of the prompt; steps that are not counted
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
}


def build(weights: str) -> LLM:
    """Build the shape with random weights, and a tokenizer with a word for each token."""
    words = {f"Ġword{i}": i for i in range(SHAPE["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        return LLM(folder, load_format="dummy", max_model_len=2048, **FORMATS[weights])


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], list[list[float]]]:
    """Return the tokens of each prompt, and the seconds and kernel seconds of each step in which all sequences ran."""
    chunks: list[OutputChunk] = []
    tokens: list[list[int]] = [[] for _ in prompts]

    def sink(i: int, chunk: OutputChunk) -> None:
        tokens[i] += chunk.token_ids
        chunks.append(chunk)

    for i, prompt in enumerate(prompts):
        request = llm.frontend.request({"prompt_token_ids": prompt, "cache_salt": f"{time.perf_counter()}"}, params)
        llm.session.add(request, lambda chunk, i=i: sink(i, chunk))
    steps = []
    while len(llm.session):
        chunks.clear()
        begin, kernels = time.perf_counter(), llm.loaded.table.driver.kernel_seconds()
        llm.session.step()
        if len(chunks) == len(prompts):
            steps.append([time.perf_counter() - begin, llm.loaded.table.driver.kernel_seconds() - kernels])
    return tokens, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=FORMATS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer; default: 64")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true", help="also print where Python spends its time")
    options = parser.parse_args()
    params = SamplingParams(temperature=options.temperature, top_p=0.9, max_tokens=options.tokens, ignore_eos=True)
    for weights in options.weights:
        llm = build(weights)
        for batch in options.batches:
            prompts = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (batch, PROMPT)).tolist()
            profile = cProfile.Profile()
            if options.profile:
                answers(llm, prompts, params)
                profile.runcall(answers, llm, prompts, params)
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
            tokens, steps = answers(llm, prompts, params)
            step, kernels = (statistics.median(s[i] for s in steps[WARM:]) for i in range(2))
            host = statistics.median(s[0] - s[1] for s in steps[WARM:])
            emit(
                f"host, 135M, {weights}, batch {batch}", tokens[-1:] == answers(llm, prompts[-1:], params)[0],
                step_ms=round(step * 1e3, 3), kernels_ms=round(kernels * 1e3, 3), host_us=round(host * 1e6, 1),
                host_share=round(host / step, 4),
            )  # fmt: skip


if __name__ == "__main__":
    main()
