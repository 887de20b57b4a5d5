"""Start the other ranks of a model that is cut, each as a process on this machine, and load the part of rank 0.

The processes are started by exec and not by fork, which would copy the locks of threads. They end when rank 0 closes
the group, or when its process ends.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import combinations

import numpy as np

from ridgeline.errors import DeviceError, RequestError
from ridgeline.ops.devices import resolve_device
from ridgeline.ops.table import CPU, REFERENCE
from ridgeline.runtime.load import LoadedModel, LoadOptions, ProgressBar, load_model, no_progress
from ridgeline.runtime.rank_group import RankGroup, shared_bytes

PROCESS = "ridgeline.runtime.rank_process"
MAX_RANKS = 64
STATUS_SECONDS = 1.0  # for the status of a process whose sockets are closed
READY = np.zeros(1, np.uint8)  # each rank passes it on when its part is loaded


def load_ranks(name: str, options: LoadOptions, size: int, progress_bar: ProgressBar = no_progress) -> LoadedModel:
    """Load a model for `size` ranks: start the others, and return the part of rank 0. One rank has the whole model.

    options: options of one rank, and its threads. Raises as `load_model`, RequestError for a model that
    cannot be cut, DeviceError where ranks cannot run, and RankError if another rank ends while it loads.
    """
    check_ranks(size, options.device)
    if size == 1:
        return load_model(name, options, progress_bar)
    group = _start(size)
    try:
        group.broadcast((name, options))
        loaded = load_model(name, options, progress_bar, group=group)
        group.gather(READY)
    except BaseException:
        group.close()
        raise
    return loaded


def unmeasured(kv_cache_dtype: str, attention: str) -> tuple[str, ...]:
    """Return a note if options were given that round something, because only a whole model tells what that costs."""
    given = {"--kv-cache-dtype": kv_cache_dtype != "auto", "--attention": attention != "exact"}
    named = " and ".join(name for name, is_given in given.items() if is_given)
    return (f"the cost in accuracy of {named} is not measured for a model that is cut",) if named else ()


def check_ranks(size: int, device: str, cache: str = "on") -> None:
    """Raise RequestError for a number of ranks that is out of range, and DeviceError for a device without ranks.

    cache: the argument of LLM.
    """
    if not 1 <= size <= MAX_RANKS:
        raise RequestError(f"tensor_parallel_size (--tensor-parallel-size) is {size}; it must be 1 to {MAX_RANKS}")
    if size == 1:
        return
    if cache == "off":
        raise RequestError("ranks (--tensor-parallel-size) keep state between steps; leave cache='off' out")
    if os.name != "posix":
        raise DeviceError("ranks (--tensor-parallel-size) need Linux or macOS, whose processes inherit open files")
    if (found := resolve_device(device)) not in (CPU, REFERENCE):
        raise DeviceError(
            f"ranks (--tensor-parallel-size {size}) run on device cpu or reference, and this is {found}; serve "
            "replicas on several GPUs (--replicas)"
        )


def _start(size: int) -> RankGroup:
    """Start the processes of all ranks but 0, and return the group of rank 0."""
    pairs = {pair: socket.socketpair() for pair in combinations(range(size), 2)}
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for (low, high), (one, other) in pairs.items():
        sockets[low][high], sockets[high][low] = one, other
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile(dir=_memory_folder()) as file:
        file.truncate(shared_bytes(size))
        memory = mmap.mmap(file.fileno(), shared_bytes(size))
        try:
            processes.extend(_process(rank, size, file.fileno(), sockets[rank]) for rank in range(1, size))
        except BaseException:
            _kill(processes)
            raise
        finally:
            for own in sockets[1:]:
                for each in own.values():
                    each.close()
    return RankGroup(0, size, memory, sockets[0], _ended(processes), lambda: _kill(processes))


def _memory_folder() -> str | None:
    """Return a folder whose files are in memory; None for the usual one for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _process(rank: int, size: int, memory: int, peers: dict[int, socket.socket]) -> subprocess.Popen[bytes]:
    """Start the process of a rank. memory: the file number of the shared memory."""
    numbers = {other: each.fileno() for other, each in peers.items()}
    named = [f"{other}:{number}" for other, number in numbers.items()]
    line = [sys.executable, "-m", PROCESS, str(rank), str(size), str(memory), *named]
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, pass_fds=[memory, *numbers.values()])


def _ended(processes: list[subprocess.Popen[bytes]]) -> Callable[[int], str]:
    def describe(rank: int) -> str:
        try:
            status = processes[rank - 1].wait(STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {-status}" if status < 0 else f" with status {status}"

    return describe


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the processes. They keep nothing, so nothing is lost; one that was stopped cannot end by itself."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
