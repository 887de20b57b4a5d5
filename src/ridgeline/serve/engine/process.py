"""An engine process as the HTTP process sees it: messages go in and come out, and it can end.

`LocalProcess` is a child process. `dist/ray_process.py` starts one on any machine of a Ray cluster.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from ridgeline.serve.engine.channel import start_process
from ridgeline.serve.engine.messages import HEADER

END_SECONDS = 10.0  # for a killed process to end; a hanging device driver can keep it alive forever
WORKER = "ridgeline.serve.engine.worker"

log = logging.getLogger(__name__)


class EngineProcess(Protocol):
    """A running engine process, and both directions of its pipe."""

    @property
    def pid(self) -> int:
        """Return the process id on the machine where it runs."""
        ...

    @property
    def ahead_s(self) -> float:
        """Return by how many seconds its time.perf_counter is ahead of ours, as known now; 0 on this machine."""
        ...

    @property
    def shares_cores(self) -> bool:
        """Return whether it waits after a step until this process has written the step's chunks on the same cores."""
        ...

    async def read(self) -> bytes:
        """Wait for the next message and return it, pickled. Raises ConnectionError at the end of the pipe."""
        ...

    def write(self, data: bytes) -> None:
        """Send a framed message, without waiting until the process has read it."""
        ...

    async def end(self, patience_s: float) -> str:
        """Close the pipe, and kill the process if it still runs after `patience_s` seconds.

        Returns how it ended, to be appended to a message, such as " by signal 9"; "" if that is not known.
        """
        ...


# Starts an engine process. Raises OSError.
StartProcess = Callable[[], Awaitable[EngineProcess]]


class LocalProcess:
    """An engine process on this machine."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> LocalProcess:
        """Start a process. Raises OSError."""
        process, pipe = await asyncio.to_thread(start_process, [sys.executable, "-m", WORKER])
        return cls(process, *await asyncio.open_connection(sock=pipe, limit=1 << 24))

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def ahead_s(self) -> float:
        """Return 0: all processes of this machine share its clock."""
        return 0.0

    @property
    def shares_cores(self) -> bool:
        """Return True: kernels on all cores would delay the HTTP process."""
        return True

    async def read(self) -> bytes:
        """Wait for the next message and return it, pickled. Raises ConnectionError at the end of the pipe."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as e:
            raise ConnectionError("the pipe ended") from e

    def write(self, data: bytes) -> None:
        """Send a framed message."""
        self._writer.write(data)

    async def end(self, patience_s: float) -> str:
        """Close the pipe, and kill the process if it still runs after `patience_s` seconds. Return how it ended."""
        self._writer.close()
        try:
            status = await asyncio.to_thread(self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                status = await asyncio.to_thread(self._process.wait, END_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("process %d of the engine was killed but has not ended yet", self.pid)
                return ""
        return f" by signal {-status}" if status < 0 else f" with status {status}"
