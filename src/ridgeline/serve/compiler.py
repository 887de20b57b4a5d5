"""Structures of requests, compiled in threads of the engine's process: a slow one holds up nobody's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue

from ridgeline.errors import RequestError
from ridgeline.runtime.grammar import Grammars
from ridgeline.serve.messages import Submit

THREADS = 2


class Compiler:
    """Belongs to the engine's loop. wake: called in a thread when something is done."""

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(THREADS, "ridgeline-grammar")
        self._done: SimpleQueue[tuple[Submit, RequestError | None]] = SimpleQueue()
        self._waiting: set[int] = set()
        self._wake = wake

    def add(self, submit: Submit) -> bool:
        """Take a request that has a structure; False for one that has none."""
        if getattr(submit.request.params, "structured_outputs", None) is None:
            return False
        self._waiting.add(submit.id)
        self._threads.submit(self._compile, submit)
        return True

    def abort(self, request_id: int) -> None:
        """Forget a request."""
        self._waiting.discard(request_id)

    def done(self) -> Iterator[tuple[Submit, RequestError | None]]:
        """Requests that have their grammar now, or why they have none."""
        while True:
            try:
                submit, error = self._done.get_nowait()
            except Empty:
                return
            if submit.id in self._waiting:
                self._waiting.discard(submit.id)
                yield submit, error

    def _compile(self, submit: Submit) -> None:
        if submit.id not in self._waiting:  # aborted while others were compiled
            return
        error = None
        try:
            submit = replace(submit, request=self._grammars.bound(submit.request))
        except RequestError as e:
            error = e
        except Exception as e:  # whatever a structure does to its compiler, it is that request that fails
            error = RequestError(f"structured_outputs could not be compiled: {type(e).__name__}")
        self._done.put((submit, error))
        self._wake()
