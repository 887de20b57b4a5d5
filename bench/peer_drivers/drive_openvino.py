"""Drive openvino-genai with its continuous batching pipeline, which LLMPipeline also uses, on token ids."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protocol import Emit, serve

CACHE_GB, LONG_CACHE_GB, LONG = 1, 2, 4096  # size of the cache, and that for contexts beyond LONG tokens


class OpenVino:
    def load(
        self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int,
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> str:  # fmt: skip
        """Load a model. properties: further ones of the device, such as the hint for the precision."""
        import openvino
        import openvino_genai as genai

        self._ov, self._genai, self._next = openvino, genai, 0
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = LONG_CACHE_GB if max_tokens > LONG else CACHE_GB
        scheduler.max_num_seqs = max_seqs
        scheduler.max_num_batched_tokens = max_tokens
        scheduler.enable_prefix_caching = False
        given: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **properties}
        self._pipeline = genai.ContinuousBatchingPipeline(Path(path), scheduler, "CPU", given)
        return version("openvino-genai")

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        handles = []
        for prompt in prompts:
            ids = self._ov.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._next, ids, config))
            self._next += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for i, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            emit(i, token)


if __name__ == "__main__":
    serve(OpenVino)
