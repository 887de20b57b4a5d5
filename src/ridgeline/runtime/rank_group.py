"""The ranks of a model that is cut, each in a process of its own on one machine: numbers in shared memory, and sockets.

Each pair of ranks has a socket. A rank writes its part of a sum into memory that all ranks share, sends each other rank
one byte, and waits for a byte of each: a byte says that a part is there, and the system calls order the memory. A rank
has two buffers for parts and uses them in turn. It writes a buffer again only after all others have sent the byte of
the call after, so they have read it. The end of a socket says that a process has ended. A rank that is stopped ends no
socket, so each rank has a thread that writes the time once a second. Only rank 0 looks at the times: every rank sends
its part before it waits, so rank 0 is the one that a stopped rank always holds up.
"""

from __future__ import annotations

import mmap
import pickle
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import numpy as np

from ridgeline.errors import RankError
from ridgeline.nn.group import Ndarray

BUFFER = 1 << 20  # bytes of a part that are passed on at once
HEAD = 8  # bytes of a rank's time at the start of the memory
BEAT_SECONDS = 1.0
LOST_SECONDS = 3.5  # without a beat, after which a rank counts as lost if the next look finds none either
START_SECONDS = 120.0  # until the first beat, while Python imports modules
LOOK_SECONDS = 0.5  # between two looks at the time of a rank that is waited for
PART, MESSAGE, LOST = 0, 1, 2  # kinds of frames
FRAME = struct.Struct("<BQ")  # kind and bytes of a message or of a reason
MAX_REASON = 1 << 16


def shared_bytes(size: int) -> int:
    """Return the bytes of memory that `size` ranks share."""
    return size * (HEAD + 2 * BUFFER)


class RankGroup:
    """One rank's view of its group; a nn.group.Group.

    Args:
        memory: shared memory of `shared_bytes(size)` bytes, zeros at the start.
        peers: the socket to each other rank.
        ended: returns how the process of a rank ended, such as " by signal 9"; "" if that is not known.
        release: is called once when this rank leaves the group.
    """

    def __init__(
        self, rank: int, size: int, memory: mmap.mmap, peers: Mapping[int, socket.socket],
        ended: Callable[[int], str] = lambda rank: "", release: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, size
        self._peers, self._ended, self._release = dict(sorted(peers.items())), ended, release
        self._beats = np.frombuffer(memory, np.float64, size)
        self._buffers = np.frombuffer(memory, np.uint8, offset=HEAD * size).reshape(size, 2, BUFFER)
        self._calls, self._lost, self._byte = 0, "", bytearray(1)
        self._missed: set[int] = set()  # ranks without a beat at the last look
        self._started, self._over = time.monotonic(), Event()
        for peer in self._peers.values():
            peer.settimeout(LOOK_SECONDS)
        # The thread does not hold the group, which may be released while it runs.
        Thread(target=_beat, args=(self._beats, rank, self._over), name="ridgeline-rank", daemon=True).start()
        weakref.finalize(self, _end, self._over, tuple(self._peers.values()), release)

    def gather(self, part: Ndarray) -> Sequence[Ndarray]:
        """Return the parts of all ranks, in their order. Raises RankError if another rank is lost."""
        own = np.ascontiguousarray(part)
        parts = [own.copy() if rank == self.rank else np.empty_like(own) for rank in range(self.size)]
        flat = [each.reshape(-1).view(np.uint8) for each in parts]
        for first in range(0, max(1, own.nbytes), BUFFER):
            last = min(first + BUFFER, own.nbytes)
            buffer = self._calls & 1
            self._calls += 1
            self._buffers[self.rank, buffer, : last - first] = flat[self.rank][first:last]
            self._send(bytes(1))
            for rank in self._peers:
                self._wait_for_part(rank)
                flat[rank][first:last] = self._buffers[rank, buffer, : last - first]
        return parts

    def broadcast(self, message: object = None) -> Any:
        """Return the message that rank 0 passes. Raises RankError if another rank is lost."""
        if self.rank == 0:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._send(FRAME.pack(MESSAGE, len(data)) + data)
            return message
        kind = self._receive(0, 1)[0]
        if kind != MESSAGE:
            self._fail(0, kind)
        (count,) = struct.unpack("<Q", self._receive(0, FRAME.size - 1))
        return pickle.loads(self._receive(0, count))  # written by rank 0, which started this process

    def leave(self) -> None:
        """Leave the group: later calls of all ranks raise RankError."""
        self.close(f"rank {self.rank} of {self.size} could not go on")

    def close(self, reason: str = "the ranks were closed") -> None:
        """Leave the group, and tell the others why."""
        if self._over.is_set():
            return
        self._over.set()
        self._lost = self._lost or reason
        data = reason.encode()[:MAX_REASON]
        for peer in self._peers.values():
            with suppress(OSError):  # it may have ended already
                peer.sendall(FRAME.pack(LOST, len(data)) + data)
            peer.close()
        self._release()

    def _send(self, data: bytes) -> None:
        """Send a frame to each other rank. Raises RankError if one of them is lost."""
        if self._lost:
            raise RankError(self._lost)
        for rank, peer in self._peers.items():
            left = memoryview(data)
            while left:
                try:
                    left = left[peer.send(left) :]
                except TimeoutError:
                    self._check(rank)
                except OSError:
                    self._end(rank)

    def _wait_for_part(self, rank: int) -> None:
        if (kind := self._receive(rank, 1)[0]) != PART:
            self._fail(rank, kind)
        self._missed.discard(rank)

    def _receive(self, rank: int, count: int) -> bytearray:
        """Return bytes of a rank. Raises RankError if it is lost."""
        data = self._byte if count == 1 else bytearray(count)
        left = memoryview(data)
        while left:
            try:
                got = self._peers[rank].recv_into(left)
            except TimeoutError:
                self._check(rank)
                continue
            except OSError:
                got = 0
            if not got:
                self._end(rank)
            left = left[got:]
        return data

    def _fail(self, rank: int, kind: int) -> None:
        """Raise RankError, with the reason that a rank gives."""
        if kind != LOST:
            raise RankError(f"rank {rank} of {self.size} sent a frame of kind {kind}: ranks run different code")
        (count,) = struct.unpack("<Q", self._receive(rank, FRAME.size - 1))
        reason = self._receive(rank, min(count, MAX_REASON)).decode(errors="replace")
        self._lose(reason)

    def _check(self, rank: int) -> None:
        """Raise RankError if a rank has not written the time for long, at two looks in a row.

        After the whole program was stopped (Ctrl-Z) and goes on, the first look comes before the next beat.
        """
        if self._lost:
            raise RankError(self._lost)
        beat, now = float(self._beats[rank]), time.monotonic()
        if self.rank or now - (beat or self._started) <= (LOST_SECONDS if beat else START_SECONDS):
            self._missed.discard(rank)
        elif rank not in self._missed:
            self._missed.add(rank)
        else:
            self._lose(f"rank {rank} of {self.size} does not answer: it has been stopped, or the machine is overloaded")

    def _end(self, rank: int) -> None:
        """Raise RankError because the socket of a rank has ended, with the reason that the rank gave, if any."""
        if self._lost:
            raise RankError(self._lost)
        self._lose(self._last_words(rank) or f"rank {rank} of {self.size} has ended{self._ended(rank)}")

    def _last_words(self, rank: int) -> str:
        """Return the reason that a rank gave before it ended; "" if it gave none."""
        peer = self._peers[rank]
        with suppress(OSError):
            while (kind := peer.recv(1)) == bytes([PART]):
                pass
            if kind == bytes([LOST]):
                (count,) = struct.unpack("<Q", peer.recv(FRAME.size - 1, socket.MSG_WAITALL))
                return peer.recv(min(count, MAX_REASON), socket.MSG_WAITALL).decode(errors="replace")
        return ""

    def _lose(self, reason: str) -> None:
        """Leave the group because a rank is lost, and raise RankError."""
        self._lost = reason
        self.close(reason)
        raise RankError(reason)


def _beat(beats: Ndarray, rank: int, over: Event) -> None:
    while True:
        beats[rank] = time.monotonic()
        if over.wait(BEAT_SECONDS):
            return


def _end(over: Event, peers: Sequence[socket.socket], release: Callable[[], None]) -> None:
    """Do what `close` does for a group that nobody holds any more. The end of a socket tells the others."""
    over.set()
    for peer in peers:
        peer.close()
    release()
