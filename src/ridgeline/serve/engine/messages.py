"""Messages between the HTTP process and the engine process: plain data, pickled, each after its length.

Both processes belong to one program and one user. Bytes from clients are never unpickled.
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
from typing import Any, NamedTuple

from ridgeline.plan.planner import Deployment
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.vectors import Floats, Reading, Text
from ridgeline.sched.stats import Stats
from ridgeline.serve.engine.meters import EngineMeters
from ridgeline.settings import EngineConfig
from ridgeline.spec import ModelSpec
from ridgeline.spec.encoder import Vectors
from ridgeline.spec.request import OutputChunk

HEADER = struct.Struct("<I")
_READ = 1 << 18


# ---- to the engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: load this model. options: arguments of LLM.

    shares_cores: whether the HTTP process sends Delivered, for which the engine waits a moment after each step.
    """

    model: str
    options: Mapping[str, Any]
    shares_cores: bool = True


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer a request.

    arrived: time of arrival by time.perf_counter of the engine's machine. stream: send the answer while it is
    generated, not only at its end.
    """

    id: int
    request: GenerationRequest
    arrived: float
    stream: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop this request: its client does not want the answer any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """All chunks of the last step are written to the clients."""


@dataclass(frozen=True, slots=True)
class Embed:
    """Compute a row of numbers for each of these texts: an embedding, or scores."""

    id: int
    texts: Sequence[Text]
    reading: Reading


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a Report."""

    id: int


@dataclass(frozen=True, slots=True)
class Adapt:
    """Load an adapter from a folder or a hub id; without a source, drop it. It is answered with Adapted or Refused."""

    id: int
    name: str
    source: str | None


# ---- from the engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of loading: bytes of weights that are loaded, and all bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded.

    weight_bytes: size of all weights. on_host: True if the weights are in host memory. tokenizer: the tokenizer's
    folder, or None. no_tokenizer: the reason why there is no tokenizer. vectors: how texts become embeddings, if the
    folder says so.
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
    vectors: Vectors | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be loaded. message: the reason in one line."""

    message: str


class Chunks(NamedTuple):
    """Chunks of steps, or of a part of a step. It is a tuple of tuples, since these pickle fastest.

    committed: when the first chunk was made (time.perf_counter of the engine's machine). items: for each chunk the
    request's id and the fields of an OutputChunk. last: True for the step's last message, which the HTTP process
    answers with Delivered.
    """

    committed: float
    items: Sequence[tuple[int, tuple[Any, ...]]]
    last: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is invalid. It did not run."""

    id: int
    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """These requests are lost because a step failed, or, with busy, because a queue is full."""

    ids: Sequence[int]
    message: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat. turn_s: time that the loop has spent in its current turn, in seconds; 0 while it waits."""

    turn_s: float


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to Embed: a row for each text."""

    id: int
    rows: Floats


@dataclass(frozen=True, slots=True)
class Adapted:
    """The adapter is loaded, or dropped."""

    id: int


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to Ask: the engine's state and counters."""

    id: int
    stats: Stats | None
    meters: EngineMeters


chunk_fields = attrgetter(*(field.name for field in fields(OutputChunk)))


def frame(message: object) -> bytes:
    """Return a message as bytes, with its length before it."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


class Inbox:
    """The engine's end of the pipe. One thread reads; any thread sends.

    Create it before many files are open: it waits with select, which only accepts file numbers below 1024 but is the
    only call with timeouts finer than a millisecond.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._data = bytearray()
        self._sending = threading.Lock()
        self._wakeup, self._wake = socket.socketpair()  # on Windows, select only accepts sockets

    def close(self) -> None:
        """Close the sockets."""
        self.sock.close()
        self._wakeup.close()
        self._wake.close()

    def send(self, message: object) -> None:
        """Send a message. Any thread may call this. Raises OSError once the other end is closed."""
        data = frame(message)
        with self._sending:
            self.sock.sendall(data)

    def wake(self) -> None:
        """End the wait of the current or next `read` with woken=True. Any thread may call this."""
        self._wake.send(b".")

    def read(self, timeout: float | None = 0.0, *, woken: bool = False) -> list[Any]:
        """Return the messages that are complete.

        timeout: seconds to wait for a message; None waits forever. woken: a call of `wake` ends the wait too. Raises
        EOFError once the other end is closed.
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
        """Wait for the next message and return it."""
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
