"""Drive onnxruntime-genai with its generator; a batch is the rows of one tensor."""

from __future__ import annotations

from importlib.metadata import version

from protocol import Emit, serve


class OnnxRuntime:
    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int) -> str:
        import onnxruntime_genai

        self._genai = onnxruntime_genai  # the converter writes the number of threads into genai_config.json
        self._model = onnxruntime_genai.Model(path)
        return version("onnxruntime-genai")

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        import numpy as np

        params = self._genai.GeneratorParams(self._model)
        length = len(prompts[0]) + tokens
        params.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False, num_beams=1
        )
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
            for i, token in enumerate(generator.get_next_tokens()):
                emit(i, token)


if __name__ == "__main__":
    serve(OnnxRuntime)
