"""Serve a model whose steps take a given time and compute nothing: python bench/paced.py MILLISECONDS serve MODEL

It is for bench/serving.py --step-ms, which measures the processor time of a served token on a machine that is too busy
for kernels. Each step sleeps, and then every open answer gets one token. Everything else is the server's own code.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ridgeline import LLM
from ridgeline.cli.main import main as ridgeline
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.sched.stats import StepShape
from ridgeline.serve.engine import client, worker

ENGINE = "engine"


class PacedGenerator:
    """A generator (runtime.generator.Generator) whose steps take `step_s` seconds."""

    def __init__(self, step_s: float, vocab_size: int) -> None:
        self._step_s, self._vocab_size = step_s, vocab_size
        self._open: dict[int, tuple[int, int]] = {}  # by request: its number of tokens so far, and the last number

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: int, request: GenerationRequest) -> None:
        self._open[request_id] = 0, int(getattr(request.params, "max_tokens", None) or 16)

    def step(self) -> list[Event]:
        time.sleep(self._step_s)
        events = []
        for request_id, (made, longest) in list(self._open.items()):
            over = made + 1 == longest
            token = 100 + (made * 7 + request_id) % (self._vocab_size - 100)
            events.append(Event(request_id, 0, (token,), finish_reason="length" if over else None))
            self._open[request_id] = made + 1, longest
            if over:
                del self._open[request_id]
        return events

    def finish(self, request_id: int, choice: int) -> None:
        self.abort(request_id)

    def abort(self, request_id: int) -> None:
        self._open.pop(request_id, None)

    def reset(self) -> None:
        self._open.clear()

    def stats(self) -> Any:
        return self.real.stats()

    def last_step(self) -> StepShape:
        return ()

    def check(self) -> None:
        pass

    real: Any = None


def main() -> None:
    """Run the server, or, as its child, the engine process."""
    pace = sys.argv[1]
    if sys.argv[2] == ENGINE:
        sys.argv = [sys.argv[0], sys.argv[-1]]
        worker.LLM = lambda *args, **options: paced(float(pace) / 1e3, LLM(*args, **options))  # type: ignore
        worker.main()
        return
    start = client.start_process
    client.start_process = lambda command: start([sys.executable, __file__, pace, ENGINE])  # type: ignore
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    ridgeline()


def paced(step_s: float, llm: LLM) -> LLM:
    """Return the model with a paced generator."""
    generator = PacedGenerator(step_s, llm.loaded.spec.vocab_size)
    session: Any = llm.session
    generator.real, session._generator = session._generator, generator
    return llm


if __name__ == "__main__":
    main()
