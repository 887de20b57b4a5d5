"""Compute the answers of a model with a canvas, one at a time: each by an engine of its own, which serves nothing else.

The rows of a canvas are computed in another way than those of finished tokens, so no single pass over a whole history
can give its logits. A new engine has no page that another request has used, and one sequence in a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ridgeline.engine import Engine
from ridgeline.ops.api import Array
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats
from ridgeline.sched.stats import StepShape
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import CanvasDiffusion
from ridgeline.spec.request import SamplingParams

PAGE = 16  # tokens of a page, or less: it has no effect on an answer that is alone
UNKNOWN_FREE_BYTES = 1 << 32  # 4 GiB, if the system does not tell


class AloneCanvases:
    """A runtime.generator.Generator that gives each request an engine. change: changes the logits of each pass."""

    def __init__(self, loaded: LoadedModel, change: Callable[[Floats], Floats] | None = None) -> None:
        self._loaded = loaded if change is None else _changed(loaded, change)
        self._engines: dict[int, Engine] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def add(self, request_id: int, request: GenerationRequest) -> None:
        """Start an engine for a request with a limit of tokens. Raises RequestError if it does not fit."""
        params, canvas = request.params, self._loaded.spec.diffusion
        assert isinstance(params, SamplingParams) and params.max_tokens is not None
        assert isinstance(canvas, CanvasDiffusion)
        longest = len(request.prompt_token_ids) + canvas.positions(params.max_tokens)
        memory = self._loaded.table.memory
        free = memory.free_bytes()
        config = resolve(
            self._loaded.spec, longest, EngineOptions(max_num_seqs=1, max_num_batched_tokens=longest, block_size=PAGE),
            free_bytes=(UNKNOWN_FREE_BYTES if free is None else free) - self._loaded.mapped_bytes, fixed_len=True,
            kv_cache_dtype=self._loaded.storage.dtype, float_bytes=memory.float_bytes,
        )  # fmt: skip
        pages = tuple(1 + group.most_pages(longest) for group in config.groups)
        engine = Engine(self._loaded, replace(config, num_pages=pages))
        engine.add(request_id, request)
        self._engines[request_id] = engine

    def step(self) -> list[Event]:
        """Run a step of each engine, and return what came of it."""
        events = [event for engine in self._engines.values() for event in engine.step()]
        self._engines = {number: engine for number, engine in self._engines.items() if len(engine)}
        return events

    def finish(self, request_id: int, choice: int) -> None:
        if request_id in self._engines:
            self._engines[request_id].finish(request_id, choice)

    def abort(self, request_id: int) -> None:
        self._engines.pop(request_id, None)

    def reset(self) -> None:
        self._engines.clear()

    def stats(self) -> None:
        return None

    def last_step(self) -> StepShape:
        return ()

    def check(self) -> None:
        """Check the pages of each engine."""
        for engine in self._engines.values():
            engine.check()


def _changed(loaded: LoadedModel, change: Callable[[Floats], Floats]) -> LoadedModel:
    """Return the model, whose logits are changed."""
    model, memory = copy.copy(loaded.model), loaded.table.memory

    def logits(stream: Any, rows: Array | None = None) -> Array:
        return memory.put(change(memory.get(loaded.model.logits(stream, rows))), "float32", "float32")

    # An attribute of this copy hides the method; the model that is served keeps it.
    model.logits = logits  # type: ignore[method-assign]
    return replace(loaded, model=model)
