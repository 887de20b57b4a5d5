"""An engine process on any machine of a Ray cluster. This file and `ray_cluster.py` are the only ones that know Ray.

An actor starts the process on its machine, as the server does on its own, and passes messages on in both directions.
Ray chooses the machine, and says when an actor has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ridgeline import __version__
from ridgeline.serve.engine.process import END_SECONDS, EngineProcess, LocalProcess

PLACE_SECONDS = 300.0  # until a machine is free for an actor; a cluster that grows starts one within minutes
CALL_SECONDS = 10.0  # for an actor to answer while an engine starts or ends
CLOCK_READINGS = 5
CLOCK_SECONDS = 60.0  # between two comparisons of clocks, which drift apart

T = TypeVar("T")
log = logging.getLogger(__name__)


class Hello(NamedTuple):
    """The first answer of an actor: the id of the engine process, and the version of Ridgeline on that machine."""

    pid: int
    version: str


class Relay:
    """Runs on the engine's machine, as a Ray actor. It starts an engine process and passes messages on."""

    def __init__(self) -> None:
        self._process: EngineProcess | None = None

    async def start(self) -> Hello:
        """Start the engine process. Raises OSError."""
        self._process = await LocalProcess.start()
        return Hello(self._process.pid, __version__)

    async def clock(self) -> float:
        """Return time.perf_counter of this machine."""
        return time.perf_counter()

    async def messages(self) -> AsyncIterator[list[bytes]]:
        """Yield the messages of the engine, each time all that have arrived. Ends when the engine ends."""
        assert self._process is not None
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        reading = asyncio.create_task(_read_into(arrived, self._process))
        try:
            while (first := await arrived.get()) is not None:
                found: list[bytes | None] = [first]
                while not arrived.empty():
                    found.append(arrived.get_nowait())
                yield [data for data in found if data is not None]
                if found[-1] is None:
                    return
        finally:
            reading.cancel()

    async def write(self, data: bytes) -> None:
        """Send framed messages to the engine."""
        assert self._process is not None
        self._process.write(data)

    async def end(self, patience_s: float) -> str:
        """End the engine process, as `EngineProcess.end` does."""
        return "" if self._process is None else await self._process.end(patience_s)


async def _read_into(arrived: asyncio.Queue[bytes | None], process: EngineProcess) -> None:
    """Read messages until the pipe ends, which None stands for."""
    try:
        while True:
            arrived.put_nowait(await process.read())
    except ConnectionError:
        arrived.put_nowait(None)


@dataclass(frozen=True, slots=True)
class Actors:
    """Starts and ends actors. `ray_cluster.py` has the one of Ray; tests have one without Ray.

    start: starts an actor of the class Relay and returns its handle. call: awaits a method of a handle. messages:
    returns the lists of `Relay.messages` of a handle. kill: ends an actor and its process. failures: exceptions that
    mean that an actor has ended or cannot be reached.
    """

    start: Callable[[], Any]
    call: Callable[..., Awaitable[Any]]
    messages: Callable[[Any], AsyncIterator[list[bytes]]]
    kill: Callable[[Any], None]
    failures: tuple[type[Exception], ...]


class RayProcess:
    """An engine process that an actor has started, as an `EngineProcess`."""

    def __init__(self, actors: Actors, actor: Any, pid: int, ahead_s: float) -> None:
        self._actors, self._actor, self._pid, self._ahead_s = actors, actor, pid, ahead_s
        self._arrived: asyncio.Queue[bytes | Exception] = asyncio.Queue()  # an exception ends the pipe
        self._ended: Exception | None = None
        self._unsent = bytearray()
        self._writing: asyncio.Task[None] | None = None
        self._tasks = asyncio.create_task(self._receive()), asyncio.create_task(self._keep_time())

    @classmethod
    async def start(cls, actors: Actors) -> RayProcess:
        """Start an actor and its engine process. Raises OSError."""
        actor = actors.start()
        try:
            hello = await _placed(actors, actor)
            if hello.version != __version__:
                raise OSError(f"that machine has Ridgeline {hello.version}, and this one {__version__}; install one")
            return cls(actors, actor, hello.pid, await _ahead(lambda: actors.call(actor, "clock")))
        except TimeoutError:
            actors.kill(actor)
            raise OSError(
                f"it was placed, but its actor did not answer within {CALL_SECONDS:.0f} s; that machine or the network "
                "is too busy: use fewer --replicas or --threads"
            ) from None
        except actors.failures as e:
            actors.kill(actor)
            raise OSError(f"its actor failed: {lines_of(e)[-1]}") from None
        except BaseException:
            actors.kill(actor)
            raise

    @property
    def pid(self) -> int:
        """Return the process id on the machine where it runs."""
        return self._pid

    @property
    def ahead_s(self) -> float:
        """Return by how many seconds its time.perf_counter is ahead of ours."""
        return self._ahead_s

    @property
    def shares_cores(self) -> bool:
        """Return False: messages pass through Ray, and news of what was written would come too late."""
        return False

    async def read(self) -> bytes:
        """Wait for the next message and return it, pickled. Raises ConnectionError at the end of the pipe, and after a
        message to the engine was lost.
        """
        found = self._ended if self._arrived.empty() and self._ended is not None else await self._arrived.get()
        if isinstance(found, Exception):
            raise found
        return found

    def write(self, data: bytes) -> None:
        """Send a framed message. Messages that are written while one is on its way go together, and stay in order.

        After one was lost, nothing is sent: the engine must start again, as `read` says.
        """
        if self._ended is not None:
            return
        self._unsent += data
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def end(self, patience_s: float) -> str:
        """End the engine process and its actor. Return how the process ended."""
        for task in (self._writing, *self._tasks):
            if task is not None:
                task.cancel()
        try:
            ending = self._actors.call(self._actor, "end", patience_s)
            return str(await _within(patience_s + END_SECONDS + CALL_SECONDS, ending))
        except TimeoutError:
            return ""
        except self._actors.failures:
            return " with its actor"
        finally:
            self._actors.kill(self._actor)

    async def _write(self) -> None:
        while self._unsent:
            data = bytes(self._unsent)
            self._unsent.clear()
            try:
                await self._actors.call(self._actor, "write", data)
            except Exception as e:  # without this message the engine would never answer what it asks
                log.error("a message did not reach an engine: %s", lines_of(e)[-1])
                self._end(ConnectionError(f"the actor of the engine did not take a message: {lines_of(e)[-1]}"))
                return

    async def _receive(self) -> None:
        """Put the messages of the engine where `read` takes them."""
        try:
            async for found in self._actors.messages(self._actor):
                for data in found:
                    self._arrived.put_nowait(data)
        except self._actors.failures as e:
            self._end(ConnectionError(f"the actor of the engine ended: {lines_of(e)[-1]}"))
        except Exception as e:  # a bug, which `read` raises where it is logged
            self._end(e)
        else:
            self._end(ConnectionError("the engine process ended"))

    def _end(self, error: Exception) -> None:
        if self._ended is None:
            self._ended = error
            self._arrived.put_nowait(error)

    async def _keep_time(self) -> None:
        """Compare the clocks again and again. A reading that fails changes nothing."""
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            with contextlib.suppress(TimeoutError, *self._actors.failures):
                self._ahead_s = await _ahead(lambda: self._actors.call(self._actor, "clock"), self._ahead_s)


def lines_of(error: Exception) -> list[str]:
    """Return the lines of an exception's text, or the name of its type if it has none."""
    return str(error).strip().splitlines() or [type(error).__name__]


async def _placed(actors: Actors, actor: Any) -> Hello:
    """Wait until an actor has a machine and its engine process has started. Raises OSError, and `actors.failures`."""
    try:
        return Hello(*await _within(PLACE_SECONDS, actors.call(actor, "start")))
    except TimeoutError:
        raise OSError(
            f"no machine of the cluster had room for it within {PLACE_SECONDS:.0f} s; `ray status` shows what is "
            "free: use fewer --replicas or --threads"
        ) from None


async def _ahead(clock: Callable[[], Awaitable[float]], known: float = 0.0) -> float:
    """Return by how many seconds another clock is ahead of ours, by the reading that took the shortest time.

    known: the difference that is known so far; it is returned if the reading differs from it by less than its own
    error, so that the clock of one machine is 0 ahead of itself. Raises TimeoutError.
    """
    best, ahead = float("inf"), 0.0
    for _ in range(CLOCK_READINGS):
        before = time.perf_counter()
        there = await _within(CALL_SECONDS, clock())
        after = time.perf_counter()
        if after - before < best:
            best, ahead = after - before, there - (before + after) / 2
    return ahead if abs(ahead - known) > best / 2 else known


async def _within(seconds: float, work: Awaitable[T]) -> T:
    """Await `work`. Raises TimeoutError after this time."""
    async with asyncio.timeout(seconds):
        return await work
