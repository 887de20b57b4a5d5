"""Measure what adapters beside the weights cost: tokens per second with eight adapters of rank 16 and with none.

Both engines answer 16 prompts in turn, in one process. Before anything is timed, each answer is compared with the one
that the same engine gives alone.

    python bench/adapters.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ridgeline import LLM, SamplingParams

LAYERS = 4
CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 2048, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "dtype": "float32",
}  # fmt: skip
RANK, BATCH = 16, 16


def write_adapter(folder: Path, hidden: int, seed: int) -> Path:
    """Write an adapter with terms for each matrix of attention and MLPs; return its folder."""
    folder.mkdir()
    rng, kv, mlp = np.random.default_rng(seed), hidden // 2, 4 * hidden
    tensors: dict[str, Any] = {}
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
             "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (hidden, mlp), "mlp.up_proj": (hidden, mlp),
             "mlp.down_proj": (mlp, hidden)}  # fmt: skip
    for layer in range(LAYERS):
        for name, (columns, rows) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}.lora_"
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                tensors[f"{key}{part}.weight"] = rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return folder


def tokens_per_second(llm: LLM, prompts: list[Any], names: list[str], length: int) -> float:
    """Return the speed of one batch of answers."""
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True), lora=names)
    return len(prompts) * length / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024, help="Hidden size of the model. Default: 1024.")
    parser.add_argument("--length", type=int, default=32, help="Tokens of an answer. Default: 32.")
    parser.add_argument("--repeat", type=int, default=5, help="Times that each engine is measured. Default: 5.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = {**CONFIG, "hidden_size": given.hidden, "intermediate_size": 4 * given.hidden}
        (folder / "config.json").write_text(json.dumps(config))
        adapters = {f"a{i}": str(write_adapter(folder / f"a{i}", given.hidden, i)) for i in range(8)}
        common: dict[str, Any] = {
            "load_format": "dummy",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "speculative": "off",
        }
        plain, adapted = LLM(str(folder), **common), LLM(str(folder), lora_modules=adapters, **common)
        prompts: list[Any] = [{"prompt_token_ids": [i + 3, 5, 7, 9]} for i in range(BATCH)]
        names = [f"a{i % 8}" for i in range(BATCH)]
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        together = adapted.generate(prompts, params, lora=names)
        for prompt, name, output in zip(prompts, names, together, strict=True):
            (alone,) = adapted.generate([prompt], params, lora=name)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids, f"{name} answers another text in company"
        rows = [
            (tokens_per_second(plain, prompts, [""] * BATCH, given.length),
             tokens_per_second(adapted, prompts, [""] * BATCH, given.length),
             tokens_per_second(adapted, prompts, names, given.length))
            for _ in range(given.repeat + 1)
        ][1:]  # fmt: skip
    none, base, eight = np.median(np.array(rows), axis=0)
    ratios = np.median([row[2] / row[0] for row in rows]), np.median([row[1] / row[0] for row in rows])
    print(f"no room for adapters      {none:8.1f} tokens/s")
    print(f"room, requests without    {base:8.1f} tokens/s, {ratios[1]:.2f} of it")
    print(f"8 adapters of rank {RANK}     {eight:8.1f} tokens/s, {ratios[0]:.2f} of it")


if __name__ == "__main__":
    main()
