"""Drive Ridgeline with an LLM's session, step by step, as `LLM.generate` does."""

from __future__ import annotations

from typing import Any

from protocol import Emit, serve


class Ridgeline:
    def load(
        self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int, activations: str | None = None,
        attention: str = "exact",
    ) -> str:  # fmt: skip
        from ridgeline import LLM
        from ridgeline.settings import EngineOptions
        from ridgeline.system import resident_bytes

        self._base = resident_bytes()
        form, _, naive = format.partition(" ")  # "naive" computes whole histories, and the engine is compared with it
        stored: dict[str, Any] = {"fp32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}}
        weights, _, taken = form.partition("/")
        how = (stored.get(form) or {"weights": weights}) | {"activations": activations or taken or None}
        self._llm = LLM(
            path, skip_tokenizer_init=True, max_model_len=max_tokens, cache="off" if naive else "on",
            engine=EngineOptions(max_num_seqs=max_seqs), threads=threads, attention=attention, **how,
        )  # fmt: skip
        self._runs = 0
        return "this tree"

    def predict(self, prompt: int, tokens: int, earlier: int) -> int:
        """Return the predicted resident bytes of this process with requests one by one.

        prompt: tokens of a prompt; 0: before the first request. earlier: number of requests that are over.
        """
        from ridgeline.measure.predict import memory_of

        config, stats = self._llm.config, self._llm.stats()
        assert config is not None and stats is not None
        kept = [group.kept_pages for group in stats.groups]
        found = memory_of(self._llm.loaded, config, int(prompt > 0), prompt, tokens, earlier=earlier, kept=kept)
        return self._base + int(found.total)

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        from ridgeline import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._runs += 1
        for i, ids in enumerate(prompts):

            def sink(chunk: Any, i: int = i) -> None:
                if chunk.error:
                    raise RuntimeError(chunk.error)
                for token in chunk.token_ids:
                    emit(i, token)

            # With a salt of its own, a run gets no prefix hit from another run.
            prompt = {"prompt_token_ids": ids, "cache_salt": f"run {self._runs}"}
            self._llm.session.add(self._llm.frontend.request(prompt, params, i), sink)
        while len(self._llm.session):
            self._llm.session.step()


if __name__ == "__main__":
    serve(Ridgeline)
