"""Drive a program that decodes greedily with drafts, one sequence at a time: python drive_drafts.py TOOL

The format of a load is JSON: {"drafts": "off", "lookup" or "model", "draft": path of the draft model, "depth": drafts
of a verification}. llama.cpp has drafts in its programs, not in its library. Its driver does the same with the C
interface: it drafts with the best tokens, verifies them in one batch, and removes those that were rejected.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protocol import Emit, serve

NGRAM = 2  # shortest suffix that is looked up
LONGEST = 4


def look_up(tokens: list[int], depth: int) -> list[int]:
    """Return the tokens that followed the longest suffix where it last occurred before."""
    for size in range(LONGEST, NGRAM - 1, -1):
        suffix = tokens[-size:]
        for at in range(len(tokens) - size - 1, -1, -1):
            if tokens[at : at + size] == suffix:
                return tokens[at + size : at + size + depth]
    return []


class Ridgeline:
    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int) -> str:
        from ridgeline import LLM
        from ridgeline.settings import EngineOptions

        how = json.loads(format)
        chosen = {"off": "off", "lookup": "ngram", "model": how["draft"]}[how["drafts"]]
        options = EngineOptions() if chosen == "off" else EngineOptions(
            speculative=chosen, num_speculative_tokens=how["depth"], draft_depth=how.get("rule", "fixed")
        )  # fmt: skip
        self._llm = LLM(path, threads=threads, max_model_len=max_tokens, engine=options)
        return "this tree"

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        from ridgeline import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        (prompt,) = prompts

        def sink(chunk: Any) -> None:
            for token in chunk.token_ids:
                emit(0, token)

        self._llm.session.add(self._llm.frontend.request({"prompt_token_ids": prompt}, params, 0), sink)
        while len(self._llm.session):
            self._llm.session.step()


class Transformers:
    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int) -> str:
        import torch
        from transformers import AutoModelForCausalLM

        self._how, self._torch = json.loads(format), torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

        def opened(folder: str) -> Any:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            model.generation_config.eos_token_id = None
            return model

        self._model, self._more = opened(path), dict[str, Any]()
        if self._how["drafts"] == "model":
            draft = opened(self._how["draft"])
            draft.generation_config.num_assistant_tokens = self._how["depth"]
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
            self._more = {"assistant_model": draft}
        elif self._how["drafts"] == "lookup":
            self._more = {"prompt_lookup_num_tokens": self._how["depth"]}
        return version("transformers")

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        from transformers.generation.streamers import BaseStreamer

        length = len(prompts[0])

        class Streamer(BaseStreamer):
            seen = 0

            def put(self, value: Any) -> None:
                for token in value.flatten().tolist():
                    self.seen += 1
                    if length < self.seen <= length + tokens:
                        emit(0, token)

            def end(self) -> None:
                pass

        ids = self._torch.tensor(prompts)
        self._model.generate(
            ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0,
            streamer=Streamer(), **self._more,
        )  # fmt: skip


class Context:
    """One model of llama.cpp with one sequence."""

    def __init__(self, lib: Any, file: Path, threads: int, max_tokens: int) -> None:
        import numpy as np

        self._lib, self._numpy = lib, np
        model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {file.name}")
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = max_tokens
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(model, params)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch, self._model = lib.llama_batch_init(max_tokens, 0, 1), model
        self.known = 0  # tokens whose state is kept

    def cut(self, length: int) -> None:
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), 0, length, -1)
        self.known = min(self.known, length)

    def best(self, tokens: list[int], wanted: int) -> list[int]:
        """Run tokens after those that are known, and return the best token after each of the last `wanted`."""
        batch, n = self._batch, len(tokens)
        batch.n_tokens = n
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.logits[at] = token, self.known + at, at >= n - wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        self.known += n
        rows = (self._lib.llama_get_logits_ith(self._context, at) for at in range(n - wanted, n))
        return [int(self._numpy.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in rows]


class LlamaCpp:
    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int) -> str:
        import llama_cpp as lib

        self._how = json.loads(format)
        lib.llama_backend_init()
        self._target, self._draft = Context(lib, Path(path), threads, max_tokens), None
        if self._how["drafts"] == "model":
            self._draft = Context(lib, Path(self._how["draft"]), threads, max_tokens)
        return str(lib.__version__)

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        (prompt,) = prompts
        target, all_tokens, left = self._target, list(prompt), tokens
        for context in filter(None, (target, self._draft)):
            context.cut(0)
        found = target.best(prompt, 1)
        while True:
            for token in found:
                emit(0, token)
            all_tokens += found
            left -= len(found)
            if not left:
                return
            drafts = self._drafts(all_tokens, min(self._how["depth"], left - 1))
            best = target.best([all_tokens[-1], *drafts], 1 + len(drafts))
            right = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
            found = best[: right + 1]
            target.cut(len(all_tokens) + right)

    def _drafts(self, tokens: list[int], depth: int) -> list[int]:
        if self._how["drafts"] == "lookup":
            return look_up(tokens, depth)
        if self._draft is None or not depth:
            return []
        self._draft.cut(min(self._draft.known, len(tokens) - 1))
        drafts = self._draft.best(tokens[self._draft.known :], 1)
        while len(drafts) < depth:
            drafts += self._draft.best(drafts[-1:], 1)
        return drafts


class OpenVino:
    """The pipeline of openvino-genai, which drafts itself."""

    def load(self, path: str, format: str, threads: int, max_seqs: int, max_tokens: int) -> str:
        import openvino
        import openvino_genai as genai

        self._how, self._ov, self._genai, self._next = json.loads(format), openvino, genai, 0
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = 1, max_seqs
        scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = max_tokens, False
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        }  # fmt: skip
        more: dict[str, Any] = {}
        if self._how["drafts"] == "model":
            more = {"draft_model": genai.draft_model(self._how["draft"], "CPU", **properties)}
        elif self._how["drafts"] == "lookup":
            more = {"prompt_lookup": True}
        self._pipeline = genai.ContinuousBatchingPipeline(Path(path), scheduler, "CPU", properties | more)
        return version("openvino-genai")

    def run(self, prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        if self._how["drafts"] != "off":
            config.num_assistant_tokens = self._how["depth"]
        if self._how["drafts"] == "lookup":
            config.max_ngram_size = LONGEST
        handle = self._pipeline.add_request(self._next, self._ov.Tensor(np.array(prompts, np.int64)), config)
        self._next += 1
        left = tokens
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    for token in output.generated_ids[:left]:
                        emit(0, token)
                    left -= len(output.generated_ids[:left])


DRIVERS = {"ridgeline": Ridgeline, "transformers": Transformers, "llama_cpp": LlamaCpp, "openvino": OpenVino}

if __name__ == "__main__":
    serve(DRIVERS[sys.argv[1]])
