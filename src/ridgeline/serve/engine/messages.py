"""What the two processes say to each other: plain data, pickled, each frame behind its length.

The pipe joins two processes of one program and one user: nothing of a client's is ever unpickled.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from ridgeline.plan.planner import Deployment
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sched.stats import Stats
from ridgeline.serve.engine.meters import EngineMeters
from ridgeline.settings import EngineConfig
from ridgeline.spec import ModelSpec
from ridgeline.spec.request import OutputChunk

HEADER = struct.Struct("<I")
_READ = 1 << 18

Pooling = Literal["mean", "last"]


# ---- to the engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load, as the arguments of LLM."""

    model: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer a request. arrived: by time.perf_counter, one clock for all processes. stream: also piece by piece."""

    id: int
    request: GenerationRequest
    arrived: float
    stream: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants this request any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """All that the last step gave is written."""


@dataclass(frozen=True, slots=True)
class Embed:
    """A vector for each of these prompts."""

    id: int
    prompts: Sequence[Sequence[int]]
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class Ask:
    """Report what the engine is doing."""

    id: int


# ---- from the engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading:
    """Bytes of weights that are there, of all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model stands. weight_bytes: of all its weights. on_host: they lie in the host's memory. tokenizer: its
    folder; None, and why not.
    """

    spec: ModelSpec
    config: EngineConfig
    sampling_defaults: Mapping[str, Any]
    tokenizer: Path | None
    no_tokenizer: str
    device: str
    weight_bytes: int
    on_host: bool
    notes: Sequence[str]
    deployment: Deployment


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be loaded: one line."""

    message: str


@dataclass(frozen=True, slots=True)
class Chunks:
    """What a step gave, or a part of it, for each request that is listened to. committed: when (time.perf_counter).

    items: each a request's id and the fields of an OutputChunk: tuples go through the pipe ten times as fast. last: of
    its step; to be answered with Delivered.
    """

    committed: float
    items: Sequence[tuple[int, tuple[Any, ...]]]
    last: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be served; nothing of it ran."""

    id: int
    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """These requests are lost: a step failed, or there is no room for them now (busy)."""

    ids: Sequence[int]
    message: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """The process lives. turn_s: seconds for which its loop has been in one turn; 0 while it waits for messages."""

    turn_s: float


@dataclass(frozen=True, slots=True)
class Embedded:
    """One vector for each prompt."""

    id: int
    vectors: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Report:
    """The engine at one moment, and its counters."""

    id: int
    stats: Stats | None
    meters: EngineMeters


chunk_fields = attrgetter(*(field.name for field in fields(OutputChunk)))


def frame(message: object) -> bytes:
    """A message as bytes that `Inbox` and `frames` take apart."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


class Inbox:
    """The engine's end: reads what has come without waiting, or waits for something; sends, from any thread. To be made
    before many files are open: select, whose timeouts alone are finer than a millisecond, takes numbers of files below
    1024 only.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._data = bytearray()
        self._sending = threading.Lock()
        self._wakeup, self._wake = socket.socketpair()  # select takes nothing but sockets on Windows

    def close(self) -> None:
        """Close its files."""
        self.sock.close()
        self._wakeup.close()
        self._wake.close()

    def send(self, message: object) -> None:
        """Send a message. From any thread. Raises OSError once the other end is closed."""
        data = frame(message)
        with self._sending:
            self.sock.sendall(data)

    def wake(self) -> None:
        """End the wait of a `read` that can be woken, this one's or the next one's. From any thread."""
        self._wake.send(b".")

    def read(self, timeout: float | None = 0.0, *, woken: bool = False) -> list[Any]:
        """The messages that are complete. timeout: seconds to wait for something to read, and, with `woken`, for a call
        of `wake`; None: for ever. Raises EOFError once the other end is closed.
        """
        files: list[Any] = [self.sock, self._wakeup] if woken else [self.sock]
        readable, _, _ = select.select(files, [], [], timeout)
        if self._wakeup in readable:
            self._wakeup.recv(_READ)
        if self.sock in readable:
            data = self.sock.recv(_READ)
            if not data:
                raise EOFError
            self._data += data
        return list(self._messages())

    def read_one(self) -> Any:
        """The next message, whenever it comes."""
        while not (found := self.read(None)):
            pass
        assert len(found) == 1
        return found[0]

    def _messages(self) -> Any:
        while len(self._data) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._data)
            end = HEADER.size + size
            if len(self._data) < end:
                return
            yield pickle.loads(memoryview(self._data)[HEADER.size : end].tobytes())
            del self._data[:end]
