"""The HTTP process's end of the pipe: start and restart the engine process, and deliver its chunks to requests."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from ridgeline.errors import HelpersBusy, RequestError, RidgelineError
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.vectors import Floats, Reading, Text
from ridgeline.serve.engine.messages import (
    Abort,
    Adapt,
    Ask,
    Beat,
    Chunks,
    Delivered,
    Embed,
    Embedded,
    Failed,
    Loading,
    Lost,
    Ready,
    Refused,
    Report,
    Start,
    Submit,
    frame,
)
from ridgeline.serve.engine.process import EngineProcess, LocalProcess, StartProcess
from ridgeline.serve.engine.watch import EngineSilent, Patience, Watch
from ridgeline.settings import EngineConfig, EngineOptions
from ridgeline.spec.request import OutputChunk

State = Literal["starting", "ready", "restarting", "sleeping", "closed"]
Health = State | Literal["silent"]
MAX_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0  # an engine that ran for this long is restarted without a pause

Batch = list[tuple[int, OutputChunk]]  # index of the prompt in its request, and the chunk

log = logging.getLogger(__name__)


def _ignore() -> None:
    """Ignore the news of new chunks."""


class EngineDown(Exception):
    """The engine process ended or a step failed. The request is lost, but not because of an error in it."""


class StartFailed(RidgelineError):
    """The model could not be loaded."""


class Answers:
    """Receives the chunks of the prompts of one request, in the order in which the engine sends them."""

    def __init__(
        self, ids: Sequence[int], end: Callable[[Sequence[int]], None], on_done: Callable[[], None] = lambda: None
    ) -> None:
        """ids: the engine's id of each prompt. end: called with the ids that are to be aborted. on_done: called once,
        when the engine has finished all of them.
        """
        self._on_done: Callable[[], None] | None = on_done
        self._open = {number: index for index, number in enumerate(ids)}  # unfinished ids -> index of the prompt
        self._end = end
        self._items: Batch = []
        self._committed = 0.0
        self.committed = 0.0  # when the engine produced the first chunk of the last batch (time.perf_counter)
        self._error: Exception | None = None
        self._news: Callable[[], None] = _ignore

    def listen(self, news: Callable[[], None]) -> None:
        """Call `news` after each message of the engine that has chunks for this request."""
        self._news = news

    @property
    def waiting(self) -> bool:
        """Return whether there is nothing to take yet."""
        return not self._items and self._error is None and bool(self._open)

    async def wait(self) -> None:
        """Wait until there is something to take."""
        if self.waiting:
            arrived = asyncio.Event()
            self.listen(arrived.set)
            while self.waiting:
                arrived.clear()
                await arrived.wait()

    def check(self) -> None:
        """Raise the exception that `take` would raise, if any."""
        if not self._items and self._error is not None:
            raise self._error

    def take(self) -> Batch:
        """Return all chunks that arrived since the last call. Unless `waiting`, an empty list means the end.

        Raises RequestError or EngineDown if a prompt failed. Its siblings are ended too.
        """
        self.check()
        items, self._items = self._items, []
        self.committed = self._committed
        return items

    def close(self) -> None:
        """Abort the unfinished prompts."""
        open_ids, self._open = list(self._open), {}
        self._end(open_ids)
        self._leave()

    def _leave(self) -> None:
        if self._on_done is not None:
            on_done, self._on_done = self._on_done, None
            on_done()

    def put(self, number: int, chunk: OutputChunk, committed: float) -> bool:
        """Add a chunk. Return whether it is the last one of its prompt."""
        index = self._open.get(number)
        if index is None:
            return True
        self._committed = self._committed if self._items else committed
        self._items.append((index, chunk))
        if chunk.output is not None:
            del self._open[number]
            if not self._open:  # the slots are free even if the client has not read everything yet
                self._leave()
        return chunk.output is not None

    def notify(self) -> None:
        """Tell the listener that there is something to take."""
        self._news()

    def fail(self, error: Exception) -> None:
        """End all prompts of the request with an error."""
        self._error = error
        self.close()
        self.notify()


class EngineClient:
    """Owns the engine process and restarts it when it ends. All methods must run in one event loop."""

    def __init__(
        self, model: str, options: Mapping[str, Any], on_loading: Callable[[Loading], None],
        patience: Patience | None = None, start_process: StartProcess = LocalProcess.start,
    ) -> None:  # fmt: skip
        self._start_message, self._on_loading, self._start_process = Start(model, options), on_loading, start_process
        self.watch = Watch(patience or Patience())
        self._ids = count()
        self._answers: dict[int, Answers] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._process: EngineProcess | None = None
        self._shares_cores = True
        self._supervisor: asyncio.Task[None] | None = None
        self.state: State = "starting"
        self.restarts = 0

    async def start(self) -> Ready:
        """Start the process and wait until the model is loaded. Raises StartFailed."""
        process, ready = await self._spawn()
        self.pin(ready.config)
        self.state = "ready"
        self._supervisor = asyncio.create_task(self._supervise(process))
        return ready

    def pin(self, config: EngineConfig) -> None:
        """Give the next engine process these settings."""
        self._start_message = pinned(self._start_message, config)

    @property
    def pid(self) -> int | None:
        """Return the process id of the engine process."""
        return self._process.pid if self._process else None

    @property
    def health(self) -> Health:
        """Return the state of the engine, or "silent" if it should be ready but sends no heartbeat."""
        return "silent" if self.state == "ready" and self.watch.silent else self.state

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last message of the engine."""
        return self.watch.silent_s

    @property
    def engines(self) -> int:
        """Return the number of engines."""
        return 1

    def replicas(self) -> Sequence[dict[str, Any]]:
        """Return nothing: there is one engine."""
        return ()

    @property
    def up(self) -> bool:
        """Return whether the engine can answer."""
        return self.health == "ready"

    def submit(
        self, requests: Sequence[GenerationRequest], arrived: float, *, stream: bool, on_done: Callable[[], None]
    ) -> Answers:
        """Send requests. arrived: when they arrived (time.perf_counter). on_done: called once, when the engine has
        finished all of them. Raises EngineDown while there is no engine.
        """
        ids = [next(self._ids) for _ in requests]
        answers = Answers(ids, self._end, on_done)
        for number, request in zip(ids, requests, strict=True):
            self._send(Submit(number, request, arrived + self._ahead_s, stream))
        self._answers |= dict.fromkeys(ids, answers)
        return answers

    async def embed(self, texts: Sequence[Text], reading: Reading) -> Floats:
        """Return a row of numbers for each text. Raises RequestError, EngineDown."""
        reply: Embedded = await self._ask(lambda number: Embed(number, texts, reading))
        return reply.rows

    async def adapt(self, name: str, source: str | None) -> None:
        """Load an adapter, or drop it if there is no source. Later engine processes do the same at their start.

        Raises RequestError, EngineDown.
        """
        await self._ask(lambda number: Adapt(number, name, source))
        start = self._start_message
        modules = {other: given for other, given in start.options.get("lora_modules", {}).items() if other != name}
        if source is not None:
            modules[name] = source
        self._start_message = Start(start.model, {**start.options, "lora_modules": modules})

    async def report(self) -> Report:
        """Return the engine's state and counters, taken between two steps. Raises EngineDown."""
        reply: Report = await self._ask(Ask)
        reply.meters.move(-self._ahead_s)
        return reply

    def end_all(self, why: str) -> None:
        """End every open request with the error `why`."""
        self._fail_all(why)

    async def close(self) -> None:
        """End the process and every open request. May be called again."""
        self.state = "closed"
        await self._rest("the server is stopping")

    async def sleep(self) -> None:
        """End the process, which frees its memory, until `wake`. Every open request ends. Raises EngineDown."""
        if self.state != "ready":
            raise EngineDown(f"the engine is {self.state}; try again")
        self.state = "sleeping"
        await self._rest("the engine was sent to sleep")

    async def wake(self) -> None:
        """Start the process again, and wait until the model is loaded. Raises EngineDown, StartFailed."""
        if self.state != "sleeping":
            raise EngineDown(f"the engine is {self.state}; only one that sleeps can wake")
        self.state = "starting"
        try:
            process, _ = await self._spawn()
        except BaseException:
            self.state = "sleeping"
            raise
        self.restarts += 1  # what other parts know of the last process does not hold any more
        self.state = "ready"
        self._supervisor = asyncio.create_task(self._supervise(process))

    async def _rest(self, why: str) -> None:
        """End the process and every open request."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._fail_all(why)
        await self._reap()

    @property
    def _ahead_s(self) -> float:
        """Return by how many seconds the clock of the engine's machine is ahead of ours."""
        return 0.0 if self._process is None else self._process.ahead_s

    # ---- the process ------------------------------------------------------------------------------------------

    async def _spawn(self) -> tuple[EngineProcess, Ready]:
        """Start a process and wait until its model is loaded. Raises StartFailed."""
        try:
            process = self._process = await self._start_process()
        except OSError as e:
            raise StartFailed(f"the engine process could not be started: {e}") from None
        self._shares_cores = process.shares_cores
        self._send(replace(self._start_message, shares_cores=self._shares_cores))
        try:
            message = await self.watch.run(self._load(process), loading=True)
        except EngineSilent as e:
            raise StartFailed(f"the engine process {e} while it loaded the model{await self._reap()}") from None
        except ConnectionError:
            raise StartFailed(f"the engine process ended while it loaded the model{await self._reap()}") from None
        except BaseException:
            await self._reap()
            raise
        return process, message

    async def _load(self, process: EngineProcess) -> Ready:
        while not isinstance(message := await _read(process), Ready):
            self.watch.heard(message)
            if isinstance(message, Failed):
                raise StartFailed(message.message)
            if isinstance(message, Loading):
                self._on_loading(message)
        return message

    async def _supervise(self, process: EngineProcess) -> None:
        """Read messages; start a new process when the process ends or hangs."""
        backoff = 0.0
        while True:
            started = time.perf_counter()
            silent, patience_s = "", 1.0
            try:
                await self.watch.run(self._listen(process))
            except EngineSilent as e:
                silent, patience_s = f", since it {e}", 0.0
            self.state = "restarting"
            why = await self._reap(patience_s) + silent
            log.error("the engine process ended%s; it is restarting", why)
            self._fail_all(f"the engine process ended{why}, and is restarting; try again")
            backoff = 0.0 if time.perf_counter() - started > STEADY_SECONDS else max(1.0, backoff * 2)
            process = await self._restart(backoff if self.restarts else 0.0)

    async def _listen(self, process: EngineProcess) -> None:
        """Handle messages until the pipe ends or a message cannot be handled."""
        try:
            while True:
                message = await _read(process)
                self.watch.heard(message)
                self._take(message)
        except ConnectionError:
            return
        except Exception:  # a bug here or in the engine: a new process is better than none
            log.exception("a message of the engine could not be handled")

    async def _restart(self, backoff: float) -> EngineProcess:
        while True:
            await asyncio.sleep(min(backoff, MAX_BACKOFF_SECONDS))
            self.restarts += 1
            try:
                process, _ = await self._spawn()
            except Exception as e:  # without this loop, the server could never answer again
                log.error("the engine could not be restarted: %s", e, exc_info=not isinstance(e, StartFailed))
                backoff = max(1.0, backoff * 2)
                continue
            self.state = "ready"
            log.warning("the engine is ready again")
            return process

    async def _reap(self, patience_s: float = 1.0) -> str:
        """Kill the process if it still runs after `patience_s`; return how it ended, to be appended to a message."""
        process, self._process = self._process, None
        return "" if process is None else await process.end(patience_s)

    # ---- messages ---------------------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        if isinstance(message, Chunks):
            self._hand_out(message)
            if message.last:
                self._delivered()
        elif isinstance(message, Refused):
            self._fail(message.id, RequestError(message.message))
        elif isinstance(message, Lost):
            for number in message.ids:
                self._fail(number, (HelpersBusy if message.busy else EngineDown)(message.message))
        elif isinstance(message, Beat):
            return
        elif (reply := self._replies.pop(message.id, None)) is not None and not reply.done():
            reply.set_result(message)

    def _hand_out(self, message: Chunks) -> None:
        """Deliver chunks. Listeners write at once: waking a task for each stream would cost as much as the write."""
        notified: dict[Answers, None] = {}
        committed = message.committed - self._ahead_s
        for number, values in message.items:
            answers = self._answers.get(number)
            if answers is not None:
                notified[answers] = None
                if answers.put(number, OutputChunk(*values), committed):
                    del self._answers[number]
        for answers in notified:
            answers.notify()

    def _fail(self, number: int, error: Exception) -> None:
        if (answers := self._answers.pop(number, None)) is not None:
            answers.fail(error)
        if (reply := self._replies.pop(number, None)) is not None and not reply.done():
            reply.set_exception(error)

    def _fail_all(self, message: str) -> None:
        for number in [*self._answers, *self._replies]:
            self._fail(number, EngineDown(message))

    def _end(self, ids: Sequence[int]) -> None:
        for number in ids:
            if self._answers.pop(number, None) is not None and self.state == "ready":
                self._send(Abort(number))

    def _delivered(self) -> None:
        if self._shares_cores and self.state == "ready":
            self._send(Delivered())

    async def _ask(self, message: Callable[[int], object]) -> Any:
        number = next(self._ids)
        self._send(message(number))
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        except asyncio.CancelledError:
            if self.state == "ready":
                self._send(Abort(number))
            raise
        finally:
            self._replies.pop(number, None)

    def _send(self, message: object) -> None:
        if self._process is None or (
            self.state in ("restarting", "sleeping", "closed") and not isinstance(message, Start)
        ):
            raise EngineDown(f"the engine is {self.state}; try again")
        self._process.write(frame(message))


def pinned(start: Start, config: EngineConfig) -> Start:
    """Return the start message with the settings that the first engine process chose.

    A restarted engine then has the settings that the HTTP process knows, even if less memory is free.
    """
    fixed = EngineOptions(
        config.max_num_seqs, config.max_num_batched_tokens, config.block_size, config.state_snapshot_tokens,
        config.state_bytes, config.steps_in_flight, config.swap_bytes, config.num_speculative_tokens,
        config.speculative, config.draft_depth, config.draft_acceptance, config.draft_tree,
    )  # fmt: skip
    return Start(start.model, {**start.options, "max_model_len": config.max_model_len, "engine": fixed})


async def _read(process: EngineProcess) -> Any:
    """Read the next message. Raises ConnectionError at the end of the pipe."""
    return pickle.loads(await process.read())
