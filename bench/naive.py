"""Compare naive sampling with that of transformers on the same random weights: python bench/naive.py

The least time of a token is that of 2 x parameters x history operations at the machine's peak of matrix products, which
is measured here. Both programs recompute the history at every token (`use_cache=False` in transformers), and their runs
alternate. The gate: the greedy tokens are equal.
"""

from __future__ import annotations

import statistics
import tempfile

import torch
from common import emit, peak_flops, seconds

from ridgeline import LLM, SamplingParams

PROMPT, NEW, ROUNDS = 64, 8, 5
SHAPES = {  # the shape of SmolLM2-135M, and one with a quarter of its hidden size
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "8M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 6,
           "num_key_value_heads": 2, "vocab_size": 16384},
}  # fmt: skip


def build(shape: dict[str, int], dtype: torch.dtype, folder: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, initializer_range=0.04)).to(dtype)
    model.save_pretrained(folder)
    return model.float().eval()


def run(name: str, dtype: torch.dtype) -> None:
    with tempfile.TemporaryDirectory() as folder:
        peer = build(SHAPES[name], dtype, folder)
        llm = LLM(folder, cache="off")
        prompt = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)

        def ours() -> list[int]:
            return llm.generate([prompt[0].tolist()], params)[0].outputs[0].token_ids

        def theirs() -> list[int]:
            options = {"do_sample": False, "use_cache": False, "min_new_tokens": NEW, "max_new_tokens": NEW}
            return peer.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, PROMPT:].tolist()

        equal = ours() == theirs()
        times = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
        peak = peak_flops()
    matrices = llm.loaded.spec.num_params() - SHAPES[name]["vocab_size"] * SHAPES[name]["hidden_size"] * 2
    # both programs compute the head for the last position only
    head = SHAPES[name]["vocab_size"] * SHAPES[name]["hidden_size"]
    work = sum(2 * (matrices * (PROMPT + i) + head) for i in range(NEW))
    mine, other = (statistics.median(t) / NEW for t in zip(*times, strict=True))
    emit(
        f"naive {name} {str(dtype).removeprefix('torch.')}, prompt {PROMPT}", equal,
        ms_per_token=round(mine * 1e3, 2), transformers_ms_per_token=round(other * 1e3, 2),
        ratio=round(statistics.median(b / a for a, b in times), 2),
        floor_ms_per_token=round(work / peak / NEW * 1e3, 2), peak_gflops=round(peak / 1e9, 1),
    )  # fmt: skip


def main() -> None:
    torch.set_grad_enabled(False)
    for name in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            run(name, dtype)


if __name__ == "__main__":
    main()
