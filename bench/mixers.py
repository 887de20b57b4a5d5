"""Measure every mixer on the kernels of the cpu device: python bench/mixers.py [--mixers NAME ...] [--profile]

Each model has twelve layers of hidden size 512, float32, random weights, and one kind of mixer (experts are combined
with small attention). The whole engine runs a prompt of `--prompt` tokens in one step, then decodes one sequence and
eight. The least time of a decode step is the bytes of weights and states that it reads over the measured read
bandwidth; `share` is the least time over the measured time. The least time of a prompt is its operations over the
measured rate of float32 products. `--threads` sets the number of cores. The gate: each greedy token is the best one of
the dense pass, to 1e-3.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from common import beyond_caches, emit

from ridgeline import LLM, SamplingParams
from ridgeline._kernels import Pool, usable_cores
from ridgeline.engine import Engine
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import (
    MLP,
    S4,
    S4D,
    Attention,
    GatedConvolution,
    GatedDelta,
    GatedMLP,
    KimiDelta,
    LatentAttention,
    Layer,
    LightningAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    MoE,
    RMSNorm,
    Rope,
    ShortConvolution,
    TaylorAttention,
    Ungated,
    to_json,
)

WIDTH, LAYERS, VOCAB, STEPS = 512, 12, 256, 24
NORM = RMSNorm(1e-5)
BESIDE = Attention(4, 1, 64, 0.125, Rope(64))
MODELS: Mapping[str, Layer] = {
    "mamba": Layer(Mamba(inner_size=2 * WIDTH, state_size=16, conv_size=4, dt_rank=WIDTH // 16), None, NORM),
    "mamba2": Layer(Mamba2(2 * WIDTH // 64, 64, 64, 1, 4, NORM), None, NORM),
    "based": Layer(TaylorAttention(num_heads=WIDTH // 64, head_dim=64, feature_dim=16), None, NORM),
    "gated convolution": Layer(GatedConvolution(2 * WIDTH, 3), None, NORM),
    "short convolution": Layer(ShortConvolution(WIDTH, 3), None, NORM),
    "lightning": Layer(LightningAttention(num_heads=WIDTH // 64, head_dim=64, norm=NORM), None, NORM),
    "s4": Layer(S4(WIDTH, 64), None, NORM),
    "s4d": Layer(S4D(WIDTH, 64), None, NORM),
    "gated delta": Layer(GatedDelta(WIDTH // 64, WIDTH // 128, 64, 128, 4, NORM), None, NORM),
    "kimi delta": Layer(KimiDelta(WIDTH // 64, head_dim=64, conv_size=4, rank=64, norm=NORM), None, NORM),
    "latent": Layer(LatentAttention(8, 128, 64, 32, 64, 96**-0.5, NORM, 192, Rope(32)), None, NORM),
    "experts": Layer(BESIDE, MoE(32, 4, 256, shared=GatedMLP(256), shared_gate=True), NORM),
    "experts, ungated": Layer(
        BESIDE, MoE(32, 4, 256, Ungated("relu2"), scores="sigmoid", shared=MLP(256, "relu2")), NORM
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt; default: 512")
    parser.add_argument("--threads", type=int, help="number of cores; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ops", nargs="*", default=[], help="backends for ops, as op=backend; default: none")
    parser.add_argument("--profile", action="store_true", help="instead, print which functions take the time of a step")
    options = parser.parse_args()
    if options.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    for name in options.mixers:
        spec = ModelSpec(name, VOCAB, WIDTH, 2 * options.prompt, (MODELS[name],) * LAYERS, NORM)
        with tempfile.TemporaryDirectory() as folder:
            config = {"model_type": "ridgeline", "spec": to_json(spec)}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            ops = dict(op.split("=") for op in options.ops)
            llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, device=options.device, ops=ops)
        bench = Bench(name, llm, spec, options.prompt)
        if options.profile:
            bench.profile()
        else:
            bench.measure(options.rounds)


class Bench:
    """Runs one model, with a new engine for each measurement."""

    def __init__(self, name: str, llm: LLM, spec: ModelSpec, prompt: int) -> None:
        self._name, self._llm, self._spec = name, llm, spec
        self._prompts = np.random.default_rng(0).integers(0, VOCAB, (8, prompt)).tolist()

    def measure(self, rounds: int) -> None:
        pool, prompt = Pool(usable_cores()), len(self._prompts[0])
        read_rate, fma_rate = pool.read_rate(beyond_caches()), pool.fma_rate()
        self.run(8, STEPS), self.run(1, STEPS)  # after this, matrices are packed and pages are in memory
        found = {n: [self.run(n, STEPS) for _ in range(rounds)] for n in (1, 8)}
        values = {}
        for n, runs in found.items():
            decode = statistics.median(seconds for _, steps, _ in runs for seconds in steps[1:])
            floor = self._bytes(n, prompt) / read_rate
            values |= {
                f"decode_{n}_ms": round(1e3 * decode, 3), f"floor_{n}_ms": round(1e3 * floor, 3),
                f"share_{n}": round(floor / decode, 2),
            }  # fmt: skip
        prefill = statistics.median(first for first, _, _ in found[1])
        mixing = sum(layer.mixer.work(prompt, prompt) for layer in self._spec.layers if layer.mixer)
        work = prompt * (self._spec.num_active_params() - 2 * VOCAB * WIDTH) + mixing
        floor = 2 * work / fma_rate
        emit(
            f"mixers: {self._name}", self._is_right(found[1][0][2]), threads=len(os.sched_getaffinity(0)), **values,
            prompt=prompt, prefill_ms=round(1e3 * prefill, 1), prefill_floor_ms=round(1e3 * floor, 1),
            prefill_share=round(floor / prefill, 2),
        )  # fmt: skip

    def profile(self) -> None:
        self.run(1, STEPS)
        for what, tokens in (("prompt", 2), ("decode", 200)):
            profile = cProfile.Profile()
            profile.enable()
            self.run(1, tokens)
            profile.disable()
            print(f"{self._name}: {what}")
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)

    def run(self, sequences: int, tokens: int) -> tuple[float, list[float], list[int]]:
        """Return seconds of the prompts and of each step after them, and the tokens of the first sequence."""
        prompts = self._prompts[:sequences]
        longest = len(prompts[0]) * sequences
        options = EngineOptions(max_num_seqs=sequences, max_num_batched_tokens=longest, steps_in_flight=1)
        config = resolve(
            self._spec, self._spec.max_position_embeddings, options, free_bytes=4 << 30, fixed_len=True,
            kv_cache_dtype=self._llm.loaded.storage.dtype, float_bytes=self._llm.loaded.table.memory.float_bytes,
        )  # fmt: skip
        engine, found, times = Engine(self._llm.loaded, config), [], []
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add(i, GenerationRequest(prompt, params, (NoiseKey(0, i),)))
        while len(engine):
            start = time.perf_counter()
            events = engine.step()
            times.append(time.perf_counter() - start)
            found += [token for event in events if event.request == 0 for token in event.tokens]
        return times[0], times[1:], found

    def _bytes(self, sequences: int, context: int) -> float:
        """Return the bytes that a decode step reads: weights once, experts that random choices use, all states."""
        total, experts = 4 * (self._spec.num_params() - VOCAB * WIDTH), 0.0
        for layer in self._spec.layers:
            if isinstance(layer.mlp, MoE):
                routed = sum(w.num_params for w in layer.mlp.weights(WIDTH) if w.name.startswith("experts."))
                experts += 4 * routed * (1 - layer.mlp.num_experts_per_tok / layer.mlp.num_experts) ** sequences
        return total - experts + 4 * sequences * self._spec.state_elements(context)

    def _is_right(self, tokens: list[int]) -> bool:
        (logits,) = self._llm.logits([[*self._prompts[0], *tokens[:-1]]])
        last = logits[-len(tokens) :]
        return bool((last.max(1) - last[np.arange(len(tokens)), tokens]).max() < 1e-3)


if __name__ == "__main__":
    main()
