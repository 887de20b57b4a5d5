"""Drive transformers with the model's forward pass and cache, without the work that `generate` adds to each token."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from protocol import Emit, serve


class Transformers:
    _model: Any

    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int, widened: bool = False) -> str:
        """Load a model. widened: whether weights of 16 bits are widened to float32, in which all is then computed."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        dtype = torch.float32 if widened or format == "fp32" else torch.bfloat16
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        return version("transformers")

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        ids, state = self._torch.tensor(prompts), {}
        for _ in range(tokens):
            out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **state)
            state = {name: out[name] for name in ("past_key_values", "cache_params") if name in out}
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            for i, token in enumerate(ids[:, 0].tolist()):
                emit(i, token)


if __name__ == "__main__":
    serve(Transformers)
