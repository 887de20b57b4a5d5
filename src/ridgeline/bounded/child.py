"""Run the helper process: it reads jobs from standard input and writes answers to standard output, one by one.

It ends when the pipe closes, even in the middle of a job: no helper outlives its parent.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from ridgeline.bounded.frames import Value, encode, read_frame, write_frame
from ridgeline.bounded.jobs import find_job
from ridgeline.bounded.limits import Limits, release_job, resident_bytes, restrict_job, restrict_process
from ridgeline.system import return_freed_memory

# A helper whose memory has grown by this much is replaced, so that the memory goes back to the system.
RETIRE_BYTES = 128 << 20
PARENT_SECONDS = 1.0  # time between two checks that the parent is alive
# Audit events that no job needs. A job that is tricked into one of these fails.
FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.startfile")


class Helper:
    """Runs jobs, each in a new thread with its own stack size."""

    def __init__(self, jobs: BinaryIO, answers: BinaryIO, parent: int) -> None:
        self._jobs, self._answers, self._parent = jobs, answers, parent
        self._state: Any = None
        self._base = 0  # physical memory after the setup

    def run(self) -> None:
        """Answer jobs until the pipe ends or the memory has grown too much."""
        while True:
            try:
                name, keep, limits, *args = read_frame(self._jobs)
            except EOFError:
                return
            answer = self._answer(name, keep, Limits(**limits), args)
            retire = not keep and resident_bytes() > self._base + RETIRE_BYTES and not _trimmed(self._base)
            write_frame(self._answers, _encoded(retire, answer))
            if retire:
                return

    def _answer(self, name: str, keep: bool, limits: Limits, args: list[Value]) -> list[Value]:
        """Run one job and return "ok" and its values, or "error", the kind and the message.

        keep: the job is the setup; its value is the state of the jobs that follow.
        """
        found: list[Value] = ["error", "RuntimeError", "the job ended without an answer"]

        def work() -> None:
            nonlocal found
            try:
                function = find_job(name)
                restrict_job(limits)
                value = function(*args) if keep else function(self._state, *args)
                if keep:
                    self._state, value = value, None
                found = ["ok", *(value if isinstance(value, tuple) else (value,))]
            except BaseException as error:  # any error fails this job alone
                found = ["error", type(error).__name__, str(error)]
            finally:
                release_job()

        self._in_thread(work, limits.stack_bytes)
        if keep:
            self._base = resident_bytes()
        return found

    def _in_thread(self, work: Callable[[], None], stack_bytes: int) -> None:
        """Run `work` in a thread with a stack of that size; exit if the parent has ended."""
        threading.stack_size(stack_bytes)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(PARENT_SECONDS)
            if os.name == "posix" and os.getppid() != self._parent:
                os._exit(1)


def _encoded(retire: bool, answer: list[Value]) -> list[bytes]:
    try:
        return encode([retire, *answer])
    except (TypeError, ValueError, MemoryError, RecursionError) as error:
        return encode([retire, "error", type(error).__name__, f"the result cannot be sent: {error}"])


def _trimmed(base: int) -> bool:
    """Return unused memory to the system; return whether that was enough."""
    return_freed_memory()
    return resident_bytes() <= base + RETIRE_BYTES


def _refuse(event: str, _: object) -> None:
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"a bounded job may not call {event}")


def main() -> None:
    """Run the process; its argument is the parent's process id.

    Only frames are written to the parent's pipe. The output of libraries goes to standard error.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    restrict_process()
    sys.addaudithook(_refuse)
    Helper(sys.stdin.buffer, answers, int(sys.argv[1])).run()
    answers.flush()
    os._exit(0)  # wait for nothing: neither threads of a library nor destructors


if __name__ == "__main__":
    main()
