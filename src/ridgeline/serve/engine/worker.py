"""The engine's process: a model, its session, and one pipe to the HTTP process.

Between two steps it reads what has come; after each step it says what came of it, in one message. It ends when the pipe
does: nothing is left behind by a server that was killed.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ridgeline.errors import HelpersBusy, RequestError, RidgelineError
from ridgeline.llm import LLM
from ridgeline.serve.engine.channel import connect
from ridgeline.serve.engine.compiler import Compiler
from ridgeline.serve.engine.embed import Embedder
from ridgeline.serve.engine.machine import StepLedger, deployment_of
from ridgeline.serve.engine.messages import (
    Abort,
    Ask,
    Chunks,
    Delivered,
    Embed,
    Failed,
    Inbox,
    Loading,
    Lost,
    Ready,
    Refused,
    Report,
    Start,
    Submit,
    chunk_fields,
)
from ridgeline.serve.engine.meters import EngineMeters
from ridgeline.serve.engine.pulse import Pulse
from ridgeline.serve.engine.settle import settle
from ridgeline.spec.request import OutputChunk

IDLE_SECONDS = 1.0  # without a step, after which the books are checked
PROGRESS_SECONDS = 0.25
MAX_FAILED_STEPS = 3  # one after the other, after which a new process may do better
MESSAGE_CHUNKS = 8  # the first ones are on their way to their sockets while the last ones become text
# What the HTTP process takes at most, as a rule, to be woken, and to write a chunk.
HAND_OVER_SECONDS, WRITE_SECONDS = 0.0005, 0.000125


class Worker:
    """The loop."""

    def __init__(self, llm: LLM, inbox: Inbox, ledger: StepLedger, pulse: Pulse) -> None:
        self._llm, self._inbox, self._ledger = llm, inbox, ledger
        self._session = llm.session
        self._pulse = pulse
        self._compiler = Compiler(llm.grammars, inbox.wake)
        self._embedder = Embedder(llm.loaded)
        self._open: dict[int, int] = {}  # the HTTP process's id -> the session's
        self._chunks: list[tuple[int, tuple[Any, ...]]] = []
        self._undelivered = 0  # chunks of the last step
        self._committed = 0.0  # when the first one of the step came; 0: none yet
        self._meters = EngineMeters()
        self._started = time.perf_counter()
        self._failures = 0  # steps since the last token
        self._checked = True
        self._stepped = 0.0  # when the last step ended (time.perf_counter)

    def run(self) -> None:
        """Until the pipe closes."""
        try:
            while True:
                self._turn()
        except EOFError:
            return

    def _turn(self) -> None:
        self._pulse.end()
        messages = self._inbox.read(self._patience(), woken=True)
        self._pulse.begin()
        for message in messages:
            self._take(message)
        for submit, error in self._compiler.done():
            if error is None:
                self._add(submit)
            elif isinstance(error, HelpersBusy):
                self._send(Lost([submit.id], str(error), busy=True))
            else:
                self._send(Refused(submit.id, str(error)))
        if len(self._session):
            self._step()
        elif not self._checked and time.perf_counter() >= self._stepped + IDLE_SECONDS:
            self._check()
        if len(self._embedder) and (answer := self._embedder.advance()) is not None:
            self._send(answer)

    def _patience(self) -> float | None:
        """Seconds to wait for a message."""
        if len(self._session) or len(self._embedder):
            return 0.0
        return None if self._checked else max(0.0, self._stepped + IDLE_SECONDS - time.perf_counter())

    def _take(self, message: Any) -> None:
        if isinstance(message, Submit):
            if not self._compiler.add(message):
                self._add(message)
        elif isinstance(message, Abort):
            self._compiler.abort(message.id)
            self._embedder.abort(message.id)
            if (known := self._open.pop(message.id, None)) is not None:
                self._session.abort(known)
        elif isinstance(message, Delivered):
            self._undelivered = 0
        elif isinstance(message, Embed):
            self._embedder.add(message)
        elif isinstance(message, Ask):
            self._meters.alive_s = time.perf_counter() - self._started
            self._send(Report(message.id, self._session.stats(), self._meters))

    def _add(self, submit: Submit) -> None:
        try:
            self._open[submit.id] = self._session.add(submit.request, self._sink(submit), submit.arrived)
        except RequestError as e:
            self._send(Refused(submit.id, str(e)))
        except Exception as e:  # a fault of ours, which one request has met, and no other need suffer for
            logging.getLogger(__name__).exception("a request could not be added")
            self._send(Lost([submit.id], f"the request could not be added ({type(e).__name__})"))

    def _sink(self, submit: Submit) -> Callable[[OutputChunk], None]:
        """What hears of a request: it counts, and passes on what is wanted."""
        meters, last = self._meters, dict[int, float]()

        def sink(chunk: OutputChunk) -> None:
            if chunk.token_ids:
                now = time.perf_counter()
                if (before := last.get(chunk.index)) is not None:
                    meters.inter_token.observe((now - before) / len(chunk.token_ids))
                elif not last:
                    meters.ttft.observe(now - submit.arrived)
                last[chunk.index] = now
                meters.generation_tokens += len(chunk.token_ids)
            if submit.stream or chunk.output is not None:
                self._committed = self._committed or time.perf_counter()
                self._chunks.append((submit.id, chunk_fields(chunk)))
                self._undelivered += 1
                if len(self._chunks) >= MESSAGE_CHUNKS:
                    self._flush()
            if chunk.output is not None:
                self._open.pop(submit.id, None)
                meters.finish(chunk.output)

        return sink

    def _step(self) -> None:
        meters, before, start = self._meters, self._meters.generation_tokens, time.perf_counter()
        self._checked, self._committed, self._undelivered = False, 0.0, 0
        try:
            self._session.step()
        except Exception as e:  # of a device, or a fault of ours: who was open is lost, the next ones are welcome
            logging.getLogger(__name__).exception("a step of the engine failed")
            self._fail(e)
        if meters.generation_tokens > before:
            self._failures = 0
        self._stepped = time.perf_counter()
        seconds = self._stepped - start
        if self._undelivered:
            self._flush(last=True)
        meters.steps += 1  # while the other process writes
        meters.busy_s += seconds
        meters.step_s.observe(seconds)
        meters.step_tokens.observe(meters.generation_tokens - before)
        self._count_cost(seconds)
        if self._undelivered and self._llm.loaded.table.memory.on_host:
            self._hand_over()

    def _fail(self, error: Exception) -> None:
        """After a step that failed. A device may be lost for good, which the supervisor mends with a new process."""
        self._meters.failed_steps += 1
        self._failures += 1
        self._flush()
        lost, self._open = list(self._open), {}
        self._send(Lost(lost, f"a step of the engine failed ({type(error).__name__}); the request is lost, try again"))
        if self._failures == MAX_FAILED_STEPS:
            logging.getLogger(__name__).error("%d steps failed one after the other: the process ends", self._failures)
            raise SystemExit(1)

    def _count_cost(self, seconds: float) -> None:
        if shape := self._session.last_step():
            self._meters.last_step_s = seconds
            self._meters.forwards += 1
            self._meters.sequences += len(shape)
            cost = self._ledger.cost(shape)
            self._meters.step_bytes += cost.bytes
            self._meters.step_flops += cost.flops
            self._meters.predicted_s += cost.predicted_s
            self._meters.roof_s += cost.roof_s

    def _hand_over(self) -> None:
        """Leave the cores to the HTTP process until it has written what the step gave, or for as long as that takes as
        a rule. Kernels on all cores wait for the slowest one, so who takes one core from them holds them all up anyway;
        they, which run for longer than a writer needs, would hold it up for whole slices of the system's time.
        """
        end = self._stepped + HAND_OVER_SECONDS + self._undelivered * WRITE_SECONDS
        while self._undelivered and (left := end - time.perf_counter()) > 0:
            for message in self._inbox.read(left):
                self._take(message)

    def _check(self) -> None:
        self._checked = True
        try:
            self._session.check()
            self._meters.page_checks["agreed"] += 1
        except AssertionError:  # a fault of ours, which has harmed nobody yet: the state is forgotten
            self._meters.page_checks["wrong"] += 1
            logging.getLogger(__name__).exception("the books of pages did not agree; the state was forgotten")

    def _flush(self, *, last: bool = False) -> None:
        chunks, self._chunks = self._chunks, []
        self._send(Chunks(self._committed, chunks, last))

    def _send(self, message: object) -> None:
        self._inbox.send(message)


def ready(llm: LLM) -> Ready:
    """What the HTTP process must know of a model."""
    assert llm.config is not None
    loaded, memory = llm.loaded, llm.loaded.table.memory
    return Ready(
        loaded.spec, llm.config, llm.default_sampling_fields(), llm.tokenizer_folder, llm.no_tokenizer,
        memory.device, loaded.weight_bytes, memory.on_host, loaded.notes, deployment_of(llm),
    )  # fmt: skip


def main() -> None:
    """Run the engine's process. Its one argument says where the pipe is (serve/engine/channel.py)."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the HTTP process, which lets the requests end first
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="engine: %(message)s")
    inbox = Inbox(connect(sys.argv[1]))
    start: Start = inbox.read_one()
    pulse = Pulse(inbox.send)
    pulse.start()
    try:
        _serve(start, inbox, pulse)
    except (BrokenPipeError, ConnectionResetError):  # the server is gone
        return
    finally:  # the supervisor need not wait for threads that still compile
        pulse.stop()
        inbox.sock.close()


def _serve(start: Start, inbox: Inbox, pulse: Pulse) -> None:
    try:
        llm = LLM(start.model, progress_bar=_progress(inbox.send), on_wait=logging.warning, **start.options)
    except RidgelineError as e:
        inbox.send(Failed(str(e)))
        return
    known = ready(llm)
    inbox.send(known)
    worker = Worker(llm, inbox, StepLedger(known.deployment), pulse)
    settle()
    worker.run()


def _progress(send: Callable[[object], None]) -> Callable[[int], Callable[[int], None]]:
    """A bar that is drawn in the other process."""

    def bar(total: int) -> Callable[[int], None]:
        done, told = 0, time.perf_counter()

        def advance(more: int) -> None:
            nonlocal done, told
            done += more
            if time.perf_counter() - told > PROGRESS_SECONDS:
                told = time.perf_counter()
                send(Loading(done, total))

        return advance

    return bar


if __name__ == "__main__":
    main()
