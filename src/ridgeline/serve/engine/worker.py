"""Run the engine process: a model, its session, and one pipe to the HTTP process.

Between two steps the process reads messages; after each step it sends the step's tokens. It ends when the pipe ends, so
no process is left behind when the server is killed.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ridgeline.errors import HelpersBusy, RankError, RequestError, RidgelineError
from ridgeline.llm import LLM
from ridgeline.serve.engine.channel import connect
from ridgeline.serve.engine.compiler import Compiler
from ridgeline.serve.engine.drift import Drift
from ridgeline.serve.engine.embed import Embedder
from ridgeline.serve.engine.machine import StepLedger, deployment_of
from ridgeline.serve.engine.messages import (
    Abort,
    Adapt,
    Adapted,
    Ask,
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
)
from ridgeline.serve.engine.meters import EngineMeters
from ridgeline.serve.engine.outgoing import Outgoing
from ridgeline.serve.engine.pulse import Pulse
from ridgeline.serve.engine.settle import settle
from ridgeline.spec.request import OutputChunk
from ridgeline.system import resident_bytes

IDLE_SECONDS = 1.0  # without a step, after which the scheduler's bookkeeping is checked
PROGRESS_SECONDS = 0.25
MAX_FAILED_STEPS = 3  # failed steps in a row, after which the process ends and is restarted
# Usual upper bounds of the time that the HTTP process takes to wake up, and to write one chunk.
HAND_OVER_SECONDS, WRITE_SECONDS = 0.0005, 0.000125


class Worker:
    """The loop of the engine process."""

    def __init__(
        self, llm: LLM, inbox: Inbox, ledger: StepLedger, pulse: Pulse, outgoing: Outgoing, *, shares_cores: bool = True
    ) -> None:
        """shares_cores: the kernels run on the cores of the HTTP process, which are left to it after each step."""
        self._hands_over = shares_cores and llm.loaded.table.memory.on_host
        self._llm, self._inbox, self._ledger = llm, inbox, ledger
        self._session = llm.session
        self._pulse, self._outgoing = pulse, outgoing
        self._compiler = Compiler(llm.grammars, inbox.wake)
        self._open: dict[int, int] = {}  # the HTTP process's id -> the session's
        self._meters = EngineMeters()
        self._embedder = Embedder(llm.embeddings.reader, llm.batch_tokens, self._meters)
        self._drift = Drift()
        self._started = time.perf_counter()
        self._failures = 0  # failed steps since the last token
        self._checked = True
        self._stepped = 0.0  # when the last step ended (time.perf_counter)

    def run(self) -> None:
        """Run until the pipe closes."""
        try:
            while True:
                self._turn()
        except EOFError:
            return

    def _turn(self) -> None:
        self._pulse.end()
        messages = self._inbox.read(self._wait_seconds(), woken=True)
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
        if len(self._embedder):
            for answer in self._embedder.advance():
                self._send(answer)

    def _wait_seconds(self) -> float | None:
        """Return how long to wait for a message, in seconds; None means without limit."""
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
            if (session_id := self._open.pop(message.id, None)) is not None:
                self._session.abort(session_id)
        elif isinstance(message, Delivered):
            self._outgoing.undelivered = 0
        elif isinstance(message, Embed):
            self._embedder.add(message)
        elif isinstance(message, Adapt):
            self._adapt(message)
        elif isinstance(message, Ask):
            self._meters.alive_s = time.perf_counter() - self._started
            self._meters.resident_bytes = resident_bytes()
            self._send(Report(message.id, self._session.stats(), self._meters))

    def _add(self, submit: Submit) -> None:
        try:
            self._open[submit.id] = self._session.add(submit.request, self._sink(submit), submit.arrived)
        except RequestError as e:
            self._send(Refused(submit.id, str(e)))
        except Exception as e:  # a bug ends only this request
            logging.getLogger(__name__).exception("a request could not be added")
            self._send(Lost([submit.id], f"the request could not be added ({type(e).__name__})"))

    def _adapt(self, message: Adapt) -> None:
        try:
            if message.source is None:
                self._llm.unload_lora(message.name)
            else:
                self._llm.load_lora(message.name, message.source)
        except RidgelineError as e:
            self._send(Refused(message.id, str(e)))
        except Exception as e:  # a bug ends only this request
            logging.getLogger(__name__).exception("an adapter could not be changed")
            self._send(Lost([message.id], f"the adapter could not be changed ({type(e).__name__})"))
        else:
            self._send(Adapted(message.id))

    def _sink(self, submit: Submit) -> Callable[[OutputChunk], None]:
        """Return the function that receives a request's chunks: it counts them and sends those that are wanted."""
        meters, last = self._meters, dict[int, float]()

        def sink(chunk: OutputChunk) -> None:
            before = last.get(chunk.index)
            if chunk.token_ids:
                now = time.perf_counter()
                if before is not None:
                    meters.inter_token.observe((now - before) / len(chunk.token_ids))
                elif not last:
                    meters.ttft.observe(now - submit.arrived)
                last[chunk.index] = now
                meters.generation_tokens += len(chunk.token_ids)
            if submit.stream or chunk.output is not None:
                self._outgoing.add(submit.id, chunk, before)
            if chunk.output is not None:
                self._open.pop(submit.id, None)
                meters.finish(chunk.output)

        return sink

    def _step(self) -> None:
        meters, before, start = self._meters, self._meters.generation_tokens, time.perf_counter()
        self._checked = False
        self._outgoing.begin()
        try:
            self._session.step()
        except Exception as e:  # an error of the device or a bug: open requests are lost, new ones are accepted
            logging.getLogger(__name__).exception("a step of the engine failed")
            self._fail(e)
        if meters.generation_tokens > before:
            self._failures = 0
        self._stepped = time.perf_counter()
        seconds = self._stepped - start
        self._outgoing.end()
        meters.steps += 1  # counted here, while the HTTP process writes
        meters.busy_s += seconds
        meters.step_s.observe(seconds)
        meters.step_tokens.observe(meters.generation_tokens - before)
        self._count_cost(seconds)
        if self._outgoing.undelivered and self._hands_over:
            self._hand_over()

    def _fail(self, error: Exception) -> None:
        """End all open requests after a failed step.

        After several in a row, or without all ranks, end the process to get a new one.
        """
        self._meters.failed_steps += 1
        self._failures += 1
        self._outgoing.drain()
        lost, self._open = list(self._open), {}
        known = isinstance(error, RidgelineError)
        why = str(error) if known else f"a step of the engine failed ({type(error).__name__})"
        self._send(Lost(lost, f"{why}; the request is lost, try again"))
        if isinstance(error, RankError):
            logging.getLogger(__name__).error("%s; all ranks are started again", error)
            raise SystemExit(1)
        if self._failures == MAX_FAILED_STEPS:
            logging.getLogger(__name__).error("%d steps failed in a row; the process ends", self._failures)
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
            if (line := self._drift.add(seconds, cost.predicted_s)) is not None:
                logging.getLogger(__name__).warning(line)
            self._meters.drift = self._drift.ratio
            self._meters.roof_s += cost.roof_s

    def _hand_over(self) -> None:
        """Leave the cores to the HTTP process until it has written the step's chunks, or for the usual time of that.

        Otherwise both processes would lose: kernels on all cores wait for the core that the HTTP process takes, and the
        HTTP process would wait for whole time slices of the system.
        """
        end = self._stepped + HAND_OVER_SECONDS + self._outgoing.undelivered * WRITE_SECONDS
        while self._outgoing.undelivered and (left := end - time.perf_counter()) > 0:
            for message in self._inbox.read(left):
                self._take(message)

    def _check(self) -> None:
        self._checked = True
        try:
            self._session.check()
            self._meters.page_checks["agreed"] += 1
        except AssertionError:  # a bug that has harmed no request yet: the cached state is dropped
            self._meters.page_checks["wrong"] += 1
            logging.getLogger(__name__).exception("the bookkeeping of pages is inconsistent; the cache was reset")

    def _send(self, message: object) -> None:
        self._inbox.send(message)


def ready(llm: LLM) -> Ready:
    """Return the message that tells the HTTP process about the loaded model."""
    assert llm.config is not None
    loaded, memory = llm.loaded, llm.loaded.table.memory
    return Ready(
        loaded.spec, llm.config, llm.default_sampling_fields(), llm.tokenizer_folder, llm.no_tokenizer,
        memory.device, loaded.weight_bytes, memory.on_host, loaded.notes, deployment_of(llm),
        loaded.checkpoint.vectors,
    )  # fmt: skip


def main() -> None:
    """Run the engine process. Its argument says where the pipe is (serve/engine/channel.py)."""
    for number in (signal.SIGINT, signal.SIGTERM):  # only for the HTTP process, which lets requests finish first
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="engine: %(message)s")
    inbox = Inbox(connect(sys.argv[1]))
    start: Start = inbox.read_one()
    pulse = Pulse(inbox.send)
    outgoing = Outgoing(inbox.send)
    pulse.start()
    outgoing.start()
    try:
        _serve(start, inbox, pulse, outgoing)
    except (BrokenPipeError, ConnectionResetError):  # the server has ended
        return
    finally:  # closes the pipe now, so that nobody waits for threads that still compile
        pulse.stop()
        outgoing.stop()
        inbox.sock.close()


def _serve(start: Start, inbox: Inbox, pulse: Pulse, outgoing: Outgoing) -> None:
    try:
        llm = LLM(start.model, progress_bar=_progress(inbox.send), on_wait=logging.warning, **start.options)
    except RidgelineError as e:
        inbox.send(Failed(str(e)))
        return
    facts = ready(llm)
    inbox.send(facts)
    ledger = StepLedger(facts.deployment)
    worker = Worker(llm, inbox, ledger, pulse, outgoing, shares_cores=start.shares_cores)
    settle()
    worker.run()


def _progress(send: Callable[[object], None]) -> Callable[[int], Callable[[int], None]]:
    """Return a progress bar that the HTTP process draws."""

    def bar(total: int) -> Callable[[int], None]:
        done, last_sent = 0, time.perf_counter()

        def advance(more: int) -> None:
            nonlocal done, last_sent
            done += more
            if time.perf_counter() - last_sent > PROGRESS_SECONDS:
                last_sent = time.perf_counter()
                send(Loading(done, total))

        return advance

    return bar


if __name__ == "__main__":
    main()
