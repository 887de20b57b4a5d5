"""Drive llama.cpp through llama-cpp-python's bindings of its C interface: parallel sequences in one llama_batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol import Emit, serve

MICRO_BATCH = 512


class LlamaCpp:
    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int, repack: bool = True) -> str:
        """Load a file. repack: whether weights may get another layout, such as that for AMX."""
        import llama_cpp as lib

        self._lib: Any = lib
        lib.llama_backend_init()
        file = next(Path(path).glob("*.gguf"))
        loading = lib.llama_model_default_params()
        loading.use_extra_bufts = repack
        self._model = lib.llama_model_load_from_file(str(file).encode(), loading)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file.name}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = max_tokens, max_tokens, MICRO_BATCH
        params.n_seq_max, params.kv_unified = max_seqs, True
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(max_tokens, 0, 1)
        return str(lib.__version__)

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        length = len(prompts[0])
        rows = [(i, p, t, p == length - 1) for i, prompt in enumerate(prompts) for p, t in enumerate(prompt)]
        for step in range(tokens):
            following = [self._greedy(at) for at in self._decode(rows)]
            for i, token in enumerate(following):
                emit(i, token)
            rows = [(i, length + step, token, True) for i, token in enumerate(following)]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run one batch; return the indices whose logits are wanted. rows: (sequence, position, token, wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return [at for at, (_, _, _, wanted) in enumerate(rows) if wanted]

    def _greedy(self, at: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, at)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp)
