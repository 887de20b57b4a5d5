"""Measure the engine's decode by batch size, and cached beside naive sampling: python bench/engine.py [--plot FILE]

The least time of a decode step is that of reading every weight once at the machine's read bandwidth, which is measured
here; in batches where arithmetic takes longer, it is the time of the operations. The gate: the tokens equal those of
naive sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import emit, median_seconds, peak_flops

from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineConfig, EngineOptions, resolve

SHAPE = {  # the shape of SmolLM2-135M
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, NEW = 128, 24


def build() -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        return LLM(folder, load_format="dummy", dtype="float32", cache="off")


def read_bandwidth() -> float:
    """Return the bytes per second of reading much more than the caches hold."""
    data = torch.ones(2**27)
    return data.numel() * 4 / median_seconds(data.sum, 7)


def timed_step(engine: Engine) -> tuple[float, list[Event]]:
    start = time.perf_counter()
    events = engine.step()
    return time.perf_counter() - start, events


def naive_token(llm: LLM, length: int) -> tuple[list[int], float]:
    """Return the first token after a history, and the median seconds of computing it three times."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    outputs: list[list[int]] = []

    def run() -> None:
        outputs.append(llm.generate([[5] * length], params)[0].outputs[0].token_ids)

    elapsed = median_seconds(run, 3)
    return outputs[0], elapsed


def settings(llm: LLM, options: EngineOptions) -> EngineConfig:
    return resolve(
        llm.loaded.spec, 2048, options, free_bytes=4 << 30, fixed_len=True, kv_cache_dtype=llm.loaded.storage.dtype,
        float_bytes=llm.loaded.table.memory.float_bytes,
    )  # fmt: skip


def decode(llm: LLM, batch: int) -> tuple[float, bool]:
    """Return median seconds of a decode step, and whether the first answer equals that of naive sampling."""
    options = EngineOptions(max_num_seqs=64, max_num_batched_tokens=512)
    engine = Engine(llm.loaded, settings(llm, options))
    rng, params = np.random.default_rng(0), SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    prompts = [rng.integers(3, 1000, PROMPT).tolist() for _ in range(batch)]
    for i, prompt in enumerate(prompts):
        engine.add(i, GenerationRequest(prompt, params, (NoiseKey(0, 0),)))
    times, first = [], []
    while len(engine):
        elapsed, events = timed_step(engine)
        first += [t for e in events if e.request == 0 for t in e.tokens]
        if len(events) == batch:
            times.append(elapsed)
    short = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    naive = llm.generate([prompts[0]], short)[0].outputs[0].token_ids
    return statistics.median(times[1:]), first[:6] == naive


def by_batch(llm: LLM) -> None:
    weights = llm.loaded.spec.num_params()
    bandwidth, peak = read_bandwidth(), peak_flops()
    single = None
    for batch in (1, 8, 32):
        step, equal = decode(llm, batch)
        single = single or step
        floor = max(4 * weights / bandwidth, 2 * weights * batch / peak)
        emit(
            f"decode 135M float32, batch {batch}, context {PROMPT}", equal,
            ms_per_step=round(step * 1e3, 1), tokens_per_s=round(batch / step, 1),
            over_batch_1=round(batch * single / step, 2), floor_ms=round(floor * 1e3, 1),
            read_gb_s=round(bandwidth / 1e9, 1), peak_gflops=round(peak / 1e9, 1),
        )  # fmt: skip


def curve(llm: LLM, path: Path | None) -> None:
    """Return milliseconds per token at growing histories, cached and naive."""
    config = settings(llm, EngineOptions(max_num_seqs=2))
    lengths, cached, naive = [16, 64, 256, 1024], [], []
    for length in lengths:
        engine = Engine(llm.loaded, config)
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        engine.add(0, GenerationRequest([5] * length, params, (NoiseKey(0, 0),)))
        times, tokens = [], []
        while len(engine):
            elapsed, events = timed_step(engine)
            tokens += [t for e in events for t in e.tokens]
            times += [elapsed] if events else []
        first, elapsed = naive_token(llm, length)
        naive.append(1e3 * elapsed)
        cached.append(1e3 * statistics.median(times[2:]))
        emit(
            f"135M float32, history {length}", first == tokens[:1],
            cached_ms_per_token=round(cached[-1], 1), naive_ms_per_token=round(naive[-1], 1),
            ratio=round(naive[-1] / cached[-1], 1),
        )  # fmt: skip
    if path:
        plot(path, lengths, cached, naive)


def plot(path: Path, lengths: list[int], cached: list[float], naive: list[float]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    axes.plot(lengths, naive, "s-", color="tab:red", label="--cache off: the whole history at every token")
    axes.plot(lengths, cached, "o-", color="tab:blue", label="the engine: keys and values kept in pages")
    axes.set(xscale="log", yscale="log", xlabel="tokens of history", ylabel="ms per token")
    axes.set_title("135M Llama, float32, 2 cores", fontsize=11)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--plot", type=Path, help="also draw milliseconds per token against the length of the history into this PNG"
    )
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    llm = build()
    by_batch(llm)
    curve(llm, options.plot)


if __name__ == "__main__":
    main()
