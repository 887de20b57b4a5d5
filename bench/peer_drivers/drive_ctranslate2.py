"""Drive CTranslate2 with generate_batch, whose callback gets each token as soon as it exists."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protocol import Emit, serve


class CTranslate2:
    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int) -> str:
        import ctranslate2

        words = json.loads((Path(path) / "vocabulary.json").read_text())
        self._words = words
        self._generator = ctranslate2.Generator(
            path, device="cpu", compute_type=format, intra_threads=threads, inter_threads=1
        )
        return version("ctranslate2")

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        def take(step: Any) -> None:
            emit(step.batch_id, step.token_id)

        self._generator.generate_batch(
            [[self._words[t] for t in prompt] for prompt in prompts],
            max_length=tokens, min_length=tokens, sampling_topk=1, include_prompt_in_result=False, end_token=[],
            callback=take,
        )  # fmt: skip


if __name__ == "__main__":
    serve(CTranslate2)
