"""Compare a recurrent layer's prompt in chunks and token by token: python bench/recurrent.py [--tokens N]

Both prompts run through the engine: one layer of hidden size 512 with random weights, in chunks on `--device`, token by
token on `--beside` (by default the same device), with the number of threads that the libraries have. The least time is
the operations of the matrices and of the recurrence over the machine's measured rate of matrix products. The gate: the
token after the prompt is equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from common import emit
from safetensors.numpy import save_file

from ridgeline import LLM, SamplingParams
from ridgeline.measure import measure_roof
from ridgeline.settings import EngineOptions
from ridgeline.spec import (
    S4,
    S4D,
    GatedDelta,
    KimiDelta,
    Layer,
    LightningAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    RMSNorm,
    TaylorAttention,
    to_json,
)

WIDTH, VOCAB = 512, 256
NORM = RMSNorm(1e-5)
MIXERS = {
    "mamba": Mamba(inner_size=2 * WIDTH, state_size=16, conv_size=4, dt_rank=WIDTH // 16),
    "mamba2": Mamba2(num_heads=2 * WIDTH // 64, head_dim=64, state_size=64, num_groups=1, conv_size=4, norm=NORM),
    "based": TaylorAttention(num_heads=WIDTH // 64, head_dim=64, feature_dim=16),
    "lightning": LightningAttention(num_heads=WIDTH // 64, head_dim=64, norm=NORM),
    "s4": S4(WIDTH, 64),
    "s4d": S4D(WIDTH, 64),
    "gated delta": GatedDelta(WIDTH // 64, WIDTH // 128, key_dim=64, head_dim=128, conv_size=4, norm=NORM),
    "kimi delta": KimiDelta(WIDTH // 64, head_dim=64, conv_size=4, rank=64, norm=NORM),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto", help="device that computes in chunks; default: auto")
    parser.add_argument("--beside", help="device that computes token by token; default: as --device")
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    options = parser.parse_args()
    prompt = np.random.default_rng(0).integers(0, VOCAB, options.tokens).tolist()
    for name in options.mixers:
        spec = ModelSpec(name, VOCAB, WIDTH, 2 * options.tokens, (Layer(MIXERS[name], None, NORM),), NORM)
        with tempfile.TemporaryDirectory() as folder:
            config = {"model_type": "ridgeline", "spec": to_json(spec)}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            rng = np.random.default_rng(0)  # written to files, because devices draw different random numbers
            weights = {w.name: rng.normal(0, 0.05, w.shape).astype(np.float32) for w in spec.weights()}
            save_file(weights, Path(folder) / "model.safetensors")
            devices = options.beside or options.device, options.device
            run(name, spec, folder, prompt, options.rounds, devices)


def run(name: str, spec: ModelSpec, folder: str, prompt: list[int], rounds: int, devices: tuple[str, str]) -> None:
    seconds, tokens = {}, {}
    for chunk, device in zip((1, len(prompt)), devices, strict=True):
        engine = EngineOptions(max_num_batched_tokens=chunk, max_num_seqs=1)
        llm = LLM(folder, skip_tokenizer_init=True, engine=engine, device=device)
        times = []
        for salt in range(rounds):
            # The salt prevents a prefix hit from the round before.
            request = {"prompt_token_ids": prompt, "cache_salt": str(salt)}
            start = time.perf_counter()
            (answer,) = llm.generate([request], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            times.append(time.perf_counter() - start)
        seconds[chunk], tokens[chunk] = sorted(times)[rounds // 2], answer.outputs[0].token_ids
    flops = measure_roof(llm.loaded.table).flops_per_s
    work = len(prompt) * (spec.num_active_params() - 2 * VOCAB * WIDTH) + spec.layers[0].mixer.work(
        len(prompt), len(prompt)
    )
    one, whole = seconds[1], seconds[len(prompt)]
    emit(
        name, tokens[1] == tokens[len(prompt)], devices=devices, tokens=len(prompt), token_by_token_s=round(one, 3),
        in_chunks_s=round(whole, 3), times=round(one / whole, 2), floor_s=round(2 * work / flops, 3),
    )  # fmt: skip


if __name__ == "__main__":
    main()
