"""Send the tokens of steps to the HTTP process. Tokens that a fast model makes within a few milliseconds are joined.

A write to a client costs as much as a step of a small model. So the tokens of an answer wait for each other, but
HOLD_SECONDS at most, and only while the next step is expected to end in time. The first and the last token of an answer
do not wait, and neither does a token that came late. Thus each token of a slow model is sent at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ridgeline.serve.engine.messages import Chunks, chunk_fields
from ridgeline.spec.request import OutputChunk

HOLD_SECONDS = 0.004  # with the time of the write, a token is on its socket within 5 ms
SLACK = 1.1  # the next step is expected to take this many times as long as the last one
LATE_SECONDS = 2 * HOLD_SECONDS  # between two tokens of an answer, after which the second one does not wait
MESSAGE_CHUNKS = 8  # chunks per message: the first chunks are written while the last ones are detokenized


class Outgoing:
    """Collects the chunks of requests, joins those of one answer and sends them with `send`.

    The loop of the engine calls `begin`, `add` and `end`. A thread sends what has waited for HOLD_SECONDS during a step
    that takes longer than expected. undelivered: number of chunks of the last step that are not written yet.
    """

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], OutputChunk] = {}  # by the request's id and the number of the answer
        self._oldest = 0.0  # when the first held chunk was made (time.perf_counter)
        self._ready: list[tuple[int, OutputChunk]] = []
        self._committed = 0.0  # when the first ready chunk was made
        self._begun = 0.0  # when the step began
        self._holding: bool | None = None  # None until the step's first chunk
        self.undelivered = 0
        self._waiting, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="ridgeline-outgoing", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._over = True
        self._waiting.set()
        self._thread.join(1.0)

    def begin(self) -> None:
        """Note that a step begins."""
        self._begun, self._holding, self.undelivered = time.perf_counter(), None, 0

    def add(self, request: int, chunk: OutputChunk, before: float | None) -> None:
        """Add a chunk of the step. before: when the answer's last token was made; None for its first one."""
        now, key = time.perf_counter(), (request, chunk.index)
        with self._lock:
            if self._holding is None:
                end = (self._oldest if self._held else now) + HOLD_SECONDS
                self._holding = now + SLACK * (now - self._begun) <= end
            held = self._held.get(key)
            if held is not None and chunk.error is not None:  # the client would only see the error
                self._make_ready(request, self._held.pop(key), self._oldest)
                self.undelivered, held = self.undelivered + 1, None
            chunk, committed = (chunk, now) if held is None else (joined(held, chunk), self._oldest)
            if self._holding and chunk.finish_reason is None and before is not None and now - before < LATE_SECONDS:
                if not self._held:
                    self._oldest = now
                    self._waiting.set()
                self._held[key] = chunk
                return
            self._held.pop(key, None)
            self._make_ready(request, chunk, committed)
            self.undelivered += 1
            if len(self._ready) >= MESSAGE_CHUNKS:
                self._flush()

    def end(self) -> None:
        """Send what the step has added, except for chunks that wait."""
        with self._lock:
            if not self._holding:
                self.undelivered += len(self._held)
                self._release()
            if self.undelivered:
                self._flush(last=True)

    def drain(self) -> None:
        """Send everything."""
        with self._lock:
            self._release()
            if self._ready:
                self._flush()

    def _make_ready(self, request: int, chunk: OutputChunk, committed: float) -> None:
        self._committed = min(self._committed, committed) if self._ready else committed
        self._ready.append((request, chunk))

    def _release(self) -> None:
        for (request, _), chunk in self._held.items():
            self._make_ready(request, chunk, self._oldest)
        self._held.clear()

    def _flush(self, *, last: bool = False) -> None:
        chunks, self._ready = self._ready, []
        self._send(Chunks(self._committed, [(request, chunk_fields(chunk)) for request, chunk in chunks], last))

    def _run(self) -> None:
        while not self._over:
            self._waiting.wait()
            time.sleep(max(0.0, self._oldest + HOLD_SECONDS - time.perf_counter()))
            with self._lock:
                if not self._held:
                    self._waiting.clear()
                elif time.perf_counter() >= self._oldest + HOLD_SECONDS:
                    self._release()
                    try:
                        self._flush()
                    except OSError:  # the server has ended; the loop notices it too
                        return


def joined(first: OutputChunk, second: OutputChunk) -> OutputChunk:
    """Return two chunks of an answer as one."""
    return OutputChunk(
        first.index, first.text + second.text, first.token_ids + second.token_ids, first.logprobs + second.logprobs,
        second.finish_reason, second.stop_reason, second.error, second.output,
    )  # fmt: skip
